"""A run of queries against a run of keys: one part of an attention that is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.backend_call import attend_on_backend_seeded
from headscope._attend.backends import blocked, native
from headscope._attend.dropout import DropoutPlace, Seed
from headscope._attend.interface import ForwardPass, Inputs, OperatorBackend, accumulate_dtype, full_precision
from headscope._attend.prepare import Prepared, canonical_inputs, prepare_with_plan
from headscope._attend.torch_operators import AS_OPERATORS
from headscope._support.precision import exact_products
from headscope.masks import Mask, cut


@dataclass(frozen=True)
class Options:
    """The options of an attention over a whole sequence.

    Attributes:
        mask: of all queries and keys, with explicit offsets; None = every key is visible.
        heads: the number of query heads.
        length: the number of queries and keys.
        seed: of dropout.
        backend: its name; None = the native one, else blocked torch.
    """

    mask: Mask | None
    scale: float | None
    softcap: float | None
    dropout: float
    heads: int
    length: int
    seed: int
    backend: str | None


class Pair(NamedTuple):
    """Some queries against some keys.

    Attributes:
        q, k, v: [B, H, queries, D], [B, Hkv, keys, D] and [B, Hkv, keys, Dv].
        bias: of these queries and keys; or None.
        sinks: [H], if these are all keys; or None.
        i, j: the positions of the queries and of the keys.
        h: the heads; None = all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    i: slice
    j: slice
    h: slice | None = None


class Call(NamedTuple):
    """A prepared pair."""

    prepared: Prepared
    inputs: Inputs
    backend: OperatorBackend
    seed: Seed


def prepare_pair(options: Options, pair: Pair) -> Call:
    """Return the call of a pair.

    Raises:
        TypeError, ValueError: a tensor or an option does not fit.
    """
    mask = None if options.mask is None else options.mask.block(pair.i, pair.j, pair.h)
    name = blocked.name if options.backend is None else options.backend
    prepared = prepare_with_plan(
        pair.q, pair.k, pair.v, mask, pair.bias, pair.sinks, options.scale, options.softcap, options.dropout, True, name
    )
    if options.backend is None and not native.refuses(prepared.call):
        prepared = replace(prepared, backend=native)
    inputs = canonical_inputs(prepared, pair.q, pair.k, pair.v, pair.bias, pair.sinks)
    starts = (0 if pair.h is None else pair.h.start, pair.i.start, pair.j.start)
    place = DropoutPlace(options.seed, options.heads, options.length, *starts)
    return Call(prepared, inputs, AS_OPERATORS[prepared.backend.name], place if options.dropout else 0)


def masks_all(call: Call) -> bool:
    """Return whether it is known that no key of a pair is visible to its queries."""
    plan = call.prepared.plan
    return plan is not None and plan.bounds is not None and bool((plan.spans[..., 1] <= plan.spans[..., 0]).all())


def attend_pair(call: Call) -> tuple[Tensor, Tensor]:
    """Return out and lse of the queries over these keys alone."""
    out, lse = attend_on_backend_seeded(call.backend, call.prepared.call, call.prepared.plan, call.inputs, call.seed)
    assert lse is not None  # the call requests it
    return out, lse


class Rows(NamedTuple):
    """Rows of the whole attention: their out and lse over all keys, and the gradients of both."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor

    def of(self, rows: slice) -> Rows:
        """Return some of them."""
        return Rows(*(x[:, :, rows] for x in self))

    def delta(self) -> Tensor:
        """Return Σ out · grad of each row, [B, H, Q]."""
        dtype = accumulate_dtype(self.out.dtype)
        return (self.out.to(dtype) * self.grad_out.to(dtype)).sum(-1)


Gradients = tuple[Tensor | None, ...]
"""Of q, k, v, bias and sinks."""


def gradients_of_pair(call: Call, rows: Rows, needs_bias: bool, *, all_keys: bool) -> Gradients:
    """Return the gradients of a pair in an attention over more keys, whose out and lse ``rows`` holds.

    Args:
        call: the pair.
        rows: its rows.
        needs_bias: whether the gradient of the bias is needed.
        all_keys: whether the pair has every key.
    """
    prepared = call.prepared
    forward = ForwardPass(prepared.call, prepared.plan, call.seed)
    needed = (needs_bias, call.inputs.sinks is not None)
    with full_precision(prepared.call), exact_products(prepared.call.device):
        if all_keys:
            results, grads = (rows.out, rows.lse), (rows.grad_out, rows.grad_lse)
            return call.backend.gradients(forward, call.inputs, results, grads, needed)
        return _through_merge(call, forward, rows, needed)


def _through_merge(call: Call, forward: ForwardPass, rows: Rows, needed: tuple[bool, bool]) -> Gradients:
    """Return the gradients through out = Σ w · out of each pair, w = exp(lse of the pair - lse)."""
    out, lse = attend_pair(call)
    weight = (lse - rows.lse).exp().masked_fill(lse == -torch.inf, 0)  # [B, H, Q]
    grad_out = rows.grad_out * weight[..., None].to(rows.grad_out.dtype)
    own = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)
    grad_lse = weight * (rows.grad_lse - rows.delta()) + own
    return call.backend.gradients(forward, call.inputs, (out, lse), (grad_out, grad_lse), needed)


def merge_pair(out: Tensor, lse: Tensor, pair_out: Tensor, pair_lse: Tensor) -> None:
    """Add the result of a pair to that of the pairs before, in place: out in the dtype of lse, [B, H, Q, Dv]."""
    total = torch.logaddexp(lse, pair_lse)
    nothing = total == -torch.inf
    before, now = ((x - total).exp().masked_fill(nothing, 0)[..., None] for x in (lse, pair_lse))
    out.mul_(before).add_(now * pair_out)
    lse.copy_(total)


def cut_bias(bias: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """Return the part of a bias for some of its rows and keys."""
    return None if bias is None else cut(bias, rows, keys)
