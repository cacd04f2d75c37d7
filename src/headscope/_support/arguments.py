"""Checks of arguments that many functions take, and how messages about them name a value."""

from __future__ import annotations

import operator
import sys
from numbers import Real

import torch
from torch import Tensor

from headscope._support.tensor_classes import check_no_causal_bias

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def shapes(**tensors: Tensor) -> str:
    """``q [2, 8, 16, 128], k [2, 8, 16, 64]``: how every message about sizes ends."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


def kind(value: object) -> str:
    """What a value is, in a few words: a dtype for a tensor, else the name of its type."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def as_whole(value: object) -> int | None:
    """It as an int, also if it is numpy's or a tensor of no axes; None if it is no whole number, as a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim or value.dtype == torch.bool)):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def whole(name: str, value: object, least: int = 1, otherwise: str = "") -> int:
    """It as an int.

    Raises:
        TypeError, ValueError: it is no whole number from ``least`` on; ``otherwise`` says what would do, too.
    """
    found, wanted = as_whole(value), f"wanted a whole number from {least}{otherwise}"
    if found is None:
        raise TypeError(f"{name}: got {kind(value)}, {wanted}")
    if found < least:
        raise ValueError(f"{name}: got {found}, {wanted}")
    return found


def check_layout(name: str, tensor: Tensor) -> None:
    """Whether it is an ordinary tensor: neither sparse nor nested, and no ``CausalBias``."""
    check_no_causal_bias(name, tensor)
    if tensor.layout == torch.jagged or (tensor.layout == torch.strided and tensor.is_nested):
        raise TypeError(f"{name}: is a nested tensor of layout {tensor.layout}, wanted an ordinary one")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: layout is {tensor.layout}, wanted an ordinary tensor (torch.strided): .to_dense()")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the dot products; by default head_dim ** -0.5."""
    if scale is None:
        return head_dim**-0.5
    scale = number("scale", scale)
    if not abs(scale) <= sys.float_info.max:  # NaN neither; a compiler can follow this, but not math.isfinite
        raise ValueError(f"scale: got {scale}, wanted a finite number")
    return float(scale)


def check_softcap(softcap: float | None) -> float | None:
    """The bound of the logits, or None."""
    if softcap is None:
        return None
    softcap = number("softcap", softcap)
    if not 0 < softcap <= sys.float_info.max:
        raise ValueError(f"softcap: got {softcap}, wanted a finite number above 0, or None")
    return float(softcap)


def check_dropout(dropout: float) -> float:
    """The probability with which a weight is dropped."""
    dropout = number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: got {dropout}, wanted a probability in [0, 1)")
    return float(dropout)


def number(name: str, value: object) -> float:
    """It, as an int or a float: numpy has numbers of its own. A bool is none."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: got bool, wanted a number")
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{name}: got {kind(value)}, wanted a number")
