"""Scores of patterns from the means of row quantities, without the weights themselves.

``_dense_stats.pattern_scores`` defines the scores on dense weights. Here the same sums come from the moments: with o_i
the overlap of row i with the pattern and c_i that of chance, score = max(0, Σ (o_i - c_i) / Σ (1 - c_i)). Σ o_i is
count times mean. Σ c_i comes from ``chance`` = 1 / n_i; docs/guides/decide.md lists which scores are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headscope.stats._dense import FEW, MINIMUM_ROWS
from headscope.stats._layer import LayerStats, Moments

SINGLE_KEYS = ("previous", "next", "self", "first")
KNOWN = {1: 19, 2: 10, 3: 6, 4: 5, 5: 4, 6: 3}
"""Number of visible keys of a row -> the only bin of ``chance`` with such rows, which holds no others."""

HALF = 10
"""The first bin of the histogram of ``max_weight`` from a weight of 0.5 on."""

MOST_EVEN = 0.5
""""local" requires that an even row has at most this share of its weight within the window."""

WIDE = 256.0
"""Up to this distance the cells of a grid are counted individually; beyond it their area is accurate to 0.1 %."""

MOST_WIDE = 1e100
"""The largest number with a finite square."""

_ROUNDING = 1e-4


class Scores(NamedTuple):
    """One pattern of all heads of a layer.

    Attributes:
        score: float64 [H] in [0, 1]; NaN if too few rows are informative.
        rows: the number of informative rows, int64 [H].
        exact: whether it is the score of the dense weights of the same rows, boolean [H].
        z: how far the mass on the pattern's keys is from what chance gives, [H]; NaN if that is unknown.
        peaks: of "uniform", the share of the rows with at least three visible keys that put half of their weight or
            more on one, [H]; NaN for other patterns.
    """

    score: Tensor
    rows: Tensor
    exact: Tensor
    z: Tensor
    peaks: Tensor


class Chance(NamedTuple):
    """Known sums of 1 / n_i, the weight of each key in an even row, all [H].

    Attributes:
        rows: the number of counted rows.
        total: Σ 1 / n_i.
        single: rows with one visible key.
        alike: whether all rows with more have equally many.
        by_count: the numbers of rows with 1, 2, … 6 visible keys, by that number.
    """

    rows: Tensor
    total: Tensor
    single: Tensor
    alike: Tensor
    by_count: Mapping[int, Tensor]

    @staticmethod
    def of(moments: Moments) -> Chance:
        """Compute from the moments of ``chance``."""
        total = torch.where(moments.count > 0, moments.mean * moments.count, 0.0)
        by_count = {n: moments.histogram[:, at] for n, at in KNOWN.items()}
        many = (moments.count - by_count[1]).clamp_min(1)
        mean = (total - by_count[1]) / many
        # over rows with several visible keys Σ (c - mean)² is 0 if they have equally many
        squares = moments.M2 + moments.mean**2 * moments.count - by_count[1] - mean**2 * many
        alike = squares.nan_to_num(0.0) / many <= (_ROUNDING * mean) ** 2
        return Chance(moments.count, total, by_count[1], alike, by_count)

    def mean_of_many(self) -> Tensor:
        """Return the mean of 1 / n_i over rows with several visible keys; NaN without such rows."""
        return (self.total - self.single) / (self.rows - self.single)

    def over(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ 1 / n_i over the rows with a quantity, the number of informative ones, and whether both are exact.

        The rows without it are first those with a single key (row 0 of a causal head has no previous one); further ones
        are assumed to equal the mean of the others.
        """
        without = self.rows - rows
        alone = torch.minimum(without, self.single)
        more = without - alone
        total = self.total - alone - torch.where(more > 0, more * self.mean_of_many(), 0.0)
        # with some of either kind, it is unknown which rows lack it
        exact = (without == 0) | ((more == 0) & (alone == self.single)) | ((self.single == 0) & self.alike)
        return total, rows - (self.single - alone), exact

    def capped(self, keys: float) -> Tensor:
        """Return Σ min(1, keys / n_i): exact up to 7 keys, beyond it an upper bound."""
        few = {n: count for n, count in self.by_count.items() if n <= keys}
        certain = sum(few.values(), torch.zeros_like(self.rows)).double()
        rest = self.total - sum((count.double() / n for n, count in few.items()), torch.zeros_like(self.total))
        return certain + torch.minimum(keys * rest.clamp_min(0), self.rows - certain)


def pattern_means(part: LayerStats) -> dict[str, Scores]:
    """Return pattern -> scores, of all that this layer's statistics can show; "local" comes with its window."""
    moments = part.moments
    if "chance" not in moments:
        return {}
    chance = Chance.of(moments["chance"])
    scores: dict[str, Scores] = {}
    whole = moments["mass"].min >= 1 - _ROUNDING  # no sinks
    for name in SINGLE_KEYS:
        if name in moments:
            even, telling, exact = chance.over(moments[name].count)
            exact = exact & (whole | (telling == moments[name].count))
            if name == "first":
                exact = exact & _all_see_the_first(part) & (part.first == 1)
            scores[name] = _score(name, _total(moments[name]), even, moments[name].count, telling, exact)
    never = torch.zeros_like(chance.alike)
    for name in ("duplicate", "induction"):
        if name in moments:
            rows = moments[name].count
            even = torch.where(rows > 0, rows * chance.mean_of_many(), 0.0)
            total = _total(moments[name])
            if name == "induction" and "next" in moments:  # its mass includes the next key's, which follows no copy
                total = (total - _total(moments["next"])).clamp_min(0)
            scores[name] = _score(name, total, even, rows, rows, never)
    if (window := smallest_window(part)) is not None:
        scores["local"] = _local(moments, chance, window, never)
    scores["uniform"] = _uniform(moments, chance, never)._replace(peaks=_peaks(moments["max_weight"], chance))
    return {name: each._replace(z=_z(part, name)) for name, each in scores.items()}


