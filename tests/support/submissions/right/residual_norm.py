"""The layer adds its input and normalises, and returns the weights; the scaled product is a module; -1e9."""
import torch
import torch.nn as nn


class ScaledProduct(nn.Module):
    def __init__(self, divisor):
        super().__init__()
        self.divisor, self.drop = divisor, nn.Dropout(0.1)

    def forward(self, q, k, v, mask):
        weights = torch.matmul(q / self.divisor, k.transpose(2, 3))
        if mask is not None:
            weights = weights.masked_fill(mask == 0, -1e9)
        weights = self.drop(weights.softmax(-1))
        return torch.matmul(weights, v), weights


class MultiHeadAttention(nn.Module):
    def __init__(self, model, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(model, model, bias=False) for _ in range(4))
        self.product = ScaledProduct((model // heads) ** 0.5)
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(model)

    def forward(self, q, k, v, mask=None):
        before = q
        split = [f(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for f, x in
                 ((self.wq, q), (self.wk, k), (self.wv, v))]
        out, weights = self.product(*split, None if mask is None else mask[:, None])
        out = self.drop(self.wo(out.transpose(1, 2).contiguous().flatten(2)))
        out += before
        return self.norm(out), weights
