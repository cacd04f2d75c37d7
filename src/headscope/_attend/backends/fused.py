"""torch's fused kernels for CUDA with lse, bands, packed documents, sinks and values of another width.

``sdpa`` runs what ``scaled_dot_product_attention`` supports. This backend calls the same kernels directly
(``fused_operators``), for the options that this function does not pass on.

Sinks are an epilogue: lse' = log(exp(lse) + exp(sink)), out' = out · exp(lse - lse'). The unchanged backward kernels,
given out' and lse', compute exact gradients: p = exp(s - lse') and δ = Σ out' · dout are those with the sink.

The backward kernels ignore the gradient of lse: ds = p (dp - δ), where δ + (-dlse) would be needed for δ. They compute
δ = Σ out · dout. So out and dout get more columns whose products sum to -dlse, and v gets columns of zeros, which leave
dp as it is. The additional columns of dv are dropped.

Dropout multiplies the weights by factors Z after the softmax, so lse and the epilogue are the same: out is linear in v.
Then ds = p (Z dp - δ), where δ = Σ p Z dp = Σ out · dout still, and the additional columns add -dlse as before.

As in the other backends, a number that is drawn on the CPU seeds each call: it seeds torch's generator of the GPU, from
which the forward operator draws. The backward pass has to draw the same factors. In eager mode it takes the state that
the forward operator returned; as an operator, whose results are out and lse, that of the seed. A capture of a CUDA
graph draws from the generator as it is, so that each replay drops other weights. Each kernel draws other factors, so
with dropout both passes run one kernel, which no setting of torch changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._attend import mask_parts
from headscope._attend.backends import fused_operators
from headscope._attend.backends.fused_masks import kernel_mask
from headscope._attend.backends.fused_operators import Kernel, State, aligned_rows
from headscope._attend.backends.sink_epilogue import with_sinks
from headscope._attend.call import Call
from headscope._attend.dropout import DropoutPlace, Seed, draw_seed
from headscope._attend.interface import ForwardPass, Inputs, Pair, once, refuse_batched, refuse_tangents
from headscope._attend.mask_parts import MaskParts
from headscope._support.autograd import Function
from headscope._support.compiler import mark_constant
from headscope.masks import Plan

name = "fused"
attend_finite = attend_careful = repeater = None

WIDEST = 256  # the largest D of flash
WIDEST_DROPPED = 192  # with dropout; on GPUs other than A100 and H100 its backward kernel does not run wider heads
HALF = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY = (8, 0)
CUDNN = 3  # the number of cuDNN's kernel in torch.nn.attention.SDPBackend


def refuses(call: Call) -> list[str]:
    """Return why torch's fused kernels do not support a call."""
    reasons = _refuses_options(call)
    if call.parts is None:
        reasons.append("mask: only bands, lengths, packed documents and boolean tensors, joined by &, are supported")
    elif not reasons:
        call = _without_unused_keys(call)
        reasons += _refuses_mask(call) or _refuses_dropout(call)
    return reasons


def _refuses_options(call: Call) -> list[str]:
    reasons: list[str] = []
    if call.device not in mask_parts.DEVICES:
        reasons.append(f"device: torch has these operators for CUDA, not for {call.device}")
    elif torch.version.hip is not None:
        reasons.append("device: the operators of ROCm lay out lse in another way")
    if not fused_operators.AVAILABLE:
        reasons.append(f"torch: {torch.__version__} has no fused operators with windows")
    if call.form not in ("plain", "traced"):
        reasons.append("tensors: of a subclass of Tensor, or of torch.func within torch.compile")
    if call.dtype not in (*HALF, torch.float32):
        reasons.append("dtype: torch has no fused kernel for float64 on CUDA")
    if call.softcap is not None:
        reasons.append("softcap: torch's fused kernels do not support it")
    if call.scale <= 0:
        reasons.append("scale: is 0 or below; torch's kernels find the largest logit before they scale")
    if call.keys == 0 or call.queries == 0 or call.heads == 0 or call.batch == 0:
        reasons.append("an axis of size 0")
    if call.bias is not None:
        if call.bias_grad:
            reasons.append("bias: its gradient would be as large as the matrix of weights")
        if call.bias_dtype != call.dtype:
            reasons.append(f"bias: dtype is {call.bias_dtype}, q has {call.dtype}")
        if call.bias[-1:] != (call.keys,):
            got = call.bias[-1] if call.bias else "missing"
            reasons.append(f"bias: axis K is {got}, expected {call.keys}; expanding it would fill a matrix")
    return reasons


