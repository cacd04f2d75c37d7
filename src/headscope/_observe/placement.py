"""Placement of rows and keys: positions, the query's own key, rows of padding, the first real keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope._observe.inputs import Request
from headscope._observe.visibility import real_keys
from headscope._support.arguments import check_layout, check_type, kind, shapes
from headscope._support.bounded import BoundedTable
from headscope._support.torch_state import is_traced
from headscope.masks import Band, Dense, KeyLengths
from headscope.stats._layer import wide


class Frame(NamedTuple):
    """The part of a ``Scene`` that depends only on sizes, mask and positions; ``padding``: rows [B, Q]."""

    line: Tensor | None
    q_at: Tensor | None
    k_at: Tensor | None
    first: Tensor
    own: Tensor | None
    padding: Tensor | None


_frames: BoundedTable[Any, Frame] = BoundedTable(16)  # some megabytes each for long sequences


def to_frame(request: Request) -> Frame:
    """Return the placement of rows and keys; computed once for calls that differ only in their values."""
    call, mask = request.call, request.mask
    specified = (request.q_pos, request.k_pos, request.real, request.inputs.bias, request.rows_at)
    if any(x is not None for x in specified):
        return _build_frame(request)
    if is_traced() or not (mask is None or mask.is_constant()):  # tensors of a tracer are useless outside it
        return _build_frame(request)
    sizes = call.batch, call.heads, call.queries, call.keys
    key = (*sizes, request.inputs.q.device, mask, request.kind, request.what.first)
    frame = _frames.get(key)
    return _frames.add(key, _build_frame(request)) if frame is None else frame


def _build_frame(request: Request) -> Frame:
    call, inputs = request.call, request.inputs
    line, q_at, k_at = _positions_of(request)
    if q_at is None and k_at is None and _sees_all(request):
        first = torch.arange(min(request.what.first, call.keys), device=inputs.q.device)[None]
        return Frame(line, None, None, first, None if request.kind == "cross" else _own_index(request), None)
    real = real_keys(call, request.plan, inputs.bias) if request.real is None else request.real
    real = real.expand(call.batch, call.keys).to(inputs.q.device)
    if request.rows_at is not None and request.kind == "self" and request.real is None:
        real = _with_keys_before(real, request, request.rows_at[0])
    first = _first_real(real, min(request.what.first, call.keys))
    if request.kind == "cross":
        return Frame(line, q_at, k_at, first, None, None)
    own = _own_index(request) if q_at is None or k_at is None else _own_by_position(request, q_at, k_at, real)
    padding = (own >= 0) & ~real.gather(1, own.clamp_min(0).expand(call.batch, -1)) if call.keys else None  # [B, Q]
    return Frame(line, q_at, k_at, first, own, padding)


def _sees_all(request: Request) -> bool:
    """Return whether every key is visible to every query, so none is padding."""
    quiet = all(x is None for x in (request.plan, request.inputs.bias, request.real, request.rows_at))
    return quiet and min(request.call.queries, request.call.heads, request.call.keys) > 0


def _with_keys_before(real: Tensor, request: Request, start: int) -> Tensor:
    """Return which keys are real, [B, K]: those before the first row are, unless a mask of keys alone hides them.

    That none of these rows sees a key says nothing of it: earlier rows of the sequence may have seen it.
    """
    call, mask = request.call, request.mask
    entries = torch.arange(call.batch, device="cpu")[:, None]
    keys = torch.arange(min(start, call.keys), device="cpu")
    before = torch.ones(call.batch, len(keys), dtype=torch.bool, device="cpu")
    for leaf in () if mask is None else mask.leaves():
        if isinstance(leaf, KeyLengths) or (isinstance(leaf, Dense) and leaf.is_of_keys):
            at = leaf.tensors()[0].device
            before &= leaf.allows(entries.to(at), 0, 0, keys.to(at)).cpu()
    return torch.cat([before.to(real.device), real[:, len(keys) :]], 1)


def _positions_of(request: Request) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return positions on a line [B or 1, Q], or specified ones of queries and keys; None in cross-attention."""
    call, device = request.call, request.inputs.q.device
    if request.kind == "cross":
        return None, None, None
    line = torch.arange(call.queries, device=device) + _offset(request)  # [B or 1, Q]
    if request.q_pos is None and request.k_pos is None:
        return line, None, None
    if request.k_pos is None:
        k_at = torch.arange(call.keys, dtype=wide(device), device=device)[None, :, None]
    else:
        k_at = _check_positions("k_pos", request.k_pos, "K", call.keys, request)
    if request.q_pos is not None:
        q_at = _check_positions("q_pos", request.q_pos, "Q", call.queries, request)
    elif call.queries > call.keys:
        sizes = shapes(q=request.inputs.q, k=request.inputs.k)
        raise ValueError(
            f"q_pos: is required, because there are more queries ({call.queries}) than keys ({call.keys}); {sizes}"
        )
    else:
        q_at = _positions_at(k_at, line, call.keys)
    if q_at.shape[-1] != k_at.shape[-1]:
        raise ValueError(f"q_pos: has {q_at.shape[-1]} numbers for each position, k_pos has {k_at.shape[-1]}")
    return None, q_at, k_at


def _positions_at(k_at: Tensor, index: Tensor, keys: int) -> Tensor:
    """Return the positions of the keys at these places, [B or 1, Q, axes]; NaN beyond them."""
    batch = len(index) if len(k_at) == 1 else len(k_at)  # possibly none
    k_at, index = k_at.expand(batch, -1, -1), index.expand(batch, -1)
    inside = (index >= 0) & (index < keys)
    places = k_at.gather(1, index.clamp(0, keys - 1)[..., None].expand(-1, -1, k_at.shape[-1]))
    return places.masked_fill(~inside[..., None], math.nan)


