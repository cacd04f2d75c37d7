"""Attention of the queries of this rank over the keys of all ranks: gathered, or passed around the ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headscope._attend.backends import blocked
from headscope._attend.interface import accumulate_dtype, once, refuse_batched, refuse_tangents
from headscope._support.autograd import Function
from headscope.parallel._exchange import Transfer, gather, sum_parts
from headscope.parallel._pairs import (
    Call,
    Options,
    Pair,
    Rows,
    attend_pair,
    cut_bias,
    gradients_of_pair,
    masks_all,
    merge_pair,
    prepare_pair,
)
from headscope.parallel._places import Places


@dataclass(frozen=True)
class Task:
    """An attention of this rank: the options, the places, and whether keys are gathered or passed on."""

    options: Options
    places: Places
    how: Literal["gather", "ring"]


class Local(NamedTuple):
    """The tensors of this rank: its queries, keys and values; bias of its rows and all keys; sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


def attend_rows(task: Task, local: Local) -> tuple[Tensor, Tensor]:
    """Return out [B, H, own, Dv] and lse [B, H, own] of this rank's queries over all keys; differentiable once."""
    return _AttendRows.apply(task, *local)


class _AttendRows(Function[tuple[Tensor, Tensor]]):
    """The forward pass, and its gradient, which exchanges the keys again: only local tensors are saved."""

    @staticmethod
    def forward(
        ctx: Any, task: Task, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        local = Local(q, k, v, bias, sinks)
        out, lse = (_over_all_keys if task.how == "gather" else _around_the_ring)(task, local)
        ctx.task = task
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(grad_out, grad_lse)
        refuse_tangents(grad_out, grad_lse)
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them in each access
        local, (out, lse) = Local(*saved[:5]), saved[5:]
        with torch.no_grad():
            sums = _Sums.zeros(local, ctx.needs_input_grad[4])
            backward = _gradients_over_all_keys if ctx.task.how == "gather" else _gradients_around_the_ring
            backward(ctx.task, local, Rows(out, lse, grad_out, grad_lse), sums)
        gradients = sums.as_dtypes_of(local)
        return None, *once(gradients, grad_out, grad_lse, *saved)


def rows_of(places: Places) -> Iterator[tuple[slice, slice]]:
    """Yield where each run of this rank lies among its own rows, and in the sequence."""
    at = 0
    for run in places.runs:
        yield slice(at, at + run.stop - run.start), run
        at += run.stop - run.start


def whole_keys(places: Places, x: Tensor) -> Tensor:
    """Return the keys or values of the whole sequence in order, [B, Hkv, T, D], from this rank's."""
    parts = gather(x.movedim(2, 0), places.lengths, places.group)
    return places.in_order(parts, 0).movedim(0, 2)


# ---------------------------------------------------------------- keys gathered


def _pairs_of_rows(task: Task, local: Local, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Call]]:
    everything = slice(0, task.options.length)
    for rows, i in rows_of(task.places):
        bias = cut_bias(local.bias, rows, everything)
        yield rows, prepare_pair(task.options, Pair(local.q[:, :, rows], k, v, bias, local.sinks, i, everything))


def _over_all_keys(task: Task, local: Local) -> tuple[Tensor, Tensor]:
    k, v = (whole_keys(task.places, x) for x in (local.k, local.v))
    result = _as_in_one_process(task, local, k, v)
    if result is not None:
        return result
    out, lse = _nothing(local, local.q.dtype)
    for rows, call in _pairs_of_rows(task, local, k, v):
        out[:, :, rows], lse[:, :, rows] = attend_pair(call)
    return out, lse


