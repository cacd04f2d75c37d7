"""Which scores of patterns are clear, and how a head is named by them.

Tables, sentences and the page take the words of a name from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard, TypeVar

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

MOST_SCORE = 0.8
"""A head with a smaller score does mostly what its pattern describes, and sentences say so."""

MOSTLY = "mostly "
"""What precedes what such a head does."""

ROUNDING = 0.005
"""What whole per cent round up: "partly" never stands before a score that is shown as 50%."""

ALSO_SCORE = 0.1
"""The smallest score that sentences have beside that of a partly followed pattern; a name needs ``CLEAR_SCORE``."""

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
    """Return whether a head with this score, in whole per cent, follows its pattern only partly."""
    return score is not None and score < WHOLE_SCORE - ROUNDING


def name_in_words(pattern: str, score: float | None) -> str:
    """Return the name of a head in words: "partly" precedes a pattern that it follows by less than half.

    Examples:
        >>> from headscope.stats._clear import name_in_words
        >>> name_in_words("induction", 0.83), name_in_words("induction", 0.38)
        ('induction', 'partly induction')
    """
    return f"{PARTLY}{pattern}" if is_part(score) else pattern


def deed_in_words(does: str, score: float | None) -> str:
    """Return what a head does, in words that claim no more than its score: "partly" or "mostly" precedes.

    Examples:
        >>> from headscope.stats._clear import deed_in_words
        >>> [deed_in_words("looks at the first token", score) for score in (0.49, 0.5, 0.8)]
        ['partly looks at the first token', 'mostly looks at the first token', 'looks at the first token']
    """
    if is_part(score):
        return f"{PARTLY}{does}"
    return f"{MOSTLY}{does}" if score is not None and score < MOST_SCORE - ROUNDING else does


def second_name(best: Scored | None, others: Sequence[Each]) -> Each | None:
    """Return what a named head shows, too: the largest other score beyond chance.

    A score of at least 0.3 is a second name. Beside a pattern that the head follows partly, one of at least 0.1 is
    mentioned. The keys of "previous", "next" and "self" are near ones, so "local" adds nothing to these; "uniform" is
    what chance gives.
    """
    if best is None or not best.is_name:
        return None
    least = ALSO_SCORE if is_part(best.score) else CLEAR_SCORE
    near = ("local",) if best.pattern in ("previous", "next", "self") else ()
    implied = (best.pattern, "uniform", *near)
    shown = [each for each in others if each.pattern not in implied and each.score >= least and each.z >= CLEAR_Z]
    return max(shown, key=lambda each: each.score, default=None)


def is_second_name(also: Scored | None) -> TypeGuard[Scored]:
    """Return whether the second pattern of a head names it, too: short forms have it, and counts include it."""
    return also is not None and also.score >= CLEAR_SCORE


def join_names(name: str, also: Scored | None) -> str:
    """Return both names of a head in short: "first · induction"."""
    return f"{name} · {also.pattern}" if is_second_name(also) else name


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
