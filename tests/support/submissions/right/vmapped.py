import torch
from torch import nn
from torch.func import vmap


def attend(q, k, v, mask):
    """One head of one sequence: [T, D]."""
    logits = q @ k.T / q.shape[-1] ** 0.5
    logits = torch.where(mask, logits, -1e30)
    return torch.softmax(logits, -1) @ v


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, mask=None):
        T = x.shape[1]
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        mask = torch.ones(T, T, dtype=torch.bool) if mask is None else mask.bool()
        over_heads = vmap(attend, in_dims=(1, 1, 1, None), out_dims=1)
        over_batch = vmap(over_heads, in_dims=(0, 0, 0, None))
        return self.o(over_batch(q, k, v, mask).flatten(-2))
