"""Small helpers that every other package may use; they do not depend on attention."""
