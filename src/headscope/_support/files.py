"""Files are written atomically."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path, PureWindowsPath


def describe_obstacle(path: Path) -> str | None:
    """Return why a file cannot replace this path, even with force; None if it can, or if the path does not exist."""
    if path.is_dir():
        return "is a directory, expected the name of a file"
    return "is not a regular file" if path.exists() and not path.is_file() else None  # a device or a pipe


def is_inside(name: str) -> bool:
    """Return whether a relative path, with slashes of either kind, stays inside the folder that it starts from."""
    windows = PureWindowsPath(name)  # it takes both kinds of slashes
    return not (name.startswith("/") or windows.drive or windows.root) and ".." not in windows.parts


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary file in the same folder, then rename; its mode follows the umask.

    A link is followed, even if its target does not exist; the link stays.

    Raises:
        OSError: it cannot be written; the error names the target.
    """
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    temporary = path.parent / f".headscope-{secrets.token_hex(8)}.tmp"
    try:
        _write_and_rename(temporary, path, content)
    except OSError as error:  # the error of a full disk names no file, others name the temporary one
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write_and_rename(temporary: Path, path: Path, content: bytes) -> None:
    file = temporary.open("xb")
    try:
        with file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
