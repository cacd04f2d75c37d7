"""The options of ``MultiHeadAttention``, with their checks: sizes, flags and norms."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

from torch import Tensor, nn

from headscope._linear import QKV, Linear, merge_heads, reproducible_sigmoid, split_heads
from headscope._support.arguments import check_type, number, whole
from headscope.positions import Rotary

QKNorm = Literal["rms", "layer", "rms_all"]


def whole_sizes(**sizes: object) -> list[int]:
    """Return sizes in order, as whole numbers from 1."""
    return [whole(name, size) for name, size in sizes.items()]


def check_heads(embed_dim: int, num_heads: int, kv_heads: int, head_dim: int | None) -> None:
    """Raise unless the width divides among the heads, and the query heads among the key/value heads."""
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"num_heads: embed_dim {embed_dim} is not divisible by num_heads {num_heads}; choose a divisor of "
            f"{embed_dim}, or pass head_dim"
        )
    if num_heads % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads}, expected a divisor of num_heads {num_heads}")


def check_rotary(rotary: Rotary | None, head_dim: int) -> Rotary | None:
    """Return rotary positions that rotate at most the width of a head."""
    if rotary is None:
        return None
    check_type("rotary", rotary, Rotary, "headscope.positions.Rotary or None")
    if rotary.dim > head_dim:
        raise ValueError(f"rotary: its dim is {rotary.dim}, expected at most head_dim {head_dim}")
    return rotary


def norm_of(
    qk_norm: QKNorm | None, heads: int, head_dim: int, eps: float, place: dict[str, Any]
) -> nn.RMSNorm | nn.LayerNorm | None:
    """Return the norm of queries or keys: of each head, or of all heads together."""
    if qk_norm is None:
        return None
    if qk_norm not in ("rms", "layer", "rms_all"):
        raise ValueError(f'qk_norm: got {qk_norm!r}, expected "rms", "layer", "rms_all" or None')
    eps = number("qk_norm_eps", eps)
    if not 0 < eps < math.inf:
        raise ValueError(f"qk_norm_eps: got {eps}, expected a finite number above 0")
    if qk_norm == "layer":
        return nn.LayerNorm(head_dim, eps, **place)
    return nn.RMSNorm(heads * head_dim if qk_norm == "rms_all" else head_dim, eps, **place)


def normed(module: Any, norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise queries or keys, [B, H, length, D]."""
    if module.qk_norm != "rms_all":
        return norm(x)
    return split_heads(norm(merge_heads(x)), x.shape[-3], module.head_dim)


def check_flags(**flags: object) -> None:
    """Raise unless all are True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")


def set_reproducible(module: Any, reproducible: bool) -> bool:
    """Set and return the flag of a module's projections, unless a part of it sums in another order."""
    check_flags(reproducible=reproducible)
    if reproducible and module.bias_k is not None:
        raise ValueError(
            "reproducible: expected False or None with bias_kv, whose products torch sums in its own order; got True"
        )
    for each in module.children():
        if isinstance(each, Linear):
            each.reproducible = reproducible
    return reproducible


def gate_of(numbers: Tensor, reproducible: bool) -> Tensor:
    """Return the sigmoid that multiplies the heads' outputs."""
    return reproducible_sigmoid(numbers) if reproducible else numbers.sigmoid()


def biased_parts(bias: bool | Collection[str]) -> frozenset[str]:
    """Return the names of the projections that have a bias."""
    if isinstance(bias, bool):
        return frozenset(QKV if bias else ())
    check_type("bias", bias, Collection, f"True, False, or names among {', '.join(QKV)}")
    names = frozenset(bias)
    if not names <= set(QKV):
        raise ValueError(f"bias: got {sorted(map(str, names))}, expected True, False, or names among {', '.join(QKV)}")
    return names
