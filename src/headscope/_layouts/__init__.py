"""Layouts of other modules, as tables."""
