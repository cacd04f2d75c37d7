"""The classes and functions of the five systems this project grew from, as they compute; see ``test_seeds``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SixSteps(nn.Module):
    """000: q_linear, k_linear, v_linear, out_proj."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.q_linear = nn.Linear(embed_dim, embed_dim)
        self.k_linear = nn.Linear(embed_dim, embed_dim)
        self.v_linear = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, seq_len, _ = x.size()
        q = self.q_linear(x).view(batch_size, seq_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_linear(x).view(batch_size, seq_len, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_linear(x).view(batch_size, seq_len, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        values = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.out_proj(values.transpose(1, 2).contiguous().view(batch_size, seq_len, self.embed_dim))


class FoldedHeads(nn.Module):
    """001: heads folded into the batch, no biases, divided by the square root of the whole width."""

    def __init__(self, k: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokeys = nn.Linear(k, k, bias=False)
        self.toqueries = nn.Linear(k, k, bias=False)
        self.tovalues = nn.Linear(k, k, bias=False)
        self.unifyheads = nn.Linear(k, k)

    def forward(self, x: Tensor) -> Tensor:
        b, t, k = x.size()
        h, s = self.heads, k // self.heads
        keys = self.tokeys(x).view(b, t, h, s).transpose(1, 2).contiguous().view(b * h, t, s)
        queries = self.toqueries(x).view(b, t, h, s).transpose(1, 2).contiguous().view(b * h, t, s)
        values = self.tovalues(x).view(b, t, h, s).transpose(1, 2).contiguous().view(b * h, t, s)
        dot = F.softmax(torch.bmm(queries, keys.transpose(1, 2)) / (k ** (1 / 2)), dim=2)
        out = torch.bmm(dot, values).view(b, h, t, s)
        return self.unifyheads(out.transpose(1, 2).contiguous().view(b, t, s * h))


class OneText(nn.Module):
    """002: one text [T, E] without a batch, head after head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, text: Tensor) -> Tensor:
        length, width = text.shape
        d_k = width // self.heads
        q, k, v = (one(text).view(length, self.heads, d_k).transpose(0, 1) for one in (self.q, self.k, self.v))
        results = []
        for q_i, k_i, v_i in zip(q, k, v, strict=True):
            r_1 = (q_i @ k_i.T) / torch.sqrt(torch.tensor(d_k))
            results.append(torch.softmax(r_1, dim=1) @ v_i)
        return self.o(torch.stack(results, dim=0).permute(1, 0, 2).reshape(length, width))


class Patches(nn.Module):
    """003: query, key, value, out, for the patches of an image."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.dim, self.head_dim = num_heads, dim, dim // num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        q = self.query(x).view(n, -1, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(n, -1, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(n, -1, self.num_heads, self.head_dim).transpose(1, 2)
        attn = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim), dim=-1)
        return self.out(torch.matmul(attn, v).transpose(1, 2).contiguous().view(n, -1, self.dim))


class Enforced(nn.Module):
    """004: w_q, w_k, w_v, w_o, and a causal mask where it says "if needed"."""

    def __init__(self, d_model: int, num_heads: int, masked: bool) -> None:
        super().__init__()
        self.h, self.d_k, self.masked = num_heads, d_model // num_heads, masked
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (w(x).view(b, t, self.h, self.d_k).transpose(1, 2) for w in (self.w_q, self.w_k, self.w_v))
        scores = (q @ k.transpose(-2, -1)) / (self.d_k**0.5)
        if self.masked:
            scores = scores.masked_fill(torch.tril(torch.ones(t, t)) == 0, float("-inf"))
        context = torch.softmax(scores, dim=-1) @ v
        return self.w_o(context.transpose(1, 2).contiguous().view(b, t, c))
