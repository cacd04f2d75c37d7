"""The front door of the command line: Ctrl-C, streams that fail, and one line for every mistake."""

from headscope.cli._main import main

__all__ = ["main"]
