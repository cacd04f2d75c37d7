"""Where a verb writes a page: whole or not at all, over nothing but pages of headscope's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headscope._commands.screen import Mistake, uninterrupted

if TYPE_CHECKING:
    from headscope.report import Sheet

PAGE = "headscope-report.html"


def save_page(sheet: Sheet, path: str | None, force: bool) -> str | None:
    """Write the page of a sheet, and return where it is; None stands for no page.

    Raises:
        Mistake: it cannot be written there.
    """
    if path is None:
        return None
    from headscope.report import save

    with _told("--out", path):
        return str(save(sheet, path, force=force))


def write_page(path: str, html: str, force: bool, option: str = "--html") -> str:
    """Write a page that is made already, and return where it is; ``option`` is what named the path.

    Raises:
        Mistake: it cannot be written there.
    """
    from headscope.report.page import write

    with _told(option, path):
        return str(write(html, path, force=force))


def check_page(path: str, force: bool, option: str = "--page") -> None:
    """See to it, before any long work, that a page may go there; ``option`` is what named the path.

    Raises:
        Mistake: it may not.
    """
    from headscope.report.page import check

    with _told(option, path):
        check(path, force=force)


@contextmanager
def _told(option: str, path: str) -> Generator[None]:
    """Write without interruption; what the system says of the file becomes a mistake of the option that named it."""
    if path == "-":
        raise Mistake(f"{option}: got -, wanted the name of a file")
    try:
        with uninterrupted():
            yield
    except OSError as error:
        raise Mistake(f"{option}: {error.strerror or error}") from error