def _z(part: LayerStats, pattern: str) -> Tensor:
    """Return how far the quantity of a pattern is from its null, in standard deviations, [H]; NaN if unknown.

    The mass of "induction" without that of "next" varies at most as much as both if they were independent: it is a part
    of the mass of "induction", of which "next" is the other part.
    """
    gain = torch.zeros_like(part.rows, dtype=torch.float64)
    variance = torch.zeros_like(gain)
    names = {"local": (f"window_{smallest_window(part):g}",)} if pattern == "local" else {}
    if pattern == "induction" and "next" in part.moments:
        names = {"induction": ("induction", "next")}
    for sign, name in zip((1, -1), names.get(pattern, (pattern,)), strict=False):
        moments = part.moments.get(name)
        null = None if part.nulls is None or moments is None else part.nulls.of(name, moments.count)
        if moments is None or null is None:
            return torch.full_like(gain, math.nan)
        there = moments.count > 0
        gain += sign * torch.where(there, (moments.mean - null.mean) * moments.count, 0.0)
        variance += torch.where(there, (null.std * moments.count).square(), 0.0)
    return gain / variance.sqrt().masked_fill(variance == 0, math.nan)


def smallest_window(part: LayerStats) -> float | None:
    """Return the smallest distance w of ``window_w`` from 1 on; window_0 is the query's own position."""
    windows = [float(name.removeprefix("window_")) for name in part.moments if name.startswith("window_")]
    return min((w for w in windows if w >= 1), default=None)


def _total(moments: Moments) -> Tensor:
    return torch.where(moments.count > 0, moments.mean * moments.count, 0.0)


def _score(name: str, total: Tensor, even: Tensor, rows: Tensor, telling: Tensor, exact: Tensor) -> Scores:
    room = rows - even
    score = ((total - even) / room).clamp(0, 1)
    enough = (telling >= MINIMUM_ROWS.get(name, FEW)) & (room > _ROUNDING)
    unknown = torch.full_like(score, math.nan)
    return Scores(torch.where(enough, score, math.nan), telling, exact & enough, unknown, unknown)


def _peaks(largest: Moments, chance: Chance) -> Tensor:
    """Return the share of rows with at least half of their weight on one key, of those with at least three keys, [H].

    Rows with one or two keys all have such a weight, except with sinks: with sinks the share is at most the true one.
    """
    few = chance.by_count[1] + chance.by_count[2]
    many = largest.histogram[:, HALF:].sum(-1)
    return (many - few).clamp_min(0).double() / (chance.rows - few)


def _all_see_the_first(part: LayerStats) -> Tensor:
    """Return whether the first key visible to any row is visible to every counted row, [H]; False if unknown."""
    if part.eligible is None or part.eligible.shape[-1] == 0:
        return torch.zeros_like(part.rows, dtype=torch.bool)
    first = (part.eligible > 0).byte().argmax(-1, keepdim=True)
    return part.eligible.gather(-1, first)[:, 0] == part.rows


def _local(moments: Mapping[str, Moments], chance: Chance, window: float, never: Tensor) -> Scores:
    """Score the mass within a window, minus the excess of its largest weight over an even spread in the window."""
    near = moments[f"window_{window:g}"]
    keys = keys_within(window, moments)
    even = chance.capped(keys) / chance.rows
    spread = (1 + keys * chance.total / chance.rows - even) / keys  # the mean of 1 / m_i with m_i = min(keys, n_i)
    peak = (moments["max_weight"].mean - spread).clamp_min(0)
    rows = near.count  # fewer than count if some have no position: those that have one are assumed to be like all
    overlap, chances = (torch.where(rows > 0, each * rows, 0.0) for each in (near.mean - peak, even))
    scores = _score("local", overlap, chances, rows, torch.minimum(rows, chance.rows - chance.single), never)
    return scores._replace(score=torch.where(even <= MOST_EVEN, scores.score, math.nan))


def keys_within(window: float, moments: Mapping[str, Moments]) -> float:
    """Return the largest number of keys within a window; a float, because a window may exceed 64 bits."""
    reach = float(math.floor(window))
    if "previous" not in moments:  # a grid
        if window > WIDE:
            return math.pi * min(window, MOST_WIDE) ** 2
        steps = range(-int(window), int(window) + 1)
        return float(sum(math.hypot(x, y) <= window for x in steps for y in steps))
    if "next" in moments and not bool(moments["next"].count.any()):  # keys ahead are masked
        return reach + 1
    return 2 * reach + 1


def _uniform(moments: Mapping[str, Moments], chance: Chance, never: Tensor) -> Scores:
    """Score an even spread over exp(entropy) keys, of the visible ones."""
    entropy, normalized = _total(moments["entropy"]), _total(moments["normalized_entropy"])
    rows = chance.rows - chance.single
    even = chance.mean_of_many()
    log_keys = entropy / normalized  # the mean of ln n_i, weighted
    overlap = torch.where(normalized > 0, (-log_keys * (1 - normalized / rows)).exp(), even)
    return _score("uniform", overlap * rows, torch.where(rows > 0, even * rows, 0.0), rows, rows, never)
