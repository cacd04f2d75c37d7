"""torch's operations beneath autograd: which move numbers, which keep them in their places."""

from __future__ import annotations

import functools
from typing import Any

import torch

MOVES = {
    *("clone", "_to_copy", "contiguous", "alias", "cat", "stack", "index", "index_select", "gather", "repeat", "tile"),
    *("flip", "roll", "constant_pad_nd", "repeat_interleave", "expand_copy", "_reshape_copy", "view_copy"),
    *("permute_copy", "select_copy", "slice_copy", "view_as_real_copy"),
}
INDEXED = {"index", "index_select", "gather"}  # moves to places that a tensor names
IN_PLACE_OF_EACH = {
    *("tril", "triu", "native_layer_norm", "native_group_norm", "native_batch_norm", "_log_softmax", "_to_copy"),
    *("nan_to_num", "native_dropout", "_fused_rms_norm"),
    *("fill", "index_put", "index_fill", "scatter"),
}
"""Operations whose results continue their arguments place by place, although torch does not mark them so."""
WRITES = {"fill", "index_put", "index_fill", "scatter"}  # of other numbers at some places of the first argument


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
def is_factory(name: str) -> bool:
    """Return whether an operation takes only sizes and the dtype from its tensor."""
    return name.endswith("_like") or name.startswith("new_")


@functools.cache
def keeps_places(name: str) -> bool:
    """Return whether each number of a result continues the number at its place."""
    if name in IN_PLACE_OF_EACH:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
