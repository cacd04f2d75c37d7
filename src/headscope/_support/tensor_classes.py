"""Subclasses of Tensor: which of them have their numbers in their own memory, and which have no numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

ORDINARY = (Tensor, torch.nn.Parameter)
UNINITIALIZED = (torch.nn.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
is_functional: Callable[[Tensor], bool] = attrgetter("_is_functional_tensor")(torch)

_function = attrgetter("__torch_function__")  # a subclass's replacement of torch's functions
_dispatch = attrgetter("__torch_dispatch__")  # a subclass's replacement of torch's operators

MASKS_OF_CAUSAL_BIAS = (
    "pass mask=causal() instead of causal_lower_right, mask=Band(None, 0, offset=0) instead of causal_upper_left"
)


def is_causal_bias(x: object) -> bool:
    """Return whether x is a ``torch.nn.attention.bias.CausalBias``, without importing that module.

    It is a Tensor of the right shape whose memory was never written. Only torch's SDPA interprets it.
    """
    if type(x) in ORDINARY:
        return False
    return type(x).__name__ == "CausalBias" and type(x).__module__ == _MODULE


_MODULE = "torch.nn.attention.bias"


def check_no_causal_bias(name: str, x: object, remedy: str = MASKS_OF_CAUSAL_BIAS) -> None:
    """Raise if an argument is a ``CausalBias``.

    Raises:
        TypeError: it is one.
    """
    if is_causal_bias(x):
        raise TypeError(f"{name}: got {_MODULE}.CausalBias, whose memory is empty; expected a mask; {remedy}")


def check_has_numbers(name: str, x: Tensor) -> None:
    """Raise if a tensor's numbers are not, or not fully, its content, because of its class or state.

    Raises:
        TypeError: it is a MaskedTensor, an uninitialised parameter, or a functional tensor of ``torch.func``.
    """
    if is_dynamo_compiling():
        return
    if isinstance(x, UNINITIALIZED):
        raise TypeError(f"{name}: is an {type(x).__name__}, which has no shape yet; call its lazy module once first")
    if type(x).__module__.startswith("torch.masked"):
        raise TypeError(
            f"{name}: got a MaskedTensor; expected an ordinary tensor: pass .get_data(), and its mask as mask="
        )
    if type(x) in ORDINARY and is_functional(x):
        raise TypeError(
            f"{name}: is a functional tensor of torch.func.functionalize; expected an ordinary one: to trace "
            "attention, use torch.compile, torch.export or make_fx"
        )


def is_distributed(x: object) -> bool:
    """Return whether x is a DTensor, without importing its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_distributed(tensors: Mapping[str, Tensor | None], beside: Mapping[str, object]) -> None:
    """Raise if DTensors are combined with tensors that they cannot be multiplied with.

    Args:
        tensors: q, k and v, of which either all or none are DTensors.
        beside: the tensors that are multiplied with them: a mask, a bias, sinks; None = absent.

    Raises:
        TypeError: some are DTensors and some are ordinary tensors.
    """
    distributed = [name for name, x in tensors.items() if is_distributed(x)]
    inside = [name for name, x in beside.items() if is_distributed(x)]
    remedy = "expected q, k and v all as DTensors, or their local parts: .to_local()"
    if distributed and len(distributed) < len(tensors):
        name = next(name for name in tensors if name not in distributed)
        raise TypeError(f"{name}: is an ordinary tensor, {distributed[0]} is a DTensor; {remedy}")
    if inside and not distributed:
        raise TypeError(
            f"{inside[0]}: is a DTensor, q, k and v are ordinary; expected an ordinary tensor: use .to_local()"
        )
    if distributed and (ordinary := [name for name, x in beside.items() if x is not None and name not in inside]):
        raise TypeError(
            f"{ordinary[0]}: is an ordinary tensor, q, k and v are DTensors; expected a DTensor over their mesh: "
            "distribute_tensor(..., [Replicate()])"
        )


def has_own_functions(x: Tensor) -> bool:
    """Return whether x's class changes torch's functions, so its behaviour may not follow from its numbers."""
    own = _function(type(x))
    if own is torch._C._disabled_torch_function_impl:
        return False
    return getattr(own, "__func__", own) is not _function(Tensor).__func__


def to_ordinary(name: str, x: Tensor) -> Tensor:
    """Return x as a tensor whose ``data_ptr`` points to memory that holds its numbers.

    A subclass that does not change operators becomes a plain Tensor over the same memory. One that does
    (``__torch_dispatch__``), such as DTensor, may have no memory, and ``data_ptr`` does not raise.

    Raises:
        TypeError: x may not have its own memory.
    """
    if type(x) in ORDINARY:
        return x
    check_no_causal_bias(name, x)
    if _dispatch(type(x)) is not _dispatch(Tensor):
        remedy = ": .full_tensor() or .to_local()" if hasattr(x, "full_tensor") else ""
        raise TypeError(f"{name}: got {type(x).__name__}; expected an ordinary tensor{remedy}")
    return x.as_subclass(Tensor)
