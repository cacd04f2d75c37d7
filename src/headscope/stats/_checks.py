"""Whether the statistics in a file are complete, and numbers that rows can come to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.stats._layer import Edges, HeadMap, LayerStats

MOMENTS = ("count", "mean", "M2", "min", "max", "histogram")
_ROUNDING = 1e-3  # more than any rounding of a weight, or of a sum of weights
_TOGETHER = ("lse", "max_logit", "entropy", "normalized_entropy", "max_weight", "effective_keys", "mass")
"""Row quantities that every observed layer has, if it has any; others are derived from these."""


def check_complete(layer: str, names: Sequence[str]) -> None:
    """Check that a layer has every row quantity that the others are derived from.

    Raises:
        ValueError: one is missing or listed twice, or a name holds no distance.
    """
    if len({*names}) < len(names):
        raise ValueError(f"layer {layer}: row quantity {Counter(names).most_common(1)[0][0]} is listed twice")
    expected: dict[str, None] = dict.fromkeys(_TOGETHER if names else ())
    for name in names:
        kind, _, distance = name.partition("_")
        if kind in ("window", "streaming"):
            _check_distance(layer, name, distance)
        if kind == "streaming":
            expected |= dict.fromkeys(("chance", f"window_{distance}"))
    if missing := [name for name in expected if name not in names]:
        raise ValueError(
            f"layer {layer}: row quantities are missing: {', '.join(missing)}; expected beside {', '.join(names)}"
        )


def _check_distance(layer: str, name: str, distance: str) -> None:
    try:
        sound = 0 <= float(distance) < math.inf and f"{float(distance):g}" == distance
    except ValueError:
        sound = False
    if not sound:
        raise ValueError(f"layer {layer}: row quantity {name}: expected a distance in its name, as window_16")


def _check_weights(name: str, values: Tensor, most: Tensor, absent: Tensor | None = None) -> None:
    """Raises: ValueError: a weight, or a sum of weights, above ``most``, or NaN where it is not ``absent``."""
    wrong = ~(values <= most * (1 + _ROUNDING))
    if absent is not None:
        wrong &= ~(values.isnan() & absent)
    if bool(wrong.any()):
        at = int(wrong.flatten().nonzero()[0])
        got, expected = float(values.flatten()[at]), float(most.expand_as(values).flatten()[at])
        raise ValueError(f"{name}: expected weights that come to at most {expected:g}, got {got:g}")


def check_parts(under: str, parts: Mapping[str, Any]) -> None:
    """Raises: ValueError: sums or maxima that no weights come to."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    if "received" in parts:
        _check_weights(f"{under}/received", parts["received"], parts["eligible"].double())
    if "map" in parts:
        held: HeadMap = parts["map"]
        _check_weights(f"{under}/map/sum", held.sum, held.count.double())
        _check_weights(f"{under}/map/max", held.max, one, held.count == 0)
    if "edges" in parts:
        largest: Edges = parts["edges"]
        _check_weights(f"{under}/edges/p", largest.p, one, largest.at[..., 0] < 0)


def check_moments(parts: Sequence[LayerStats]) -> None:
    """Of all layers at once, for there may be thousands.

    Raises:
        ValueError: numbers that no rows come to; NaN is left alone.
    """
    for name in dict.fromkeys(name for part in parts for name in part.moments):
        those = {n: part for n, part in enumerate(parts) if name in part.moments}
        each = [part.moments[name] for part in those.values()]
        count, mean, M2, least, most, histogram = (torch.cat([getattr(x, what) for x in each]) for what in MOMENTS)
        rows = torch.cat([part.rows for part in those.values()])  # [heads of all layers], as the others
        room = 1e-3 * torch.maximum(least.abs(), most.abs())  # more than any rounding
        wrong = {
            "count": (count < 0) | (count > rows),
            "histogram": (histogram < 0).any(-1) | (histogram.sum(-1) != count),
            "M2": M2 < 0,
            "min": (least <= 0) & (name == "chance"),  # 1 / n
            "mean": mean.isfinite() & ((mean < least - room) | (mean > most + room)),  # a sum may overflow
        }
        for what, heads in wrong.items():
            if bool(heads.any()):
                layers = [n for n, part in those.items() for _ in range(part.heads)]
                raise ValueError(f"{layers[int(heads.nonzero()[0])]}/moments/{name}/{what}: is not that of any rows")
