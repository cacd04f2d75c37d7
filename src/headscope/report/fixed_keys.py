"""Heads that put most of their weight on one key that is not the first: a separator, a mark, a patch.

docs/concepts/statistics.md defines the score, and the bound that it has where only sums are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.stats import CLEAR_SCORE, CLEAR_Z, HeadStats, Match

__all__ = ["FEWEST_ROWS", "FIXED_KEY", "FixedKey", "fixed_key_of_weights", "fixed_keys", "match_fixed_keys"]

FIXED_KEY = "fixed key"
"""The name of the pattern."""

FEWEST_ROWS = 8
"""A key that fewer rows see is not a candidate; nor is one that less than half of the rows see."""

MOST = 0.5
"""The smallest mean weight that is most of a row."""


class FixedKey(NamedTuple):
    """The key that receives most of the weight of a head.

    Attributes:
        key: its position.
        share: the mean weight that it receives, over the rows that see it.
        score: from 0 (chance or worse) to 1 (every row has all of its weight on this key); at most the true one.
        rows: how many rows see it.
        z: how far its weight is from what exchanged keys receive, in standard deviations; at most the true one.
        limit: the z from which chance does not explain the largest of so many keys.

    Examples:
        >>> import torch
        >>> from headscope.report.fixed_keys import fixed_keys
        >>> from headscope import observe
        >>> q = torch.ones(1, 1, 12, 4)
        >>> k = torch.zeros(1, 1, 12, 4)
        >>> k[0, 0, 7] = 4.0  # all queries attend to key 7
        >>> (found,) = fixed_keys(observe(q, k), "0")
        >>> found.key, round(found.share, 2), found.is_clear
        (7, 1.0, True)
    """

    key: int
    share: float
    score: float
    rows: int
    z: float
    limit: float

    @property
    def is_clear(self) -> bool:
        """Whether the key has most of the weight, a large score, and more than chance explains."""
        return self.share >= MOST and self.score >= CLEAR_SCORE and self.z >= self.limit

    @property
    def match(self) -> Match:
        """The key as a match with the pattern "fixed key"."""
        return Match(FIXED_KEY, self.score, self.rows, self.z)

    def beats(self, match: Match | None) -> bool:
        """Return whether tables name the head by this key: it is clear, and no other clear pattern has its score.

        "first" is not another one: of patches, the first may be the key.
        """
        other = match is not None and match.pattern not in ("uniform", "first") and match.is_name
        return self.is_clear and (match is None or not other or self.score > match.score)


def fixed_keys(stats: HeadStats, layer: str, *, skips_first: bool = True) -> list[FixedKey | None]:
    """Return for each head of a layer the key with the largest share of the weight; None where no key is a candidate.

    Only sums over rows are known: the rows that do not see the key count as if they added to what chance gives. Score
    and z are therefore at most the true ones.

    Args:
        stats: with row quantities and received mass.
        layer: its name.
        skips_first: whether the first key is no candidate, because it has a pattern of its own ("first").

    Examples:
        >>> import torch
        >>> from headscope.report.fixed_keys import fixed_keys
        >>> from headscope import observe
        >>> q = torch.zeros(1, 2, 3, 4)  # three rows are too few
        >>> fixed_keys(observe(q, q), "0")
        [None, None]
    """
    part = stats.parts[layer]
    chance = part.moments.get("chance")
    if part.received is None or part.eligible is None or chance is None:
        return [None] * part.heads
    received, eligible = _array(part.received), _array(part.eligible)
    rows, alone = _array(part.rows)[:, None], _array(chance.histogram[:, -1])[:, None]  # rows with one visible key
    total = np.nan_to_num(_array(chance.mean) * _array(chance.count))[:, None]
    even = total - np.minimum(alone, rows - eligible)  # those rows do not see the key
    variance = np.full((part.heads, 1), math.nan)
    for name in ("self", "first"):  # one key each, which has the same variance as any other visible one
        moments = part.moments.get(name)
        null = None if part.nulls is None or moments is None else part.nulls.of(name, moments.count)
        if moments is None or null is None or (name == "first" and part.first != 1):
            continue
        spread = (_array(null.std) * _array(moments.count))[:, None] ** 2
        variance = np.where(np.isnan(variance) & (_array(moments.count)[:, None] == rows), spread, variance)
    return [_largest(*each, skips_first) for each in zip(received, eligible, rows, even, variance, strict=True)]


def fixed_key_of_weights(
    weights: NDArray[np.float32], visible: NDArray[np.bool_] | None, *, skips_first: bool = True
) -> list[FixedKey | None]:
    """Return the same from all weights, [H, Q, K], and the visible pairs; score and z are exact.

    Examples:
        >>> import numpy as np
        >>> from headscope.report.fixed_keys import fixed_key_of_weights
        >>> weights = np.full((1, 12, 12), 0.02, dtype=np.float32)
        >>> weights[..., 7] = 0.78
        >>> (found,) = fixed_key_of_weights(weights, None)
        >>> found.key, found.rows, round(found.score, 2)
        (7, 12, 0.76)
    """
    there = np.ones(weights.shape, dtype=bool) if visible is None else np.broadcast_to(visible, weights.shape)
    whole: NDArray[np.bool_] = np.asarray(np.isfinite(weights).all(-1) & there.any(-1))  # [H, Q]
    there = there & whole[..., None]
    p = np.where(there, weights, 0).astype(np.float64)
    keys = there.sum(-1, keepdims=True)
    counted = there & (keys > 1)
    one = 1 / np.maximum(keys, 1)
    mass, squares = p.sum(-1, keepdims=True), (p**2).sum(-1, keepdims=True)
    uneven = squares - mass**2 * one
    spread = np.where(uneven > 1e-6 * squares, uneven, 0) * one
    # rows with one visible key show nothing
    sums = [np.where(counted, each, 0).sum(1) for each in (p, np.ones_like(p), one, spread)]
    received, eligible, even, variance = sums
    rows = np.broadcast_to((keys > 1).sum((1, 2))[:, None], (len(weights), 1))
    return [_largest(*each, skips_first) for each in zip(received, eligible, rows, even, variance, strict=True)]


def match_fixed_keys(
    matches: Sequence[Match | None], weights: Tensor, visible: Tensor | None, *, skips_first: bool = True
) -> list[Match | None]:
    """Return the best matches of the heads of a layer, with "fixed key" where it is clear and its score the highest.

    Shapes: weights [H, Q, K]; visible, boolean, the same or None = all.

    Examples:
        >>> import torch
        >>> from headscope.report.fixed_keys import match_fixed_keys
        >>> weights = torch.full((1, 12, 12), 0.02)
        >>> weights[..., 7] = 0.78
        >>> match_fixed_keys([None], weights, None)[0].pattern
        'fixed key'
    """
    seen = None if visible is None else visible.numpy()
    keys = fixed_key_of_weights(weights.numpy(), seen, skips_first=skips_first)
    return [
        match if key is None or not key.beats(match) else key.match for match, key in zip(matches, keys, strict=True)
    ]


def _largest(received: Any, eligible: Any, rows: Any, even: Any, variance: Any, skips_first: bool) -> FixedKey | None:
    """Return the candidate of one head with the largest score; [K] each, rows [1], and variance [1] or [K]."""
    candidates = (eligible >= FEWEST_ROWS) & (2 * eligible >= rows)
    seen = np.flatnonzero(eligible > 0)
    if skips_first and len(seen):
        candidates[seen[0]] = False
    if not candidates.any():
        return None
    room = eligible - even
    share = received / np.maximum(eligible, 1)
    best = int(np.where(candidates & (room > 0), share, -1).argmax())
    if not candidates[best] or room[best] <= 0:
        return None
    gain = float(received[best] - even[best])
    spread = math.sqrt(float(np.broadcast_to(variance, eligible.shape)[best]))
    z = gain / spread if spread > 0 else math.nan
    score = min(1.0, max(0.0, gain / float(room[best])))
    limit = math.sqrt(CLEAR_Z**2 + 2 * math.log(int(candidates.sum())))
    return FixedKey(best, float(share[best]), score, int(eligible[best]), z, limit)


def _array(values: Tensor) -> NDArray[np.float64]:
    return values.detach().to("cpu", torch.float64).numpy()