def _refuses_mask(call: Call) -> list[str]:
    parts = call.parts
    assert parts is not None
    matrix = call.bias is not None or parts.lengths or parts.matrix != "none"
    if parts.packed is not None and matrix:
        return ["mask: packed documents together with a bias, lengths or a boolean tensor"]
    if call.keys <= 0 or any(reach is not None and reach < 0 for reach in (parts.left, parts.right)):
        return [
            "mask: a band that starts after the diagonal, masks every key, or ends before the diagonal of documents"
        ]
    if not _is_banded(call, parts):
        return []
    if not matrix and _takes_flash(call):
        more = call.lse and call.grad  # the gradient of lse may need more columns than flash has
        if not more or _width(call, "flash band", more=True) <= WIDEST:
            return []
    kernels = "torch's memory-efficient kernels"  # flash has no bias, and neither float32 nor wider heads
    if parts.right != 0 and (parts.has_band or parts.packed is None):
        return [f"mask: {kernels} support bands that end at the diagonal only"]
    if call.queries > call.keys and parts.has_band:
        return [f"mask: {kernels} do not support bands with more queries than keys"]
    return []


def _refuses_dropout(call: Call) -> list[str]:
    """Return why the backward pass would drop other weights than the forward pass.

    Source: torch 2.9 to 2.13, aten/src/ATen/native/transformers/cuda/attention.cu and mem_eff_attention/kernel_*.h.
    """
    if not call.dropout or not choose(call).startswith("efficient"):
        return []
    kernels, weights = "torch's memory-efficient kernels", call.batch * call.heads * call.queries * call.keys
    if call.parts is not None and call.parts.packed is not None:  # the first pass numbers the weights by K = 0
        return [f"dropout: {kernels} drop other weights of packed documents in the backward pass"]
    if not fused_operators.can_number(weights):
        return [f"dropout: {kernels} number the weights in 32 bits; B x H x Q x K is {weights}, expected below 2^31"]
    return []


def _without_unused_keys(call: Call) -> Call:
    """Return a call without the last keys that no query attends to; top-left causal may then be square."""
    parts = call.parts
    if parts is None or parts.right is None or parts.right >= 0 or parts.packed is not None:
        return call
    left = None if parts.left is None else parts.left + parts.right
    return replace(call, keys=call.keys + parts.right, parts=replace(parts, left=left, right=0))


def _used_keys(call: Call, inputs: Inputs) -> tuple[Call, Inputs]:
    """Return ``_without_unused_keys``, and the inputs without these keys."""
    fewer = _without_unused_keys(call)
    if fewer is call:
        return call, inputs
    k, v = (x[:, :, : fewer.keys] for x in inputs[1:3])
    return fewer, inputs._replace(k=k, v=v, bias=None if inputs.bias is None else inputs.bias[..., : fewer.keys])


def _takes_flash(call: Call) -> bool:
    """Return whether the sizes and dtype of a call are those of flash, after padding to a multiple of 8."""
    if call.dropout and _width(call, "flash", more=True) > WIDEST_DROPPED:
        return False
    return call.dtype in HALF and max(call.head_dim, call.v_head_dim) <= WIDEST and _has_flash()


def _is_banded(call: Call, parts: MaskParts) -> bool:
    """Return whether a call requires an operator with windows and cumulative lengths."""
    if parts.packed is not None or parts.left is not None:
        return True
    return parts.right is not None and not (parts.right == 0 and call.queries == call.keys)


def choose(call: Call, inputs: Inputs | None = None) -> Kernel:
    """Return the kernel for a call that is not refused; without inputs, as if torch did not prefer cuDNN.

    Half types without a matrix go to flash, or to cuDNN where torch itself prefers it; others to the memory-efficient
    kernels. On GPUs without flash all go to the latter.
    """
    call = _without_unused_keys(call)
    parts = call.parts
    assert parts is not None
    matrix = call.bias is not None or parts.lengths or parts.matrix != "none"
    banded = _is_banded(call, parts)
    if matrix or not _takes_flash(call):
        return "efficient band" if banded else "efficient"
    if banded:
        return "flash band"
    return "cudnn" if inputs is not None and not call.dropout and _prefers_cudnn(call, inputs) else "flash"


