"""Subclasses of Tensor: which of them hold their numbers in memory of their own, and which hold no numbers at all."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

ORDINARY = (Tensor, torch.nn.Parameter)

_function = attrgetter("__torch_function__")  # what a subclass does in place of torch's functions
_dispatch = attrgetter("__torch_dispatch__")  # what a subclass does in place of torch's operators

MASKS_OF_CAUSAL_BIAS = (
    "pass mask=causal() in place of causal_lower_right, mask=Band(None, 0, offset=0) in place of causal_upper_left"
)


def is_causal_bias(x: object) -> bool:
    """Return whether x is a ``torch.nn.attention.bias.CausalBias``, without importing that module.

    It is a Tensor of the right shape whose memory was never written. Only torch's SDPA knows what it stands for.
    """
    if type(x) in ORDINARY:
        return False
    return type(x).__name__ == "CausalBias" and type(x).__module__ == _MODULE


_MODULE = "torch.nn.attention.bias"


def check_no_causal_bias(name: str, x: object, remedy: str = MASKS_OF_CAUSAL_BIAS) -> None:
    """Raise where an argument is a ``CausalBias``.

    Raises:
        TypeError: it is one.
    """
    if is_causal_bias(x):
        raise TypeError(f"{name}: got {_MODULE}.CausalBias, whose memory holds no numbers; expected a mask; {remedy}")


def has_own_functions(x: Tensor) -> bool:
    """Return whether x's class changes torch's functions, so that its numbers may not say what it does."""
    own = _function(type(x))
    if own is torch._C._disabled_torch_function_impl:
        return False
    return getattr(own, "__func__", own) is not _function(Tensor).__func__


def to_ordinary(name: str, x: Tensor) -> Tensor:
    """Return x as a tensor whose ``data_ptr`` points to memory that holds its numbers.

    A subclass that changes no operator keeps its memory, and becomes a plain Tensor over it. One that does
    (``__torch_dispatch__``), such as DTensor, may have no memory, and ``data_ptr`` does not raise.

    Raises:
        TypeError: x may have no memory of its own.
    """
    if type(x) in ORDINARY:
        return x
    check_no_causal_bias(name, x)
    if _dispatch(type(x)) is not _dispatch(Tensor):
        remedy = ": .full_tensor() or .to_local()" if hasattr(x, "full_tensor") else ""
        raise TypeError(f"{name}: got {type(x).__name__}; expected an ordinary tensor{remedy}")
    return x.as_subclass(Tensor)
