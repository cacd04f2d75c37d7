"""The logarithm of the mask is added; exp of a difference is the softmax."""
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(2, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT * q.size(-1) ** -0.5
        if mask is not None:
            s = s + mask.to(s.dtype).log()
        p = (s - s.logsumexp(-1, keepdim=True)).exp()
        return self.o((p @ v).transpose(1, 2).flatten(2))
