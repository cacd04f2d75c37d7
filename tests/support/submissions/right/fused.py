"""One matrix for all three projections, and the fused kernel."""
import torch.nn as nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


class MultiHeadAttention(nn.Module):
    def __init__(self, width, n_head):
        super().__init__()
        self.into, self.out = nn.Linear(width, width * 3), nn.Linear(width, width)
        self.n_head = n_head

    def forward(self, x, attn_mask=None):
        b, t, e = x.size()
        three = [part.view(b, t, self.n_head, e // self.n_head).transpose(1, 2) for part in self.into(x).split(e, 2)]
        y = sdpa(*three, attn_mask=attn_mask)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, e))
