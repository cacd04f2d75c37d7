"""The mask of a call for torch's fused kernels: a band, cumulative lengths, or a bias; and its rows without keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._attend.backends.fused_operators import KernelMask, aligned_rows
from headscope._attend.call import Call
from headscope._attend.interface import Inputs
from headscope._attend.mask_parts import MaskParts, lengths_of, matrix_of, packing_of
from headscope.masks import Plan

ALIGNED_KEYS = 16  # numbers: rows of a bias start at multiples of so many


def kernel_mask(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[KernelMask, Tensor | None]:
    """Return the mask for a kernel, and which rows have no visible key, broadcastable to [B, H, Q], or None."""
    parts, source = call.parts, None if plan is None else plan.source
    assert parts is not None
    visible = _visible_keys(call, parts, plan, inputs.q.device)
    bias = None if visible is None and inputs.bias is None else _bias(call, inputs, visible)
    packing = packing_of(source) if parts.packed is not None else None
    longest = (call.queries, call.keys) if parts.packed is None else parts.packed
    mask = KernelMask(parts.left, parts.right, packing, longest, bias)
    return mask, _empty_rows(call, parts, inputs, visible, packing)


def _visible_keys(call: Call, parts: MaskParts, plan: Plan | None, device: torch.device) -> Tensor | None:
    """Return which keys lengths and boolean tensors allow, [B or 1, H or 1, Q or 1, K]; None if all."""
    if plan is None or plan.source is None or not (parts.lengths or parts.matrix != "none"):
        return None
    visible, lengths = matrix_of(plan.source), lengths_of(plan.source, device)
    if visible is not None and visible.shape[-1] > call.keys:
        visible = visible[..., : call.keys]  # without unused keys
    if lengths is not None:
        within = torch.arange(call.keys, device=lengths.device) < lengths[:, None, None, None]
        visible = within if visible is None else visible & within
    assert visible is not None
    return visible.expand(*visible.shape[:3], call.keys)


def _bias(call: Call, inputs: Inputs, visible: Tensor | None) -> Tensor:
    """Return what is added to the logits, [B, H, Q, K] in q's dtype, with aligned rows; repeated axes are views."""
    padding = -call.keys % ALIGNED_KEYS
    if visible is None:
        assert inputs.bias is not None
        bias = inputs.bias
    elif inputs.bias is None:
        bias = torch.zeros(visible.shape, dtype=call.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    else:
        bias = inputs.bias.masked_fill(~visible, -torch.inf)
    bias = F.pad(bias, (0, padding))[..., : call.keys] if padding else aligned_rows(bias, call.keys)
    return bias.expand(call.batch, call.heads, call.queries, call.keys)


def _empty_rows(
    call: Call, parts: MaskParts, inputs: Inputs, visible: Tensor | None, packing: tuple[Tensor, Tensor] | None
) -> Tensor | None:
    """Return which rows have no visible key; None if every row has one. The kernels differ in the lse of such rows."""
    shift = call.keys - call.queries
    if packing is not None:
        return _empty_documents(call, packing)
    if visible is None and inputs.bias is None:
        if parts.right is None or shift + parts.right >= 0:
            return None
        return torch.arange(call.queries, device=inputs.q.device) + (shift + parts.right) < 0  # [Q]
    allowed = visible
    if inputs.bias is not None:
        finite = inputs.bias != -torch.inf
        allowed = finite if visible is None else finite & visible
    assert allowed is not None
    if not parts.has_band:
        return ~allowed.any(-1)
    allowed = allowed.expand(*allowed.shape[:2], call.queries, call.keys)
    allowed = allowed if parts.right is None else allowed.tril(shift + parts.right)
    return ~(allowed if parts.left is None else allowed.triu(shift - parts.left)).any(-1)


def _empty_documents(call: Call, packing: tuple[Tensor, Tensor]) -> Tensor | None:
    """Return which packed queries have no keys in their document, [Q]; None if queries and keys are packed alike."""
    q, k = packing
    if q is k or call.parts is None or call.parts.has_band:
        return None
    at = torch.arange(call.queries, device=q.device)
    entry = torch.searchsorted(q.long(), at, right=True) - 1
    return k.diff()[entry] <= 0
