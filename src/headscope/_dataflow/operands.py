"""torch's operations as they are followed: what each does, and which of its arguments are tensors."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from headscope._dataflow.table import is_followed
from headscope._support.torch_operations import (
    is_composite,
    is_factory,
    is_in_place,
    is_pointwise,
    is_view,
    name_of,
)

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
    name = name_of(func)
    return Operation(
        name=name,
        is_composite=is_composite(func),
        is_view=is_view(func),
        writes=is_in_place(func),
        is_elementwise=name in TRIANGLES | _UNTAGGED or is_pointwise(name, func.overloadpacket),
        is_of_images=any(each in name for each in _OF_IMAGES),
        is_factory=is_factory(name),
        is_norm=any(each in name for each in ("layer_norm", "rms_norm", "batch_norm")),
    )


def followed_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments that can be followed, also in lists."""
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            tensors += [y for y in x if is_followed(y)]
        elif is_followed(x):
            tensors.append(x)
    return tensors