@mark_constant
def _has_flash() -> bool:
    """Return whether the GPU has flash; True without one, where tensors have no values and stand for those of some."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= FLASH_CAPABILITY


def _prefers_cudnn(call: Call, inputs: Inputs) -> bool:
    """Return whether torch would run cuDNN's kernel for this call, which it decides by GPU, sizes and settings."""
    if not torch.cuda.is_available() or call.head_dim % 8 or call.v_head_dim != call.head_dim:
        return False
    decide: Any = getattr(torch, "_fused_sdp_choice", None)
    if decide is None:
        return False
    causal = call.parts is not None and call.parts.right == 0
    q, k, v = inputs[:3]
    return decide(q, k, v, None, 0.0, causal, scale=call.scale, enable_gqa=call.group > 1) == CUDNN


def attend(call: Call, plan: Plan | None, inputs: Inputs, seed: Seed | None = None) -> tuple[Tensor, Tensor | None]:
    """Return out and lse. Without ``seed``, torch's generator draws the dropout seed."""
    refuse_tangents(*inputs)
    check = seed is not None
    if seed is None and call.dropout and fused_operators.can_seed(inputs.q.device):
        seed = int(draw_seed().item())
    return _Fused.apply(call, plan, _Draw(seed, check), *inputs)


class _Draw(NamedTuple):
    """How a forward pass draws.

    Attributes:
        seed: what seeds the generator; None = nothing.
        check: whether the backward pass will have only the seed.
    """

    seed: Seed | None
    check: bool


class _Fused(Function[tuple[Tensor, Tensor]]):
    """The forward kernel, and its gradient by the backward kernel."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Plan | None, draw: _Draw,
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, state = _run(call, plan, Inputs(q, k, v, bias, sinks), draw)
        ctx.call, ctx.plan = call, plan
        read = () if plan is None or plan.source is None else plan.source.tensors()
        drawn = state if call.dropout else (None, None)
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse, *drawn, *(x for x in read if not x.is_inference()))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched(*grads)
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them in each access
        inputs, results, state = Inputs(*saved[:5]), (saved[5], saved[6]), saved[7:9] if ctx.call.dropout else None
        with torch.no_grad():
            gradients_of_inputs = _gradients(
                ctx.call, ctx.plan, state, inputs, results, (grads[0], grads[1]), ctx.needs_input_grad[6:]
            )
        return None, None, None, *once(gradients_of_inputs, *grads, *saved)


def _run(call: Call, plan: Plan | None, inputs: Inputs, draw: _Draw) -> tuple[Tensor, Tensor, State]:
    """Return out [B, H, Q, Dv] in q's dtype, lse [B, H, Q] and the state of dropout."""
    call, inputs = _used_keys(call, inputs)
    kernel = choose(call, inputs)
    mask, empty = kernel_mask(call, plan, inputs)
    args = (kernel, *_prepared(call, kernel, *inputs[:3]), mask, call.scale, call.dropout)
    if call.dropout and draw.seed is not None:
        out, lse, state = fused_operators.forward_seeded(*args, _of_whole_call(draw.seed), draw.check)
    else:
        out, lse, state = fused_operators.forward(*args)
    out = out[..., : call.v_head_dim]
    if empty is not None:
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    if inputs.sinks is not None:
        out, lse = with_sinks(out, lse, inputs.sinks)
    return out, lse, state


def _of_whole_call(seed: Seed) -> int:
    """Return a seed, unless it is that of a part of a larger call."""
    if isinstance(seed, DropoutPlace):
        raise ValueError(
            "backend: fused cannot drop the weights that a larger call would drop, as context parallelism requires; "
            'expected backend="blocked", or None to choose'
        )
    return seed


