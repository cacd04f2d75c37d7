"""torch's flex_attention, compiled: softcap, biases and masks that no fused kernel of CUDA supports.

The compiler generates one kernel for each mask and set of options, in some seconds. Blocks of 128 x 128 without a
visible key are skipped; those of a mask without tensors are found once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from headscope._attend import mask_parts
from headscope._attend.backends.sink_epilogue import with_sinks
from headscope._attend.call import Call
from headscope._attend.interface import Inputs, Result, refuse_tangents
from headscope._support.bounded import BoundedTable
from headscope._support.compiler import mark_constant
from headscope.masks import And, Dense, Mask, Or, Plan

name = "flex"
attend_finite = attend_careful = repeater = None

NARROWEST = 16  # numbers in a head; torch's kernels refuse fewer
MOST_KERNELS = 512  # masks, options and sizes in one process; beyond them torch raises
_block_masks: BoundedTable[Any, Any] = BoundedTable(16)


def refuses(call: Call) -> list[str]:
    """Return why flex_attention does not support a call."""
    reasons: list[str] = []
    if call.device not in mask_parts.DEVICES:
        reasons.append(f"device: headscope uses flex_attention on CUDA only, not on {call.device}")
    elif not _has_triton():
        reasons.append("build: flex_attention requires Triton, which is not installed")
    if call.form not in ("plain", "traced"):
        reasons.append("tensors: of a subclass of Tensor, or of torch.func within torch.compile")
    if call.form == "traced" and not call.compiled:
        reasons.append("tracing: outside torch.compile, flex_attention would compute a Q x K matrix")
    if not call.indexable:
        reasons.append("mask: a caller's own class, or a band with an offset for each batch entry")
    if call.dtype == torch.float64:
        reasons.append("dtype: flex_attention has no kernel for float64 on CUDA")
    if min(call.head_dim, call.v_head_dim) < NARROWEST:
        reasons.append(f"D: flex_attention requires at least {NARROWEST}, got {min(call.head_dim, call.v_head_dim)}")
    if call.dropout:
        reasons.append("dropout: flex_attention does not support it")
    if call.keys == 0 or call.queries == 0 or call.heads == 0 or call.batch == 0:
        reasons.append("an axis of size 0")
    return reasons


@mark_constant
def _has_triton() -> bool:
    """Return whether a GPU of this machine can run generated kernels; True without one, when calls are only judged."""
    return not torch.cuda.is_available() or find_spec("triton") is not None


def attend(call: Call, plan: Plan | None, inputs: Inputs) -> Result:
    """Return out and lse."""
    from torch.nn.attention.flex_attention import AuxRequest  # loads torch's operators of higher order

    refuse_tangents(*inputs)
    source = None if plan is None else plan.source
    result, aux = _function()(
        *inputs[:3],
        score_mod=_score(call.softcap, inputs.bias),
        block_mask=None if source is None else _block_mask(call, source, inputs.q.device),
        scale=call.scale,
        enable_gqa=call.group > 1,
        return_aux=AuxRequest(lse=True),
    )
    lse = aux.lse
    return (result, lse) if inputs.sinks is None else with_sinks(result, lse, inputs.sinks)


def _function() -> Callable[..., Any]:
    """Return flex_attention: within a compiled function itself, else compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if is_dynamo_compiling() else _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, fullgraph=True)
    dynamo: Any = torch._dynamo  # which torch.compile has imported

    def run(*args: Any, **options: Any) -> Any:
        with dynamo.config.patch(recompile_limit=MOST_KERNELS, accumulated_recompile_limit=MOST_KERNELS):
            return compiled(*args, **options)

    return run


def _score(softcap: float | None, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """Return the change of a scaled logit: cap, then bias."""
    if softcap is None and bias is None:
        return None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if bias is not None:
            s = s + _at(bias, (b, h, i, j))
        return s

    return score


def _block_mask(call: Call, source: Mask, device: torch.device) -> Any:
    """Return which blocks have visible keys; computed once for a mask that cannot change."""
    constant = source.is_constant() and not is_dynamo_compiling()
    key = (source, call.queries, call.keys, device)
    known = _block_masks.get(key) if constant else None
    if known is None:
        known = _build_block_mask(call, source, device)
        if constant:
            _block_masks.add(key, known)
    return known


def _build_block_mask(call: Call, source: Mask, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    traceable = _traceable(source)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return traceable.allows(b, h, i, j)

    batch, heads = (None, None) if not source.tensors() else (call.batch, call.heads)
    return create_block_mask(visible, batch, heads, call.queries, call.keys, device=device)


class _Table(Mask):
    """A boolean tensor of four axes, read by index tensors only: the compiler takes no number as an index."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return _at(self.tensor, (b, h, i, j))


def _at(x: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
    """Return an element of a tensor whose axes of size 1 repeat."""
    return x[tuple(index * 0 if size == 1 else index for size, index in zip(x.shape, indices, strict=True))]


def _traceable(mask: Mask) -> Mask:
    """Return a mask whose boolean tensors are tables."""
    if isinstance(mask, (And, Or)):
        return type(mask)(_traceable(mask.first), _traceable(mask.second))
    return _Table(mask.tensor[(None,) * (4 - mask.tensor.ndim)]) if isinstance(mask, Dense) else mask
