"""The probes of ``check``, by what they examine."""
