"""Measure one attention call: after it, from its log-sum-exp, or in the same pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling

from headscope._attend import context
from headscope._attend.backends import native
from headscope._attend.interface import is_lazy
from headscope._attend.prepare import canonical_inputs, prepare, prepare_with_plan
from headscope._observe import steps
from headscope._observe.inputs import Request
from headscope._support.arguments import check_layout, check_type
from headscope._support.tensor_classes import ORDINARY, check_has_numbers, is_distributed
from headscope._support.torch_state import has_no_values
from headscope.masks import Mask
from headscope.stats import HeadStats, Observe


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of queries and keys.

    Attributes:
        q_pos, k_pos: as ``headscope.observe`` takes them.
        kind: "cross" if queries and keys do not share an axis.
        real: which keys are not padding, boolean [B or 1, K]; None = those that are visible to some query.
        rows_at: the place of the first query in a whole sequence, and the number of its queries.
        with_native_pass: whether the native kernels attend in such calls, and may measure them in the same pass.
        repeats: whether to retain what measures further calls like it.
    """

    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    kind: Literal["self", "cross"] = "self"
    real: Tensor | None = None
    rows_at: tuple[int, int] | None = None
    with_native_pass: bool = False
    repeats: bool = False


SELF = Positions()


def measure_call(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: Tensor | None, what: Observe,
    positions: Positions = SELF, *, nulls: bool = True,
) -> HeadStats:  # fmt: skip
    """Measure the weights of a call; the arguments are those of ``headscope.observe``.

    ``nulls``: whether to compute what chance gives, too.
    """
    arguments = (q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, what, positions)
    request = to_request(*arguments)
    return steps.observe_request(request if nulls else replace(request, nulls=False))


def to_request(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: Tensor | None, what: Observe,
    positions: Positions = SELF,
) -> Request:  # fmt: skip
    """Check the call of an observation; the arguments are those of ``headscope.observe``."""
    _check_readable(q=q, k=k, v=v)
    check_type("what", what, Observe, "a headscope.Observe")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor):
            check_layout(name, x)
    if v is None:
        check_type("q", q, Tensor, "a torch.Tensor")
        check_type("k", k, Tensor, "a torch.Tensor")
    values = v if v is not None else k[..., :1]
    with torch.no_grad():
        prepared = prepare_with_plan(q, k, values, mask, bias, sinks, scale, softcap, dropout, False, "blocked")
        inputs = canonical_inputs(prepared, q, k, values, bias, sinks).detach()
    return Request(
        call=prepared.call,
        mask=prepared.mask,
        plan=prepared.plan,
        inputs=inputs,
        has_values=v is not None,
        lse=lse,
        q_pos=positions.q_pos,
        k_pos=positions.k_pos,
        kind=positions.kind,
        real=positions.real,
        what=what,
        prepared=prepared,
        has_place=False,
        rows_at=positions.rows_at,
        in_whole_pass=positions.with_native_pass and steps.shares_pass(what, prepared.call),
        repeats=positions.repeats,
    )


def attend_and_observe(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, backend: str | None, what: Observe,
) -> tuple[Tensor, Tensor, HeadStats] | None:  # fmt: skip
    """Attend and observe in one pass; return out, lse and the statistics.

    Returns None if that is not possible: dropout, a gradient, a backend other than the native one, an option that
    ``native_observer`` does not support, or a row that is not finite; or context parallelism. And with ``rows``, unless
    the sample is so large that a pass of its own would take longer.
    """
    if context.active is not None or is_dynamo_compiling():  # a graph has no values to read
        return None
    prepared = prepare(q, k, v, mask, bias, sinks, scale, softcap, dropout, True, backend)
    repeat = steps.repeater_of(prepared, what)
    if repeat is not None and bias is None and sinks is None:
        result = repeat(q, k, v)
        if result is not None:
            return result
    call = prepared.call
    in_whole_pass = steps.shares_pass(what, call)
    if call.dropout or not (in_whole_pass or what.rows is None):
        return None
    if prepared.backend.name != native.name or call.form != "plain" or call.grad or call.bias_grad:
        return None
    inputs = canonical_inputs(prepared, q, k, v, bias, sinks)
    has_place = prepared.canonical and all(x.stride(-1) == 1 and not is_lazy(x) for x in (q, k, v))
    request = Request(
        call=call,
        mask=prepared.mask,
        plan=prepared.plan,
        inputs=inputs,
        has_values=True,
        lse=None,
        q_pos=None,
        k_pos=None,
        kind="self",
        real=None,
        what=what,
        prepared=prepared,
        has_place=has_place,
        in_whole_pass=in_whole_pass,
    )
    result = steps.attend_request(request)
    if result is None:
        return None
    out, lse, stats = result
    return out.reshape(*call.lead, *out.shape[1:]), lse.reshape(*call.lead, *lse.shape[1:]), stats


def _check_readable(**tensors: Tensor | None) -> None:
    """Raise if tensors have no readable values, or hold those of a part of a call or of many calls."""
    for name, x in tensors.items():
        if is_distributed(x):
            raise TypeError(f"{name}: got a DTensor; expected an ordinary tensor: use .to_local(), or watch the module")
        if isinstance(x, Tensor):
            check_has_numbers(name, x)
        if isinstance(x, Tensor) and type(x) in ORDINARY and is_batchedtensor(x):
            raise ValueError(
                "observe: within torch.vmap, which hides the values of single entries; observe the whole batch"
            )
    present = [x for x in tensors.values() if isinstance(x, Tensor)]
    if has_no_values() or any(x.is_meta or isinstance(x, FakeTensor) for x in present):
        raise ValueError(
            "observe: its tensors have no values (meta or fake tensors, make_fx, torch.export); observe a call "
            "that computes"
        )
