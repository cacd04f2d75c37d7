"""The formula of a logit, shared by every tile of the portable code. The slow reference states it separately."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._support.precision import exact_products


def scaled_products(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return scale · q kᵀ, or scale / softcap · q kᵀ: q [..., i, D] and k [..., j, D] -> [..., i, j].

    scale / softcap is one factor of q: neither the product with scale nor its quotient by softcap overflows separately.
    """
    with exact_products(q.device.type):
        return (q * (scale / (softcap or 1))) @ k.transpose(-2, -1)


def cap_logits(s: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(s) of the result of ``scaled_products``, or s itself without a softcap."""
    return s if softcap is None else softcap * torch.tanh(s)


def has_half_products(x: Tensor) -> bool:
    """Return whether ``half_products`` supports a factor: of a half type, on CUDA."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


def half_products(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return ``scaled_products`` of half types in float32: the products are exact, so float32 copies add nothing.

    The matrix units multiply half types many times faster than float32. Without gradients.
    """
    rows, keys = q.flatten(0, -3), k.flatten(0, -3).transpose(-2, -1)  # [n, i, D] and [n, D, j]
    product = torch.bmm(rows, keys, out_dtype=torch.float32)
    return product.mul_(scale / (softcap or 1)).unflatten(0, q.shape[:-2])
