"""Kernels of three axes and einsum for everything, as in Keras; a mask that is added; -1e9."""
import torch
from torch import nn


class Einsum(nn.Module):
    def __init__(self, rule, shape, bias):
        super().__init__()
        self.rule = rule
        self.kernel = nn.Parameter(0.6 * torch.rand(shape) - 0.3)
        self.bias = nn.Parameter(torch.zeros(bias))

    def forward(self, x):
        return torch.einsum(self.rule, x, self.kernel) + self.bias


class MultiHeadAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        size = width // heads
        self.size = size
        self.query = Einsum("bte,ehd->bthd", (width, heads, size), (heads, size))
        self.key = Einsum("bte,ehd->bthd", (width, heads, size), (heads, size))
        self.value = Einsum("bte,ehd->bthd", (width, heads, size), (heads, size))
        self.output = Einsum("bthd,hde->bte", (heads, size, width), (width,))

    def forward(self, inputs, attention_mask=None):
        query, key, value = self.query(inputs) * (1.0 / self.size ** 0.5), self.key(inputs), self.value(inputs)
        scores = torch.einsum("bkhd,bqhd->bhqk", key, query)
        if attention_mask is not None:
            scores += (1.0 - attention_mask.to(scores.dtype)) * -1e9
        mixed = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), value)
        return self.output(mixed)
