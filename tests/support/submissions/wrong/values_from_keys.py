"""The values are projected by the layer of the keys."""
import torch
from torch import nn


def soft(scores, visible):
    if visible is None:
        return scores.softmax(-1)
    return scores.masked_fill(visible.logical_not(), -1e6).softmax(-1)


class MultiHeadAttention(nn.Module):
    def __init__(self, size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_map = nn.Linear(size, size, bias=False)
        self.key_map = nn.Linear(size, size, bias=False)
        self.value_map = nn.Linear(size, size, bias=False)
        self.last_map = nn.Linear(size, size, bias=False)

    def fold(self, t):
        n, length, size = t.shape
        t = t.reshape(n, length, self.num_heads, size // self.num_heads).permute(0, 2, 1, 3)
        return t.reshape(n * self.num_heads, length, -1)

    def unfold(self, t):
        length = t.shape[1]
        t = t.reshape(-1, self.num_heads, length, t.shape[2]).permute(0, 2, 1, 3)
        return t.reshape(t.shape[0], length, -1)

    def forward(self, queries, keys, values, mask=None):
        if mask is not None and mask.ndim == 3:  # one for each text
            mask = mask.repeat_interleave(self.num_heads, 0)
        q = self.fold(self.query_map(queries))
        k = self.fold(self.key_map(keys))
        v = self.fold(self.key_map(values))
        p = soft(torch.bmm(q, k.transpose(1, 2)) * q.shape[2] ** -0.5, mask)
        return self.last_map(self.unfold(torch.bmm(p, v)))
