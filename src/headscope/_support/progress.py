"""A sign of life of work that takes long."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

SECONDS = 1.0
"""After this, work is said to take long."""


@contextmanager
def waiting(what: str) -> Generator[None]:
    """Show on stderr what is being done once it takes long, if stderr is a terminal."""
    if not (sys.stderr and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":  # it is None where it was closed
        yield
        return
    from rich.console import Console

    status = Console(stderr=True, highlight=False, markup=False).status(what)
    timer = threading.Timer(SECONDS, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
