"""The key and value of each head that belong to no token: ``MultiHeadAttention(bias_kv=True)``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._support.logits import cap_logits, scaled_products


def own_share(q: Tensor, bias_k: Tensor, lse: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the weight of the own key in the softmax with all others, [B, H, Q, 1].

    Args:
        q: [B, H, Q, D], not rotated: the own keys belong to no token and have no position.
        bias_k: the own keys, [Hkv, D].
        lse: the log-sum-exp of the other logits, [B, H, Q].
        scale: factor of the dot products.
        softcap: bound of the logits.
    """
    k = bias_k.repeat_interleave(q.shape[-3] // len(bias_k), 0)  # [H, D]
    s = scaled_products(q.to(lse.dtype), k[:, None].to(lse.dtype), scale, softcap)  # [B, H, Q, 1]
    logit = cap_logits(s, softcap)[..., 0]
    return torch.sigmoid(logit - lse)[..., None]  # exp(logit) / (exp(logit) + exp(lse))


def add_own_value(heads: Tensor, own: Tensor, bias_v: Tensor, dropout: float) -> Tensor:
    """Return the heads' outputs [B, H, Q, Dv] with the own values [Hkv, Dv], by their weights ``own``."""
    v = bias_v.repeat_interleave(heads.shape[-3] // len(bias_v), 0)[:, None]  # [H, 1, Dv]
    return (heads * (1 - own) + F.dropout(own, dropout) * v).to(heads.dtype)
