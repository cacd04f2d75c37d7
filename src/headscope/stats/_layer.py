"""The parts of the statistics of one layer, each with its own exact ``merge``; tensors only, no models.

All sums are float64 or int64 (float32 on a device without float64). A *run* is one observed call; merging retains the
order of the runs, which decides ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope.stats._head_weights import HeadWeights, merge_weights
from headscope.stats._kept_weights import Tiles
from headscope.stats._moments import Moments as Moments
from headscope.stats._moments import MomentsTable as MomentsTable
from headscope.stats._moments import Packed as Packed
from headscope.stats._moments import merged
from headscope.stats._nulls import Nulls, merged_nulls
from headscope.stats._part import Part
from headscope.stats._part import wide as wide
from headscope.stats._segment_mass import SegmentMass, longer_maximum, longer_sum


@dataclass(frozen=True, eq=False)
class HeadMap(Part):
    """The weights of each head in n x n bins: bin b holds queries (rows) or keys (columns) ⌊bT/n⌋ to ⌊(b+1)T/n⌋ - 1.

    Attributes:
        sum: of the weights of each bin, [H, n, n].
        count: of the visible pairs of counted rows, int64 [H, n, n].
        max: the largest weight of each bin, [H, n, n]; NaN where count is 0.
        places: its place, whole numbers [H, n, n, 4] as in ``argmax``; or, of one run, [H, n, n, 3] without the run.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> q = torch.zeros(1, 2, 8, 4)
        >>> observe(q, q, what=Observe(map=2)).map.mean[0].round(decimals=3).tolist()
        [[0.125, 0.125], [0.125, 0.125]]
    """

    sum: Tensor
    count: Tensor
    max: Tensor
    places: Tensor

    @property
    def argmax(self) -> Tensor:
        """The place of ``max``, int64 [H, n, n, 4]: run, batch entry, query, key; -1 where count is 0.

        Ties go to the first in that order.
        """
        if self.places.shape[-1] == 4:
            return self.places.long()
        run = torch.where(self.places[..., :1] < 0, -1, 0)
        return torch.cat([run, self.places], -1).long()

    @property
    def bins(self) -> int:
        """n."""
        return self.sum.shape[-1]

    @property
    def mean(self) -> Tensor:
        """The mean weight of each bin over its eligible pairs, [H, n, n]; NaN without such pairs."""
        return self.sum / self.count

    @staticmethod
    def merged(maps: Sequence[HeadMap], before: Sequence[int]) -> HeadMap:
        """Return the merged map of all; ``before``: the number of runs before each."""
        first = maps[0]
        if other := next((each for each in maps if each.bins != first.bins), None):
            raise ValueError(f"map: cannot merge {first.bins} bins with {other.bins}; maps merge for equal n only")
        sum_, count, largest = first.sum.clone(), first.count.clone(), first.max
        best, run = torch.zeros_like(count), torch.zeros_like(count)
        for n, (each, runs) in enumerate(zip(maps[1:], before[1:], strict=True), 1):
            sum_ += each.sum
            count += each.count
            better = (each.max > largest) | largest.isnan()
            largest = torch.where(better, each.max, largest)
            best.masked_fill_(better, n)
            run.masked_fill_(better, runs)
        for n, each in enumerate(maps):
            if each.places.shape[-1] == 4:
                run += torch.where(best == n, each.places[..., 0], 0)
        cells = best.numel()
        place = torch.cat([each.places[..., -3:].reshape(cells, 3).int() for each in maps])  # [maps * H * n * n, 3]
        place = place[(best.flatten() * cells).add_(torch.arange(cells, device=best.device))].view(*best.shape, 3)
        run.masked_fill_(place[..., -1] < 0, -1)  # no pair is visible there
        return HeadMap(sum_, count, largest, torch.cat([run[..., None], place], -1))


class Edge(NamedTuple):
    """One weight: query i of batch entry b in a run attends to key j with weight p.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> k = 40 * torch.eye(4)[None, None]
        >>> (edge,) = observe(k[:, :, 2:3], k, what=Observe(edges=1)).edges.of(0)  # one query, like key 2
        >>> edge.i, edge.j
        (0, 2)
    """

    i: int
    j: int
    p: float
    b: int
    run: int


@dataclass(frozen=True, eq=False)
class Edges(Part):
    """The k largest weights of each head.

    Attributes:
        p: [H, k], largest first; NaN where a head has fewer.
        at: int64 [H, k, 4]: run, batch entry, query, key; -1 where a head has fewer. Equal weights are in this order.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> observe(q, q, what=Observe(edges=3)).edges.p.shape
        torch.Size([2, 3])
    """

    p: Tensor
    at: Tensor

    def of(self, head: int) -> list[Edge]:
        """Return the edges of one head, as numbers."""
        return [
            Edge(i, j, p, b, run)
            for p, (run, b, i, j) in zip(self.p[head].tolist(), self.at[head].tolist(), strict=True)
            if run >= 0
        ]

    @staticmethod
    def merged(several: Sequence[Edges], before: Sequence[int]) -> Edges:
        """Return the k largest of all; ``before``: the number of runs before each."""
        k = several[0].p.shape[1]
        if other := next((each for each in several if each.p.shape[1] != k), None):
            raise ValueError(f"edges: cannot merge {k} for each head with {other.p.shape[1]}")
        places: list[Tensor] = []
        for each, runs in zip(several, before, strict=True):
            places.append(each.at.clone())
            places[-1][..., 0] += torch.where(each.at[..., 0] >= 0, runs, 0)
        p, at = torch.cat([each.p for each in several], 1), torch.cat(places, 1)
        order = largest_first(p)[:, :k]
        return Edges(p.gather(1, order), at.gather(1, order[..., None].expand(-1, -1, 4)))


def largest_first(p: Tensor) -> Tensor:
    """Return the order of the last axis from the largest to the smallest, NaN last; ties stay in order."""
    return torch.sort(p.nan_to_num(nan=-math.inf), dim=-1, descending=True, stable=True).indices


@dataclass(frozen=True, eq=False)
class Kept(Part):
    """The retained rows of one run, batch entry by batch entry.

    Attributes:
        queries: which queries these are, int64 [R].
        counted: which of them count, boolean [B, H, R].
        values: name -> [B, H, R], NaN where a row does not have the quantity; ``argmax`` is int64, -1 if there is none;
            ``top_keys`` and ``top_weights`` are [B, H, R, k], largest first, -1 and NaN if there are fewer.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> observe(q, q, what=Observe(keep_rows=True)).kept[0].values["entropy"].shape
        torch.Size([1, 2, 4])
    """

    queries: Tensor
    counted: Tensor
    values: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class LayerStats(Part):
    """The statistics of one layer.

    Attributes:
        heads: the number of query heads.
        runs: the number of observed calls.
        looked_at, of: the number of observed query rows of a head, and of all (B * Q, over the runs).
        rows: the number of them that count, int64 [H].
        broken: the number that hold NaN or infinity and are excluded, int64 [H].
        moments: of each requested row quantity.
        received, eligible: by key position, [H, K] and int64 [H, K].
        map, edges: see there.
        kept: the retained rows, one entry for each run.
        tiles: run -> access to its weights, for runs with retained q and k, in order; saved only on request.
        lengths: the numbers of queries and keys of each run; None if they differ.
        first: the number of first real keys in ``first`` and ``streaming_{w}``; None if unknown.
        segments: see there.
        received_max: the largest weight that each key receives, by position, [H, K].
        weights: those of chosen heads, one entry for each run.
        nulls: what chance gives; None in files of earlier versions, and without row quantities.
    """

    heads: int
    runs: int
    looked_at: int
    of: int
    rows: Tensor
    broken: Tensor
    moments: Mapping[str, Moments] = field(default_factory=dict[str, Moments])
    received: Tensor | None = None
    eligible: Tensor | None = None
    map: HeadMap | None = None
    edges: Edges | None = None
    kept: tuple[Kept, ...] = ()
    tiles: Mapping[int, Tiles] = field(default_factory=dict[int, Tiles])
    lengths: tuple[int, int] | None = None
    first: int | None = None
    segments: SegmentMass | None = None
    received_max: Tensor | None = None
    weights: tuple[HeadWeights, ...] = ()
    nulls: Nulls | None = None

    @property
    def last_tiles(self) -> Tiles | None:
        """Return access to the weights of the last run with retained q and k."""
        return self.tiles[max(self.tiles)] if self.tiles else None

    def merge(self, *others: LayerStats) -> LayerStats:
        """Return the statistics of the runs of all, in this order.

        Raises:
            ValueError: different heads, devices, bins, edges, first keys or segments, or a part that only some have.
        """
        for other in others:
            if self.heads != other.heads:
                raise ValueError(f"heads: cannot merge {self.heads} heads with {other.heads}")
            if self.rows.device != other.rows.device:
                raise ValueError(
                    f"device: cannot merge statistics on {self.rows.device} with statistics on {other.rows.device}; "
                    'move both to one device first: stats.to("cpu")'
                )
            for part in ("moments", "received", "map", "edges", "kept", "segments", "received_max", "weights"):
                if _has(self, part) != _has(other, part):
                    option = "row_stats" if part == "moments" else part
                    raise ValueError(
                        f"{option}: cannot merge, only one of the two has it; observe both with the same options"
                    )
        several = (self, *others)
        first = [each.first for each in several if each.first is not None]
        if other := next((n for n in first if n != first[0]), None):
            raise ValueError(f"first: cannot merge sums over the first {first[0]} keys with those over {other}")
        before = [0, *accumulate(each.runs for each in several[:-1])]
        maps = [each.map for each in several if each.map is not None]
        edges = [each.edges for each in several if each.edges is not None]
        masses = [each.segments for each in several if each.segments is not None]
        return LayerStats(
            self.heads,
            sum(each.runs for each in several),
            sum(each.looked_at for each in several),
            sum(each.of for each in several),
            reduce(torch.add, [each.rows for each in several]),
            reduce(torch.add, [each.broken for each in several]),
            reduce(merged, [each.moments for each in several]),
            reduce(longer_sum, [each.received for each in several]),
            reduce(longer_sum, [each.eligible for each in several]),
            HeadMap.merged(maps, before) if maps else None,
            Edges.merged(edges, before) if edges else None,
            tuple(rows for each in several for rows in each.kept),
            {n + run: at for n, each in zip(before, several, strict=True) for run, at in each.tiles.items()},
            self.lengths if all(each.lengths == self.lengths for each in others) else None,
            first[0] if first else None,
            SegmentMass.merged(masses) if masses else None,
            reduce(longer_maximum, [each.received_max for each in several]),
            merge_weights(each.weights for each in several),
            merged_nulls(several),
        )

    def to(self, device: torch.device | str) -> LayerStats:
        """Return the same with every tensor on a device, except the inputs of ``tiles``."""
        return moved(self, torch.device(device))


def _has(stats: LayerStats, part: str) -> bool:
    value = getattr(stats, part)
    return value is not None and (not isinstance(value, (Mapping, tuple)) or len(value) > 0)


def equally_segmented(parts: Sequence[LayerStats]) -> list[LayerStats]:
    """Return the parts of a layer, those without segments with a mass of no rows if others have one."""
    known = next((part.segments for part in parts if part.segments is not None), None)
    if known is None:
        return [*parts]
    empty = known.without_rows()
    return [part if part.segments is not None else replace(part, segments=empty) for part in parts]


def moved(value: Any, device: torch.device) -> Any:
    """Return a part, or a mapping or tuple of parts, with every tensor on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, MomentsTable):
        return MomentsTable(value.names, moved(value.together, device))
    if isinstance(value, Mapping):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if isinstance(value, (Moments, HeadMap, Edges, Kept, HeadWeights, Nulls, LayerStats, SegmentMass)):
        return replace(value, **{each.name: moved(getattr(value, each.name), device) for each in fields(value)})
    return value


for _class in (HeadMap, Edge, Edges, Kept):
    _class.__module__ = "headscope.stats"  # their public path
