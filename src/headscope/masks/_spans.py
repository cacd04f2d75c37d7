"""Spans: half-open intervals of keys, integers [b, q, n, 2], ascending and disjoint, an empty one at (K, K)."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_span(low: Tensor, high: Tensor, keys: int) -> Tensor:
    """Return one span for each pair of ends [b, q], clipped to the existing keys, [b, q, 1, 2]."""
    low, high = low.long().clamp(0, keys), high.long().clamp(0, keys)
    low, high = torch.broadcast_tensors(low, high)
    visible = high > low
    return torch.stack([torch.where(visible, low, keys), torch.where(visible, high, keys)], -1)[:, :, None]


def first_keys(number: int, keys: int, device: torch.device) -> Tensor:
    """Return the span of the first ``number`` keys, the same for every query, [1, 1, 1, 2]."""
    return clip_span(torch.zeros(1, 1, device=device), torch.full((1, 1), number, device=device), keys)


def hull(spans: Tensor, keys: int) -> Tensor:
    """Return the one span from the first to the last key of all, [b, q, 1, 2]."""
    if spans.shape[2] == 1:
        return spans
    low, high = spans[..., 0], spans[..., 1]
    return clip_span(low.amin(-1), torch.where(high > low, high, 0).amax(-1), keys)


def intersect(spans: Tensor, other: Tensor, keys: int) -> Tensor:
    """Return the intersection, where at most one of them has two spans."""
    a, b = (spans, other) if spans.shape[2] >= other.shape[2] else (other, spans)
    pieces = [
        clip_span(torch.maximum(a[:, :, n, 0], b[:, :, 0, 0]), torch.minimum(a[:, :, n, 1], b[:, :, 0, 1]), keys)
        for n in range(a.shape[2])
    ]
    return pieces[0] if len(pieces) == 1 else ascending_pair(pieces[0], pieces[1], keys)


def ascending_pair(a: Tensor, b: Tensor, keys: int) -> Tensor:
    """Return two spans [b, q, 1, 2] as an ascending, disjoint pair [b, q, 2, 2]; where they touch, the first has all.

    An empty span, at (K, K), comes last.
    """
    a, b = torch.broadcast_tensors(a[:, :, 0], b[:, :, 0])
    swap = b[..., :1] < a[..., :1]
    first, second = torch.where(swap, b, a), torch.where(swap, a, b)
    touch = second[..., 0] <= first[..., 1]
    end = torch.where(touch, torch.maximum(first[..., 1], second[..., 1]), first[..., 1])
    one = clip_span(first[..., 0], end, keys)
    two = torch.where(touch[..., None], keys, second)[:, :, None]
    return torch.cat([one, two], 2)


def bound_keys(spans: Tensor) -> Tensor:
    """Return the first and the last key + 1 of each query, [q, 2], of spans [B or 1, q, n, 2]; without keys, (K, 0)."""
    low, high = spans[:, :, 0, 0], spans[..., 1]
    last = torch.where(high > spans[..., 0], high, 0).amax(-1)
    if len(spans) == 1:  # a minimum over an axis of one takes a hundred times as long
        return torch.stack([low[0], last[0]], -1)
    return torch.stack([low.amin(0), last.amax(0)], -1)


def are_causal(spans: Tensor, queries: int, keys: int) -> bool:
    """Return whether query i attends to exactly the keys up to i, with as many queries as keys."""
    if queries != keys or spans.shape[:3] != (1, queries, 1):
        return False
    low, high = spans[0, :, 0].unbind(-1)
    if low[-1] != 0 or high[0] != 1:
        return False
    return bool((low == 0).all()) and torch.equal(high, torch.arange(1, keys + 1, device=spans.device))


def within(block: slice, size: int) -> slice:
    """Return the part of an axis of this size; an axis of 1 repeats."""
    return slice(None) if size == 1 else block
