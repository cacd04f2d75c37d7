"""The map of a layer in a file; docs/concepts/recordings.md describes the tensors.

Only bins with a visible pair are stored, head by head, row by row. So that no small file fills the memory, a map has at
most ``_MOST_CELLS`` bins for each of its bytes; ``store_map`` writes the counts of every head where it would have more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headscope.stats._checks import check_parts
from headscope.stats._derived_map import DerivedMap, MapSource, fits, source_of
from headscope.stats._header import read_list, read_value, read_whole
from headscope.stats._kept_weights import KeptWeights
from headscope.stats._layer import HeadMap, LayerStats
from headscope.stats._map_codes import decode, encode, expand_runs, narrowed, runs_of_equal, scale_of

_PLACES = ("run", "entry", "query", "key")
_MOST_CELLS = 8
_WHOLE = (torch.uint8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)

_known: WeakKeyDictionary[LayerStats, Mapping[int, Tensor] | None] = WeakKeyDictionary()
"""The rows that count in a map that q and k give again, or None: ``size_of`` and then ``save`` compute it once."""


def store_map(
    part: LayerStats, under: str, tensors: dict[str, Tensor], weights: Mapping[int, KeptWeights], *, exact: bool
) -> dict[str, Any] | None:
    """Add the tensors of a layer's map, and return its entry in the header; None without a map.

    Args:
        part: the layer.
        under: the start of the names of its tensors.
        tensors: all of the file.
        weights: run -> weights that the file holds, too; a map that follows from them is not stored.
        exact: store float64.
    """
    stored = part.map
    if stored is None:
        return None
    if not exact and sorted(weights) == [*range(part.runs)]:
        if part not in _known:
            source = source_of(stored, part.lengths, weights)
            _known[part] = None if source is None else source.counted
        counted = _known[part]
        if counted is not None:
            tensors |= {f"{under}/map/counted/{run}": x for run, x in counted.items()}
            return {"bins": stored.bins, "form": "weights"}
    sum_, count, largest, places = (x.detach().cpu() for x in (stored.sum, stored.count, stored.max, stored.places))
    visible = count > 0
    mine, equal = _weights(sum_, count, largest, visible, exact)
    form = "codes" if "scale" in mine else "exact"
    offsets = _offsets(places, visible, part.lengths)
    mine |= offsets
    mine |= _counts(count, sum(x.numel() * x.element_size() for x in mine.values()))
    tensors |= {f"{under}/map/{name}": x for name, x in mine.items()}
    return {"bins": stored.bins, "form": form, "equal": equal, "places": [*offsets]}


def _weights(
    sum_: Tensor, count: Tensor, largest: Tensor, visible: Tensor, exact: bool
) -> tuple[dict[str, Tensor], bool]:
    """Return the means and maxima of visible bins, and whether they are equal, so that the maxima are not stored."""
    sums, most = sum_.masked_select(visible), largest.masked_select(visible)
    if not exact:
        mean = sums.double() / count.masked_select(visible)
        equal = torch.equal(mean, most.double())
        numbers = {"mean": mean} if equal else {"mean": mean, "max": most.double()}
        sizes: list[int] = visible.flatten(1).sum(-1).tolist()
        heads = {name: x.split(sizes) for name, x in numbers.items()}
        scales = [scale_of(*those) for those in zip(*heads.values(), strict=True)]
        if None not in scales:
            scale = torch.tensor(scales, dtype=torch.float64, device="cpu").reshape(-1, 2)
            codes = {
                name: [encode(x, *at) for x, at in zip(those, scale.tolist(), strict=True)]
                for name, those in heads.items()
            }
            return {"scale": scale, **{name: torch.cat(those) for name, those in codes.items()}}, equal
    equal = torch.equal(sums, most)
    return {"sum": sums} if equal else {"sum": sums, "max": most}, equal


def _offsets(places: Tensor, visible: Tensor, lengths: tuple[int, int] | None) -> dict[str, Tensor]:
    """Return the places of the maxima: queries and keys from the first of their bin; without those that are all 0."""
    at = dict(zip(_PLACES[-places.shape[-1] :], places.unbind(-1), strict=True))
    for name, start in zip(("query", "key"), _starts(visible.shape[-1], lengths), strict=True):
        at[name] = at[name] - start
    offsets = {name: x.masked_select(visible) for name, x in at.items()}
    return {name: narrowed(x) for name, x in offsets.items() if bool(x.any())}


def _starts(bins: int, lengths: tuple[int, int] | None) -> tuple[Tensor | int, Tensor | int]:
    """Return the first query of each row of bins [n, 1], and the first key of each column [n]; 0 if not known."""
    if lengths is None:
        return 0, 0
    rows, columns = (_bounds(bins, length)[:-1] for length in lengths)
    return rows[:, None], columns


def _bounds(bins: int, length: int) -> Tensor:
    return torch.arange(bins + 1, device="cpu") * length // bins


def _counts(count: Tensor, others: int) -> dict[str, Tensor]:
    """Return the counts of different heads, as runs of equal numbers if shorter; ``others``: bytes of other tensors."""
    patterns: list[Tensor] = []
    which: list[int] = []
    for each in count:
        which.append(next((n for n, other in enumerate(patterns) if torch.equal(each, other)), len(patterns)))
        if which[-1] == len(patterns):
            patterns.append(each)
    different = narrowed(torch.stack(patterns) if patterns else count)
    numbers, lengths = runs_of_equal(different.flatten())
    result = {"count": different}
    if _size(numbers) + _size(lengths) < _size(different):
        result = {"count": numbers, "length": lengths}
    if len(patterns) > 1:
        result["pattern"] = narrowed(torch.tensor(which, device="cpu"))
    if count.numel() <= _MOST_CELLS * (others + sum(map(_size, result.values()))):
        return result
    return {"count": narrowed(count)} | (
        {"pattern": narrowed(torch.arange(len(count), device="cpu"))} if len(count) > 1 else {}
    )


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


# ---------------------------------------------------------------- reading


class Layer(NamedTuple):
    """What the header says of the layer of a map, and the weights of its runs."""

    heads: int
    runs: int
    of: int
    lengths: tuple[int, int] | None
    weights: Mapping[int, KeptWeights]


class _Tensors(NamedTuple):
    """The tensors of a map by name."""

    tensors: Mapping[str, Tensor]
    under: str

    def read(self, name: str, shape: tuple[int, ...], *kinds: torch.dtype) -> Tensor:
        """Return a tensor.

        Raises:
            KeyError, TypeError: it is missing, or has another shape or dtype.
        """
        name = f"{self.under}/map/{name}"
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise TypeError(f"{name}: got {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in kinds:
            raise TypeError(f"{name}: got {tensor.dtype}, expected {' or '.join(map(str, kinds))}")
        return tensor

    def has(self, name: str) -> bool:
        return f"{self.under}/map/{name}" in self.tensors


def with_map(part: LayerStats, entry: Mapping[str, Any], under: str, tensors: Mapping[str, Tensor]) -> LayerStats:
    """Return a layer that was read with its map, if its entry in the header states one; raise as ``read_map``."""
    cells = read_value({"cells": None} | {**entry}, "cells", dict, NoneType)
    if cells is None:
        return part
    weights = {run: tiles.to_weights() for run, tiles in part.tiles.items()}
    stored = read_map(cells, under, tensors, Layer(part.heads, part.runs, part.of, part.lengths, weights))
    if not isinstance(stored, DerivedMap):
        check_parts(under, {"map": stored})
    return replace(part, map=stored)


def read_map(entry: Mapping[str, Any], under: str, tensors: Mapping[str, Tensor], layer: Layer) -> HeadMap:
    """Read the result of ``store_map``.

    Raises:
        KeyError, TypeError, ValueError: a part is missing, or not possible.
    """
    n, form = read_whole(entry, "bins", 1), read_value(entry, "form", str)
    held = _Tensors(tensors, under)
    if form == "weights":
        return DerivedMap(_read_source(held, n, layer))
    if form not in ("codes", "exact"):
        raise ValueError(f"form: got {form}, expected weights, codes or exact")
    stored = sum(_size(x) for name, x in tensors.items() if name.startswith(f"{under}/map/"))
    if layer.heads * n * n > _MOST_CELLS * stored:
        raise ValueError(
            f"{under}/map: got {n} x {n} bins of {layer.heads} heads in {stored} bytes, expected more bytes"
        )
    count = _read_counts(held, layer.heads, n)
    visible = count > 0
    equal = read_value(entry, "equal", bool)
    read = _read_codes if form == "codes" else _read_exact
    sums, most = read(held, count.masked_select(visible), visible.flatten(1).sum(-1).tolist(), equal)
    places = _read_places(held, read_list(entry, "places", str), visible, layer)
    sum_ = torch.zeros(count.shape, dtype=sums.dtype, device="cpu")
    largest = torch.full(count.shape, math.nan, dtype=most.dtype, device="cpu")
    sum_.masked_scatter_(visible, sums)
    largest.masked_scatter_(visible, most)
    return HeadMap(sum_, count, largest, places)


def _read_source(held: _Tensors, bins: int, layer: Layer) -> MapSource:
    if layer.lengths is None or 0 in layer.lengths or not fits(bins, *layer.lengths):
        raise ValueError(f"{held.under}/map: got {bins} bins for lengths {layer.lengths}, expected one for each token")
    if not layer.weights or [*layer.weights] != [*range(layer.runs)]:
        raise ValueError(f"{held.under}/map: expected q and k of {layer.runs} runs, got those of {[*layer.weights]}")
    counted: dict[int, Tensor] = {}
    for run, weights in layer.weights.items():
        batch, heads = weights.sizes["q"][:2]
        of_one = held.tensors[f"{held.under}/map/counted/{run}"].shape[1:2] == (1,)
        counted[run] = held.read(f"counted/{run}", (batch, 1 if of_one else heads, layer.lengths[0]), torch.bool)
    return MapSource(layer.weights, counted, bins)


def _read_counts(held: _Tensors, heads: int, n: int) -> Tensor:
    """Return the counts, int64 [H, n, n]."""
    name, which = f"{held.under}/map/count", torch.zeros(heads, dtype=torch.int64, device="cpu")
    if held.has("pattern"):
        which = held.read("pattern", (heads,), *_WHOLE).long()
        if bool(((which < 0) | (which >= heads)).any()):
            raise ValueError(
                f"{held.under}/map/pattern: holds {which.min()} to {which.max()}, outside the possible range"
            )
    patterns = int(which.max()) + 1 if heads else 0
    if held.has("length"):
        runs = (held.tensors[name].numel(),)
        numbers, lengths = held.read("count", runs, *_WHOLE), held.read("length", runs, *_WHOLE)
        count = expand_runs(f"{held.under}/map/length", numbers, lengths, patterns * n * n)
    else:
        count = held.read("count", (patterns, n, n), *_WHOLE).long()
    if bool((count < 0).any()):
        raise ValueError(f"{name}: holds {count.min()} to {count.max()}, outside the possible range")
    return count.view(patterns, n, n)[which]


def _read_codes(held: _Tensors, counts: Tensor, sizes: list[int], equal: bool) -> tuple[Tensor, Tensor]:
    """Return sums and maxima of the visible bins, float64."""
    scale = held.read("scale", (len(sizes), 2), torch.float64)
    low, high = scale.unbind(-1)
    if not bool(((low >= 0) & (low <= high) & (high < math.inf) & ((low > 0) | (high == 0))).all()):
        raise ValueError(
            f"{held.under}/map/scale: holds {scale.min():g} to {scale.max():g}, outside the possible range"
        )
    values: list[Tensor] = []
    for name in ("mean",) if equal else ("mean", "max"):
        codes = held.read(name, (len(counts),), torch.int16).split(sizes)
        values.append(
            torch.cat(
                [counts.new_zeros(0).double(), *(decode(x, *at) for x, at in zip(codes, scale.tolist(), strict=True))]
            )
        )
    return values[0] * counts, values[-1]


def _read_exact(held: _Tensors, counts: Tensor, sizes: list[int], equal: bool) -> tuple[Tensor, Tensor]:
    """Return sums and maxima of the visible bins."""
    sums, *most = (held.read(name, (sum(sizes),), *_FLOATS) for name in (("sum",) if equal else ("sum", "max")))
    for name, values in zip(("sum", "max"), (sums, *most), strict=False):
        if bool((values < 0).any()):
            raise ValueError(
                f"{held.under}/map/{name}: holds {values.min()} to {values.max()}, outside the possible range"
            )
    return sums, most[0] if most else sums.clone()


def _read_places(held: _Tensors, names: list[str], visible: Tensor, layer: Layer) -> Tensor:
    """Return the places of the maxima, whole numbers [H, n, n, 4]; -1 where no pair is visible."""
    cells, n = int(visible.sum()), visible.shape[-1]
    far = layer.lengths is not None and max(layer.lengths) > 2**31
    places = torch.zeros(*visible.shape, 4, dtype=torch.int64 if far else torch.int32, device="cpu")
    ends: list[Tensor | int] = [layer.runs, layer.of, 2**31, 2**31]
    if layer.lengths is not None:
        rows, columns = (_bounds(n, length) for length in layer.lengths)
        places[..., 2], places[..., 3] = rows[:-1, None], columns[:-1]
        ends[2:] = rows.diff()[:, None], columns.diff()
    for column, (name, end) in enumerate(zip(_PLACES, ends, strict=True)):
        most = end.masked_select(visible) if isinstance(end, Tensor) else end
        offset = torch.zeros(1, dtype=torch.int64, device="cpu")
        if name in names:
            offset = held.read(name, (cells,), *_WHOLE).long()
            places[..., column] += torch.zeros_like(visible, dtype=places.dtype).masked_scatter_(
                visible, offset.to(places.dtype)
            )
        if cells and bool(((offset < 0) | (offset >= most)).any()):
            name = f"{held.under}/map/{name}"
            raise ValueError(f"{name}: holds {offset.min()} to {offset.max()}, outside the possible range")
    return places.masked_fill_(~visible[..., None], -1)
