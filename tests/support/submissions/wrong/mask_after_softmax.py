"""Weights are set to 0 after the softmax."""
import numpy as np
import torch
from torch import nn


def softmax(x):
    x = x - x.max(dim=-1, keepdim=True).values
    e = torch.exp(x)
    return e / e.sum(dim=-1, keepdim=True)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super(MultiHeadAttention, self).__init__()
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_model // n_heads
        self.Wq = nn.Parameter(torch.randn(d_model, d_model) / np.sqrt(d_model))
        self.Wk = nn.Parameter(torch.randn(d_model, d_model) / np.sqrt(d_model))
        self.Wv = nn.Parameter(torch.randn(d_model, d_model) / np.sqrt(d_model))
        self.Wo = nn.Parameter(torch.randn(d_model, d_model) / np.sqrt(d_model))

    def split(self, x):
        return torch.stack(x.split(self.d_head, dim=-1), dim=1)

    def forward(self, x, mask=None):
        Q, K, V = self.split(x @ self.Wq), self.split(x @ self.Wk), self.split(x @ self.Wv)
        S = Q @ K.mT / float(np.sqrt(self.d_head))
        P = softmax(S)
        if mask is not None:
            P = torch.where(mask.bool(), P, 0.0)
        Z = P @ V
        return torch.cat(Z.unbind(1), dim=-1) @ self.Wo
