"""Numbers of a block as bytes, compressed, and as text."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["deflated", "floats", "planes", "text", "width_of"]

Array = NDArray[Any]


def deflated(block: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY, *, ends: bool = True) -> bytes:
    """Return a compressed block; if it does not end, another one may follow.

    Small differences rarely repeat, so that a search for repeats costs time and bytes.
    """
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(block) + coder.flush(zlib.Z_FINISH if ends else zlib.Z_FULL_FLUSH)


def text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def floats(values: Array) -> bytes:
    return values.astype("<f4").tobytes()


def planes(values: Array, width: int) -> bytes:
    """Return whole numbers as planes of bytes, the lowest first."""
    wide = values.astype("<u4" if width == 4 else f"<u{width}")
    return np.ascontiguousarray(wide.reshape(-1).view(np.uint8).reshape(-1, width).T).tobytes()


def width_of(largest: int) -> int:
    """Return how many bytes hold numbers up to ``largest``; 0 if all are 0."""
    return 0 if largest == 0 else 1 if largest < 2**8 else 2 if largest < 2**16 else 4
