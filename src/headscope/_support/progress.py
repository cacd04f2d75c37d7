"""The progress line of long work, on stderr, if stderr is a terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from headscope._support.text import visible

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")


@contextmanager
def progress_line(text: str, delay: float = 0.0) -> Generator[None]:
    """Show a text and a spinner on stderr until the end of the block.

    Args:
        text: the work, such as "loading torch".
        delay: show it only after this many seconds.
    """
    if not _has_terminal():
        yield
        return
    status = _console().status(visible(text))
    if delay == 0:
        with status:
            yield
        return
    timer = threading.Timer(delay, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def progress_over(items: Sequence[Item], text: str) -> Iterator[Item]:
    """Yield the items one by one; show on stderr how many are done, or only the text for one item."""
    if len(items) == 1 or not _has_terminal():
        with progress_line(text):
            yield from items
        return
    from rich.progress import track

    yield from track(items, visible(text), console=_console(), transient=True)


def _has_terminal() -> bool:
    # sys.stderr is None where it was closed
    return bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)
