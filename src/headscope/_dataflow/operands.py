"""The arguments of torch's operations: which are tensors, and which are the operands of a product."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope._dataflow.table import is_followed
from headscope._support.torch_operations import is_composite

COPIES = {"clone", "_to_copy", "contiguous", "expand_copy", "_reshape_copy", "view_copy", "permute_copy"}
MOVES = COPIES | {"index_select", "gather", "repeat", "flip", "roll", "constant_pad_nd", "index"}
JOINS = {"cat", "stack"}
FILLS = {"index_put", "_index_put_impl_", "masked_scatter", "index_fill", "index_copy", "scatter", "slice_scatter"}
"""These replace some numbers of their first argument at places that other arguments state."""
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "logsumexp"}
TRIANGLES = {"tril", "triu"}
_UNTAGGED = {"hardswish", "_prelu_kernel", "log_sigmoid_forward"}
"""Elementwise operations that torch does not tag as such."""
_OF_IMAGES = ("convolution", "pool", "batch_norm", "group_norm", "upsample")


class Operation(NamedTuple):
    """What a followed operation does.

    Attributes:
        name: that of the operation; one that writes in place has that of the one that does not.
        is_composite: whether it is composed of others, which are followed in its place.
        is_view: whether its result shares the storage of its argument.
        writes: whether it writes into its first argument.
        is_elementwise: whether each number of the result depends on the numbers at the same place.
        is_of_images: whether it is one of images or sequences whose features are axis 1.
        is_factory: whether its result does not depend on the numbers of the arguments.
        is_norm: whether it normalises features, so that its result has the axes of its argument.
    """

    name: str
    is_composite: bool
    is_view: bool
    writes: bool
    is_elementwise: bool
    is_of_images: bool
    is_factory: bool
    is_norm: bool


@functools.cache
def describe(func: Any) -> Operation:
    """Return what an operation does; one look-up, because hashing an operation takes half a microsecond."""
    return Operation(
        _name_of(func), is_composite(func), _is_view(func), _is_in_place(func), _is_elementwise(func),
        _is_of_images(func), _is_factory(func), _is_norm(func),
    )  # fmt: skip


def _name_of(func: Any) -> str:
    """Return the name of an operation; one that writes in place has that of the one that does not."""
    name = func.overloadpacket.__name__
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


def _is_view(func: Any) -> bool:
    """Return whether the result of an operation shares the storage of its argument."""
    returns = func._schema.returns
    return bool(returns) and any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _is_in_place(func: Any) -> bool:
    """Return whether an operation writes into its first argument."""
    return func._schema.is_mutable


def _is_elementwise(func: Any) -> bool:
    """Return whether each number of the result depends on the numbers at the same place."""
    packet = getattr(torch.ops.aten, _name_of(func), func.overloadpacket)  # in place, some have no tag
    return _name_of(func) in TRIANGLES | _UNTAGGED or any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _is_of_images(func: Any) -> bool:
    """Return whether an operation is one of images or sequences whose features are axis 1."""
    return any(each in _name_of(func) for each in _OF_IMAGES)


def _is_factory(func: Any) -> bool:
    """Return whether a result does not depend on the numbers of the arguments."""
    return _name_of(func).endswith("_like") or _name_of(func).startswith("new_")


def _is_norm(func: Any) -> bool:
    """Return whether an operation normalises features, so that its result has the axes of its argument."""
    return any(each in _name_of(func) for each in ("layer_norm", "rms_norm", "batch_norm"))


def followed_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments that can be followed, also in lists."""
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            tensors += [y for y in x if is_followed(y)]
        elif is_followed(x):
            tensors.append(x)
    return tensors
