"""The backends, one module each: native (named "cpu"), sdpa, blocked and reference. ``_attend.select`` chooses one."""
