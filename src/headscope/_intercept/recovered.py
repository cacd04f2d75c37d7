"""The queries and keys of an attention that a module has written out, in place of its scores."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headscope._attend.blocks import slices
from headscope._intercept.intercepted_call import AT_ONCE, InterceptedCall
from headscope.masks import as_mask

ROUNDINGS = 8
"""How many roundings of ‖q‖ ‖k‖ a score may differ from their product. Sums of D products round √D times at most."""
NEAR = 1e-3  # relative difference of a fitted scale from the usual ones


def by_product(call: InterceptedCall) -> InterceptedCall | None:
    """Return the same call by its queries and keys; None if its visible scores are not their scaled product.

    All of the scores are compared. Where only the weights are known, so are the scores up to a number for each row.
    """
    scores = call.bias
    if call.factors is None or scores is None or 0 in scores.shape or (call.sinks is not None and not call.has_logits):
        return None
    q, k = (x.detach().to(scores.dtype) for x in call.factors)
    scale = _scale(call, scores, q, k)
    if scale is None or not _fits(call, scores, scale * q, k, torch.finfo(call.factors[0].dtype).eps):
        return None
    has_logits = call.has_logits or call.from_exponentials
    return replace(call, q=q, k=k, bias=None, scale=scale, has_logits=has_logits, is_written=False)


def _scale(call: InterceptedCall, scores: Tensor, q: Tensor, k: Tensor) -> float | None:
    """Return the number of times that scores are the product of queries and keys; None if there is none."""
    both = total = 0.0
    for rows, visible in _blocks(call):
        x, y = scores[:, :, rows].double(), (q[:, :, rows] @ k.mT).double()
        x, y = x.masked_fill(~visible, 0.0), y.masked_fill(~visible, 0.0)
        if not call.has_logits:
            count = visible.sum(-1, keepdim=True).clamp_min(1)
            x, y = ((each - each.sum(-1, keepdim=True) / count).masked_fill(~visible, 0.0) for each in (x, y))
        both, total = both + float((x * y).sum()), total + float((y * y).sum())
    scale = both / total if total else math.nan
    if not math.isfinite(scale) or not scale:
        return None
    usual = (1.0, q.shape[-1] ** -0.5)
    return next((each for each in usual if abs(scale - each) <= NEAR * each), scale)


def _fits(call: InterceptedCall, scores: Tensor, q: Tensor, k: Tensor, eps: float) -> bool:
    """Return whether visible scores are a product up to rounding, and, without logits, up to a number for each row."""
    widths = k.norm(dim=-1)[:, :, None]
    for rows, visible in _blocks(call):
        apart = scores[:, :, rows] - q[:, :, rows] @ k.mT
        bound = ROUNDINGS * eps * (q[:, :, rows].norm(dim=-1, keepdim=True) * widths)
        if not call.has_logits:
            apart = apart - apart.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
            bound = bound.amax(-1, keepdim=True) + ROUNDINGS * eps * (1 + scores[:, :, rows].abs())
        if not bool(((apart.abs() <= bound) | ~visible).all()):
            return False
    return True


def _blocks(call: InterceptedCall) -> list[tuple[slice, Tensor]]:
    """Return blocks of queries, with their visible keys, boolean [B or 1, H or 1, rows, K]."""
    assert call.bias is not None
    batch, heads, queries, keys = call.bias.shape
    device, mask = call.bias.device, as_mask(call.mask)
    blocks: list[tuple[slice, Tensor]] = []
    for rows in slices(queries, AT_ONCE // max(1, batch * heads * keys)):
        if mask is None:
            visible = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
        else:
            b, h, j = (torch.arange(n, device=device) for n in (batch, heads, keys))
            i = torch.arange(rows.start, rows.stop, device=device)[:, None]
            visible = mask.at(queries, keys).allows(b[:, None, None, None], h[:, None, None], i, j)
        blocks.append((rows, visible))
    return blocks
