"""Checks that the statistics in a file are complete, and that their numbers are possible."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.stats._layer import Edges, HeadMap, Kept, LayerStats
from headscope.stats._moments import Moments
from headscope.stats._origin import Origin
from headscope.stats._quantities import MAY_BE_INFINITE, quantity_of
from headscope.stats._segment_mass import SegmentMass

MOMENTS = ("count", "mean", "M2", "min", "max", "histogram")
_ROUNDING = 1e-3  # exceeds any rounding of a weight, of a sum of weights, or of a row quantity
_ALWAYS = ("entropy", "max_weight", "effective_keys", "mass")
"""Row quantities that every observed layer has, if it has any; others are derived from these."""
_OF_LOGITS = ("lse", "max_logit")
"""Row quantities that a layer has both, or neither: the logits of its calls may be unknown."""


def check_complete(layer: str, names: Sequence[str]) -> None:
    """Check that a layer has every row quantity from which others are derived.

    Raises:
        ValueError: one is missing or listed twice, or a name does not contain a distance.
    """
    if len({*names}) < len(names):
        raise ValueError(f"layer {layer}: row quantity {Counter(names).most_common(1)[0][0]} is listed twice")
    expected: dict[str, None] = dict.fromkeys(_OF_LOGITS if {*names} & {*_OF_LOGITS} else ())
    expected |= dict.fromkeys(_ALWAYS if names else ())
    if "chance" in names:
        expected["normalized_entropy"] = None
    for name in names:
        kind, _, distance = name.partition("_")
        if kind in ("window", "streaming"):
            _check_distance(layer, name, distance)
        if kind == "streaming":
            expected |= dict.fromkeys(("chance", f"window_{distance}"))
    if missing := [name for name in expected if name not in names]:
        raise ValueError(
            f"layer {layer}: row quantities are missing: {', '.join(missing)}; expected together with "
            f"{', '.join(names)}"
        )


def _check_distance(layer: str, name: str, distance: str) -> None:
    try:
        sound = 0 <= float(distance) < math.inf and f"{float(distance):g}" == distance
    except ValueError:
        sound = False
    if not sound:
        raise ValueError(f"layer {layer}: row quantity {name}: expected a distance in its name, as window_16")


def _check_weights(name: str, values: Tensor, most: Tensor, absent: Tensor | None = None) -> None:
    """Raise ValueError for a weight, or a sum of weights, above ``most``, or for NaN where it is not ``absent``."""
    wrong = ~(values <= most * (1 + _ROUNDING))
    if absent is not None:
        wrong &= ~(values.isnan() & absent)
    if bool(wrong.any()):
        at = int(wrong.flatten().nonzero()[0])
        got, expected = float(values.flatten()[at]), float(most.expand_as(values).flatten()[at])
        raise ValueError(f"{name}: expected weights, or sums of them, of at most {expected:g}, got {got:g}")


def check_parts(under: str, parts: Mapping[str, Any]) -> None:
    """Check received weight, the map, segments and edges.

    Raises:
        ValueError: impossible sums or maxima, or a number without a weight.
    """
    one = torch.ones((), dtype=torch.float64, device="cpu")
    if "received" in parts:
        _check_weights(f"{under}/received", parts["received"], parts["eligible"].double())
    if "map" in parts:
        stored: HeadMap = parts["map"]
        empty = stored.count == 0
        _check_weights(f"{under}/map/sum", stored.sum, stored.count.double())
        _check_weights(f"{under}/map/max", stored.max, one, empty)
        _check_absent(f"{under}/map/max", stored.max, empty)
        _check_places(f"{under}/map/argmax", stored.places, empty)
    if "segments" in parts:
        mass: SegmentMass = parts["segments"]
        _check_weights(f"{under}/segments/sum", mass.sum, mass.count[..., None].double())
        _check_weights(f"{under}/segments/sum", mass.sum.sum(-1), mass.count.double())
        if mass.first_sum is not None:
            _check_weights(f"{under}/segments/first", mass.first_sum, mass.sum)
        if mass.null_sums is not None:
            _check_weights(f"{under}/segments/nulls", mass.null_sums, mass.count[..., None].double())
    if "received_max" in parts:
        absent = parts["received_max"].isnan()
        if "received" in parts:
            absent = parts["eligible"] == 0
            _check_absent(f"{under}/received_max", parts["received_max"], absent)
        _check_weights(f"{under}/received_max", parts["received_max"], one, absent)
    if "edges" in parts:
        largest: Edges = parts["edges"]
        absent = largest.at[..., 0] < 0
        _check_weights(f"{under}/edges/p", largest.p, one, absent)
        _check_absent(f"{under}/edges/p", largest.p, absent)
        _check_places(f"{under}/edges/at", largest.at, absent)


def _check_absent(name: str, values: Tensor, absent: Tensor) -> None:
    """Raise ValueError for a number without a weight."""
    numbers = values[absent]
    if not bool(numbers.isnan().all()):
        raise ValueError(f"{name}: got {float(numbers[~numbers.isnan()][0]):g} where there is no weight, expected NaN")


def _check_places(name: str, places: Tensor, absent: Tensor) -> None:
    """Raise ValueError for a place [..., 4] without run, batch entry, query or key, though there is a weight."""
    if not torch.equal(places < 0, absent[..., None].expand_as(places)):
        raise ValueError(f"{name}: expected -1 where there is no weight, and only there")


def check_kept(name: str, rows: Kept) -> None:
    """Check the retained rows of one run.

    Raises:
        ValueError: an impossible value, or one of a row that does not count.
    """
    for quantity, values in rows.values.items():
        counted = rows.counted.view(*rows.counted.shape, *[1] * (values.ndim - rows.counted.ndim)).expand_as(values)
        if not values.is_floating_point():  # keys
            if bool((values[~counted] >= 0).any()):
                raise ValueError(f"{name}/{quantity}: got a key in a row that does not count, expected -1")
            continue
        least, most = (0.0, 1.0) if quantity == "top_weights" else _bounds(quantity)
        finite = ~values.isnan() if quantity in MAY_BE_INFINITE else values.isfinite()
        inside = finite & (values >= least) & (values <= most)
        if not bool((inside | values.isnan()).all()):
            wrong = float(values[~(inside | values.isnan())][0])
            raise ValueError(f"{name}/{quantity}: holds {wrong:g}, expected {least:g} to {most:g}")
        if not bool(values[~counted].isnan().all()):
            raise ValueError(f"{name}/{quantity}: got a number in a row that does not count, expected NaN")


def check_widths(origin: Origin, parts: Mapping[str, LayerStats]) -> None:
    """Check the width of the heads that an origin states against q and k.

    Raises:
        ValueError: they differ.
    """
    for name, layer in origin.layers.items():
        for tiles in parts[name].tiles.values():
            width = tiles.to_weights().sizes["q"][-1]
            if layer.widths[0] != width:
                raise ValueError(
                    f"layers: {name} has heads of width {layer.widths[0]}, expected {width} as q and k have"
                )


def check_moments(parts: Sequence[LayerStats]) -> None:
    """Check the moments of all layers at once, because there may be thousands.

    Raises:
        ValueError: impossible numbers.
    """
    for name in dict.fromkeys(name for part in parts for name in part.moments):
        those = {n: part for n, part in enumerate(parts) if name in part.moments}
        each = [part.moments[name] for part in those.values()]
        together = Moments(*(torch.cat([getattr(x, what) for x in each]) for what in MOMENTS))
        rows = torch.cat([part.rows for part in those.values()])  # [heads of all layers], as the others
        for what, heads in _wrong_moments(name, together, rows).items():
            if bool(heads.any()):
                layers = [n for n, part in those.items() for _ in range(part.heads)]
                layer = layers[int(heads.nonzero()[0])]
                raise ValueError(f"{layer}/moments/{name}/{what}: is not possible for any rows")


def _wrong_moments(name: str, moments: Moments, rows: Tensor) -> dict[str, Tensor]:
    """Return for each kind of number the heads where it is impossible; ``rows``: the number of rows of each head.

    Sums of large numbers may overflow: to an infinite mean, and so to any M2.
    """
    count, mean, M2, least, most = moments.count, moments.mean, moments.M2, moments.min, moments.max
    lowest, highest = _bounds(name)
    none = count == 0
    size = torch.maximum(least.abs(), most.abs())
    room = _ROUNDING * size  # exceeds any rounding
    overflown = ~mean.isfinite() & (count.to(size.dtype) * size).isinf()
    limit = count.to(size.dtype) * ((most - least).square() / 4 + room.square())  # Popoviciu's inequality
    impossible = {
        "min": ~(least.isfinite() & (least >= lowest)) | ((least <= 0) & (name == "chance")),
        "max": ~(most.isfinite() & (most <= highest) & (most >= least)),
        "mean": ~((mean >= least - room) & (mean <= most + room)) & ~overflown,
        "M2": ~((M2 >= 0) & (limit >= M2)) & ~overflown,
    }
    wrong = {
        "count": (count < 0) | (count > rows),
        "histogram": (moments.histogram < 0).any(-1) | (moments.histogram.sum(-1) != count),
    }
    return wrong | {what: torch.where(none, ~getattr(moments, what).isnan(), x) for what, x in impossible.items()}


def _bounds(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value of a row quantity, with a margin for rounding."""
    quantity = quantity_of(name)
    least, most = (-math.inf, math.inf) if quantity is None else quantity.bounds
    return least - _ROUNDING, most + _ROUNDING * max(1.0, most)
