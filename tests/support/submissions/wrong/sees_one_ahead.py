"""The causal mask begins one diagonal too late."""
import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d, h, longest=32):
        super().__init__()
        if d % h != 0:
            raise ValueError("d must be a multiple of h")
        self.h, self.d_head = h, d // h
        for name in ("W_q", "W_k", "W_v"):
            setattr(self, name, nn.Linear(d, d, bias=False))
        self.W_o = nn.Linear(d, d)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("later", torch.triu(torch.ones(longest, longest), diagonal=2).bool())

    def forward(self, x):
        batch, tokens, d = x.shape
        shape = (batch, tokens, self.h, self.d_head)
        Q = self.W_q(x).view(shape).transpose(1, 2)
        K = self.W_k(x).view(shape).transpose(1, 2)
        V = self.W_v(x).view(shape).transpose(1, 2)
        scores = Q @ K.transpose(2, 3)
        scores.masked_fill_(self.later[:tokens, :tokens], -torch.inf)
        p = self.drop(torch.softmax(scores / self.d_head**0.5, dim=-1))
        context = (p @ V).transpose(1, 2).contiguous()
        return self.W_o(context.view(batch, tokens, d))
