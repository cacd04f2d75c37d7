"""Heads are chunks that are joined along the batch, head by head; -2**32."""
import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, units, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(units, units) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (torch.cat(f(x).chunk(self.heads, dim=2), dim=0) for f in (self.q, self.k, self.v))
        scores = torch.bmm(q, k.transpose(1, 2)) / (k.size(-1) ** 0.5)
        if mask is not None:
            each = mask if mask.ndim == 3 else mask.expand(x.size(0), -1, -1)
            scores = torch.where(each.bool().repeat(self.heads, 1, 1), scores, torch.full_like(scores, -2**32 + 1))
        mixed = torch.bmm(torch.softmax(scores, -1), v)
        return self.o(torch.cat(mixed.chunk(self.heads, dim=0), dim=2))
