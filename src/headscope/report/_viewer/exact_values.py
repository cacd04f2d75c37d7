"""The bytes of q, k, lse and the mask of one head, as the page stores them, and the error of storing them.

A matrix has one of these kinds. Codes of several bytes are planes, all low bytes first, which compresses better:

    float16, bfloat16   the values as the model computed them
    float32             the values
    int16, int8         float32 [rows] scales, then codes: value = float32(code * scale)

All blocks are little-endian and compressed (raw deflate).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "int16": 2, "int8": 1}
"""The bytes of a value of each kind."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix as it is stored.

    Attributes:
        kind: see above.
        block: the bytes, before compression.
        values: the values that the page reads, float64 [rows, D].
        wrong: by how much each row differs from the original, as the norm of the difference, float64 [rows].
    """

    kind: str
    block: bytes
    values: NDArray[np.float64]
    wrong: NDArray[np.float64]

    @staticmethod
    def of(x: Tensor, kind: str) -> Matrix:
        """Store a matrix [rows, D]; NaN and infinity become 0 where the kind has none: their rows have no weights."""
        original = x.double().numpy()
        if kind in ("float16", "bfloat16"):
            block = _planes(x.contiguous().view(torch.int16).numpy().astype("<i2"))
            return Matrix(kind, block, original, np.zeros(len(original)))
        finite = np.nan_to_num(original, nan=0.0, posinf=0.0, neginf=0.0)
        if kind == "float32":
            stored = finite.astype("<f4")
            return Matrix(kind, _planes(stored), stored.astype(float), _norms(stored - finite))
        top = 2 ** (8 * WIDTHS[kind] - 1) - 1
        scales = (np.abs(finite).max(axis=1, initial=0.0) / top).astype("<f4")
        divisors = np.where(scales > 0, scales, 1)[:, None].astype(float)
        codes = np.clip(np.rint(finite / divisors), -top, top).astype(f"<i{WIDTHS[kind]}")
        values = (codes.astype("f4") * scales[:, None]).astype(float)
        return Matrix(kind, scales.tobytes() + _planes(codes), values, _norms(values - finite))


def kind_of(x: Tensor, bits: int) -> str:
    """Return the kind of q or k in at most so many bits a value, 32, 16 or 8."""
    own = {torch.float16: "float16", torch.bfloat16: "bfloat16"}.get(x.dtype, "float32")
    return own if 8 * WIDTHS[own] <= bits else f"int{bits}"


def largest_error(q: Matrix, k: Matrix, lse: Tensor, scale: float) -> float:
    """Return the most by which a weight p differs from that of the original q, k and lse, as a share of p.

    By Cauchy and Schwarz a logit changes by at most scale · (|Δq| |k| + |q| |Δk|). A softcap and a bias do not
    increase that, and exp(x + e) = exp(x) · exp(e).
    """
    finite = lse[lse.isfinite()].double()
    rounding = float((finite.float().double() - finite).abs().max()) if finite.numel() else 0.0
    if not (q.wrong.any() or k.wrong.any()):
        return math.expm1(rounding)
    original = (_norms(k.values) + k.wrong).max(initial=0.0)  # no row of k is longer
    change = abs(scale) * (q.wrong * original + _norms(q.values) * k.wrong.max(initial=0.0))
    return math.expm1(min(700.0, float(change.max(initial=0.0)) + rounding))


def deflated(block: bytes, *, search: bool = False) -> bytes:
    """Return a compressed block; values rarely repeat, so that a search for repeats is only for masks."""
    strategy = zlib.Z_DEFAULT_STRATEGY if search else zlib.Z_HUFFMAN_ONLY
    coder = zlib.compressobj(9 if search else 1, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(block) + coder.flush()


def spans_block(spans: Tensor) -> bytes:
    """Return spans [rows, n, 2] as int32 [n, 2, rows], each less the one of the row before."""
    rows = spans.permute(1, 2, 0).numpy().astype("<i4")
    return np.diff(rows, axis=-1, prepend=0).astype("<i4").tobytes()


def relative_bias(bias: Tensor) -> Tensor | None:
    """Return b of bias[i, j] = b[j - i + rows - 1], [rows + columns - 1]; None if it depends on more than j - i."""
    rows, columns = bias.shape
    values = torch.cat([bias[:, 0].flip(0), bias[0, 1:]])
    step = max(1, 2**22 // max(columns, 1))
    at = torch.arange(columns, device="cpu")
    for first in range(0, rows, step):
        i = torch.arange(first, min(first + step, rows), device="cpu")
        if not torch.equal(values[at - i[:, None] + rows - 1], bias[first : first + step]):
            return None
    return values


def _planes(codes: NDArray[Any]) -> bytes:
    width = codes.dtype.itemsize
    return np.ascontiguousarray(codes.reshape(-1).view(np.uint8).reshape(-1, width).T).tobytes()


def _norms(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return the norm of each row; the rows of NaN and infinity have no weights, and count as 0."""
    return np.nan_to_num(np.sqrt((x.astype(float) ** 2).sum(axis=-1)), nan=0.0, posinf=0.0)
