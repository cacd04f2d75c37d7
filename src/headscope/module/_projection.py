"""The projections of a ``MultiHeadAttention``: from its inputs to the heads of q, k and v."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from headscope._linear import QKV, in_heads, reproducible_linear, weight_and_bias
from headscope.module._inputs import check_sliced
from headscope.module._local_heads import heads_of, refuse_part

_PARTS_FIRST = {2: (1, 2, 0, 3), 3: (2, 0, 3, 1, 4)}  # [B, Q, 3, H, D] -> [3, B, H, Q, D], without and with B


def project(
    module: Any, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads' queries [B, H, Q, D], keys [B, Hkv, K, D] and values [B, Hkv, K, Dv].

    In a module that is split over ranks, they are the heads of this rank.
    """
    k_from, v_from = module._sources(x, context)
    module._check_inputs(x, k_from, v_from)
    module._check_kinds(x, k_from, v_from)
    splits, num_heads, head_dim = module.splits, module.num_heads, module.head_dim
    if context is None and module.packed and splits[0] == splits[1] == splits[2]:  # one split for all
        together = in_heads(module.qkv_proj, x, head_dim)  # [B, 3 * H, Q, D]
        if together is not None:
            q, k, v = together.unflatten(-3, (3, num_heads)).unbind(-4)  # each [B, H, Q, D]
            return q, k, v
        packed = _project_packed(module, x).view(*x.shape[:-1], 3, num_heads, head_dim)  # [B, Q, 3, H, D]
        q, k, v = packed.permute(_PARTS_FIRST[x.ndim]).unbind(0)  # each [B, H, Q, D]
        return q, k, v
    if context is None and module.packed:
        q, k, v = _project_packed(module, x).split(splits, -1)  # each [B, Q, H * D]
    else:
        sources = (x, k_from, v_from)
        if module.packed:
            check_sliced(module.qkv_proj)
            weight, bias = weight_and_bias(module.qkv_proj)  # once: a parametrization computes it in each access
            weights = weight.split(splits)
            biases = (None, None, None) if bias is None else bias.split(splits)
            q, k, v = map(reproducible_linear if module.reproducible else F.linear, sources, weights, biases)
        else:  # called, so that their wrappers and hooks run
            q, k, v = (getattr(module, f"{name}_proj")(source) for name, source in zip(QKV, sources, strict=True))
    return heads_of(module, q, k, v)


def _project_packed(module: Any, x: Tensor) -> Tensor:
    """Return the output of the packed projection, [..., sum(splits)]."""
    packed = module.qkv_proj(x)
    return packed if packed.shape[-1] == sum(module.splits) else refuse_part(packed, module.splits)
