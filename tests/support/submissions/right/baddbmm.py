import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    """Additive mask, scaled inside of baddbmm."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.d = dim // heads
        self.query, self.key, self.value, self.dense = [nn.Linear(dim, dim) for _ in range(4)]

    def forward(self, x, mask=None):
        B, T, E = x.shape
        H, D = self.heads, self.d
        q = self.query(x).view(B, T, H, D).permute(0, 2, 1, 3).reshape(B * H, T, D)
        k = self.key(x).view(B, T, H, D).permute(0, 2, 3, 1).reshape(B * H, D, T)
        v = self.value(x).view(B, T, H, D).permute(0, 2, 1, 3).reshape(B * H, T, D)
        bias = torch.zeros(1, T, T, dtype=x.dtype)
        if mask is not None:
            bias = (1.0 - mask.to(x.dtype)) * -1e9
            if bias.dim() == 2:
                bias = bias[None]
        scores = torch.baddbmm(bias.expand(B * H, T, T), q, k, beta=1.0, alpha=D ** -0.5)
        weights = torch.softmax(scores, -1)
        y = torch.bmm(weights, v).view(B, H, T, D).permute(0, 2, 1, 3).reshape(B, T, E)
        return self.dense(y)
