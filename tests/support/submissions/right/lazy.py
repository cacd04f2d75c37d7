"""Lazy layers, which learn their input width from the first call; -1e6."""
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.LazyLinear(size, bias=False) for _ in range(4))

    def cut(self, t):
        return t.unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3)

    def forward(self, queries, keys, values, mask=None):
        q, k, v = self.cut(self.q(queries)), self.cut(self.k(keys)), self.cut(self.v(values))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask.bool(), -1e6)
        return self.o((torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3).flatten(2))
