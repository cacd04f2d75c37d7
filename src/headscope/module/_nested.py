"""Nested tensors in ``MultiHeadAttention``: rows of unequal length, concatenated, as documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headscope._support.arguments import kind
from headscope._support.tensor_classes import ORDINARY
from headscope.masks import Band, Documents, Mask
from headscope.positions import restarting


def forward_nested(
    attend: Callable[..., Tensor], x: Tensor, context: Any, mask: Mask | Tensor | None, restart: bool, **others: object
) -> Tensor:
    """Run a nested x [B, ragged, E]: each row attends to itself, or to the same row of a nested context.

    Args:
        attend: the forward pass of ordinary tensors.
        x: the queries' tokens.
        context: the keys' tokens, nested too; None = x.
        mask: ``causal()``, ``window(n)`` or another combination of bands.
        restart: whether to pass positions that restart from 0 in each row.
        others: arguments that nested tensors do not support, unless None or False.

    Raises:
        ValueError: another layout, or an argument that nested tensors do not support.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected None together with a nested x, whose rows differ in length")
    offsets = _offsets("x", x)
    documents, sources = Documents.from_cu_seqlens(offsets), {}
    if context is not None:
        if mask is not None:
            raise ValueError(
                "mask: expected None together with a nested context; each row of x attends to its own row of the "
                "context"
            )
        if not isinstance(context, Tensor) or not context.is_nested:
            got = kind(context) if not isinstance(context, Tensor) else f"a tensor of {context.ndim} axes"
            raise ValueError(f"context: got {got}, expected a nested tensor, as x is")
        k_offsets = _offsets("context", context)
        if len(k_offsets) != len(offsets):
            raise ValueError(f"context: has {len(k_offsets) - 1} rows, x has {len(offsets) - 1}")
        documents = Documents.from_cu_seqlens(offsets, k_offsets)
        sources = {"context": context.values()[None]}
    positions = {"positions": restarting(offsets)} if restart else {}
    out = attend(x.values()[None], mask=_within(documents, mask), **sources, **positions)  # [1, total, E]
    if type(out) not in ORDINARY:  # a sum over ranks that may be in flight: nested tensors cannot hold it
        out = out.clone()
    return torch.nested.nested_tensor_from_jagged(out[0], offsets)


def _within(documents: Documents, mask: Mask | Tensor | None) -> Mask:
    if mask is None:
        return documents
    if not isinstance(mask, Mask) or not all(isinstance(leaf, Band) and leaf.offset is None for leaf in mask.leaves()):
        raise ValueError(
            f"mask: got {kind(mask)}, expected causal(), window(n) or another Band without offset, because key "
            "numbers differ from row to row of a nested x"
        )
    return mask & documents


def _offsets(name: str, x: Tensor) -> Tensor:
    """Return where the rows of a nested tensor begin in its values, and where the last one ends."""
    if x.layout != torch.jagged:
        raise ValueError(f"{name}: is a nested tensor of layout {x.layout}, expected torch.jagged")
    jagged: Any = x
    if jagged.ndim != 3 or jagged._ragged_idx != 1:
        raise ValueError(f"{name}: is a nested tensor of {jagged.ndim} axes, expected [B, ragged, E]")
    if jagged.lengths() is not None:
        raise ValueError(
            f"{name}: is a nested tensor with gaps between its rows; expected a contiguous one: use .contiguous()"
        )
    return jagged.offsets()
