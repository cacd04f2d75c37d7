"""The definition of attention: every option, computed directly. It builds the Q x K matrix; float64 stays float64."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import Inputs, accumulate_dtype
from headscope.masks import Plan

name = "reference"
attend_finite = attend_careful = repeater = None


def refuses(call: Call) -> list[str]:
    """Return no reasons: every call is supported."""
    return []


def logits(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the final logits s [B, H, Q, K]: scaled, capped, biased, -inf for masked keys; and which keys are visible.

    scale / softcap is one factor: neither the product with scale nor its quotient by softcap can overflow separately.
    """
    dtype = accumulate_dtype(call.dtype)
    q, k = inputs.q.to(dtype), inputs.k.to(dtype)
    k = k.repeat_interleave(call.group, dim=1)  # [B, H, K, D]: each key head serves a group of query heads
    s = call.scale / (call.softcap or 1) * (q @ k.transpose(-2, -1))  # [B, H, Q, K]
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s)
    visible = torch.ones((), dtype=torch.bool, device=s.device)
    if inputs.bias is not None:
        s = s + inputs.bias.to(dtype)
        visible = inputs.bias != -torch.inf
    if plan is not None:
        batch, heads, queries, keys = s.shape
        tile = plan.tile(slice(0, batch), slice(0, heads), slice(0, queries), slice(0, keys))  # [B, H, Q, K]
        visible = visible & tile.to(s.device)
    visible = visible.expand(s.shape)
    return s.masked_fill(~visible, -torch.inf), visible


def weights(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the attention weights p [B, H, Q, K] and lse [B, H, Q]. Rows sum to one, or to less with sinks."""
    s, visible = logits(call, plan, inputs)
    terms, empty = s, ~visible.any(dim=-1, keepdim=True)  # [B, H, Q, 1]
    if inputs.sinks is not None:
        sink = inputs.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)  # [B, H, Q, 1]
        terms, empty = torch.cat([s, sink], dim=-1), empty & (sink == -torch.inf)
    terms = terms.masked_fill(empty, 0)
    p = torch.softmax(terms, dim=-1)[..., : call.keys]  # exp(s - lse), with fewer roundings
    lse = terms.logsumexp(dim=-1, keepdim=True)
    lse = lse.masked_fill(lse.isinf(), torch.nan)  # as the row's weights: inf - inf
    return p.masked_fill(empty, 0), lse.masked_fill(empty, -torch.inf).squeeze(-1)


def attend(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Return out = p v, with p as defined above."""
    p, lse = weights(call, plan, inputs)
    if call.dropout > 0:
        p = torch.nn.functional.dropout(p, call.dropout)
    v = inputs.v.to(p.dtype).repeat_interleave(call.group, dim=1)  # [B, H, K, Dv]
    out = p @ v
    if call.sinks and call.keys == 0:  # no weight carries the NaN that a sink of NaN or +inf gives its rows
        out = out + 0 * lse.masked_fill(lse.isinf(), 0)[..., None]
    return out.to(call.dtype), lse
