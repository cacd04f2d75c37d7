"""The selected keys of ``Observe``: which kinds of values describe a selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from headscope._support.arguments import kind
from headscope.masks import Mask

Selected: TypeAlias = "Tensor | Mask"
"""Indices of keys, a boolean tensor, or a mask."""

Policy: TypeAlias = "Callable[[str, Tensor, Tensor], Selected]"
"""Returns the selected keys of a call: layer, q [B, H, Q, D] and k [B, Hkv, K, D] -> selection."""

EXPECTED = "indices of keys [B, H, Q, n] (-1 = none), a boolean tensor or a mask (True = selected)"
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_selected(selected: object, row_stats: bool = True) -> None:
    """Check the kind of a selection.

    Raises:
        TypeError: it is not a tensor of whole numbers or booleans, a mask or a function.
        ValueError: row quantities are not measured.
    """
    if not row_stats:
        raise ValueError(
            "selected: expected None together with row_stats=False, because its results are row quantities"
        )
    if isinstance(selected, Tensor):
        if selected.dtype != torch.bool and selected.dtype not in INTEGERS:
            raise TypeError(
                f"selected: dtype is {kind(selected)}, expected {EXPECTED}; scores.topk(n, -1).indices are such indices"
            )
    elif not isinstance(selected, Mask) and not callable(selected):
        raise TypeError(f"selected: got {kind(selected)}, expected {EXPECTED}, or a function that returns one of these")
