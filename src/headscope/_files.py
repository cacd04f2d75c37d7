"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write to a file beside the target, then put it in the target's place; its mode is what the umask leaves."""
    temporary = path.parent / f".headscope-{secrets.token_hex(8)}.tmp"
    file = temporary.open("xb")
    try:
        with file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
