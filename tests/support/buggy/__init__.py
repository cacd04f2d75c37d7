"""Attention modules with a bug on demand."""
