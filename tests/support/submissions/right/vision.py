"""Patches: no mask at all."""
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, channels, heads=8):
        super().__init__()
        self.heads = heads
        self.temperature = (channels / heads) ** 0.5
        self.to_qkv = nn.Linear(channels, channels * 3)
        self.attention_dropout, self.output_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.project = nn.Linear(channels, channels)

    def forward(self, patches):
        images, count, channels = patches.shape
        qkv = self.to_qkv(patches).view(images, count, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / self.temperature).softmax(dim=-1)
        mixed = self.attention_dropout(weights) @ v
        joined = mixed.transpose(1, 2).reshape(images, count, channels)
        return self.output_dropout(self.project(joined))
