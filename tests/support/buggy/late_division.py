"""Attention that divides by the sums of its weights after these have met the values, in several spellings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def over(e: Tensor, z: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    return (e @ v) / sums


def times(e: Tensor, z: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    return sums.reciprocal() * torch.einsum("bhqk,bhkd->bhqd", e, v)


def in_place(e: Tensor, z: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    out = e @ v
    out /= sums
    return out


def by_logarithms(e: Tensor, z: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    return e @ v * (z.amax(-1, keepdim=True) - z.logsumexp(-1, keepdim=True)).exp()


def column_of_ones(e: Tensor, z: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    both = e @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return both[..., :-1] / both[..., -1:]


def never(e: Tensor, z: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    return e @ v


def over_keys(e: Tensor, z: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    return (e @ v) / e.sum(-2)[..., None]


RIGHT = (over, times, in_place, by_logarithms, column_of_ones)
WRONG = (never, over_keys)


class Late(nn.Module):
    """Causal or not; the last step is the given one."""

    def __init__(self, step: object, *, causal: bool) -> None:
        super().__init__()
        self.step, self.causal = step, causal
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))  # [B, H, T, D]
        z = q @ k.mT / math.sqrt(8)
        if self.causal:
            z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        e = (z - z.amax(-1, keepdim=True)).exp()
        out = self.step(e, z, v, e.sum(-1, keepdim=True))  # pyright: ignore[reportCallIssue]
        return self.o(out.transpose(1, 2).flatten(2))
