"""A mask of real tokens [B, T], turned into numbers that are added; -10000."""
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def by_head(self, states):
        return states.view(*states.size()[:-1], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, states, attention_mask=None):
        q, k, v = self.by_head(self.query(states)), self.by_head(self.key(states)), self.by_head(self.value(states))
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.size ** -0.5
        if attention_mask is not None:
            penalty = 1.0 - attention_mask[:, None, None, :].to(scores.dtype)
            scores = scores + penalty * -10000.0
        weights = self.dropout(nn.Softmax(dim=-1)(scores))
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3)
        return self.dense(mixed.flatten(2))
