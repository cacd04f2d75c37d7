"""Segments and the largest weight of each key by definition: float64, dense. Nothing of headscope is imported here."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def segment_mass(p: Tensor, counted: Tensor, query_ids: Tensor, key_ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sum [H, S, S] and count [H, S] of weights [B, H, Q, K] over counted rows [B, H, Q], by ids [B, Q] and [B, K]."""
    heads = p.shape[1]
    total = torch.zeros(heads, size, size, dtype=torch.float64)
    count = torch.zeros(heads, size, dtype=torch.int64)
    for a in range(size):
        rows = counted & (query_ids == a)[:, None]  # [B, H, Q]
        count[:, a] = rows.sum((0, 2))
        for b in range(size):
            pairs = rows[..., None] & (key_ids == b)[:, None, None]
            total[:, a, b] = torch.where(pairs, p.double(), 0.0).sum((0, 2, 3))
    return total, count


def mass_on_first(
    p: Tensor, counted: Tensor, query_ids: Tensor, key_ids: Tensor, visible: Tensor, first: int, size: int
) -> Tensor:
    """The part of the sum [H, S, S] on the first real keys: those that some row of the batch entry sees."""
    batch, heads, _, keys = p.shape
    total = torch.zeros(heads, size, size, dtype=torch.float64)
    for b in range(batch):
        real = [j for j in range(keys) if visible[b, ..., j].any()]
        for j in real[:first]:
            if key_ids[b, j] < 0:
                continue
            for a in range(size):
                rows = counted[b] & (query_ids[b] == a)  # [H, Q]
                total[:, a, key_ids[b, j]] += torch.where(rows, p[b, ..., j].double(), 0.0).sum(-1)
    return total


def nulls(
    p: Tensor, counted: Tensor, query_ids: Tensor, key_ids: Tensor, visible: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Sums over counted rows of mean and variance [H, S, S] if the keys of each row are exchanged, row by row."""
    batch, heads, queries, _ = p.shape
    mean, variance = torch.zeros(2, heads, size, size, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                a = int(query_ids[b, i])
                if a < 0 or not counted[b, h, i]:
                    continue
                shown = visible[b, h, i]
                row, ids = p[b, h, i][shown].double(), key_ids[b][shown]
                n, mass = len(row), float(row.sum())
                apart = float((row - mass / n).square().sum())
                for c in range(size):
                    member = (ids == c).double()
                    spread = float((member - member.mean()).square().sum()) / max(1, n - 1)
                    mean[h, a, c] += mass * float(member.mean())
                    variance[h, a, c] += apart * spread
    return mean, variance


def largest_received(p: Tensor, counted: Tensor, visible: Tensor) -> Tensor:
    """The largest weight that a counted row gives each key, [H, K]; NaN where none sees it."""
    pairs = visible & counted[..., None]
    shown = torch.where(pairs, p.double(), -math.inf)
    if 0 in (p.shape[0], p.shape[2]):
        return torch.full((p.shape[1], p.shape[3]), math.nan, dtype=torch.float64)
    largest = shown.amax((0, 2))
    return largest.masked_fill(largest == -math.inf, math.nan)
