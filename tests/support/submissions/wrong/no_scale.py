"""The scores are not scaled."""
import torch
from torch import nn, einsum


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.size = heads, dim // heads
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.join = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, e = x.shape
        q, k, v = (f(x).reshape(b, n, self.h, self.size) for f in (self.q, self.k, self.v))
        products = einsum('bihd,bjhd->bhij', q, k)
        if mask is not None:
            lowest = -torch.finfo(products.dtype).max
            products = products.masked_fill(~mask.bool(), lowest)
        out = einsum('bhij,bjhd->bihd', products.softmax(dim=-1), v)
        return self.join(out.reshape(b, n, e))
