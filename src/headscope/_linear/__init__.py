"""Linear layers by the fastest route, as a shipped table selects it."""
