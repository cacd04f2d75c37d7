"""Shared computations of several decisions."""
