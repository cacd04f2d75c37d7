"""Which scores of patterns are clear: large, and far from what chance gives."""

from __future__ import annotations

import torch
from torch import Tensor

CLEAR_SCORE = 0.3
"""The smallest score that is large: the share of what is possible beyond chance."""

CLEAR_Z = 3.0
"""The smallest number of standard deviations from chance."""


def is_name(pattern: str, score: float, z: float) -> bool:
    """Return whether a head shows this pattern's name: the score is clear, or describes an even spread.

    "uniform" is what chance gives: exchanging the keys of an even row changes nothing, so it has no z.
    """
    return score >= CLEAR_SCORE and (z >= CLEAR_Z or pattern == "uniform")


def z_of_mass(p: Tensor, target: Tensor, visible: Tensor, rows: Tensor) -> Tensor:
    """Return how far the mass on some keys is from that of exchanged keys, in standard deviations, [H].

    Shapes: p, target and visible broadcast to [B, H, Q, K], rows to [B, H, Q]. NaN where exchanging changes nothing.
    """
    keys = visible.sum(-1).clamp_min(1).double()
    there = (target & visible).sum(-1)
    mass = p.sum(-1)
    squares = p.square().sum(-1)
    uneven = squares - mass.square() / keys
    uneven = torch.where(uneven > 1e-6 * squares, uneven, 0.0)
    variance = uneven * there * (1 - there / keys) / (keys - 1).clamp_min(1)
    gain = (p * target).sum(-1) - mass * there / keys
    rows = rows & (there > 0)
    std = torch.where(rows, variance, 0.0).sum((0, 2)).sqrt()
    return torch.where(rows, gain, 0.0).sum((0, 2)) / std.masked_fill(std == 0, torch.nan)
