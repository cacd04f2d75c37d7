import math

import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.Q, self.K, self.V, self.O = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        batch, length, dim = x.shape
        Q, K, V = self.Q(x), self.K(x), self.V(x)
        output = torch.zeros(batch, length, dim, dtype=x.dtype)
        for h in range(self.heads):
            part = slice(h * self.size, (h + 1) * self.size)
            for i in range(length):
                scores = torch.matmul(K[:, :, part], Q[:, i, part].unsqueeze(-1)).squeeze(-1) / math.sqrt(self.size)
                if mask is not None:
                    scores = scores.masked_fill(mask[i] == 0, float("-inf"))
                weights = torch.softmax(scores, dim=1)
                output[:, i, part] = torch.matmul(weights.unsqueeze(1), V[:, :, part]).squeeze(1)
        return self.O(output)
