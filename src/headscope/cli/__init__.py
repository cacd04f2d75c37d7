"""The command line."""

from headscope.cli._main import main

__all__ = ["main"]
