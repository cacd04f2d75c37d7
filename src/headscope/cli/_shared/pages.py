"""Where a command writes a page: atomically, and without --force only over pages that headscope wrote."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headscope.cli._shared.console import say, uninterrupted
from headscope.cli._shared.mistakes import Mistake, name_options

if TYPE_CHECKING:
    from headscope.report import Sheet

PAGE = "headscope-report.html"  # of ``watch`` and ``report``
TEXT_PAGE = "headscope-text.html"
IMAGE_PAGE = "headscope-image.html"


def save_page(sheet: Sheet, path: str | None, force: bool) -> str | None:
    """Write the page of a sheet, say if it replaces a file, and return its path; for the path None, write nothing.

    Raises:
        Mistake: the page cannot be written there.
    """
    if path is None:
        return None
    from headscope.report import save

    is_replaced = os.path.exists(path)
    with _written_as_option("--out", path):
        written = str(save(sheet, path, force=force))
    if is_replaced:
        say(f"headscope {sheet.kind}: replaced the earlier {written}; --out writes to another file")
    return written


def write_page(path: str, html: str, force: bool, option: str = "--html") -> str:
    """Write the HTML of a page and return its path; ``option`` is the option that specified the path.

    Raises:
        Mistake: the page cannot be written there.
    """
    from headscope.report.page import write

    with _written_as_option(option, path):
        return str(write(html, path, force=force))


def check_page(path: str, force: bool, option: str = "--page") -> None:
    """Check before any long work that a page can be written; ``option`` is the option that specified the path.

    Raises:
        Mistake: it cannot.
    """
    from headscope.report.page import check

    with _written_as_option(option, path):
        check(path, force=force)


def check_name(option: str, path: str) -> None:
    """Check that a path to write names a file.

    Raises:
        Mistake: the path is empty or "-".
    """
    if path in ("", "-"):
        raise Mistake(f"{option}: {'got -' if path else 'is empty'}, expected the name of a file")


def check_apart(option: str, path: str | None, read: Mapping[str, str | None], model: str | None = None) -> None:
    """Check that the output would not overwrite an input, also with --force.

    Args:
        option: the option that specified the output.
        path: of the output, or None for no output.
        read: name of each input -> its path; None or "-" where it is not a file.
        model: a name that may be a folder with a model; in it, only pages and recordings may be overwritten.

    Raises:
        Mistake: it would.
    """
    if path is None:
        return
    for what, other in read.items():
        if other is not None and _is_one(path, other):
            raise Mistake(f"{option}: {path}: is {what} itself, expected another file")
    if model is not None and _is_one(os.path.dirname(os.path.realpath(path)), model) and not _is_ours(path):
        raise Mistake(f"{option}: {path}: is a file of the model itself, expected another file")


def _is_one(path: str, other: str) -> bool:
    """Return whether both paths exist and lead to the same file."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return False


def _is_ours(path: str) -> bool:
    """Return whether the path holds a page or a recording of headscope, or nothing."""
    from headscope.report.page import SaveError, check
    from headscope.stats import _statistics_file

    try:
        check(path)
    except SaveError:
        return _statistics_file.is_statistics(Path(path))
    return True


@contextmanager
def _written_as_option(option: str, path: str) -> Generator[None]:
    """Run the block without interruption, and turn an OSError into a mistake of the option that specified the path."""
    check_name(option, path)
    try:
        with uninterrupted():
            yield
    except OSError as error:
        message = error.strerror or name_options(str(error), {"force": "--force"})
        raise Mistake(f"{option}: {message}") from error
