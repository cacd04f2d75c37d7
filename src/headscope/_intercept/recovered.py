"""The queries and keys of an attention that a module has written out, in place of its scores."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headscope._attend.blocks import slices
from headscope._intercept.call_positions import AT_ONCE
from headscope._intercept.intercepted_call import InterceptedCall
from headscope._intercept.written_masks import LEAST, mask_of
from headscope.masks import as_mask

ROUNDINGS = 8
"""How many roundings of ‖q‖ and the largest ‖k‖ a score may differ from their product."""
ROWS = 64
"""How many rows the scale is computed from."""
SURELY_POSITIVE, SURELY_ZERO = -60.0, -85.0
"""Above and below these logarithms, a weight of float32 is not 0, or may be rounded to 0."""
NEAR = 1e-3  # relative difference of a fitted scale from the usual ones


def by_product(call: InterceptedCall) -> InterceptedCall | None:
    """Return the same call by its queries and keys; None if its visible scores are not their scaled product.

    All of the scores are compared. Where only the weights are known, so are the scores up to a number for each row.
    """
    if not call.is_visibility_known:
        return _by_product_of_either(call)
    scores = call.bias
    if call.factors is None or scores is None or 0 in scores.shape or (call.sinks is not None and not call.has_logits):
        return None
    q, k = (x.detach().to(scores.dtype) for x in call.factors)
    scale = _scale(call, scores, q, k)
    if scale is None or not _fits(call, scores, scale * q, k, torch.finfo(call.factors[0].dtype).eps):
        return None
    has_logits = call.has_logits or call.from_exponentials
    return replace(call, q=q, k=k, bias=None, scale=scale, has_logits=has_logits, is_written=False)


def _by_product_of_either(call: InterceptedCall) -> InterceptedCall | None:
    """Return the same call by its queries and keys, if these show which keys of weight 0 are visible; else None.

    Such a key is masked if its weight would not be 0, and visible if its exponential is too small for the dtype.
    """
    if call.bias is None:
        return None
    zero = call.bias == LEAST
    mask, real = mask_of(call.bias.masked_fill(zero, -math.inf))
    masked = by_product(replace(call, mask=mask, real=real, bias=call.bias, is_visibility_known=True))
    if masked is None or masked.scale is None:
        return None
    logits = masked.scale * masked.q @ masked.k.mT
    shares = (logits - logits.masked_fill(call.bias <= LEAST, -math.inf).logsumexp(-1, keepdim=True))[zero]
    if float(shares.amin()) > SURELY_POSITIVE:
        return masked
    return replace(masked, mask=call.mask, real=call.real) if float(shares.amax()) < SURELY_ZERO else None


def _scale(call: InterceptedCall, scores: Tensor, q: Tensor, k: Tensor) -> float | None:
    """Return how many times the product of queries and keys scores are, by some rows; None if it is not known."""
    queries = scores.shape[-2]
    step = -(-queries // ROWS)
    rows = torch.arange(queries - 1, -1, -step, device=scores.device)  # the last one has the most keys
    visible = _visible(call, rows)
    x, y = scores[:, :, rows].double(), q[:, :, rows].double() @ k.mT.double()
    x, y = x.masked_fill(~visible, 0.0), y.masked_fill(~visible, 0.0)
    if not call.has_logits:
        count = visible.sum(-1, keepdim=True).clamp_min(1)
        x, y = ((each - each.sum(-1, keepdim=True) / count).masked_fill(~visible, 0.0) for each in (x, y))
    total = float(y.square().sum())
    scale = float((x * y).sum()) / total if total else math.nan
    if not math.isfinite(scale) or not scale:
        return None
    usual = (1.0, q.shape[-1] ** -0.5)
    return next((each for each in usual if abs(scale - each) <= NEAR * each), scale)


def _fits(call: InterceptedCall, scores: Tensor, q: Tensor, k: Tensor, eps: float) -> bool:
    """Return whether visible scores are a product up to rounding, and, without logits, up to a number for each row."""
    batch, heads, queries, keys = scores.shape
    longest = k.norm(dim=-1).amax(-1)[..., None]
    for block in slices(queries, AT_ONCE // (batch * heads * keys)):
        rows = torch.arange(block.start, block.stop, device=scores.device)
        apart = torch.matmul(q[:, :, block], k.mT).sub_(scores[:, :, block])
        bound = q[:, :, block].norm(dim=-1) * longest
        visible = None if call.mask is None else _visible(call, rows)
        if visible is not None:
            apart.masked_fill_(~visible, 0.0)
        if not call.has_logits:
            count = keys if visible is None else visible.sum(-1, keepdim=True).clamp_min(1)
            apart -= apart.sum(-1, keepdim=True) / count
            shown = scores[:, :, block] if visible is None else scores[:, :, block].masked_fill(~visible, 0.0)
            bound += 1 + shown.abs().amax(-1)
            apart = apart if visible is None else apart.masked_fill_(~visible, 0.0)
        if not bool((apart.abs_().amax(-1) <= ROUNDINGS * eps * bound).all()):
            return False
    return True


def _visible(call: InterceptedCall, rows: Tensor) -> Tensor:
    """Return which keys the mask shows some rows, boolean [B or 1, H or 1, R, K]."""
    mask = as_mask(call.mask)
    assert call.bias is not None
    batch, heads, queries, keys = call.bias.shape
    if mask is None:
        return torch.ones(1, 1, 1, keys, dtype=torch.bool, device=rows.device)
    b, h, j = (torch.arange(n, device=rows.device) for n in (batch, heads, keys))
    return mask.at(queries, keys).allows(b[:, None, None, None], h[:, None, None], rows[:, None], j)
