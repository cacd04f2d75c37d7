"""Visible keys of rows, block by block; and the effect of NaN or infinity in q, k or v on rows and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headscope._attend.blocks import slices, visible_keys
from headscope._attend.call import Call
from headscope._attend.interface import ForwardPass, Inputs, Pair, accumulate_dtype
from headscope.masks import Plan

ROWS = 1 << 19  # elements of one block of visibility

Gradients = tuple[Tensor | None, ...]
"""Gradients of q, k, v, bias and sinks."""


def hides(call: Call) -> bool:
    """Return whether some keys may be masked for some row."""
    return call.spans != "all" or call.rest != "none" or call.bias is not None


def visible_blocks(
    call: Call, plan: Plan | None, bias: Tensor | None, keys: slice, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield which of some keys are visible to each row, a block of rows at a time.

    Yields:
        rows; the span of keys that are visible to any of them; and visibility, boolean [B or 1, H or 1, rows, span].
    """
    for rows in slices(call.queries, ROWS // max(1, call.batch * call.heads * (keys.stop - keys.start))):
        any_row = visible_keys(call, plan, rows)
        span = slice(max(keys.start, any_row.start), min(keys.stop, any_row.stop))
        if span.start >= span.stop:
            continue
        visible = torch.ones((1, 1, rows.stop - rows.start, span.stop - span.start), dtype=torch.bool, device=device)
        if plan is not None:
            visible = visible & plan.tile(slice(0, call.batch), slice(0, call.heads), rows, span)
        if bias is not None:
            cut = bias[:, :, slice(None) if bias.shape[2] == 1 else rows]
            visible = visible & (cut[..., slice(None) if bias.shape[3] == 1 else span] != -torch.inf)
        yield rows, span, visible


def marks_of_rows(call: Call, plan: Plan | None, bias: Tensor | None, marks: Tensor) -> Tensor:
    """Return whether a marked key is visible to a row: marks [B, Hkv, K, C] -> [B, H, Q, C].

    Marks are rare, or everywhere at once: only keys and columns with a mark are visited.
    """
    marked = marks.new_zeros((call.batch, call.heads, call.queries, marks.shape[-1]))
    keys, columns = (marks.any(0).any(0).any(axis).nonzero().flatten() for axis in (1, 0))
    if len(keys) == 0:
        return marked
    marks = marks[:, :, keys][..., columns].to(accumulate_dtype(call.dtype))  # [B, Hkv, marked keys, marked columns]
    for rows, span, visible in visible_blocks(call, plan, bias, slice(int(keys[0]), int(keys[-1]) + 1), marks.device):
        here = slice(*torch.searchsorted(keys, torch.tensor([span.start, span.stop], device=keys.device)).tolist())
        visible = visible[..., keys[here] - span.start].to(marks.dtype)  # [B or 1, H or 1, rows, marked keys]
        cut = marks[:, :, here]
        if visible.shape[:2] == (1, 1):  # one product for all
            counts = torch.einsum("ij,bhjc->bhic", visible[0, 0], cut).repeat_interleave(call.group, 1)
        else:
            counts = visible @ cut.repeat_interleave(call.group, 1)
        marked[:, :, rows, columns] = counts > 0
    return marked


def rows_with_keys(call: Call, plan: Plan | None, bias: Tensor | None, device: torch.device) -> Tensor:
    """Return whether a row has any visible key, [B, H, Q]."""
    shape = (call.batch, call.heads, call.queries)
    if call.keys and bias is None and (plan is None or not plan.may_be_empty):
        return torch.ones(shape, dtype=torch.bool, device=device)
    nonempty = torch.zeros(shape, dtype=torch.bool, device=device)
    for rows, _, visible in visible_blocks(call, plan, bias, slice(0, call.keys), device):
        nonempty[:, :, rows] = visible.any(-1)
    return nonempty


def rows_of_bad_logits(call: Call, plan: Plan | None, bias: Tensor | None, bad_q: Tensor, bad_k: Tensor) -> Tensor:
    """Return whether a row has a visible key where q or k is not finite, [B, H, Q]."""
    rows = marks_of_rows(call, plan, bias, bad_k.any(-1, keepdim=True))[..., 0]
    if bad_q.any():
        rows = rows | (bad_q.any(-1) & rows_with_keys(call, plan, bias, bad_q.device))
    return rows


def incoming(grads: Pair) -> Tensor | bool:
    """Return whether the gradient of a row's out or lse is not 0, [B, H, Q]."""
    nonzero: Tensor | bool = False
    if grads[0] is not None:
        nonzero = (grads[0] != 0).any(-1)
    if grads[1] is not None:
        nonzero = (grads[1] != 0) | nonzero
    return nonzero


def gradients_of_bad_inputs(
    forward: ForwardPass, inputs: Inputs, grads: Pair, gradients: Callable[[Inputs, Pair], Gradients]
) -> Gradients | None:
    """Return gradients for q, k or v with NaN or infinity; None if all are finite.

    Rows of bad logits have the gradient NaN, and so have their visible keys and values, unless nothing depends on their
    result. The other rows contribute as if NaN and infinity were zeros, because 0 x NaN is NaN.
    """
    call, plan, bias = forward.call, forward.plan, inputs.bias
    bad = [~x.isfinite() for x in inputs[:3]]
    if not any(x.any() for x in bad):
        return None
    rows = rows_of_bad_logits(call, plan, bias, bad[0], bad[1])
    q, k, v = (x.masked_fill(b, 0) for x, b in zip(inputs[:3], bad, strict=True))
    others = (
        None if grads[0] is None else grads[0].masked_fill(rows[..., None], 0),
        None if grads[1] is None else grads[1].masked_fill(rows, 0),
    )
    grads_of_rest = gradients(Inputs(q, k, v, bias, inputs.sinks), others)
    zeroed = tuple(None if x is None else x.masked_fill(b, 0) for x, b in zip(grads_of_rest[:3], bad, strict=True))
    return with_nan_of_rows(call, plan, bias, rows & incoming(grads), (*zeroed, *grads_of_rest[3:]))


def with_nan_of_rows(
    call: Call, plan: Plan | None, bias: Tensor | None, rows: Tensor, gradients: Gradients
) -> Gradients:
    """Return gradients with NaN for some rows [B, H, Q], and for their visible keys and values, biases and sinks."""
    if not rows.any():
        return gradients
    dq, dk, dv, dbias, dsinks = gradients
    keys = rows.new_zeros((call.batch, call.heads, call.keys))
    biases = None if dbias is None else rows.new_zeros(dbias.shape)
    axes = () if dbias is None else tuple(axis for axis in range(4) if dbias.shape[axis] == 1)
    for at, span, visible in visible_blocks(call, plan, bias, slice(0, call.keys), rows.device):
        met = visible & rows[:, :, at, None]  # [B, H, rows, keys]
        keys[:, :, span] |= met.any(2)
        if biases is not None:
            for axis in axes:
                met = met.any(axis, keepdim=True)
            place = (slice(None), slice(None), at, span)
            biases[tuple(slice(None) if axis in axes else place[axis] for axis in range(4))] |= met
    keys = keys.unflatten(1, (-1, call.group)).any(2)  # [B, Hkv, K]
    marks = (rows[..., None], keys[..., None], keys[..., None], biases, rows.any(2).any(0))
    return tuple(
        x if x is None or mark is None else x.masked_fill(mark, torch.nan)
        for x, mark in zip((dq, dk, dv, dbias, dsinks), marks, strict=True)
    )
