import torch
from torch import nn
from torch.nn import functional as F


def rotate(x):
    a, b = x.chunk(2, dim=-1)
    t = torch.arange(x.shape[-2], dtype=x.dtype)
    freq = 10000.0 ** (-torch.arange(a.shape[-1], dtype=x.dtype) / a.shape[-1])
    angle = t[:, None] * freq
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None):
        b, t, e = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, e // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q), rotate(k)
        scores = q @ k.transpose(-1, -2) / (e // self.heads) ** 0.5
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        if mask is not None:
            causal = causal & mask.bool()
        scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, e))
