"""Small helpers that every other package may use; none of them knows attention."""
