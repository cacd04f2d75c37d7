"""Prepared calls: the checks, the backend and the plan of a call, cached by sizes and options."""

from __future__ import annotations

import atexit
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._attend import torch_operators
from headscope._attend.backends import native, reproducible, sdpa
from headscope._attend.call import Call, Options, check_and_plan, fold, fold_mask, form
from headscope._attend.context_parallel import CONTEXT_PARALLEL, check_context_parallel
from headscope._attend.interface import Backend, Inputs, Repeat
from headscope._attend.select import select
from headscope._support.bounded import BoundedTable
from headscope._support.torch_state import is_traced
from headscope.masks import Mask, Plan, as_mask


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The part of a call that does not depend on the values of its tensors.

    Attributes:
        canonical: q, k, v already have four axes and equal batch sizes.
        repeat: the backend's fast path for the same call on other tensors, or None.
    """

    call: Call
    mask: Mask | None
    plan: Plan | None
    backend: Backend
    canonical: bool
    repeat: Repeat | None


class PreparedCalls(BoundedTable[tuple[Any, ...], Prepared]):
    """A table of prepared calls by keys, bounded by their number and by the rows of their plans.

    Attributes:
        most_rows: the most rows of all plans together; a row takes about 50 bytes.
        rows: their present number.
        latest: the latest call and its key. ``prepare`` compares this key first: that takes half as long as hashing a
            key. They form one tuple because another thread may replace them at any time.
    """

    def __init__(self, most: int = 1024, most_rows: int = 1 << 19) -> None:
        super().__init__(most)
        self.most_rows = most_rows
        self.rows = 0
        self.latest: tuple[tuple[Any, ...], Prepared | None] = ((), None)

    def find(self, key: tuple[Any, ...]) -> Prepared | None:
        """Return the call with this key, or None.

        Raises:
            TypeError: the key cannot be hashed.
        """
        prepared = self.get(key)
        if prepared is not None:
            self.latest = key, prepared
        return prepared

    def add(self, key: tuple[Any, ...], value: Prepared) -> Prepared:
        """Add a call, unless its plan alone has more than half of ``most_rows``; return it."""
        rows = _rows_of_plan(value)
        if rows > self.most_rows // 2:
            return value
        if self.rows + rows > self.most_rows:
            self.clear()
        super().add(key, value)
        self.latest = key, value
        self.rows += rows
        return value

    def clear(self) -> None:
        """Drop all calls."""
        super().clear()
        self.latest = (), None
        self.rows = 0


def _rows_of_plan(prepared: Prepared) -> int:
    return 0 if prepared.plan is None else math.prod(prepared.plan.spans.shape[:2])


prepared_calls = PreparedCalls()
atexit.register(prepared_calls.clear)  # torch's operators refer to this table until the extension is unloaded
_modules = sys.modules


def prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None,
) -> Prepared:  # fmt: skip
    """Return the prepared call: from the table, or newly checked, planned and assigned to a backend.

    A call that an operator will run has no plan: the operator plans when it runs.
    """
    if CONTEXT_PARALLEL in _modules:
        check_context_parallel()
    key = None
    if not is_traced() and (mask is None or not isinstance(mask, Tensor)):
        try:
            if mask is None or not mask.tensors():  # the values of tensors may change under an equal key
                key = (
                    q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
                    (q.is_cpu and k.is_cpu and v.is_cpu) or (q.device, k.device, v.device),  # naming them takes longer
                    type(q), type(k), type(v), mask, backend,
                    q.is_neg() or k.is_neg() or v.is_neg(),  # the memory then holds the negatives
                    scale, softcap, dropout, lse, type(scale), type(softcap), type(dropout),  # True == 1
                    torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or "none"),
                    bias is not None and _key(bias),
                    sinks is not None and _key(sinks),
                )  # fmt: skip
                latest_key, latest = prepared_calls.latest
                if latest_key == key and latest is not None:
                    return latest
                prepared = prepared_calls.find(key)
                if prepared is not None:
                    return prepared
        except (AttributeError, TypeError, RuntimeError, ValueError):
            key = None  # not hashable or wrong: the checks raise
    prepared = _prepare_anew(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, backend)
    return prepared if key is None else prepared_calls.add(key, prepared)


def prepare_with_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None,
) -> Prepared:  # fmt: skip
    """Return ``prepare``, always with the plan of the mask."""
    prepared = prepare(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, backend)
    call, mask = prepared.call, prepared.mask
    if mask is None or prepared.plan is not None:
        return prepared
    return replace(prepared, plan=mask.plan(call.batch, call.heads, call.queries, call.keys))


def _key(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_neg()


def _prepare_anew(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None,
) -> Prepared:  # fmt: skip
    """Check a call, choose its backend and plan its mask."""
    if isinstance(mask, Tensor) and any(getattr(x, "ndim", 0) > 4 for x in (q, k, v)):
        mask = fold_mask(mask, q, k, v)
    mask = as_mask(mask)
    # the operator plans when it runs: planning here would add unused nodes to a compiler's graph
    if is_traced():  # the compiler guards the comparison: a graph from outside context_parallel is retraced within it
        _ = F.scaled_dot_product_attention is sdpa.ORIGINAL
    traced = form(q, k, v, bias, sinks, *(() if mask is None else mask.tensors())) == "traced"
    if backend is None:  # off the CPU the parts of the mask determine the backend
        as_operator = native.extension is not None or not q.is_cpu
    else:
        as_operator = backend in torch_operators.OPERATOR_BACKENDS or not q.is_cpu
    planned = not (traced and as_operator)
    call, plan = check_and_plan(q, k, v, bias, sinks, Options(mask, scale, softcap, dropout, lse, planned))
    canonical = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]
    if q.layout == torch.jagged:
        if backend not in (None, "sdpa"):
            raise ValueError(f'backend: got {backend!r}, expected "sdpa" or None for nested q, k and v')
        backend = "sdpa"
    selected = select(call, backend)
    if selected is reproducible:
        call = replace(call, uniform=True)
    if traced and selected.name in torch_operators.OPERATOR_BACKENDS:
        plan = None
    elif mask is not None and plan is None and not (selected is sdpa and call.spans == "causal"):
        plan = mask.plan(call.batch, call.heads, call.queries, call.keys)
    may_repeat = mask is None or len(mask.tensors()) == 0  # else the plan may change between equal calls
    repeat = None
    if canonical and may_repeat and call.form == "plain" and selected.repeater is not None:
        repeat = selected.repeater(call, plan, Inputs(q, k, v, bias, sinks))
    return Prepared(call, mask, plan, selected, canonical, repeat)


def canonical_inputs(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
) -> Inputs:
    """Return the tensors as backends take them: four axes, one batch size, one number of key/value heads."""
    call = prepared.call
    if bias is not None:
        bias = fold(bias, call.lead)[(None,) * (4 - min(4, bias.ndim))]
    if prepared.canonical:
        return Inputs(q, k, v, bias, sinks)
    return Inputs(
        _four_axes(q, call.lead, call.heads),
        _four_axes(k, call.lead, call.kv_heads),
        _four_axes(v, call.lead, call.kv_heads),
        bias,
        sinks,
    )


def _four_axes(tensor: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    last = (heads, *tensor.shape[-2:])
    return tensor.expand(*lead, *last).reshape(math.prod(lead), *last)  # [B, H, length, D]
