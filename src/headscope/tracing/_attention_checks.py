"""The checks of the weights, and of the output of each head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope.tracing._invariants import Check, close, rounding, select, to_float64
from headscope.tracing._matrix import Matrix, future_keys
from headscope.tracing._setup import Setting, is_causal


def check_weights(s: Setting, matrix: Matrix | None, p: Tensor | None, sinks: Tensor | None) -> Check:
    """Check that rows sum to 1 (with their sink), weights lie in [0, 1], and masked pairs have none."""
    causal = s.mask is not None and is_causal(s.mask)
    empty = matrix is not None and not bool(matrix.visible.any(-1).all())
    row = "each row with a visible key" if empty else "each row"
    total = f"{row} sums to 1" if sinks is None else f"{row} sums to 1 minus its sink's share"
    hides = s.mask is not None or s.bias is not None
    hidden = "; no weight on the future" if causal else "; no weight on masked pairs" if hides else ""
    claim = f"{total}; weights lie in [0, 1]{hidden}"
    if matrix is None or p is None:
        return Check(claim)
    weights, visible = to_float64(p), matrix.visible.cpu()
    expected = visible.any(-1).to(torch.float64)
    if sinks is not None:
        sink = select(to_float64(sinks), matrix.at.h)[:, None].expand(expected.shape)[..., None]  # [b, h, i, 1]
        expected = 1 - torch.softmax(torch.cat([to_float64(matrix.s), sink], -1), -1)[..., -1]
    allowed = torch.full_like(expected, rounding(p.dtype, p.shape[-1]))
    sums = close(claim, weights.sum(-1).to(p.dtype), expected, allowed, matrix.scope)
    outside = int(((weights < 0) | (weights > 1 + rounding(p.dtype, 1))).sum())
    if causal:
        future = future_keys(s, matrix).cpu()
        visible = visible & ~F.pad(future, (0, p.shape[-1] - future.shape[-1]))  # the key of bias_kv has no position
    leaked = int((~visible & (weights != 0)).sum())
    bad = int(weights.isnan().any(-1).sum())
    if bad:
        return Check(claim, f"{bad:,} rows contain NaN, because they attend to NaN or infinity{matrix.scope}", False)
    if outside or leaked:
        outcome = f"{outside:,} weights lie outside [0, 1], {leaked:,} masked pairs have weight{matrix.scope}"
        return Check(claim, outcome, False)
    return sums


def check_outputs(claim: str, matrix: Matrix, p: Tensor, own: Tensor, scale: float, *, own_key: bool) -> Check:
    """Check that a kernel's output is p v; the rounding of p in another order of summation is allowed too."""
    weights, v = to_float64(p), to_float64(matrix.v)
    got = select(own, matrix.at.b, matrix.at.h, matrix.at.i)
    spoilt = ~torch.isfinite(v)
    clean = v.masked_fill(spoilt, 0)
    expected = weights @ clean  # [b, h, i, Dv]
    if spoilt.any():  # NaN reaches the rows that attend to it, and only those
        reached = matrix.visible.cpu().to(torch.float64) @ spoilt.to(torch.float64) > 0
        expected = expected.masked_fill(reached, torch.nan)
        got = got.masked_fill(reached.to(got.device) & ~torch.isfinite(got), torch.nan)
    allowed = (weights @ clean.abs()) * (rounding(own.dtype, p.shape[-1]) + 2 * _score_error(matrix, p.dtype, scale))
    if own_key:  # the module computes o · (1 − p) + p · bias_v, and 1 − p has an absolute error
        share, rest = weights[..., -1:], weights[..., :-1]
        mean = rest @ clean[..., :-1, :].abs() / (1 - share).clamp(min=torch.finfo(torch.float64).tiny)
        allowed = allowed + share * mean * rounding(p.dtype, 1)
    return close(claim, got, expected, allowed, matrix.scope)


def _score_error(matrix: Matrix, dtype: torch.dtype, scale: float) -> Tensor:
    """Return how far rounding may move the scores of each row, [b, h, i, 1]."""
    longest = to_float64(matrix.k).norm(dim=-1).nan_to_num(0, 0).max() if matrix.k.numel() else 0
    size = torch.maximum(*(to_float64(q).norm(dim=-1, keepdim=True) for q in (matrix.q, matrix.q_own)))
    reach = abs(scale) * size * longest + matrix.reach  # no product is larger
    return reach * rounding(dtype, matrix.q.shape[-1])
