"""A sheet as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from headscope.report._page_file import MARKER, SaveError, asset, check, check_target, digest, embedded, write
from headscope.report.sheet import Sheet
from headscope.report.viewer import render_sheet

__all__ = ["MARKER", "SaveError", "asset", "check", "digest", "embedded", "render", "save", "write"]

SaveError.__module__ = __name__  # its public path


def save(sheet: Sheet, path: str | Path, *, force: bool = False) -> Path:
    """Write the page atomically and return its path.

    Args:
        sheet: what to show.
        path: the file; an existing page of headscope is overwritten.
        force: overwrite any other file too.

    Raises:
        SaveError: the path is a directory, holds a file that headscope did not write, or cannot be written.
        ValueError: as ``render``.

    Examples:
        >>> import torch
        >>> from headscope.report import save, text_sheet
        >>> sheet = text_sheet("Each token attends to itself", ["a", "b", "c"], [torch.eye(3)[None]])
        >>> save(sheet, "page.html").name
        'page.html'
    """
    check_target(Path(path), force)
    return write(render(sheet), path, force=force)


def render(sheet: Sheet) -> str:
    """Return the page as one self-contained HTML document, which loads nothing.

    Raises:
        ValueError: the weights do not fit one page.

    Examples:
        >>> import torch
        >>> from headscope.report import render, text_sheet
        >>> sheet = text_sheet("Each token attends to itself", ["a", "b", "c"], [torch.eye(3)[None]])
        >>> render(sheet).splitlines()[:2]
        ['<!DOCTYPE html>', '<!-- headscope report -->']
    """
    return render_sheet(sheet)
