"""The backends: reference, blocked, sdpa and native."""