def _check_positions(name: str, positions: Tensor, letter: str, length: int, request: Request) -> Tensor:
    check_type(name, positions, Tensor, "a torch.Tensor or None")
    check_layout(name, positions)
    if positions.dtype == torch.bool or positions.dtype.is_complex:
        raise TypeError(f"{name}: dtype is {kind(positions)}, expected numbers")
    batch = request.call.batch
    fits = tuple(positions.shape) in ((length,), (length, 1), (length, 2))
    if not fits and tuple(positions.shape) not in {(b, length, n) for b in (1, batch) for n in (1, 2)}:
        raise ValueError(
            f"{name}: expected [{letter}] or [{letter}, 2], or [B, {letter}, 1 or 2], here {letter} = {length} and "
            f"B = {batch}; {shapes(**{name: positions})}"
        )
    at = positions.detach().to(device=request.inputs.q.device, dtype=wide(request.inputs.q.device))
    at = at.masked_fill(at.isinf(), math.nan)
    return at if at.ndim == 3 else at[None] if at.ndim == 2 else at[None, :, None]  # [B or 1, length, axes]


def _offset(request: Request) -> Tensor:
    """Return the position of query 0, int64 [B or 1, 1]: that of the mask's bands if they agree, else K - Q."""
    call, device = request.call, request.inputs.q.device
    leaves = request.mask.at(call.queries, call.keys).leaves() if request.mask is not None else ()
    offsets = [leaf.offset for leaf in leaves if isinstance(leaf, Band)]
    columns = [_column(offset, device) for offset in offsets]
    whole = [column.expand(call.batch, 1) for column in columns]
    start = None if request.rows_at is None else request.rows_at[0]
    if not columns or any(not torch.equal(one, whole[0]) for one in whole[1:]):
        return torch.full((1, 1), call.keys - call.queries if start is None else start, device=device)
    if start is not None and bool((columns[0] != start).any()):
        key = int(columns[0].flatten()[0])
        raise ValueError(
            f"rows_at: row 0 is row {start} of the sequence, and the mask places it at key {key}; pass the first "
            f"{start + call.queries} keys, or a Band with offset={start}"
        )
    return columns[0]


def _own_index(request: Request) -> Tensor:
    """Return the key at each query's place on the line, [B or 1, Q]; -1 = none."""
    call = request.call
    line = torch.arange(call.queries, device=request.inputs.q.device) + _offset(request)
    return torch.where((line >= 0) & (line < call.keys), line, -1)


def _own_by_position(request: Request, q_at: Tensor, k_at: Tensor, real: Tensor) -> Tensor:
    """Return the key at each query's position, [B, Q]: of several the one at its place, else the first real one.

    The own key of a query without a position is the key at its place on the line, if that has no position either.
    """
    call = request.call
    batch = call.batch
    if 0 in (batch, call.keys, call.queries):
        return torch.full((batch, call.queries), -1, device=q_at.device)
    q_at, k_at = q_at.expand(batch, -1, -1), k_at.expand(batch, -1, -1)
    line = _own_index(request).expand(batch, -1)  # [B, Q]
    there = _positions_at(k_at, line, call.keys)
    same = (there == q_at).all(-1) | (there.isnan().any(-1) & q_at.isnan().any(-1))
    same &= line >= 0
    both = torch.cat([k_at.flatten(0, 1), q_at.flatten(0, 1)])
    _, number = both.nan_to_num(nan=-math.inf).unique(dim=0, return_inverse=True)
    k_number, q_number = number[: batch * call.keys].view(batch, -1), number[batch * call.keys :].view(batch, -1)
    order = torch.sort(2 * k_number + (~real).long(), dim=-1, stable=True)  # of equal positions the real ones first
    place = torch.searchsorted(order.values, 2 * q_number).clamp_max(call.keys - 1)
    matches = order.indices.gather(1, place)
    equal = k_number.gather(1, matches) == q_number
    equal &= ~q_at.isnan().any(-1)
    return torch.where(same, line, torch.where(equal, matches, -1))


def _column(offset: object, device: torch.device) -> Tensor:
    """Return an offset, or one for each batch entry, int64 [B or 1, 1]; a number is not copied from the host."""
    if isinstance(offset, int):
        return torch.full((1, 1), offset, dtype=torch.long, device=device)
    return torch.as_tensor(offset, dtype=torch.long, device=device).reshape(-1, 1)


def find_first_key(k_at: Tensor | None) -> int:
    """Return the first position, if keys have consecutive whole positions, equal for all batch entries; else 0."""
    if k_at is None or k_at.shape[0] != 1 or k_at.shape[2] != 1 or k_at.shape[1] == 0:
        return 0
    start = float(k_at[0, 0, 0])
    if not (math.isfinite(start) and start >= 0 and start == int(start)):
        return 0
    run = torch.arange(k_at.shape[1], dtype=k_at.dtype, device=k_at.device) + start
    return int(start) if torch.equal(k_at[0, :, 0], run) else 0


def _first_real(real: Tensor, n: int) -> Tensor:
    """Return the places of the first n real keys, [B, n]; -1 if there are fewer."""
    order = torch.sort((~real).byte(), dim=-1, stable=True).indices[:, :n]
    return torch.where(real.gather(1, order), order, -1)
