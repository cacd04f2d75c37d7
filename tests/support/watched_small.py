"""Models of a few lines that the tests of watch share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headscope
from headscope.masks import causal


class Attention(nn.Module):
    """Causal self-attention by SDPA, with as many heads as are asked for."""

    def __init__(self, width: int = 15, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Small(nn.Module):
    """Three layers, each of another make."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Attention()
        self.ours = headscope.MultiHeadAttention(15, 5)
        self.theirs = nn.MultiheadAttention(15, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ours(self.plain(x), mask=causal())
        return self.theirs(x, x, x, need_weights=False)[0]


def input_of(model: nn.Module, width: int = 15) -> Tensor:
    return torch.randn(2, 7, width, dtype=next(model.parameters()).dtype)


class Alone(nn.Module):
    """One ``nn.MultiheadAttention``, on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Raw(nn.Module):
    """SDPA and nothing else."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, **more: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, **self.options, **more)
