"""A map with a bin for each token, computed from the q, k and lse of its calls when it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope.stats._kept_weights import KeptWeights
from headscope.stats._layer import HeadMap
from headscope.stats._map_codes import ERROR

_FIELDS = ("sum", "count", "max", "places")
_SMALLEST = 1e-36  # below it float32 has fewer bits
_MOST_EMPTY = 1024  # bins of a map with more bins than tokens


class MapSource(NamedTuple):
    """The inputs of a map.

    Attributes:
        weights: run -> its weights, all of the same Q and K.
        counted: run -> which rows count, boolean [B, H or 1, Q].
        bins: n, at least Q and K.
    """

    weights: Mapping[int, KeptWeights]
    counted: Mapping[int, Tensor]
    bins: int


class DerivedMap(HeadMap):
    """A map that is computed on first access, and is a plain ``HeadMap`` from then on."""

    def __init__(self, source: MapSource) -> None:
        vars(self)["source"] = source

    @property
    def bins(self) -> int:
        """n, without computing the map."""
        source: MapSource | None = vars(self).get("source")
        return self.sum.shape[-1] if source is None else source.bins

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(name)
        source: MapSource | None = vars(self).get("source")
        if source is not None:  # else another thread has just computed it
            values = vars(computed_map(source))
            vars(self).update(values)
            vars(self).pop("source", None)
            object.__setattr__(self, "__class__", HeadMap)
        return vars(self)[name]


def fits(bins: int, queries: int, keys: int) -> bool:
    """Return whether a map has a bin for each token, and not so many more that it would fill the memory."""
    return max(queries, keys) <= bins <= max(_MOST_EMPTY, 2 * max(queries, keys))


def source_of(stored: HeadMap, lengths: tuple[int, int] | None, weights: Mapping[int, KeptWeights]) -> MapSource | None:
    """Return a source that gives a map again within ``ERROR``, and its counts to the last; None if there is none.

    Args:
        stored: the map.
        lengths: Q and K of each run; None if they differ.
        weights: those of all runs, or fewer if not all were retained.
    """
    if isinstance(stored, DerivedMap) and (source := vars(stored).get("source")) is not None:
        return MapSource(weights, source.counted, source.bins) if weights.keys() == source.weights.keys() else None
    if lengths is None or 0 in lengths or not weights or not fits(stored.bins, *lengths):
        return None
    for counted in _candidates(stored, lengths, weights):
        source = MapSource(weights, counted, stored.bins)
        if _agree(stored, computed_map(source)):
            return source
    return None


def _candidates(
    stored: HeadMap, lengths: tuple[int, int], weights: Mapping[int, KeptWeights]
) -> Iterator[dict[int, Tensor]]:
    """Yield which rows may count: those of the only text; all; or those whose own key is visible to some row."""
    queries, keys = lengths
    if sum(each.sizes["q"][0] for each in weights.values()) == 1:
        rows, columns = (_places(length, stored.bins) for length in lengths)
        counted = (stored.count.cpu()[:, rows][:, :, columns] > 0).any(-1)[None]  # [1, H, Q]
        same = bool((counted == counted[:, :1]).all())
        yield {run: (counted[:, :1] if same else counted).contiguous() for run in weights}
        return
    batches = {run: each.sizes["q"][0] for run, each in weights.items()}
    yield {run: torch.ones(batch, 1, queries, dtype=torch.bool, device="cpu") for run, batch in batches.items()}
    padding: dict[int, Tensor] = {}
    for run, each in weights.items():
        offset = keys - queries if each.offset is None else each.offset
        own = torch.arange(queries, device="cpu") + offset
        if not bool(((own >= 0) & (own < keys)).all()):
            return
        padding[run] = torch.stack([_visible_keys(each, b)[own] for b in range(batches[run])])[:, None]
    yield padding


def _visible_keys(weights: KeptWeights, b: int) -> Tensor:
    """Return the keys of a batch entry that are visible to a row of some head, [K]."""
    whole = ((0, weights.queries), (0, weights.keys))
    visible = torch.zeros(weights.keys, dtype=torch.bool, device="cpu")
    for head in range(weights.sizes["q"][1]):
        visible |= (~weights.piece(b, head, *whole).isnan()).any(0)
    return visible


def _agree(stored: HeadMap, computed: HeadMap) -> bool:
    """Return whether two maps have the same counts, and the same weights within ``ERROR``."""
    if not torch.equal(stored.count.cpu(), computed.count):
        return False
    pairs = ((getattr(stored, name).cpu().double(), getattr(computed, name)) for name in ("sum", "max"))
    return all(torch.allclose(ours, theirs, rtol=ERROR, atol=_SMALLEST, equal_nan=True) for ours, theirs in pairs)


def computed_map(source: MapSource) -> HeadMap:
    """Return the map of retained weights; of equal weights the first one has the place.

    Raises:
        NoWeightsError: the file that holds them has changed or is damaged.
    """
    first, n = next(iter(source.weights.values())), source.bins
    heads, queries, keys = first.sizes["q"][1], first.queries, first.keys
    shape, rows, columns = (heads, n, n), _places(queries, n)[:, None], _places(keys, n)
    result = HeadMap(
        torch.zeros(shape, dtype=torch.float64, device="cpu"),
        torch.zeros(shape, dtype=torch.int64, device="cpu"),
        torch.full(shape, math.nan, dtype=torch.float64, device="cpu"),
        torch.full((*shape, 4), -1, dtype=torch.int32, device="cpu"),
    )
    i, j = (torch.arange(length, dtype=torch.int32, device="cpu") for length in (queries, keys))
    for head in range(heads):
        total, count, largest, at = _tokens(source, head, queries, keys)
        at = torch.stack([*at, i[:, None].expand(-1, keys), j.expand(queries, -1)], -1)
        at.masked_fill_((count == 0)[..., None], -1)
        for whole, part in ((result.sum, total), (result.count, count), (result.max, largest), (result.places, at)):
            whole[head][rows, columns] = part
    return result


def _tokens(
    source: MapSource, head: int, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return sum, count and max of a head for each query and key, and the run and batch entry of the max; [Q, K]."""
    total = torch.zeros(queries, keys, dtype=torch.float64, device="cpu")
    count = torch.zeros(queries, keys, dtype=torch.int64, device="cpu")
    largest = torch.full_like(total, -math.inf)
    at = torch.zeros(2, queries, keys, dtype=torch.int32, device="cpu")
    for run, weights in source.weights.items():
        for b, counted in enumerate(source.counted[run]):  # [H or 1, Q]
            p = weights.piece(b, head, (0, queries), (0, keys)).double()
            p.masked_fill_(~counted[min(head, len(counted) - 1)][:, None], math.nan)
            visible = ~p.isnan()
            better = p > largest  # not for NaN
            total += p.nan_to_num(0.0)
            count += visible
            largest = torch.where(better, p, largest)
            at[0].masked_fill_(better, run)
            at[1].masked_fill_(better, b)
    return total, count, largest.masked_fill_(count == 0, math.nan), (at[0], at[1])


def _places(length: int, bins: int) -> Tensor:
    """Return the bin of each token, int64 [length], where no bin has two."""
    return ((torch.arange(length, device="cpu") + 1) * bins - 1) // length
