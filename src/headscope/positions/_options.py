"""The options of positions: numbers in a range, and positions as integers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headscope._support.arguments import kind, number, whole


def to_positions(name: str, x: object, axes: str) -> Tensor:
    """Return a tensor of any integer dtype as int64: small dtypes wrap around, and uint8 indexes like a mask."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name}: got {kind(x)}, expected integers {axes}")
    return x.long()


def to_numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {values!r}, expected numbers") from None


def settle_whole(options: object, name: str) -> None:
    """Set one of the frozen options to a whole number from 1."""
    object.__setattr__(options, name, whole(name, getattr(options, name)))


def settle_number(options: object, name: str, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """Set one of the frozen options to a finite number."""
    value = number(name, getattr(options, name))
    check_number(name, value, least=least, above=above)
    object.__setattr__(options, name, value)


def check_number(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    if not (least <= value < math.inf and value > above):
        expected = f"a finite number above {above}" if above > -math.inf else f"a finite number from {least}"
        raise ValueError(f"{name}: got {value}, expected {expected}")
