"""Which scores of patterns are clear, and how a head is named by them.

Tables, sentences and the page take the words of a name from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

CLEAR_SCORE = 0.3
"""The smallest score that is large: the share of what is possible beyond chance."""

CLEAR_Z = 3.0
"""The smallest number of standard deviations from chance."""


WHOLE_SCORE = 0.5
"""A head with a smaller score follows its pattern partly, and its name says so."""

PARTLY = "partly "
"""What precedes the name of such a pattern, and what such a head does."""

ALSO_SCORE = 0.1
"""The smallest score that is named beside that of a partly followed pattern."""

MOST_PEAKS = 0.1
"""The largest share of rows with half of their weight on one key where the spread of a head is still even."""


class Scored(Protocol):
    """A score of a head for a pattern."""

    @property
    def pattern(self) -> str: ...
    @property
    def score(self) -> float: ...
    @property
    def z(self) -> float: ...
    @property
    def is_name(self) -> bool: ...


Each = TypeVar("Each", bound=Scored)


def is_name(pattern: str, score: float, z: float, peaks: float) -> bool:
    """Return whether a head shows this pattern's name: the score is clear, or describes an even spread.

    "uniform" is what chance gives: exchanging the keys of an even row changes nothing, so it has no z. Rows that often
    put half of their weight on one key are not even, whatever the score.
    """
    if pattern == "uniform":
        return score >= CLEAR_SCORE and not peaks > MOST_PEAKS
    return score >= CLEAR_SCORE and z >= CLEAR_Z


def is_part(score: float | None) -> bool:
    """Return whether a head with this score follows its pattern only partly."""
    return score is not None and score < WHOLE_SCORE


def name_in_words(pattern: str, score: float | None) -> str:
    """Return the name of a head in words: "partly" precedes a pattern that it follows by less than half.

    Examples:
        >>> from headscope.stats._clear import name_in_words
        >>> name_in_words("induction", 0.83), name_in_words("induction", 0.38)
        ('induction', 'partly induction')
    """
    return f"{PARTLY}{pattern}" if is_part(score) else pattern


def second_name(best: Scored | None, others: Sequence[Each]) -> Each | None:
    """Return what a head that follows its best pattern partly shows, too: the largest other score beyond chance.

    The keys of "previous", "next" and "self" are near ones, so "local" adds nothing to these.
    """
    if best is None or not best.is_name or not is_part(best.score):
        return None
    implied = (best.pattern, "local") if best.pattern in ("previous", "next", "self") else (best.pattern,)
    shown = [each for each in others if each.pattern not in implied and each.score >= ALSO_SCORE and each.z >= CLEAR_Z]
    return max(shown, key=lambda each: each.score, default=None)


def share_of_peaks(largest: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Return the share of the rows with several keys that put at least half of their weight on one, [H].

    Rows with one or two visible keys cannot do otherwise, so they do not count. [B, H, Q] each; NaN without rows.
    """
    rows = rows & (keys >= 3)
    return ((largest >= WHOLE_SCORE) & rows).sum((0, 2)).double() / rows.sum((0, 2))


def z_of_mass(p: Tensor, target: Tensor, visible: Tensor, rows: Tensor) -> Tensor:
    """Return how far the mass on some keys is from that of exchanged keys, in standard deviations, [H].

    Shapes: p, target and visible broadcast to [B, H, Q, K], rows to [B, H, Q]. NaN where exchanging changes nothing.
    """
    keys = visible.sum(-1).clamp_min(1).double()
    there = (target & visible).sum(-1)
    mass = p.sum(-1)
    squares = p.square().sum(-1)
    uneven = squares - mass.square() / keys
    uneven = torch.where(uneven > 1e-6 * squares, uneven, 0.0)
    variance = uneven * there * (1 - there / keys) / (keys - 1).clamp_min(1)
    gain = (p * target).sum(-1) - mass * there / keys
    rows = rows & (there > 0)
    std = torch.where(rows, variance, 0.0).sum((0, 2)).sqrt()
    return torch.where(rows, gain, 0.0).sum((0, 2)) / std.masked_fill(std == 0, torch.nan)
