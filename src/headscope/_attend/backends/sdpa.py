"""torch's fused kernels, through ``scaled_dot_product_attention``, for calls without a Q x K matrix."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from headscope._attend.backends import blocked
from headscope._attend.backends.fused_operators import can_number
from headscope._attend.call import Call
from headscope._attend.interface import (
    Inputs,
    Repeat,
    Result,
    accumulate_dtype,
    readable,
    refuse_tangents,
    within_range,
)
from headscope.masks import Dense, Plan

name = "sdpa"
attend_finite = None
LANES = 16
"""With fewer keys than this, torch's kernel for a CPU returns 0 for a row of NaN. With more, and all of them visible to
every row, its kernels for float32 and float64 propagate NaN and infinity correctly."""
WIDEST = 256
"""The largest D of torch's flash kernel for CUDA."""

ORIGINAL = F.scaled_dot_product_attention
_entered = threading.local()


def refuses(call: Call) -> list[str]:
    """Return why torch's fused kernels do not support a call, or would build the Q x K matrix."""
    reasons: list[str] = []
    if call.lse:
        reasons.append("lse: scaled_dot_product_attention does not return lse")
    if call.softcap is not None:
        reasons.append("softcap: scaled_dot_product_attention does not support it")
    if call.sinks:
        reasons.append("sinks: scaled_dot_product_attention does not support them")
    if call.dropout and call.device == "cpu":
        reasons.append("dropout: torch has no fused kernel with dropout on a CPU")
    if call.v_head_dim != call.head_dim:
        reasons.append(f"Dv: torch has no fused kernel for Dv {call.v_head_dim} with D {call.head_dim}")
    if call.rest in ("other", "many") or (call.rest == "dense" and call.spans != "all"):
        reasons.append("mask: this combination would require a Q x K matrix")
    elif call.spans == "rows":
        reasons.append(
            "mask: would require a Q x K matrix: it is a band other than the square causal one, or its lengths are "
            "not known during tracing"
        )
    if call.scale <= 0 and (call.spans == "causal" or call.device != "cpu"):
        reasons.append("scale: is 0 or below; torch's kernels mask keys and find the largest logit before they scale")
    if call.bias is not None:
        reasons += _refuses_bias(call)
    if call.device == "cuda" and call.form != "subclass":  # a subclass determines itself which kernel runs
        reasons += _refuses_on_cuda(call)
    if call.keys == 0 or call.queries == 0 or call.heads == 0 or call.batch == 0:
        reasons.append("an axis of size 0")
    return reasons


def _refuses_bias(call: Call) -> list[str]:
    reasons: list[str] = []
    if call.bias_grad:
        reasons.append(
            "bias: torch's fused kernels do not compute its gradient; without gradients, under "
            "torch.no_grad(), they support it"
        )
    if call.bias_dtype != call.dtype:
        reasons.append(f"bias: dtype is {call.bias_dtype}, q has {call.dtype}")
    if call.spans != "all" or call.rest != "none":
        reasons.append("bias: together with a mask it would require a Q x K matrix")
    return reasons


def _refuses_on_cuda(call: Call) -> list[str]:
    """Return why torch would use its math kernel, which builds Q x K matrices.

    Source: torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if call.dtype == torch.float64:
        return ["dtype: torch has no fused kernel for float64 on CUDA and would compute a Q x K matrix"]
    if call.head_dim > WIDEST:
        return [
            f"D: {call.head_dim} is above {WIDEST}, the limit of torch's flash kernel; torch may compute a Q x K matrix"
        ]
    half = call.dtype != torch.float32
    masked = call.bias is not None or call.rest != "none" or call.spans == "keys"
    least = 8 if half else 4  # 16 bytes, the alignment of the memory-efficient kernel, which is the one with masks
    if call.head_dim % least and (masked or not half):
        reason = f"D: torch's memory-efficient kernel requires a multiple of {least}, got {call.head_dim}"
        return [f"{reason}; torch would compute a Q x K matrix"]
    weights = call.batch * call.heads * call.queries * call.keys
    if call.dropout and (masked or not half) and not can_number(weights):
        return [
            f"dropout: with B x H x Q x K {weights}, the memory-efficient kernel would drop other weights backwards"
        ]
    return []


def attend(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attend with one call of ``scaled_dot_product_attention``."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if call.form != "subclass":  # a subclass determines itself which kernel runs
        refuse_tangents(q, k, v, inputs.bias)
    if q.layout == torch.strided:
        if not torch.compiler.is_compiling():  # the compiler cannot trace this condition
            q, k, v = readable(q), readable(k), readable(v)
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        q, k, v = _without_overlap(q), _without_overlap(k), _without_overlap(v)
    gqa = False
    if call.group > 1:  # not gqa = ...: with symbolic heads that is a symbol, which SDPA does not accept
        gqa = True
    if gqa and call.device != "cpu" and (call.dtype == torch.float32 or _matrix(call, plan, inputs) is not None):
        # on an accelerator only the half-precision kernel without a mask supports grouped heads
        k, v, gqa = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1), False
    matrix = _matrix(call, plan, inputs)
    with _kernels(call, masked=matrix is not None):
        out = _torch_attention(
            q,
            k,
            v,
            attn_mask=matrix,
            dropout_p=call.dropout,
            is_causal=call.spans == "causal",
            scale=call.scale,
            enable_gqa=gqa,
        )
    return out, None


def _kernels(call: Call, masked: bool) -> AbstractContextManager[object]:
    """Return a context without cuDNN's kernel for a masked call, which it computes wrongly.

    From torch 2.11 on it is the default on H100 and later, and before that it can be preferred. Rows without a visible
    key are not 0 (the largest error seen, with cuDNN 9.19 on an H100, is 2), and the gradient of q is NaN where rows
    have a logsumexp below -88.7: https://github.com/pytorch/pytorch/issues/196678. It has no kernel for float32.
    """
    if call.device != "cuda" or not masked or call.dtype == torch.float32:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def attend_careful(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Attend for inputs whose logits may overflow: torch's kernels for a CPU then return 0, not NaN."""
    fits = within_range(call, inputs.q, inputs.k, inputs.bias)
    return attend(call, plan, inputs) if fits else blocked.attend(call, plan, inputs)


