"""Visible keys are filled."""
import copy

import torch
from torch import nn


def attend(q, k, v, mask, drop):
    similarity = torch.matmul(q, k.transpose(-1, -2)).div(q.shape[-1] ** 0.5)
    if mask is not None:
        similarity = similarity.masked_fill(mask.unsqueeze(1) == 1, -1e9)
    weights = torch.softmax(similarity, -1)
    return torch.matmul(drop(weights), v), weights


class MultiHeadAttention(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        assert width % count == 0
        layer = nn.Linear(width, width)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))
        self.count = count
        self.drop = nn.Dropout(0.1)
        self.seen_weights = None

    def forward(self, q, k, v, mask=None):
        parts = []
        for layer, tensor in zip(self.layers, (q, k, v)):
            n, t, _ = tensor.shape
            parts.append(layer(tensor).view(n, t, self.count, -1).transpose(1, 2))
        heads, self.seen_weights = attend(*parts, mask, self.drop)
        n, h, t, d = heads.shape
        return self.layers[3](heads.transpose(1, 2).reshape(n, t, h * d))