def _as_in_one_process(task: Task, local: Local, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return out and lse with the bits of one process: of its call, the blocks of rows that this rank needs.

    None if the native kernels do not support the call, or the bias has rows: those of other ranks are not here.
    """
    places, length = task.places, task.options.length
    if not places.runs or not local.q.is_cpu or (local.bias is not None and local.bias.shape[2] > 1):
        return None
    everything = slice(0, length)
    q = local.q.new_zeros(*local.q.shape[:2], length, local.q.shape[3])  # pages that nobody writes take no memory
    for rows, i in rows_of(places):
        q[:, :, i] = local.q[:, :, rows]
    call = prepare_pair(task.options, Pair(q, k, v, local.bias, local.sinks, everything, everything))
    if call.prepared.backend.name == blocked.name:
        return None
    needed = tuple(sorted((run.start, run.stop) for run in places.runs))
    out, lse = attend_pair(
        call._replace(prepared=replace(call.prepared, call=replace(call.prepared.call, needed=needed)))
    )
    return places.shard(out, 2), places.shard(lse, 2)


def _gradients_over_all_keys(task: Task, local: Local, rows: Rows, sums: _Sums) -> None:
    places = task.places
    k, v = (whole_keys(places, x) for x in (local.k, local.v))
    dk, dv = (torch.zeros_like(x, dtype=rows.lse.dtype) for x in (k, v))
    for here, call in _pairs_of_rows(task, local, k, v):
        dq, *of_keys, dbias, dsinks = gradients_of_pair(call, rows.of(here), sums.bias is not None, all_keys=True)
        sums.add(here, slice(0, task.options.length), dq, dbias, dsinks)
        for total, part in zip((dk, dv), of_keys, strict=True):
            total += 0 if part is None else part
    for total, part in ((sums.k, dk), (sums.v, dv)):
        mine = sum_parts(places.by_rank(part.movedim(2, 0), 0), places.lengths, places.group)
        total += mine.movedim(0, 2)


# ---------------------------------------------------------------- keys passed around the ring


def _pairs_with(
    task: Task, local: Local, holder: int, k: Tensor, v: Tensor
) -> Iterator[tuple[slice, slice, slice, Call]]:
    """Yield the rows of each pair, its place among the holder's keys, its keys, and its call."""
    at = 0
    for j in task.places.parts[holder]:
        keys = slice(at, at + j.stop - j.start)
        at = keys.stop
        for rows, i in rows_of(task.places):
            bias = cut_bias(local.bias, rows, j)
            pair = Pair(local.q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, None, i, j)
            call = prepare_pair(task.options, pair)
            if not masks_all(call):
                yield rows, keys, j, call


def _ring(task: Task, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the keys and values of each rank in turn, this rank's first; the next ones are on their way meanwhile."""
    places, ranks = task.places, len(task.places.parts)
    for step in range(ranks):
        holder, after = ((places.rank - n) % ranks for n in (step, step + 1))
        transfer = None
        if step + 1 < ranks:
            transfer = Transfer(tensors, [_with_length(x, places.lengths[after]) for x in tensors], places.group)
        yield holder, tensors
        tensors = [] if transfer is None else transfer.wait()


def _with_length(x: Tensor, length: int) -> list[int]:
    return [*x.shape[:2], length, *x.shape[3:]]


def _around_the_ring(task: Task, local: Local) -> tuple[Tensor, Tensor]:
    out, lse = _nothing(local, accumulate_dtype(local.q.dtype))
    for holder, (k, v) in _ring(task, [local.k, local.v]):
        for rows, _, _, call in _pairs_with(task, local, holder, k, v):
            merge_pair(out[:, :, rows], lse[:, :, rows], *attend_pair(call))
    if local.sinks is not None:  # a key without a value, once
        sinks = local.sinks.to(lse.dtype)[:, None]
        total = torch.logaddexp(lse, sinks)
        out.mul_((lse - total).exp().masked_fill(total == -torch.inf, 0)[..., None])
        lse = total
    return out.to(local.q.dtype), lse


def _gradients_around_the_ring(task: Task, local: Local, rows: Rows, sums: _Sums) -> None:
    """The gradients of a rank's keys and values follow these around the ring, one step behind, and end where they are.

    Each rank adds its own part, the holder first: the order is fixed.
    """
    places, ranks = task.places, len(task.places.parts)
    dtype = rows.lse.dtype
    carried = [torch.zeros_like(x, dtype=dtype) for x in (local.k, local.v)]
    for step, (holder, (k, v)) in enumerate(_ring(task, [local.k, local.v])):
        if step > 0:
            shapes = [_with_length(x, places.lengths[holder]) for x in (k, v)]
            carried = Transfer(carried, shapes, places.group).wait()
        for here, keys, j, call in _pairs_with(task, local, holder, k, v):
            dq, dk, dv, dbias, _ = gradients_of_pair(call, rows.of(here), sums.bias is not None, all_keys=False)
            sums.add(here, j, dq, dbias, None)
            for total, part in zip(carried, (dk, dv), strict=True):
                total[:, :, keys] += 0 if part is None else part
    if ranks > 1:
        carried = Transfer(
            carried, [_with_length(x, places.lengths[places.rank]) for x in carried], places.group
        ).wait()
    sums.k.add_(carried[0])
    sums.v.add_(carried[1])
    if sums.sinks is not None and local.sinks is not None:
        weight = (local.sinks.to(dtype)[:, None] - rows.lse).exp().masked_fill(rows.lse == -torch.inf, 0)
        sums.sinks.add_((weight * (rows.grad_lse - rows.delta())).sum((0, 2)))


def _nothing(local: Local, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return out and lse of rows without visible keys."""
    q = local.q
    out = q.new_zeros(*q.shape[:3], local.v.shape[3], dtype=dtype)
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))


@dataclass(frozen=True)
class _Sums:
    """The gradients of a rank's tensors, in the dtype of sums."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None

    @classmethod
    def zeros(cls, local: Local, needs_bias: bool) -> _Sums:
        dtype = accumulate_dtype(local.q.dtype)

        def zeros(x: Tensor) -> Tensor:
            return torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)

        bias = None if local.bias is None or not needs_bias else zeros(local.bias)
        sinks = None if local.sinks is None else zeros(local.sinks)
        return cls(zeros(local.q), zeros(local.k), zeros(local.v), bias, sinks)

    def add(self, rows: slice, keys: slice, dq: Tensor | None, dbias: Tensor | None, dsinks: Tensor | None) -> None:
        """Add the gradients of some rows and keys."""
        for total, part in (
            (self.q[:, :, rows], dq),
            (cut_bias(self.bias, rows, keys), dbias),
            (self.sinks, dsinks),
        ):
            if total is not None and part is not None:
                total += part

    def as_dtypes_of(self, local: Local) -> tuple[Tensor | None, ...]:
        sums = (self.q, self.k, self.v, self.bias, self.sinks)
        return tuple(
            None if total is None or x is None else total.to(x.dtype) for total, x in zip(sums, local, strict=True)
        )
