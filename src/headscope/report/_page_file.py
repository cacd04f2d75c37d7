"""The file of a page: its marker, its assets, and how it is written."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from headscope._support.files import describe_obstacle, replace_file
from headscope.report._texts import visible

__all__ = ["MARKER", "SaveError", "asset", "check", "check_target", "digest", "embedded", "write"]

MARKER = "<!-- headscope report -->"
"""The comment near the start of a page by which headscope recognises its own pages."""


class SaveError(OSError):
    """A page cannot be written to its path; the message is one line with the reason.

    Examples:
        >>> from pathlib import Path
        >>> from headscope.report.page import SaveError, check
        >>> _ = Path("notes.html").write_text("my notes")
        >>> try:
        ...     check("notes.html")
        ... except SaveError as error:
        ...     print(str(error).partition(";")[0])
        notes.html: exists and is not a page that headscope wrote
    """


def write(html: str, path: str | Path, *, force: bool = False) -> Path:
    """Write HTML that has the ``MARKER`` in its first 256 bytes; arguments, result and errors as for ``save``.

    Examples:
        >>> from headscope.report.page import MARKER, write
        >>> path = write(f"{MARKER}<p>a page</p>", "page.html")
        >>> path.read_text(encoding="utf-8")
        '<!-- headscope report --><p>a page</p>'
    """
    target = Path(path)
    check_target(target, force)
    try:
        replace_file(target, html.encode("utf-8"))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise SaveError(f"{_shown(target)}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return target


def check(path: str | Path, *, force: bool = False) -> None:
    """Check, as far as possible before writing, that ``save`` can write a page to this path.

    Raises:
        SaveError: it cannot.

    Examples:
        >>> from headscope.report.page import check
        >>> check("page.html")
        >>> try:
        ...     check("missing/page.html")
        ... except OSError as error:
        ...     print(error)
        missing/page.html: cannot be written: ...
    """
    check_target(Path(path), force)
    if not Path(path).parent.is_dir():
        raise SaveError(f"{_shown(Path(path))}: cannot be written: no such folder")


def check_target(target: Path, force: bool) -> None:
    """Check that a page may be written to this path.

    Raises:
        SaveError: it is a folder, or a file that headscope did not write.
    """
    try:
        if (problem := describe_obstacle(target)) is not None:
            raise SaveError(f"{_shown(target)}: {problem}")
        if not target.exists():
            return
        with target.open("rb") as file:
            ours = MARKER.encode() in file.read(256)
    except SaveError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise SaveError(f"{_shown(target)}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not ours and not force:
        raise SaveError(
            f"{_shown(target)}: exists and is not a page that headscope wrote; choose another name, or "
            "overwrite it with force=True"
        )


def _shown(path: Path) -> str:
    """Return a path on one line, with control characters escaped."""
    return visible(str(path), limit=1000, blanks=False)


def asset(name: str) -> str:
    """Return a file of this package as text.

    Examples:
        >>> from headscope.report.page import asset
        >>> asset("viewer.html.jinja").splitlines()[0]
        '<!DOCTYPE html>'
    """
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Return the hash by which a content security policy allows a style or script.

    Examples:
        >>> from headscope.report.page import digest
        >>> digest("a{}")
        'sha256-X1RutGBrXCt9KkSaXMK7tHftWiRscFHOhxsS8tv8hBk='
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}"


def embedded(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: ASCII, without "<", ">" and "&".

    Examples:
        >>> from headscope.report.page import embedded
        >>> embedded({"heads": [0, 1]}), "<" in embedded({"title": "</script>"})
        ('{"heads":[0,1]}', False)
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
