"""torch's fused kernels, through ``scaled_dot_product_attention``, where they need no Q x K matrix of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headscope._backends import Inputs, accumulate_dtype
from headscope._call import Call
from headscope.masks import Dense, Plan

name = "sdpa"
LANES = 16
"""With fewer keys than this, torch's kernel for a CPU makes 0 of a row of NaN; with more, and all of them seen by every
row, NaN and infinity go where they belong by themselves."""


def refuses(call: Call) -> list[str]:
    """What torch's fused kernels cannot do, or do only by filling the matrix."""
    reasons: list[str] = []
    if call.lse:
        reasons.append("lse: scaled_dot_product_attention does not return it")
    if call.softcap is not None:
        reasons.append("softcap: not an option of scaled_dot_product_attention")
    if call.sinks:
        reasons.append("sinks: not an option of scaled_dot_product_attention")
    if call.dropout and call.device == "cpu":
        reasons.append("dropout: torch has no fused kernel for it on a CPU")
    if call.v_head_dim != call.head_dim:
        reasons.append(f"Dv: torch has no fused kernel for Dv {call.v_head_dim} beside D {call.head_dim}")
    if call.rest in ("other", "many") or (call.rest == "dense" and call.spans != "all"):
        reasons.append("mask: this combination would have to be filled in as a Q x K matrix")
    elif call.spans == "rows":
        reasons.append(
            "mask: a band other than the square causal one, or lengths that a graph does not know while it is made, "
            "would have to be filled in as a Q x K matrix"
        )
    if call.scale <= 0 and (call.spans == "causal" or call.device != "cpu"):
        reasons.append("scale: at or below 0; torch's kernels hide keys and look for the largest logit first")
    if call.bias is not None:
        reasons += _refuses_bias(call)
    if call.keys == 0 or call.queries == 0 or call.batch == 0:
        reasons.append("an axis of size 0")
    return reasons


def _refuses_bias(call: Call) -> list[str]:
    reasons: list[str] = []
    if call.bias_grad:
        reasons.append("bias: torch's fused kernels have no gradient for it, which torch.no_grad() does without")
    if call.bias_dtype != call.dtype:
        reasons.append(f"bias: dtype {call.bias_dtype} beside {call.dtype}")
    if call.spans != "all" or call.rest != "none":
        reasons.append("bias: together with a mask it would have to be filled in as a Q x K matrix")
    return reasons


def attend(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """One call of ``scaled_dot_product_attention``."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    gqa = False
    if call.group > 1:  # not gqa = ...: while a compiler leaves the heads open that is a symbol, which SDPA refuses
        gqa = True
    if gqa and call.device != "cpu" and (call.dtype == torch.float32 or _matrix(call, plan, inputs) is not None):
        # on an accelerator only the half-precision kernel without a mask knows grouped heads
        k, v, gqa = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1), False
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_matrix(call, plan, inputs),
        dropout_p=call.dropout,
        is_causal=call.spans == "causal",
        scale=call.scale,
        enable_gqa=gqa,
    )
    return out, None


def repeater(
    call: Call, plan: Plan | None, q: Tensor, k: Tensor, v: Tensor, *beside: Tensor | None
) -> Callable[..., tuple[Tensor, None] | None] | None:
    """A short way for a call that will come again with other tensors of the same sizes, dtypes and strides.

    It takes q, k, v and returns out and no lse; or None where the long way has to look closer: NaN or infinity, or
    autocast. There is none for calls with tensors beside q, k, v.
    """
    unit = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    plain = call.bias is None and call.spans in ("all", "causal") and call.rest == "none" and not call.dropout
    if call.device != "cpu" or not unit or not plain:
        return None
    causal, scale, gqa, dtype = call.spans == "causal", call.scale, call.group > 1, accumulate_dtype(call.dtype)
    faithful = not causal and call.keys >= LANES

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None] | None:
        if torch.is_autocast_enabled("cpu"):
            return None
        if not faithful:
            total = q.sum(dtype=dtype) + k.sum(dtype=dtype)
            if causal:
                total = total + v.sum(dtype=dtype)
            if not math.isfinite(total.item()):
                return None
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa), None

    return run


def _matrix(call: Call, plan: Plan | None, inputs: Inputs) -> Tensor | None:
    """What to pass as ``attn_mask``: never larger than what the caller gave."""
    if inputs.bias is not None:
        return inputs.bias
    if plan is None:
        return None
    if isinstance(plan.rest, Dense):
        return plan.rest.tensor[(None,) * (4 - plan.rest.tensor.ndim)]
    if call.spans == "keys":
        every = slice(0, None)
        return plan.tile(every, every, every, slice(0, call.keys)).to(inputs.q.device)  # [B or 1, 1, 1, K]
    return None
