"""Numbers of a map in few bits: weights as 16-bit logarithms, counts as runs of equal numbers, places as offsets.

A code c of 16 bits is 0 for the weight 0. Any other weight is ``low · (high / low) ** ((c - 1) / 65534)``, where low
and high are the smallest and the largest positive mean or max of the head. Files hold c - 32768, which I16 can hold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ERROR = 1e-3
"""The largest relative error of a mean or a max that is stored as a code."""

_MOST_RANGE = 130.0  # ln(high / low): half a step, 130 / 65534 / 2, is then below ERROR
_NARROW = 1e-6  # a smaller range in so many steps is below the rounding of a logarithm
_STEPS = 65_534
_SHIFT = 32_768


def scale_of(*values: Tensor) -> tuple[float, float] | None:
    """Return low and high of the weights of a head, (0, 0) if all are 0; None if codes cannot hold them."""
    together = torch.cat([x.flatten() for x in values])
    positive = together[together > 0]
    if not bool((together >= 0).all()):  # NaN is not
        return None
    if len(positive) == 0:
        return 0.0, 0.0
    low, high = float(positive.min()), float(positive.max())
    return (low, high) if high < math.inf and math.log(high) - math.log(low) <= _MOST_RANGE else None


def encode(values: Tensor, low: float, high: float) -> Tensor:
    """Return the codes of float64 weights as int16; the order of weights is that of their codes."""
    step = _step(low, high)
    codes = torch.ones_like(values)
    if step > 0:
        codes += ((values.log() - math.log(low)) / step).round_().clamp_(0, _STEPS)
    codes.masked_fill_(values >= high, _STEPS + 1)
    return (torch.where(values > 0, codes, 0.0) - _SHIFT).to(torch.int16)


def decode(codes: Tensor, low: float, high: float) -> Tensor:
    """Return float64 weights; their codes are the same again."""
    steps = codes.double() + (_SHIFT - 1)
    values = low * (steps * _step(low, high)).exp_()
    values.masked_fill_(steps == _STEPS, high)
    return values.masked_fill_(steps < 0, 0.0)


def _step(low: float, high: float) -> float:
    """Return the logarithm of the ratio of two codes; 0 if all weights are nearly equal, to low or to high."""
    extent = math.log(high) - math.log(low) if low > 0 else 0.0
    return extent / _STEPS if extent > _NARROW else 0.0


def narrowed(values: Tensor) -> Tensor:
    """Return whole numbers from 0 in the smallest dtype that files use."""
    largest = int(values.max()) if values.numel() else 0
    kinds = {torch.uint8: 8, torch.int16: 15, torch.int32: 31}
    return values.to(next((kind for kind, bits in kinds.items() if largest < 2**bits), torch.int64))


def runs_of_equal(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers and the lengths of the runs of equal numbers in a flat tensor."""
    numbers, lengths = torch.unique_consecutive(values, return_counts=True)
    return narrowed(numbers), narrowed(lengths)


def expand_runs(name: str, numbers: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Return the flat tensor of ``size`` numbers that these runs make up.

    Raises:
        ValueError: they make up another number.
    """
    lengths = lengths.long()
    inside = numbers.shape == lengths.shape and len(lengths) <= size and bool(((lengths > 0) & (lengths <= size)).all())
    total = sum(lengths.tolist()) if inside else -1
    if total != size:
        raise ValueError(f"{name}: expected runs of {size} numbers, got {total if inside else 'others'}")
    return numbers.long().repeat_interleave(lengths)
