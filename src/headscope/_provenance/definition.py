"""torch's fused attention by its definition, in operations that can be followed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FUSED_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def define_fused_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the output of a call of ``FUSED_ATTENTION``, computed by its definition."""
    return _attend(**dict(zip(("query", "key", "value", "dropout_p", "is_causal"), args, strict=False)), **kwargs)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``torch.nn.functional.scaled_dot_product_attention``; a row that sees nothing is zero, as there."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (key, value))  # [B, H, K, D]
    s = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    hidden = None
    if is_causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    elif attn_mask is not None:
        s = s + attn_mask
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    p = torch.softmax(s, -1)
    p = p.masked_fill((s == -math.inf).all(-1, keepdim=True), 0)
    if dropout_p:
        p = F.dropout(p, dropout_p)
    return p @ value
