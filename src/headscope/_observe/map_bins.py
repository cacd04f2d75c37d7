"""The map of a head: sum, count, largest weight and its place, in n x n bins, accumulated tile by tile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headscope._observe.inputs import Whole
from headscope._support.device_constants import integers
from headscope.stats._layer import wide


@dataclass(frozen=True, eq=False)
class MapSums:
    """The sums of each bin so far.

    Attributes:
        sum: [H, n, n], float64.
        count: of eligible pairs, int64 [H, n, n].
        max: [H, n, n], float64; -inf if there is no such pair.
        at: batch entry, query and key of the largest, int64 [H, n, n, 3]; -1 if there is none.
    """

    sum: Tensor
    count: Tensor
    max: Tensor
    at: Tensor

    @staticmethod
    def empty(heads: int, bins: int, device: torch.device) -> MapSums:
        """Return the sums of nothing."""
        shape, dtype = (heads, bins, bins), wide(device)
        return MapSums(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.full(shape, -torch.inf, dtype=dtype, device=device),
            torch.full((*shape, 3), -1, device=device),
        )


@dataclass(frozen=True, eq=False)
class Segments:
    """The entries of an axis in each bin: a run of bins, each with adjacent entries.

    Attributes:
        bins: the bins, a run of them.
        index: entries of each bin [bins, w]; those beyond its own repeat an entry.
        inside: which of them are its own, boolean [bins, w]; None = all, and the axis has equal parts.
    """

    bins: slice
    index: Tensor
    inside: Tensor | None


def segments(places: Sequence[int], length: int, n: int, device: torch.device) -> Segments:
    """Return the bins of entries at ascending places: bin b holds ⌊b·length/n⌋ to ⌊(b+1)·length/n⌋ - 1."""
    first, last = (((place + 1) * n - 1) // length for place in (places[0], places[-1]))
    cuts = [_before(places, b * length // n) for b in range(first, last + 2)]
    cuts[-1] = len(places)
    sizes = [stop - start for start, stop in pairwise(cuts)]
    width = max(sizes)
    index = integers(cuts[:-1], device)[:, None] + torch.arange(width, device=device)
    inside = None
    if min(sizes) < width:
        inside = torch.arange(width, device=device) < integers(sizes, device)[:, None]
        index = torch.where(inside, index, 0)
    return Segments(slice(first, last + 1), index, inside)


def _before(places: Sequence[int], limit: int) -> int:
    """Return the number of places before a limit."""
    if isinstance(places, range):
        return max(0, min(len(places), limit - places.start))
    return bisect_left(places, limit)


def binned(x: Tensor, axis: int, cut: Segments, fill: float) -> Tensor:
    """Return the entries of each bin along an axis, [..., T, ...] -> [..., bins, w, ...]; ``fill`` past a bin's own."""
    parts, width = cut.index.shape
    if cut.inside is None:
        return x.unflatten(axis, (parts, width))
    cells = x.index_select(axis, cut.index.flatten()).unflatten(axis, (parts, width))
    after = x.ndim - 1 - axis
    return cells.masked_fill_(~cut.inside.view(parts, width, *(1,) * after), fill)


def add_to_map(
    sums: MapSums, p: Tensor, visible: Tensor | None, hidden: Tensor | None, counted: Tensor,
    heads: slice, batch: int, queries: Sequence[int], j: slice, whole: Whole,
) -> None:  # fmt: skip
    """Add a tile: p [b, h, i, j] of these heads, queries and keys, whose first batch entry is number ``batch``."""
    n = sums.sum.shape[-1]
    placed = [query + whole.start for query in queries] if whole.start else queries
    rows = segments(placed, whole.queries, n, p.device)
    columns = segments(range(j.start, j.stop), whole.keys, n, p.device)
    at = (heads, rows.bins, columns.bins)
    sums.sum[at] += _sum(_sum(p, 3, columns), 2, rows).sum(0)
    per_row = columns.index.new_full((1, 1, 1, len(columns.index)), columns.index.shape[1])
    if columns.inside is not None:
        per_row = columns.inside.sum(-1)[None, None, None]
    if visible is not None:
        per_row = _sum(visible.expand(-1, -1, -1, j.stop - j.start).to(p.dtype), 3, columns)
    eligible = counted[..., None] * per_row.to(p.dtype)  # [b, h, i, bins]
    sums.count[at] += _sum(eligible, 2, rows).sum(0).long()
    shown = p if hidden is None else p + hidden
    _largest(sums, shown, counted, (rows, columns), at, (batch, queries, j))


def _sum(x: Tensor, axis: int, cut: Segments) -> Tensor:
    """Return the sum of each bin; float64 once the keys are summed."""
    x = x if axis == 3 else x.to(wide(x.device))
    return binned(x, axis, cut, 0.0).sum(axis + 1)


def _largest(
    sums: MapSums, shown: Tensor, counted: Tensor, cuts: tuple[Segments, Segments], at: tuple[slice, slice, slice],
    place: tuple[int, Sequence[int], slice],
) -> None:  # fmt: skip
    """Update the largest weight of each bin; ties go to the first by batch entry, query, key."""
    rows, columns = cuts
    batch, queries, j = place
    cells = binned(shown, 3, columns, -torch.inf)  # [b, h, i, y, w]
    by_row = cells.amax(-1).masked_fill(~counted[..., None], -torch.inf)  # [b, h, i, y]
    best, row = binned(by_row, 2, rows, -torch.inf).max(3)  # [b, h, x, y]
    best, entry = best.max(0)  # [h, x, y]
    row = row.gather(0, entry[None])[0]  # which row of the bin
    row = rows.index[torch.arange(len(rows.index), device=row.device)[:, None], row]  # which row of the tile
    flat = (entry * shown.shape[2] + row)[..., None].expand(-1, -1, -1, cells.shape[-1])  # [h, x, y, w]
    winners = cells.movedim(0, 1).flatten(1, 2).gather(1, flat)  # [h, x, y, w]
    key = winners.argmax(-1)
    key = columns.index[torch.arange(len(columns.index), device=key.device), key] + j.start
    query = row + queries.start if isinstance(queries, range) else integers(queries, row.device)[row]
    better = best > sums.max[at]
    sums.max[at] = torch.where(better, best.to(sums.max.dtype), sums.max[at])
    places = torch.stack([entry + batch, query, key], -1)
    sums.at[at] = torch.where(better[..., None], places, sums.at[at])
