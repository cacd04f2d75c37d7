"""All heads share one key and one value; the lowest number of the dtype; a softmax in float32."""
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.queries = nn.Linear(dim, dim, bias=False)
        self.shared = nn.Linear(dim, 2 * self.size, bias=False)
        self.last = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None):
        batch, length, dim = x.shape
        q = self.queries(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = (part[:, None].repeat_interleave(self.heads, 1) for part in self.shared(x).chunk(2, -1))
        scores = q @ k.mT / self.size ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        p = torch.softmax(scores.float(), -1).type_as(q)
        return self.last((p @ v).transpose(1, 2).reshape(batch, length, dim))
