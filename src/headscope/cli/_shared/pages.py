"""Where a command writes a page: whole or not at all, over nothing but pages of headscope's own."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headscope.cli._shared.console import uninterrupted
from headscope.cli._shared.mistakes import Mistake, name_options

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

    with _written_as_option("--out", path):
        return str(save(sheet, path, force=force))


def write_page(path: str, html: str, force: bool, option: str = "--html") -> str:
    """Write a page that is made already, and return where it is; ``option`` is what named the path.

    Raises:
        Mistake: it cannot be written there.
    """
    from headscope.report.page import write

    with _written_as_option(option, path):
        return str(write(html, path, force=force))


def check_page(path: str, force: bool, option: str = "--page") -> None:
    """See to it, before any long work, that a page may go there; ``option`` is what named the path.

    Raises:
        Mistake: it may not.
    """
    from headscope.report.page import check

    with _written_as_option(option, path):
        check(path, force=force)


def check_name(option: str, path: str) -> None:
    """Raises: Mistake: there is no such name of a file that is to be written."""
    if path in ("", "-"):
        raise Mistake(f"{option}: {'got -' if path else 'is empty'}, expected the name of a file")


def check_apart(option: str, path: str | None, read: Mapping[str, str | None], model: str | None = None) -> None:
    """See to it that nothing is written over what is read, which is gone then: also with --force.

    Args:
        option: what named the path of what is written.
        read: what is read -> its path, or None or "-" where that is no file.
        model: what may be a folder with a model; in it, nothing but pages and recordings is written over.

    Raises:
        Mistake: it would be.
    """
    if path is None:
        return
    for what, other in read.items():
        if other is not None and _is_one(path, other):
            raise Mistake(f"{option}: {path}: is {what} itself")
    if model is not None and _is_one(os.path.dirname(os.path.realpath(path)), model) and not _is_ours(path):
        raise Mistake(f"{option}: {path}: is a file of the model itself")


def _is_one(path: str, other: str) -> bool:
    """Whether both are there and are the same file, by whatever names."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return False


def _is_ours(path: str) -> bool:
    """Whether a page or a recording is there, or nothing."""
    from headscope.report.page import SaveError, check
    from headscope.stats import _statistics_file

    try:
        check(path)
    except SaveError:
        return _statistics_file.is_statistics(Path(path))
    return True


@contextmanager
def _written_as_option(option: str, path: str) -> Generator[None]:
    """Write without interruption; an error becomes a mistake of the option that named the path."""
    check_name(option, path)
    try:
        with uninterrupted():
            yield
    except OSError as error:
        message = error.strerror or name_options(str(error), {"force": "--force"})
        raise Mistake(f"{option}: {message}") from error
