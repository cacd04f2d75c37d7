"""NaN and infinity in q, k, v reach exactly the rows where they are visible, whatever else is in the batch.

Masked logits are replaced, so a NaN in them has no effect. But weights multiply whole blocks of values, and 0 x NaN is
NaN: a NaN in a masked value would leak into rows where it is not visible. So if some values are not finite and some
    keys are masked, the backend runs with zeros instead of them. The non-finite values are then added to the rows where
    they are visible. The sums of gradients have the same problem for q and k, and torch's fused kernels add a mask to
the logits instead of replacing them. Therefore gradients, and those kernels, get zeros in q and k too. Finite inputs
come here only if a sum overflows, and the result is then the same.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headscope._attend.call import Call
from headscope._attend.interface import Attend, Inputs, Pair, accumulate_dtype, within_range
from headscope._attend.visibility import (
    hides,
    incoming,
    marks_of_rows,
    rows_of_bad_logits,
    with_nan_of_rows,
)
from headscope._support.autograd import Function
from headscope._support.torch_state import has_no_values
from headscope.masks import Plan

_dispatch = attrgetter("__torch_dispatch__")  # a subclass's replacement of torch's operators


def suspicious(call: Call, inputs: Inputs, with_bias: bool = False) -> bool:
    """Return whether q, k, v or their logits may hold NaN or infinity, for backends that do not report it.

    It reads norms and sums only: one that overflows is suspicious too. ``with_bias``: so is NaN or +inf in the bias.
    """
    if call.device != "cpu" or has_no_values() or torch._C._are_functorch_transforms_active():
        return False
    if any(_dispatch(type(x)) is not _dispatch(Tensor) for x in inputs[:3]):  # these may have no values
        return False
    if not within_range(call, inputs.q, inputs.k, inputs.bias if with_bias else None):
        return True
    if not hides(call):  # all of v is visible to each row anyway
        return False
    return not math.isfinite(inputs.v.detach().sum(dtype=accumulate_dtype(call.dtype)).item())


def attend(
    backend_attend: Attend, call: Call, plan: Plan | None, inputs: Inputs, replaces: Attend
) -> tuple[Tensor, Tensor | None]:
    """Run ``backend_attend``, a backend's ``attend``, on inputs that may hold NaN or infinity.

    Args:
        backend_attend: the backend's function.
        call, plan, inputs: its arguments.
        replaces: the ``attend`` of a backend that replaces masked logits; ``backend_attend``, unless it adds a mask to
            them.
    """
    bad_q, bad_k, bad_v = (~torch.isfinite(x.detach()) for x in inputs[:3])
    if not (bad_q.any() or bad_k.any() or bad_v.any()):
        return backend_attend(call, plan, inputs)
    bias = None if inputs.bias is None else inputs.bias.detach()
    v = inputs.v.masked_fill(bad_v, 0) if hides(call) else inputs.v
    clean = inputs._replace(q=inputs.q.masked_fill(bad_q, 0), k=inputs.k.masked_fill(bad_k, 0), v=v)
    out, lse = backend_attend(call, plan, clean)
    rows = rows_of_bad_logits(call, plan, bias, bad_q, bad_k)
    if rows.any():
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # another draw would change all later draws
            exact_out, exact_lse = replaces(call, plan, inputs._replace(v=v).detach())
        out = torch.where(rows[..., None], exact_out, out)
        lse = None if lse is None or exact_lse is None else torch.where(rows, exact_lse, lse)
        if call.grad or call.bias_grad or forward_ad._current_level >= 0:
            out, lse = _NanGradients.apply((call, plan, rows), out, lse, *inputs)
    if hides(call) and bad_v.any():
        out = out + _sums_of_bad_values(call, plan, bias, inputs.v.detach(), out.dtype)
    return out, lse


def _sums_of_bad_values(call: Call, plan: Plan | None, bias: Tensor | None, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of NaN and infinity in the values visible to a row, and 0 elsewhere, [B, H, Q, Dv]."""
    signs = torch.cat([v.isnan(), v == torch.inf, v == -torch.inf], -1)
    nan, plus, minus = marks_of_rows(call, plan, bias, signs).unflatten(-1, (3, -1)).unbind(-2)  # [B, H, Q, Dv]
    sums = torch.zeros_like(nan, dtype=dtype).masked_fill_(plus, torch.inf).masked_fill_(minus, -torch.inf)
    return sums.masked_fill_(nan | (plus & minus), torch.nan)


class _NanGradients(Function[tuple[Tensor, Tensor | None]]):
    """An identity on out and lse, whose gradient is NaN for all that is visible to rows of bad logits."""

    @staticmethod
    def forward(
        ctx: Any, rows_of: tuple[Call, Plan | None, Tensor], out: Tensor, lse: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.rows_of = rows_of
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return out.clone(), None if lse is None else lse.clone()  # torch requires views as tangents of views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (call, plan, rows), inputs = ctx.rows_of, ctx.saved_tensors
        pair: Pair = (grads[0], grads[1])
        zeros = tuple(
            torch.zeros_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[3:], strict=True)
        )
        with torch.no_grad():
            gradients = with_nan_of_rows(call, plan, inputs[3], rows & incoming(pair), zeros)
        return None, *pair, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        rows = ctx.rows_of[2]
        out, lse = tangents[1:3]
        return (
            None if out is None else out.masked_fill(rows[..., None], torch.nan),
            None if lse is None else lse.masked_fill(rows, torch.nan),
        )
