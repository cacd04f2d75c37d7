"""Statistics that belong together, as one: merged over rows, or joined over heads or layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headscope.stats._head_weights import HeadWeights
from headscope.stats._layer import Edges, HeadMap, Kept, LayerStats
from headscope.stats._moments import Moments
from headscope.stats._nulls import Nulls
from headscope.stats._origin import LayerOrigin, Origin, joined
from headscope.stats._segment_mass import SegmentMass

Held = tuple[Mapping[str, LayerStats], Origin | None]
"""The statistics of layers, and their origin: the fields of ``HeadStats``."""


def merged_layers(several: Sequence[Held]) -> tuple[dict[str, LayerStats], Origin | None]:
    """Return the statistics of the runs of all; see ``HeadStats.merge``."""
    layers: dict[str, list[LayerStats]] = {}
    for parts, _ in several:
        for name, part in parts.items():
            layers.setdefault(name, []).append(part)
    origin = joined([origin for parts, origin in several if parts])
    merged: dict[str, LayerStats] = {}
    for name, (first, *rest) in layers.items():
        try:
            merged[name] = first.merge(*rest) if rest else first
        except ValueError as error:
            raise ValueError(f"layer {name}: {error}") from error
    return merged, origin


def joined_layers(several: Sequence[Held]) -> tuple[dict[str, LayerStats], Origin | None]:
    """Return the layers of all, in this order; no layer is in two of them."""
    parts = {name: part for each, _ in several for name, part in each.items()}
    return parts, joined([origin for each, origin in several if each])


def joined_heads(several: Sequence[Held]) -> tuple[dict[str, LayerStats], Origin | None]:
    """Return whole layers from parts of their heads, which ``check_heads`` has found to fit.

    A layer without a part holds all heads in each; the first is taken.
    """
    first, origin = several[0]
    if origin is None:
        return dict(first), None
    parts: dict[str, LayerStats] = {}
    layers: dict[str, LayerOrigin] = {}
    for name, part in first.items():
        held = [(_first_head(origin, name), each[name]) for each, origin in several]
        held = sorted((each for each in held if each[0] is not None), key=lambda each: each[0] or 0)
        parts[name] = _join_heads([each for _, each in held]) if held else part
        if name in origin.layers:
            layers[name] = replace(origin.layers[name], part=None)
    return parts, replace(origin, layers=layers)


def _first_head(origin: Origin | None, layer: str) -> int | None:
    """Return the first head of a part of a layer; None: it is not a part, or an unknown one."""
    held = None if origin is None else origin.layers.get(layer)
    return None if held is None or held.part is None or held.part.heads is None else held.part.heads[0]


def _join_heads(parts: Sequence[LayerStats]) -> LayerStats:
    """Return the statistics of the heads of all, in this order, of the same rows."""
    first = parts[0]
    masses = [part.segments for part in parts if part.segments is not None]
    kept = [_join_kept(runs) for runs in zip(*(part.kept for part in parts), strict=True)]
    moments = {name: _join_moments([part.moments[name] for part in parts]) for name in first.moments}
    edges = [part.edges for part in parts if part.edges is not None]
    return LayerStats(
        sum(part.heads for part in parts),
        first.runs,
        first.looked_at,
        first.of,
        torch.cat([part.rows for part in parts]),
        torch.cat([part.broken for part in parts]),
        moments,
        _cat([part.received for part in parts]),
        _cat([part.eligible for part in parts]),
        _join_maps([part.map for part in parts if part.map is not None]),
        Edges(torch.cat([each.p for each in edges]), torch.cat([each.at for each in edges])) if edges else None,
        tuple(kept),
        lengths=first.lengths,
        first=first.first,
        segments=_join_masses(masses) if masses else None,
        received_max=_cat([part.received_max for part in parts]),
        weights=_join_weights(parts),
        nulls=_join_nulls([part.nulls for part in parts]),
    )


def _cat(several: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    known = [each for each in several if each is not None]
    return torch.cat(known, dim) if len(known) == len(several) else None


def _join_moments(several: Sequence[Moments]) -> Moments:
    together: Callable[[str], Tensor] = lambda field: torch.cat([getattr(each, field) for each in several])  # noqa: E731
    return Moments(*map(together, ("count", "mean", "M2", "min", "max", "histogram")))


def _join_maps(maps: Sequence[HeadMap]) -> HeadMap | None:
    if not maps:
        return None
    sums, counts, most = (torch.cat([getattr(each, name) for each in maps]) for name in ("sum", "count", "max"))
    return HeadMap(sums, counts, most, torch.cat([each.argmax for each in maps]))


def _join_kept(runs: Sequence[Kept]) -> Kept:
    values = {name: torch.cat([run.values[name] for run in runs], 1) for name in runs[0].values}  # [B, H, R, …]
    return Kept(runs[0].queries, torch.cat([run.counted for run in runs], 1), values)


def _join_masses(masses: Sequence[SegmentMass]) -> SegmentMass:
    sums, counts = (torch.cat([getattr(each, name) for each in masses]) for name in ("sum", "count"))
    alike = all((each.spans, each.images) == (masses[0].spans, masses[0].images) for each in masses)
    places = (masses[0].spans, masses[0].images) if alike else ((), ())
    on_first, nulls = _cat([each.first_sum for each in masses]), _cat([each.null_sums for each in masses], 1)
    return SegmentMass(masses[0].names, sums, counts, *places, on_first, nulls)


def _join_weights(parts: Sequence[LayerStats]) -> tuple[HeadWeights, ...]:
    """Return the weights of chosen heads of each run, by their numbers in the whole layer."""
    before, chosen = 0, list[tuple[int, tuple[HeadWeights, ...]]]()
    for part in parts:
        chosen += [(before, part.weights)] if part.weights else []
        before += part.heads
    joined_runs: list[HeadWeights] = []
    for runs in zip(*(weights for _, weights in chosen), strict=True):
        heads = tuple(start + head for (start, _), run in zip(chosen, runs, strict=True) for head in run.heads)
        joined_runs.append(replace(runs[0], heads=heads, p=torch.cat([run.p for run in runs], 1)))
    return tuple(joined_runs)


def _join_nulls(several: Sequence[Nulls | None]) -> Nulls | None:
    known = [each for each in several if each is not None]
    if len(known) < len(several) or any(each.names != known[0].names for each in known):
        return None
    return Nulls(known[0].names, torch.cat([each.sums for each in known], 2))
