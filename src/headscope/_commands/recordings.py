"""What is wrong with a file that was to be a recording."""

from __future__ import annotations

import json
import os

LONGEST = 100_000_000  # of a header, by safetensors
HEADER = b'"headscope.stats"'  # under this name, in the header of a safetensors file, statistics are described


def why_unreadable(path: str, error: Exception) -> str:
    """What to say of a file that could not be read: that it is cut short, or what the error says."""
    try:
        short = _is_cut_short(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        short = False  # it is damaged in another way, or no such file at all
    return f"{path}: is cut short, its end is missing" if short else getattr(error, "strerror", None) or str(error)


def _is_cut_short(path: str) -> bool:
    """Whether a file has the header of a recording, and less than that tells of."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size)) if length <= LONGEST else b""
    if HEADER not in header:
        return False
    if len(header) < length:
        return True
    tensors = (said for name, said in json.loads(header).items() if name != "__metadata__")
    return size < 8 + length + max((said["data_offsets"][1] for said in tensors), default=0)
