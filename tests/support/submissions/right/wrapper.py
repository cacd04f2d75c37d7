from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.mha = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x, mask=None):
        if mask is not None:
            mask = mask.logical_not()
        out, _ = self.mha(x, x, x, attn_mask=mask, need_weights=False)
        return out
