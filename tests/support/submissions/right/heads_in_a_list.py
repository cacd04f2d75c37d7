"""Each head is a module with a causal buffer and -inf; the class joins them."""
import torch
from torch import nn

MAX = 64


class OneHead(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.to_query, self.to_key, self.to_value = [nn.Linear(width, size, bias=False) for _ in range(3)]
        self.register_buffer('past', torch.ones(MAX, MAX).tril())
        self.drop = nn.Dropout(0.2)
        self.size = size

    def forward(self, x):
        n = x.size(1)
        affinity = self.to_query(x) @ self.to_key(x).mT / self.size ** .5
        affinity = affinity.masked_fill(self.past[:n, :n] == 0, float('-inf'))
        return self.drop(affinity.softmax(-1)) @ self.to_value(x)


class MultiHeadAttention(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.many = nn.ModuleList()
        for _ in range(count):
            self.many.append(OneHead(width, width // count))
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        joined = torch.cat([one(x) for one in self.many], -1)
        return self.mix(joined)
