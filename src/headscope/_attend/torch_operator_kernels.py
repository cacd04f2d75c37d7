"""Kernels of the operators of ``_attend.torch_operators``: they run the same as a call without a compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from headscope._attend import torch_operators
from headscope._attend.backend_call import attend_on_backend_seeded
from headscope._attend.backends import blocked
from headscope._attend.interface import ForwardPass, Inputs, Pair, full_precision
from headscope._attend.prepare import prepare_with_plan
from headscope._attend.visibility import gradients_of_bad_inputs
from headscope.masks import mask_from_codes

Sizes = tuple[int, ...]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, codes: list[int], parts: list[Tensor],
    scale: float, softcap: float, dropout: float, seed: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and lse, without gradients."""
    with torch.no_grad():
        mask = mask_from_codes(codes, parts)
        prepared = prepare_with_plan(q, k, v, mask, bias, sinks, scale, softcap or None, dropout, True, backend)
        result = prepared.repeat(q, k, v, bias, sinks) if prepared.repeat is not None else None
        if result is None:
            inputs, number = Inputs(q, k, v, bias, sinks), 0 if seed is None else int(seed)
            result = attend_on_backend_seeded(
                torch_operators.AS_OPERATORS[backend], prepared.call, prepared.plan, inputs, number
            )
    out, lse = result
    assert lse is not None  # the call requests it
    return torch_operators.lay_out(out, backend), lse.contiguous()


def _backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, codes: list[int], parts: list[Tensor],
    scale: float, softcap: float, dropout: float, seed: Tensor | None, backend: str,
    out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None, dbias: bool, dsinks: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k, v, bias and sinks; one that is not needed has no elements."""
    with torch.no_grad():
        mask = mask_from_codes(codes, parts)
        prepared = prepare_with_plan(q, k, v, mask, bias, sinks, scale, softcap or None, dropout, True, backend)
        forward = ForwardPass(prepared.call, prepared.plan, 0 if seed is None else int(seed))
        inputs, results, grads, needed = Inputs(q, k, v, bias, sinks), (out, lse), (grad_out, grad_lse), (dbias, dsinks)
        with full_precision(prepared.call):
            gradients = torch_operators.AS_OPERATORS[backend].gradients(forward, inputs, results, grads, needed)
            if backend == blocked.name and q.is_cpu and not all(x is None or x.isfinite().all() for x in gradients[:3]):
                gradients = _of_bad_inputs(forward, inputs, results, grads, needed) or gradients
        rows = [None if x is None else torch_operators.lay_out(x, backend) for x in gradients[:3]]
        beside = [None if x is None else x.contiguous() for x in gradients[3:]]
        return tuple(q.new_empty(0) if x is None else x for x in (*rows, *beside))


def _of_bad_inputs(
    forward: ForwardPass, inputs: Inputs, results: tuple[Tensor, Tensor], grads: Pair, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...] | None:
    """Return the gradients of blocked torch where q, k or v hold NaN or infinity; None if they do not."""

    def gradients(clean: Inputs, grads: Pair) -> tuple[Tensor | None, ...]:
        return blocked.gradients(forward, clean, results, grads, needed)

    return gradients_of_bad_inputs(forward, inputs, grads, gradients)


def _forward_flops(q: Sizes, k: Sizes, v: Sizes, *rest: Any, **options: Any) -> int:
    """Count both products, as torch counts its own attention: masked keys included."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


def _backward_flops(q: Sizes, k: Sizes, v: Sizes, *rest: Any, **options: Any) -> int:
    """Count five products: the recomputed logits, and the gradients of weights, q, k and v."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (3 * width + 2 * v[3])


def register() -> None:
    """Register the kernels of the operators; ``_attend.attention`` does so when it is imported."""
    torch_operators.implement(_forward, _backward)
    count: Any = register_flop_formula
    count([torch.ops.headscope.attend_forward])(_forward_flops)
    count([torch.ops.headscope.attend_backward])(_backward_flops)
