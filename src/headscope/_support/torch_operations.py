"""torch's operations beneath autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PRODUCTS: dict[str, Callable[[tuple[Any, ...]], tuple[Tensor, Tensor]]] = {
    "mm": lambda args: (args[0], args[1]),
    "bmm": lambda args: (args[0], args[1]),
    "addmm": lambda args: (args[1], args[2]),
    "baddbmm": lambda args: (args[1], args[2]),
}
"""Products of two matrices by name: from the arguments to the operands."""


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is composed of others: without autograd it arrives whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def name_of(func: Any) -> str:
    """Return the name of an operation; one that writes in place has that of the one that does not."""
    name = func.overloadpacket.__name__
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


@functools.cache
def is_view(func: Any) -> bool:
    """Return whether the result of an operation shares the storage of its argument."""
    returns = func._schema.returns
    return bool(returns) and any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def is_in_place(func: Any) -> bool:
    """Return whether an operation writes into its first argument."""
    return func._schema.is_mutable


def is_factory(name: str) -> bool:
    """Return whether an operation takes only sizes and the dtype from its tensor."""
    return name.endswith("_like") or name.startswith("new_")


def is_pointwise(name: str, packet: Any = None) -> bool:
    """Return whether torch marks an operation as one that computes each number by itself.

    Args:
        name: as ``name_of`` returns it: some operations have the mark only where they do not write in place.
        packet: the operation, if it may be another library's.
    """
    packet = getattr(torch.ops.aten, name, packet)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
