"""torch's operations beneath autograd: which move numbers, which keep them in their places."""

from __future__ import annotations

import functools

from headscope._support.torch_operations import is_pointwise

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
def keeps_places(name: str) -> bool:
    """Return whether each number of a result continues the number at its place."""
    return name in IN_PLACE_OF_EACH or is_pointwise(name)