def gradients(
    forward: ForwardPass, inputs: Inputs, results: tuple[Tensor, Tensor], grads: Pair, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, and of sinks if needed; a bias never needs one."""
    call, plan, seed = forward
    state = None
    if call.dropout:
        state = fused_operators.state_of_seed(choose(call, inputs), inputs.q, _of_whole_call(seed))
    return _gradients(call, plan, state, inputs, results, grads, needed)


def _gradients(
    call: Call, plan: Plan | None, state: State | None,
    inputs: Inputs, results: tuple[Tensor, Tensor], grads: Pair, needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return ``gradients``, with the state of dropout from the forward pass."""
    keys = call.keys
    call, inputs = _used_keys(call, inputs)
    (out, lse), (grad_out, grad_lse) = results, grads
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    kernel = choose(call, inputs)
    if kernel == "cudnn" and grad_lse is not None and _width(call, kernel, True) > WIDEST // 2:
        kernel = "flash"  # cuDNN's backward kernel is limited to D 128
    if kernel.startswith("flash") and grad_lse is not None and _width(call, kernel, True) > WIDEST:
        kernel = "efficient band" if kernel == "flash band" else "efficient"
    mask, _ = kernel_mask(call, plan, inputs)
    q, k, v = _prepared(call, kernel, *inputs[:3], more=grad_lse is not None)
    width = v.shape[-1]
    safe = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(-inf - inf) = 0, where -inf + inf would be NaN
    columns = [out], [grad_out.to(out.dtype)]
    if grad_lse is not None:
        for sums, each in zip(
            columns, _columns_of_lse(grad_lse.masked_fill(lse == -torch.inf, 0), out.dtype), strict=True
        ):
            sums.append(each)
    of_out, of_grad = (_padded(torch.cat(x, -1) if len(x) > 1 else x[0], width) for x in columns)
    dq, dk, dv = fused_operators.backward(kernel, of_grad, q, k, v, of_out, safe, mask, call.scale, call.dropout, state)
    dk, dv = (_ungrouped(x, call) for x in (dk, dv))
    if call.keys < keys:
        dk, dv = (F.pad(x, (0, 0, 0, keys - call.keys)) for x in (dk, dv))
    dsinks = None
    if inputs.sinks is not None and needed[1]:
        delta = (out.float() * grad_out.float()).sum(-1)
        inner = -delta if grad_lse is None else grad_lse - delta
        weight = (inputs.sinks.to(lse.dtype)[:, None] - lse).exp().masked_fill(lse == -torch.inf, 0)
        dsinks = (weight * inner).sum((0, 2)).to(inputs.sinks.dtype)
    d, dv_width = call.head_dim, call.v_head_dim
    return dq[..., :d], dk[..., :d], dv[..., :dv_width], None, dsinks


def _columns_of_lse(grad_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return columns of out and of dout whose products sum to -dlse exactly, [B, H, Q, 1 or 3].

    Three numbers of a half type hold the 24 bits of one float32. Half of its exponent goes to each side, because
    float16 would underflow.
    """
    negative = -grad_lse[..., None].float()
    if dtype == torch.float32:
        return negative, torch.ones_like(negative)
    exponent = torch.frexp(negative.nan_to_num(1.0, 1.0, 1.0)).exponent.clamp(-28, 28).div(2, rounding_mode="floor")
    power = torch.ldexp(torch.ones_like(negative), exponent)
    rest, parts = negative / power, list[Tensor]()
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.cat(parts, -1), power.to(dtype).expand(-1, -1, -1, 3)


def _width(call: Call, kernel: Kernel, more: bool, of_values: bool = False) -> int:
    """Return the padded width of the heads; ``more``: with columns for the gradient of lse."""
    extra = 0 if not more else 1 if call.dtype == torch.float32 else 3
    step = 4 if call.dtype == torch.float32 else 8
    if kernel.startswith("efficient"):
        return -(-(call.v_head_dim + extra if of_values else call.head_dim) // step) * step
    return -(-max(call.head_dim, call.v_head_dim + extra) // step) * step


def _prepared(
    call: Call, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, more: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with the widths, heads and strides that a kernel requires."""
    if kernel.startswith("efficient") and call.group > 1:
        k, v = (x.repeat_interleave(call.group, 1) for x in (k, v))
    wide = _width(call, kernel, more), _width(call, kernel, more, of_values=True)
    return aligned_rows(q, wide[0]), aligned_rows(k, wide[0]), aligned_rows(v, wide[1])


def _ungrouped(x: Tensor, call: Call) -> Tensor:
    """Return the gradient of keys or values [B, H or Hkv, K, D], summed over the queries of each group."""
    if x.shape[1] == call.kv_heads:
        return x
    return x.unflatten(1, (call.kv_heads, call.group)).sum(2, dtype=torch.float32).to(x.dtype)


def _padded(x: Tensor, width: int) -> Tensor:
    """Return rows of a given width, padded with zeros."""
    return x.contiguous() if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
