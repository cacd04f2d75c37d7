"""Heads that nearly repeat another head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope._analysis.answers import Basis, Decision, HasStats, decimal, plural, stats_of
from headscope._analysis.distances import PROFILE, bins_of, distributions, largest_gap, mass_of, profiles, variation
from headscope._support.arguments import number
from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.stats import HeadStats

__all__ = ["HeadPair", "NearDuplicates", "near_duplicates"]


@dataclass(frozen=True)
class HeadPair:
    """The distances between two heads, each from 0 (equal) to 1.

    Attributes:
        layer, head, other_layer, other_head: the two heads.
        map: total variation between their maps.
        received: total variation between the received weight of their keys.
        rows: the largest difference between the means of a row quantity, see ``PROFILE``; 0 if there are none.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> from headscope.decisions import near_duplicates
        >>> q = torch.zeros(1, 2, 4, 8)  # two equal heads
        >>> pair = near_duplicates(observe(q, q, what=Observe(map=2))).closest
        >>> pair.head, pair.other_head, round(pair.distance, 3)
        (0, 1, 0.0)
    """

    layer: str
    head: int
    other_layer: str
    other_head: int
    map: float
    received: float
    rows: float

    @property
    def distance(self) -> float:
        """The largest of the three."""
        return max(self.map, self.received, self.rows)


@dataclass(frozen=True)
class NearDuplicates(Decision):
    """Heads that nearly repeat another; see ``near_duplicates``.

    Attributes:
        threshold: the largest distance of a pair.
        bins: of the maps.
        pairs: those within the threshold, the closest first.
        closest: the closest of all pairs; None if there are fewer than two heads.
        left_out: heads and layers that could not be compared, and why.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> from headscope.decisions import near_duplicates
        >>> q = torch.zeros(1, 2, 4, 8)  # two equal heads
        >>> answer = near_duplicates(observe(q, q, what=Observe(map=2)))
        >>> answer.threshold, answer.bins, len(answer.pairs)
        (0.1, 2, 1)
    """

    threshold: float
    bins: int
    pairs: tuple[HeadPair, ...]
    closest: HeadPair | None
    left_out: tuple[str, ...]

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head", "other layer", "other head", "map", "received", "rows")

    def cells(self) -> list[tuple[str, ...]]:
        """Return the pairs within the threshold, the closest first."""
        return [
            (
                pair.layer,
                str(pair.head),
                pair.other_layer,
                str(pair.other_head),
                *map(decimal, (pair.map, pair.received, pair.rows)),
            )
            for pair in self.pairs
        ]

    def caption(self) -> str:
        """Return the caption of the table."""
        text = f"{len(self.pairs)} {plural('pair', len(self.pairs))} within {self.threshold:g}."
        if not self.pairs and self.closest is not None:
            pair = self.closest
            text += f" The closest are {pair.layer} head {pair.head} and {pair.other_layer} head {pair.other_head}:"
            text += f" {pair.distance:.2f} apart."
        left = f" Excluded: {'; '.join(self.left_out)}." if self.left_out else ""
        return visible(f"{text} {super().caption()}{left}")

    def to_dict(self) -> dict[str, Any]:
        """Return the answer ready for JSON; undefined values are None."""
        pairs = [self.closest, *self.pairs] if self.closest is not None else []
        entries = super().to_dict()
        for entry, pair in zip([entries["closest"], *entries["pairs"]], pairs, strict=False):
            entry["distance"] = plain(pair.distance)
        return entries


def near_duplicates(stats: HeadStats | HasStats, threshold: float = 0.1) -> NearDuplicates:
    """Return pairs of heads, of the same layer or of others, with nearly the same attention.

    The distance of two heads is the largest of three: total variation (half the sum of absolute differences) between
    their maps and between the received weight of their keys, each normalised to sum to one, and the largest difference
    between the means of their row quantities. Distances in bins never exceed those of single weights: the distance is a
    lower bound.

    Args:
        stats: with a map and ``received``.
        threshold: the largest distance of near-duplicates, from 0 to 1.

    Raises:
        TypeError: threshold is not a number.
        ValueError: threshold is out of range, no layer has a map and ``received``, or maps have different bins.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> from headscope.decisions import near_duplicates
        >>> q = 40 * torch.stack([torch.zeros(4, 4), torch.zeros(4, 4), torch.eye(4)])[None]
        >>> answer = near_duplicates(observe(q, q, what=Observe(map=4)))
        >>> [(pair.head, pair.other_head) for pair in answer.pairs]
        [(0, 1)]
    """
    if not 0 <= number("threshold", threshold) <= 1:
        raise ValueError(f"threshold: got {threshold}, expected 0 to 1")
    observed = stats_of(stats)
    parts = {
        layer: part for layer, part in observed.parts.items() if part.map is not None and part.received is not None
    }
    if not parts:
        raise ValueError(
            "near_duplicates: requires maps and the mass that keys received; observe with Observe(map=64, "
            "received=True)"
        )
    bins = bins_of(parts.values())
    left_out = [f"{layer} (no map or received)" for layer in observed.layers if layer not in parts]
    every = [(layer, head) for layer, part in parts.items() for head in range(part.heads)]
    has_weight, profile = mass_of(parts.values()) > 0, profiles(parts.values())
    places = [place for place, has in zip(every, has_weight.tolist(), strict=True) if has]
    left_out += [f"{layer} head {head} (no weight)" for layer, head in every if (layer, head) not in places]
    between = [variation(x[has_weight], x[has_weight]) for x in distributions(parts.values())]
    between.append(largest_gap(profile[has_weight], profile[has_weight]))
    names = (f"maps of {bins} bins", "received", *(name for name in PROFILE if name in observed.names))
    basis = Basis.of_layers(parts.values(), names, [n for part in parts.values() for n in part.rows.tolist()])
    caveat = (
        "Similar on this input, in bins; heads without a task here (all weight on the first key, say) are similar, too."
    )
    pairs, closest = _pairs(places, between, threshold), _closest(places, between)
    return NearDuplicates(basis, caveat, threshold, bins, pairs, closest, tuple(left_out))


def _pair(places: list[tuple[str, int]], between: list[Tensor], a: int, b: int) -> HeadPair:
    return HeadPair(*places[a], *places[b], *(float(x[a, b]) for x in between))


def _pairs(places: list[tuple[str, int]], between: list[Tensor], threshold: float) -> tuple[HeadPair, ...]:
    far = torch.stack(between).amax(0)
    near = (far <= threshold).triu(1).nonzero().tolist()
    pairs = [_pair(places, between, a, b) for a, b in near]
    return tuple(sorted(pairs, key=lambda pair: pair.distance))


def _closest(places: list[tuple[str, int]], between: list[Tensor]) -> HeadPair | None:
    if len(places) < 2:
        return None
    far = torch.stack(between).amax(0)
    far = torch.where(torch.ones_like(far, dtype=torch.bool).triu(1), far, math.inf)
    a, b = divmod(int(far.argmin()), len(places))
    return _pair(places, between, a, b)


for _class in (HeadPair, NearDuplicates):
    _class.__module__ = "headscope.decisions"  # their public path
