"""Distances between heads: by their maps, by ``received`` of their keys, and by the means of their rows.

And the weight between segments, before and after.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headscope.stats import SegmentMass
from headscope.stats._layer import LayerStats

PROFILE = ("self", "previous", "next", "first", "max_weight", "normalized_entropy", "duplicate", "induction")
"""Row quantities from 0 to 1 whose means distinguish heads with the same map."""


def bins_of(parts: Collection[LayerStats]) -> int:
    """Return the number of bins of the maps.

    Raises:
        ValueError: the numbers differ.
    """
    bins = sorted({part.map.bins for part in parts if part.map is not None})
    if len(bins) != 1:
        raise ValueError(f"map: got {', '.join(map(str, bins))} bins in different layers, expected as many in each")
    return bins[0]


def mass_of(parts: Collection[LayerStats]) -> Tensor:
    """Return the weight in each head's map, [heads of all layers]."""
    return torch.cat([part.map.sum.cpu().sum((1, 2)) for part in parts if part.map is not None])


def distributions(parts: Collection[LayerStats]) -> tuple[Tensor, Tensor]:
    """Return maps [heads, n * n] and received [heads, K] of all layers; each head's sum is one, or 0."""
    maps = torch.cat([part.map.sum.cpu().flatten(1) for part in parts if part.map is not None])
    received = [part.received.cpu() for part in parts if part.received is not None]
    wide = max((x.shape[-1] for x in received), default=0)
    keys = [torch.nn.functional.pad(x, (0, wide - x.shape[-1])) for x in received]
    return normalised(maps), normalised(torch.cat(keys))


def normalised(x: Tensor) -> Tensor:
    """Return each row of [heads, n] divided by its sum, in float64; a row without weight stays 0."""
    total = x.double().sum(-1, keepdim=True)
    return torch.where(total > 0, x.double() / total, 0.0)


def variation(x: Tensor, y: Tensor) -> Tensor:
    """Return the total variation between rows of x [a, n] and y [b, n], half the sum of differences, [a, b]."""
    return (torch.cdist(x, y, p=1.0) / 2).clamp(0, 1)


def variation_of_heads(old: Tensor, new: Tensor) -> Tensor:
    """Return the total variation between the same head before and after, [H].

    NaN where one side has no weight; infinite where a weight is not finite, so the two cannot be compared.
    """
    old, new = old.cpu(), new.cpu()
    undefined = ~(old.isfinite().all(-1) & new.isfinite().all(-1))
    old, new = normalised(old), normalised(new)
    there = (old.sum(-1) > 0) & (new.sum(-1) > 0)
    distance = torch.where(there, (old - new).abs().sum(-1) / 2, math.nan)
    return distance.masked_fill(undefined, math.inf)


def profiles(parts: Collection[LayerStats]) -> Tensor:
    """Return the means of ``PROFILE`` of all heads, [heads, quantities]; NaN where a head lacks the quantity."""
    rows: list[Tensor] = []
    for part in parts:
        none = torch.full((part.heads,), math.nan, dtype=torch.float64, device="cpu")
        means = [part.moments[name].mean.cpu().double() if name in part.moments else none for name in PROFILE]
        rows.append(torch.stack(means, -1))  # [H, quantities]
    return torch.cat(rows)


def largest_gap(x: Tensor, y: Tensor) -> Tensor:
    """Return the largest defined difference between rows of x [a, n] and y [b, n], [a, b]; 0 if none is defined."""
    gap = x.new_zeros(len(x), len(y), dtype=torch.float64)
    for a, b in zip(x.unbind(-1), y.unbind(-1), strict=True):
        gap = torch.maximum(gap, (a[:, None] - b).abs().nan_to_num(0.0))
    return gap


class PairMeans(NamedTuple):
    """The mean weight between two segments before and after, NaN without rows; and the rows of each."""

    name: str
    before: float
    after: float
    rows: tuple[int, int]


def segment_means(old: LayerStats, new: LayerStats, head: int) -> Iterator[PairMeans]:
    """Yield the means of each pair of segments of a head, if both have the same segments.

    Then those without the first keys, of the segments that have one in both, if both have as many first keys.
    """
    if old.segments is None or new.segments is None or old.segments.names != new.segments.names:
        return
    before, after = old.segments.pairs(), new.segments.pairs()
    if old.first == new.first or old.first is None or new.first is None:
        before |= old.segments.pairs_without_first()
        after |= new.segments.pairs_without_first()
    for name, (mean, count) in before.items():
        if name not in after:
            continue
        later, later_count = after[name]
        yield PairMeans(name, float(mean[head]), float(later[head]), (int(count[head]), int(later_count[head])))


def segment_notes(shared: Iterable[tuple[SegmentMass | None, SegmentMass | None]]) -> list[str]:
    """Describe the segments that differ, so their weights are not compared, or have rows on one side only."""
    both = [(a, b) for a, b in shared if a is not None and b is not None]
    pairs = dict.fromkeys((a.names, b.names) for a, b in both)
    notes = [f"Different segments: {', '.join(old)} before, {', '.join(new)} after" for old, new in pairs if old != new]
    for when, (one, other) in {"before": (0, 1), "after": (1, 0)}.items():
        names: dict[str, None] = {}
        for pair in both:
            if pair[0].names == pair[1].names:
                some = [mass.count.sum(0) > 0 for mass in pair]
                names |= dict.fromkeys(name for n, name in enumerate(pair[0].names) if some[other][n] > some[one][n])
        if names:
            notes.append(f"No row {when} is in {', '.join(names)}")
    return notes
