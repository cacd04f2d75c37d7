"""The mask is an argument that nothing uses."""
import math

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Rows without a visible key give zeros; the weights are returned as well."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        if d_model % n_head:
            raise ValueError("d_model must be divisible by n_head")
        self.n_head = n_head
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (t.unflatten(2, (self.n_head, -1)).movedim(2, 1) for t in self.in_proj(x).chunk(3, dim=2))
        logits = torch.matmul(q, k.movedim(-1, -2)).div(math.sqrt(q.size(-1)))
        weights = torch.nan_to_num(logits.softmax(dim=-1))
        out = torch.matmul(weights, v).movedim(1, 2).flatten(2)
        return self.out_proj(out), weights
