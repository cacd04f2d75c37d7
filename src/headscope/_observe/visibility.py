"""Visible keys: of a block, of rows by their index, and of any query."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._attend.blocks import slices
from headscope._attend.call import Call
from headscope._observe import inputs
from headscope.masks import Plan


def real_keys(call: Call, plan: Plan | None, bias: Tensor | None) -> Tensor:
    """Return which keys are visible to any query of any head of a batch entry, boolean [B, K]."""
    device = torch.device("cpu") if plan is None else plan.spans.device
    device = bias.device if bias is not None else device
    if call.queries == 0 or call.heads == 0:
        return torch.zeros(call.batch, call.keys, dtype=torch.bool, device=device)
    if plan is None and bias is None:
        return torch.ones(call.batch, call.keys, dtype=torch.bool, device=device)
    if plan is not None and plan.rest is None and bias is None:
        return _spanned(plan.spans, call.keys).expand(call.batch, -1)
    real = torch.zeros(call.batch, call.keys, dtype=torch.bool, device=device)
    for i in slices(call.queries, inputs.BLOCK // max(1, call.batch * call.heads * call.keys)):
        pairs = visible_block(plan, bias, (slice(0, call.batch), slice(0, call.heads), i, slice(0, call.keys)), device)
        real |= pairs.any(1).any(1) if pairs is not None else True
    return real


def _spanned(spans: Tensor, keys: int) -> Tensor:
    """Return which keys lie in a span of some query, [B or 1, K]."""
    ends = spans.flatten(1, 2)  # [B or 1, Q or 1 * n, 2]
    steps = ends.new_zeros(len(ends), keys + 1)
    one = torch.ones_like(ends[..., 0])
    steps.scatter_add_(1, ends[..., 0], one).scatter_add_(1, ends[..., 1], -one)
    return steps.cumsum(1)[:, :keys] > 0


Cut = tuple[slice, slice, slice, slice]
"""A block of the matrix: batch entries, query heads, queries, keys."""


def visible_block(plan: Plan | None, bias: Tensor | None, cut: Cut, device: torch.device) -> Tensor | None:
    """Return which keys are visible in a block, boolean, broadcastable to [b, h, i, j]; None = all."""
    pairs = None
    if plan is not None and not plan.everything:
        pairs = plan.tile(*cut).to(device)
    if bias is not None:
        tile = bias[tuple(slice(None) if n == 1 else here for n, here in zip(bias.shape, cut, strict=True))]
        shown = tile != -torch.inf
        pairs = shown if pairs is None else pairs & shown
    return pairs


def visible_rows(plan: Plan | None, bias: Tensor | None, b: slice, h: slice, i: Tensor, j: slice) -> Tensor | None:
    """Return the same for rows by their query index ``i``, int64 [1, 1, r] or [b, h, r]."""
    at_b = torch.arange(b.start, b.stop, device=i.device)[:, None, None]
    at_h = torch.arange(h.start, h.stop, device=i.device)[:, None]
    pairs = None
    if plan is not None and not plan.everything:
        device = plan.spans.device
        rows, in_b, in_h = i.to(device), at_b.to(device), at_h.to(device)
        spans = plan.spans[_index(in_b, plan.spans.shape[0]), _index(rows, plan.spans.shape[1])]  # [b, h, r, n, 2]
        keys = torch.arange(j.start, j.stop, device=device)
        pairs = ((keys >= spans[..., 0, None]) & (keys < spans[..., 1, None])).any(-2)  # [b, h, r, j]
        if plan.rest is not None:
            pairs = pairs & plan.rest.allows(in_b[..., None], in_h[..., None], rows[..., None], keys)
        pairs = pairs.to(i.device)
    if bias is not None:
        shown = bias_rows(bias, at_b, at_h, i, j) != -torch.inf
        pairs = shown if pairs is None else pairs & shown
    return pairs


def bias_rows(bias: Tensor, b: Tensor, h: Tensor, i: Tensor, j: slice) -> Tensor:
    """Return the bias of rows by their indices, broadcastable to [b, h, r, j]."""
    block = bias[tuple(_index(at, n) for at, n in zip((b, h, i), bias.shape, strict=False))]
    return block if block.shape[-1] == 1 else block[..., j]


def _index(at: Tensor, size: int) -> Tensor:
    return torch.zeros_like(at) if size == 1 else at