def _torch_attention(*args: Any, **options: Any) -> Tensor:
    """Return ``F.scaled_dot_product_attention``, looked up now: it may have been replaced, perhaps by headscope."""
    current = F.scaled_dot_product_attention
    if current is ORIGINAL or torch.compiler.is_compiling():
        return current(*args, **options)
    if getattr(_entered, "now", False):  # the replacement has called headscope
        return ORIGINAL(*args, **options)
    _entered.now = True
    try:
        return current(*args, **options)
    finally:
        _entered.now = False


def _without_overlap(x: Tensor) -> Tensor:
    """Return x, or a copy if rows share memory: torch gives its result the strides of q, and would overwrite rows."""
    return x.contiguous().clone() if _overlaps(x) else x


def _overlaps(x: Tensor) -> bool:
    """Return whether a step along an axis is shorter than a row.

    Batch entries and heads may repeat, with a stride of 0.
    """
    *outer, rows, width = x.shape
    *steps, step, _ = x.stride()
    if rows > 1 and step < width:
        return True
    return any(size > 1 and 0 < stride < width for size, stride in zip(outer, steps, strict=True))


def repeater(call: Call, plan: Plan | None, inputs: Inputs) -> Repeat | None:
    """Return a fast path for repeated calls with other tensors of the same sizes, dtypes and strides.

    It takes q, k, v and returns out without lse; or None if the full path must decide: NaN or infinity, or autocast.
    Calls with tensors in addition to q, k, v do not have one.
    """
    q, k, v = inputs[:3]
    unit = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    plain = call.bias is None and call.spans in ("all", "causal") and call.rest == "none" and not call.dropout
    if call.device != "cpu" or not unit or not plain or any(_overlaps(x) for x in (q, k, v)):
        return None
    causal, scale, gqa, dtype = call.spans == "causal", call.scale, call.group > 1, accumulate_dtype(call.dtype)
    faithful = not causal and call.keys >= LANES and call.dtype in (torch.float32, torch.float64)

    def repeat(
        q: Tensor, k: Tensor, v: Tensor, _bias: Tensor | None = None, _sinks: Tensor | None = None
    ) -> Result | None:
        if torch.is_autocast_enabled("cpu") or any(x._is_zerotensor() for x in (q, k, v)):
            return None
        if not faithful:
            if not within_range(call, q, k):
                return None
            if causal and not math.isfinite(v.sum(dtype=dtype).item()):
                return None
        return _torch_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa), None

    return repeat


def _matrix(call: Call, plan: Plan | None, inputs: Inputs) -> Tensor | None:
    """Return the ``attn_mask`` to pass: never larger than the caller's."""
    if inputs.bias is not None:
        return inputs.bias
    if plan is None:
        return None
    if isinstance(plan.rest, Dense):
        return plan.rest.tensor[(None,) * (4 - plan.rest.tensor.ndim)]
    if call.spans == "keys":
        every = slice(0, None)
        return plan.on(inputs.q.device).tile(every, every, every, slice(0, call.keys))  # [B or 1, 1, 1, K]
    return None
