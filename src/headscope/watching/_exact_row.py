"""One row of attention in float64, by definition.

This is written for reading: it verifies the kernels of headscope and of the model, and calls none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._intercept import InterceptedCall
from headscope.masks import Band, as_mask

LEAST = 1e-12
"""Weights below this share of the largest one cannot change a result within its bound."""


@dataclass(frozen=True, eq=False)
class ExactRow:
    """One row in float64, over its n visible keys.

    Attributes:
        keys: n.
        quantities: name -> value, NaN if the row does not have it; empty without visible keys.
        out: the row of the output, [Dv].
        size: Σ p |v| of each component, [Dv].
        rounding: the change of each component if logits, weights and values are rounded, in roundings, [Dv].
        logit_size: the largest Σ |q k|, bias included, of the logits that have weight.
        is_finite: whether all logits and visible values are finite.
        hides_finite: whether all values of masked keys are.
    """

    keys: int
    quantities: Mapping[str, float]
    out: Tensor
    size: Tensor
    rounding: Tensor
    logit_size: float
    is_finite: bool
    hides_finite: bool


def exact_row(call: InterceptedCall, lead: tuple[int, ...], at: tuple[int, int, int]) -> ExactRow:
    """Return row (b, h, i) of a call: softmax(scale · q k + bias) v over its visible keys.

    Args:
        call: the call.
        lead: the leading axes of q, k and v, broadcast; b counts their entries.
        at: b, h and i.
    """
    b, h, i = at
    heads, width = call.q.shape[-3], call.k.shape[-1]
    q = entry(call.q, lead, b)[h, i].cpu().double()  # [D]
    k = _of_head(entry(call.k, lead, b), h, heads)  # [K, D]
    v = k[:, :0] if call.v is None else _of_head(entry(call.v, lead, b), h, heads)  # [K, Dv]
    bias = _bias_row(call, lead, at)
    visible = _visible_keys(call, lead, at) & (bias != -math.inf)
    scale = width**-0.5 if call.scale is None else call.scale
    bias, k, hidden, v = bias[visible], k[visible], v[~visible], v[visible]  # from here on over n keys
    s, size = scale * (k @ q), abs(scale) * (k.abs() @ q.abs()) + bias.abs()
    s = (s if call.softcap is None else call.softcap * torch.tanh(s / call.softcap)) + bias
    hides_finite = bool(hidden.isfinite().all())
    if not len(s):
        zero = v.new_zeros(v.shape[-1])
        return ExactRow(0, {}, zero, zero, zero, 0.0, True, hides_finite)
    sink = -math.inf if call.sinks is None else float(call.sinks.reshape(-1).expand(heads)[h])
    lse = torch.cat([s, s.new_tensor([sink])]).logsumexp(0)
    p = (s - lse).exp()
    quantities = _of_weights(p, s, float(lse)) | _of_positions(call, b, i, p, visible)
    if call.v is not None:
        quantities["value_norm"] = float(p @ v.norm(dim=-1))
    # a weight has the roundings of its own logit, and of the mean logit in the sum by which it is divided
    rounding = (p * (1 + size + p @ size)) @ v.abs()
    largest = float(size[p >= LEAST * p.amax()].amax()) if bool(p.isfinite().all()) else math.inf
    is_finite = bool(s.isfinite().all() and lse.isfinite() and v.isfinite().all())
    return ExactRow(len(s), quantities, p @ v, p @ v.abs(), rounding, largest, is_finite, hides_finite)


def projected_row(call: InterceptedCall, lead: tuple[int, ...], at: tuple[int, int, int]) -> ExactRow | None:
    """Return a row with the outputs of all heads projected, [E]; None if a head has no visible key."""
    assert call.projection is not None
    b, _, i = at
    heads = [exact_row(call, lead, (b, h, i)) for h in range(call.q.shape[-3])]
    if not all(row.quantities for row in heads):
        return None
    out, size, rounding = (
        torch.cat(parts) for parts in zip(*((x.out, x.size, x.rounding) for x in heads), strict=True)
    )
    weight = call.projection[0].detach().cpu().double()  # [E, H * Dv]
    bias = weight.new_zeros(len(weight)) if call.projection[1] is None else call.projection[1].detach().cpu().double()
    return ExactRow(
        max(row.keys for row in heads) + len(out),
        heads[0].quantities,
        weight @ out + bias,
        weight.abs() @ size + bias.abs(),
        weight.abs() @ (rounding + size) + bias.abs(),
        0.0,
        all(row.is_finite for row in heads),
        all(row.hides_finite for row in heads),
    )


def _of_weights(p: Tensor, s: Tensor, lse: float) -> dict[str, float]:
    """Return the quantities that follow from weights and logits, [n] both."""
    n = len(p)
    entropy = float(torch.special.entr(p).sum())
    squares = float(p.square().sum())
    return {
        "lse": lse,
        "max_logit": float(s.amax()),
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(n) if n > 1 else math.nan,
        "max_weight": float(p.amax()),
        "second_weight": float(p.topk(2).values[1]) if n > 1 else 0.0,
        "effective_keys": 1 / squares if squares > torch.finfo(torch.float32).tiny else math.nan,
        "mass": float(p.sum()),
        "chance": 1 / n,
    }


def _of_positions(call: InterceptedCall, b: int, i: int, p: Tensor, visible: Tensor) -> dict[str, float]:
    """Return the quantities that follow from weights and positions on a line, if these are known."""
    gap = None if call.kind == "cross" else _gap(call, b, i)
    if gap is None or bool(gap.isnan().all()):
        return {}
    gap = gap[visible]
    places = {"self": 0, "previous": -1, "next": 1}
    masses = {
        name: float(p[gap == place].sum()) if bool((gap == place).any()) else math.nan for name, place in places.items()
    }
    return masses | {"distance": float((p * gap.abs().nan_to_num(0.0)).sum())}


def _gap(call: InterceptedCall, b: int, i: int) -> Tensor | None:
    """Return the position of each key minus that of the query, [K]; None = not on a line, or not plainly known."""
    queries, keys = call.q.shape[-2], call.k.shape[-2]
    if call.q_pos is not None and call.k_pos is not None:
        if call.q_pos.ndim > 1 or call.k_pos.ndim > 1:
            return None
        return call.k_pos.cpu().double() - float(call.q_pos[i])
    mask = None if isinstance(call.mask, Tensor) else call.mask
    if call.q_pos is not None or call.k_pos is not None:
        return None
    leaves = () if mask is None else mask.at(queries, keys).leaves()
    bands = [leaf.offset for leaf in leaves if isinstance(leaf, Band)]
    offsets = {tuple(torch.as_tensor(offset, device="cpu").reshape(-1).tolist()) for offset in bands}
    if len(offsets) > 1:
        return None
    offset = next(iter(offsets), (keys - queries,))
    return torch.arange(keys, dtype=torch.float64, device="cpu") - (i + offset[b if len(offset) > 1 else 0])


def entry(x: Tensor, lead: tuple[int, ...], b: int) -> Tensor:
    """Return entry b of the leading axes of a tensor [*lead, H, length, width], to which it broadcasts."""
    x = x.detach()
    for size in reversed(lead):
        b, at = divmod(b, size)
        if x.ndim > 3:
            x = x.select(-4, at if x.shape[-4] > 1 else 0)
    return x


def _of_head(x: Tensor, h: int, heads: int) -> Tensor:
    """Return the keys or values of query head h, of [Hkv, K, D], in float64."""
    return x[h * x.shape[0] // heads].cpu().double()


def _bias_row(call: InterceptedCall, lead: tuple[int, ...], at: tuple[int, int, int]) -> Tensor:
    """Return what is added to the logits of a row, [K], which broadcasts from [B, H, Q, K]."""
    keys = call.k.shape[-2]
    if call.bias is None:
        return torch.zeros(keys, dtype=torch.float64, device="cpu")
    b, h, i = at
    bias = call.bias[(None,) * max(0, 3 - call.bias.ndim)]
    bias = bias.detach()[b if bias.shape[0] > 1 else 0] if bias.ndim == 4 else entry(bias, lead, b)
    bias = bias[h if bias.shape[0] > 1 else 0]
    return bias[i if bias.shape[0] > 1 else 0].expand(keys).cpu().double()


def _visible_keys(call: InterceptedCall, lead: tuple[int, ...], at: tuple[int, int, int]) -> Tensor:
    """Return which keys the mask shows a row, boolean [K]."""
    queries, keys = call.q.shape[-2], call.k.shape[-2]
    mask = call.mask
    if isinstance(mask, Tensor) and call.q.ndim > 4 and mask.ndim > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    mask = as_mask(mask)
    if mask is None:
        return torch.ones(keys, dtype=torch.bool, device="cpu")
    b, h, i = (torch.tensor(n, device=call.q.device) for n in at)
    j = torch.arange(keys, device=call.q.device)
    return (
        mask.at(queries, keys)
        .allows(b.view(1, 1, 1, 1), h.view(1, 1, 1), i.view(1, 1), j)
        .reshape(-1)
        .expand(keys)
        .cpu()
    )
