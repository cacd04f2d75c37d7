"""The transformer layer of both examples, and its initialisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from headscope.masks import Mask
from headscope.module import MultiHeadAttention


class Layer(nn.Module):
    """Self-attention, then an MLP of four times the width; each reads a normalised input and adds to it (pre-norm).

    Args:
        embed_dim: Width E.
        num_heads: Number of heads H, a divisor of embed_dim.

    Source: Xiong et al., "On Layer Normalization in the Transformer Architecture" (2020), figure 1b.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = MultiHeadAttention(embed_dim, num_heads)
        self.mlp_norm = nn.LayerNorm(embed_dim)
        self.mlp_in = nn.Linear(embed_dim, 4 * embed_dim)
        self.mlp_out = nn.Linear(4 * embed_dim, embed_dim)

    def forward(self, x: Tensor, mask: Mask | None = None, *, weights: list[Tensor] | None = None) -> Tensor:
        """Return the layer's output.

        Shapes: x [B, T, E], output [B, T, E].

        Args:
            x: The residual stream.
            mask: Which positions are visible to each position; None = all.
            weights: A list to which the attention weights [B, H, T, T] are appended.
        """
        normed = self.attention_norm(x)
        if weights is None:
            x = x + self.attention(normed, mask=mask)
        else:
            attended, layer_weights = self.attention(normed, mask=mask, need_weights=True)
            x = x + attended
            weights.append(layer_weights)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def initialise(model: nn.Module, num_layers: int) -> None:
    """Initialise a model for training, with torch's global generator.

    Matrices have the standard deviation fan_in ** -0.5, those that write to the residual stream (named out) divided by
    (2 * num_layers) ** 0.5; embeddings 0.1; biases are 0 and norms stay 1.
    """
    writes = (2 * num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "embedding" in name:
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 2:
            factor = writes if "out" in name.rsplit(".", 2)[-2] else 1.0
            nn.init.normal_(parameter, std=factor * parameter.shape[1] ** -0.5)
