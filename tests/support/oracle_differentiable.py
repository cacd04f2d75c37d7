"""Entropy, received mass and segments of dense weights in float64, with torch's own graph. Slow and literal.

Nothing of headscope is imported here. Rows that do not count have the entropy 0, and no part in any sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from support import oracle


def weights(call: dict[str, Any]) -> Tensor:
    """p [B, H, Q, K] of the arguments of ``oracle.attention``, in float64, with its graph."""
    p = oracle.attention(**call).weights
    return p.reshape(math.prod(p.shape[:-3]), *p.shape[-3:])


def entropy(p: Tensor, counted: Tensor) -> Tensor:
    """-Σ p ln p of each row, [B, H, Q]; a weight of 0 adds nothing."""
    p = torch.where(counted[..., None], p, 0.0)
    return -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum(-1)


def received(p: Tensor, counted: Tensor) -> Tensor:
    """The sum over counted rows of the weight on each key, [B, H, K]."""
    return torch.where(counted[..., None], p, 0.0).sum(2)


def segments(p: Tensor, counted: Tensor, query_ids: Tensor, key_ids: Tensor, size: int) -> Tensor:
    """The mean over counted rows of a segment of the weight on each segment, [B, H, S, S], by ids [B, Q] and [B, K].

    0 for a segment without such rows.
    """
    means = []
    for a in range(size):
        rows = counted & (query_ids == a)[:, None]  # [B, H, Q]
        for b in range(size):
            pairs = rows[..., None] & (key_ids == b)[:, None, None]
            means.append(torch.where(pairs, p, 0.0).sum((2, 3)) / rows.sum(-1).clamp_min(1))
    return torch.stack(means, -1).unflatten(-1, (size, size)) if size else p.new_zeros(*p.shape[:2], 0, 0)
