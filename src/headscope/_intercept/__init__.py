"""How the attention calls of a running model are caught."""
