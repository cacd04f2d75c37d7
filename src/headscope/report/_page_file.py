"""The file of a page: what stands at its start, what it is made of, and how it is written."""

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
"""By this, near its start, a page of headscope's own is known."""


class SaveError(OSError):
    """A page cannot be written where it was asked for; the message is one line that says why."""


def write(html: str, path: str | Path, *, force: bool = False) -> Path:
    """Write HTML that has the ``MARKER`` in its first 256 bytes; arguments, result and errors are those of ``save``."""
    target = Path(path)
    check_target(target, force)
    try:
        replace_file(target, html.encode("utf-8"))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise SaveError(f"{_shown(target)}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return target


def check(path: str | Path, *, force: bool = False) -> None:
    """Raises: SaveError: ``save`` would not write there, as far as can be told before."""
    check_target(Path(path), force)
    if not Path(path).parent.is_dir():
        raise SaveError(f"{_shown(Path(path))}: cannot be written: there is no such folder")


def check_target(target: Path, force: bool) -> None:
    """Check that a page may be written there.

    Raises:
        SaveError: a folder, or a file that is no page of headscope's own.
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
            f"{_shown(target)}: holds a file that is no page of headscope's own; choose another name, or give "
            "force=True"
        )


def _shown(path: Path) -> str:
    """A path fit for one line."""
    return visible(str(path), limit=1000, blanks=False)


def asset(name: str) -> str:
    """Return a file of this package as text."""
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """How a content security policy names a style or script that may be there."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}"


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: ASCII, without "<", ">" and "&"."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
