"""The softmax runs over the queries."""
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        d = width // n_heads
        self.qs = nn.ModuleList(nn.Linear(width, d) for _ in range(n_heads))
        self.ks = nn.ModuleList(nn.Linear(width, d) for _ in range(n_heads))
        self.vs = nn.ModuleList(nn.Linear(width, d) for _ in range(n_heads))
        self.final = nn.Linear(width, width)
        self.d = d

    def forward(self, inputs, mask=None):
        results = []
        for q_layer, k_layer, v_layer in zip(self.qs, self.ks, self.vs):
            q = q_layer(inputs)
            k = k_layer(inputs)
            v = v_layer(inputs)
            score = torch.bmm(q, k.permute(0, 2, 1)) / self.d ** 0.5
            if mask is not None:
                score = score.masked_fill(mask == False, torch.finfo(score.dtype).min)
            results.append(torch.bmm(torch.softmax(score, dim=1), v))
        return self.final(torch.cat(results, 2))
