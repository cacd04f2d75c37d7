"""The width is cut into heads without moving them in front of the length."""
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads, p=0.1):
        super().__init__()
        self.heads, self.p = heads, p
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (w(x).reshape(x.shape[0], self.heads, x.shape[1], -1) for w in (self.wq, self.wk, self.wv))
        if mask is not None:
            mask = mask.to(torch.bool)
        p = self.p if self.training else 0.0
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.wo(o.transpose(1, 2).flatten(-2))
