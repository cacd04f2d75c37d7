"""The arguments of torch's operations: which are tensors, and which are the operands of a product."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from headscope._dataflow.table import is_followed

COPIES = {"clone", "_to_copy", "contiguous", "expand_copy", "_reshape_copy", "view_copy", "permute_copy"}
MOVES = COPIES | {"index_select", "gather", "repeat", "flip", "roll", "constant_pad_nd", "index"}
JOINS = {"cat", "stack"}
FILLS = {"index_put", "_index_put_impl_", "masked_scatter", "index_fill", "index_copy", "scatter", "slice_scatter"}
"""These replace some numbers of their first argument at places that other arguments state."""
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "logsumexp"}
TRIANGLES = {"tril", "triu"}
_OF_IMAGES = ("convolution", "pool", "batch_norm", "group_norm", "upsample")


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


@functools.cache
def is_in_place(func: Any) -> bool:
    """Return whether an operation writes into its first argument."""
    return func._schema.is_mutable


@functools.cache
def is_elementwise(func: Any) -> bool:
    """Return whether each number of the result depends on the numbers at the same place."""
    packet = getattr(torch.ops.aten, name_of(func), func.overloadpacket)  # in place, some have no tag
    return name_of(func) in TRIANGLES or any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


@functools.cache
def is_of_images(func: Any) -> bool:
    """Return whether an operation is one of images or sequences whose features are axis 1."""
    return any(each in name_of(func) for each in _OF_IMAGES)


@functools.cache
def is_factory(func: Any) -> bool:
    """Return whether a result does not depend on the numbers of the arguments."""
    return name_of(func).endswith("_like") or name_of(func).startswith("new_")


@functools.cache
def is_norm(func: Any) -> bool:
    """Return whether an operation normalises features, so that its result has the axes of its argument."""
    return "layer_norm" in name_of(func) or "rms_norm" in name_of(func)


def followed_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments that can be followed, also in lists."""
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            tensors += [y for y in x if is_followed(y)]
        elif is_followed(x):
            tensors.append(x)
    return tensors
