"""The softmax runs over the heads."""
import torch
import torch.nn as nn


def attention_of(query, key, value, mask=None):
    logits = query.matmul(key.transpose(-2, -1)) / query.shape[-1] ** 0.5
    if mask is not None:
        logits = logits.masked_fill(mask == 0, -9e15)
    probabilities = nn.functional.softmax(logits, dim=1)
    return probabilities.matmul(value), probabilities


def to_four_axes(mask):
    if mask.ndim == 2:
        return mask[None, None]
    return mask[:, None] if mask.ndim == 3 else mask


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.project_in = nn.Linear(embed_dim, 3 * embed_dim)
        self.project_out = nn.Linear(embed_dim, embed_dim)
        for layer in (self.project_in, self.project_out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, mask=None, with_weights=False):
        n, length, size = x.shape
        packed = self.project_in(x).reshape(n, length, self.num_heads, -1).transpose(1, 2)
        q, k, v = packed.chunk(3, dim=-1)
        values, weights = attention_of(q, k, v, None if mask is None else to_four_axes(mask))
        out = self.project_out(values.transpose(1, 2).reshape(n, length, size))
        return (out, weights) if with_weights else out


if __name__ == "__main__":
    print(MultiHeadAttention(16, 4)(torch.randn(2, 5, 16)).shape)
