"""One call of attention, from its arguments to a backend."""
