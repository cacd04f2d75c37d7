"""Patterns that heads match, from the means of their row quantities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headscope._analysis.answers import Basis, Decision, HasStats, decimal, stats_of
from headscope._analysis.pattern_means import pattern_means, smallest_window
from headscope.stats import (
    CLEAR_SCORE,
    CLEAR_Z,
    PATTERNS,
    WHOLE_SCORE,
    HeadStats,
    is_name,
    name_in_words,
    second_name,
)

__all__ = ["PatternScore", "Patterns", "patterns"]


@dataclass(frozen=True)
class PatternScore:
    """The score of one head for one pattern: a likeness, not a claim of what the head is for.

    Attributes:
        layer, head: the head.
        pattern: its name.
        score: from 0 (chance or worse) to 1 (every row is exactly the pattern).
        rows: the number of informative rows.
        exact: whether it equals ``pattern_scores`` of the dense weights of the same rows; else an estimate.
        z: how far the mass on the pattern's keys is from what chance gives, in standard deviations; NaN for "uniform",
            where exchanging keys changes nothing, and for files of earlier versions.
        peaks: of "uniform", the share of the rows with at least three visible keys that put half of their weight or
            more on one; NaN for other patterns.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.decisions import patterns
        >>> q = 40 * torch.eye(4)[None, None]  # each row attends to its own key
        >>> best = patterns(observe(q, q)).best[0]
        >>> best.pattern, round(best.score, 3), best.rows, round(best.z, 2), best.is_clear
        ('self', 1.0, 4, 3.46, True)
    """

    layer: str
    head: int
    pattern: str
    score: float
    rows: int
    exact: bool
    z: float = math.nan
    peaks: float = math.nan

    @property
    def is_clear(self) -> bool:
        """Whether the score is at least 0.3, and at least 3 standard deviations from chance.

        If the statistics are from a file of an earlier version, which lacks what chance gives, the score decides.
        """
        unknown = math.isnan(self.z) and self.pattern != "uniform"
        return self.score >= CLEAR_SCORE and (unknown or self.z >= CLEAR_Z)

    @property
    def is_name(self) -> bool:
        """Whether tables name the head by this pattern: its score is clear, or describes an even spread.

        A spread is not even if more than a tenth of the rows put half of their weight or more on one key.
        """
        return self.is_clear or is_name(self.pattern, self.score, self.z, self.peaks)

    @property
    def name(self) -> str:
        """The name that tables show: "partly induction" below a score of 0.5, and "" where ``is_name`` is False."""
        return name_in_words(self.pattern, self.score) if self.is_name else ""


@dataclass(frozen=True)
class Patterns(Decision):
    """Patterns that heads match; see ``patterns``.

    Attributes:
        scores: of each head and each pattern that can be determined, in the order of the model.
        local: the distances within which "local" was measured, for each layer that has any.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.decisions import patterns
        >>> q = 40 * torch.eye(4)[None, None]  # each row attends to its own key
        >>> answer = patterns(observe(q, q))
        >>> round(answer.of("0", 0)["previous"].score, 3)
        0.0
    """

    scores: tuple[PatternScore, ...]
    local: dict[str, float]

    def of(self, layer: str, head: int) -> dict[str, PatternScore]:
        """Return pattern -> score of one head.

        Raises:
            KeyError: no pattern could be determined for such a head.
        """
        scores = {each.pattern: each for each in self.scores if (each.layer, each.head) == (layer, head)}
        if not scores:
            layers = ", ".join(dict.fromkeys(each.layer for each in self.scores)) or "none"
            raise KeyError(f"layer {layer}, head {head}: has no scores; these layers have scores: {layers}")
        return scores

    @property
    def best(self) -> tuple[PatternScore, ...]:
        """Return for each head the pattern with the highest score; ties go to the more specific one.

        Clear scores come first, see ``names``. Heads without a score are omitted.
        """
        return tuple(ranked[0] for ranked in self.ranked())

    @property
    def names(self) -> tuple[PatternScore, ...]:
        """Return for each head the clear pattern with the highest score, or "uniform"; other heads are omitted.

        "uniform" is no claim that a head differs from chance: it is what chance gives.
        """
        return tuple(each for each in self.best if each.is_name)

    @property
    def also(self) -> tuple[PatternScore, ...]:
        """Return the second pattern of each head with a name, if chance does not explain it.

        It has the largest score of those of at least 0.3 that are 3 standard deviations from chance. Beside a pattern
        that the head follows partly, 0.1 suffices.
        """
        second = (second_name(best, others) for best, *others in self.ranked())
        return tuple(each for each in second if each is not None)

    def ranked(self) -> list[list[PatternScore]]:
        """Return the scores of each head: names first, then by score."""
        heads: dict[tuple[str, int], list[PatternScore]] = {}
        for each in self.scores:
            heads.setdefault((each.layer, each.head), []).append(each)
        return [sorted(each, key=_rank) for each in heads.values()]  # stable: specific ones first

    def to_dict(self) -> dict[str, Any]:
        """Return the answer ready for JSON; of each score also ``named``: whether tables name the head by it."""
        entries = super().to_dict()
        for entry, each in zip(entries["scores"], self.scores, strict=True):
            entry["named"] = each.is_name
        return entries

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head", "pattern", "score", "rows", "next best", "its score")

    def cells(self) -> list[tuple[str, ...]]:
        """Return one line for each head: its best pattern and the next best."""
        lines: list[tuple[str, ...]] = []
        for best, *rest in self.ranked():
            second = (_marked(rest[0]), decimal(rest[0].score)) if rest else ("", "")
            lines.append((best.layer, str(best.head), _marked(best), decimal(best.score), f"{best.rows:,}", *second))
        return lines


def _rank(score: PatternScore) -> tuple[bool, float]:
    return not score.is_name, -score.score


def _marked(score: PatternScore) -> str:
    name = score.name or f"({score.pattern})"
    return name if score.exact else f"{name} ~"


def patterns(stats: HeadStats | HasStats) -> Patterns:
    """Return the patterns that each head matches, with score and number of rows.

    previous, next, self, duplicate, induction, first, local and uniform, in the sense of ``pattern_scores``: row is
    query, and "previous" is weight on the key before it. From means only, the scores of previous, next, self and first
    equal those of the dense weights in most cases; the others are estimates, marked ``exact=False`` and by ~ in the
    table. docs/guides/decide.md explains how each differs. "first" expects ``Observe(first=1)``.

    Args:
        stats: with the row quantities; "duplicate" and "induction" require ``Observe(tokens=...)``, "local" a window,
            of which the smallest from 1 on is used.

    Raises:
        ValueError: row quantities are missing.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.decisions import patterns
        >>> q = 40 * torch.stack([torch.eye(4), torch.zeros(4, 4)])[None]
        >>> [(best.head, best.pattern) for best in patterns(observe(q, q)).best]
        [(0, 'self'), (1, 'uniform')]
    """
    observed = stats_of(stats)
    parts = {layer: part for layer, part in observed.parts.items() if "chance" in part.moments}
    if not parts:
        raise ValueError("patterns: requires row quantities, chance included; observe with Observe(row_stats=True)")
    scores: list[PatternScore] = []
    for layer, part in parts.items():
        means = {name: tuple(x.tolist() for x in each) for name, each in pattern_means(part).items()}
        for head in range(part.heads):
            scores += [
                PatternScore(layer, head, name, *(x[head] for x in means[name]))
                for name in PATTERNS
                if name in means and not math.isnan(means[name][0][head])
            ]
    local = {layer: w for layer, part in parts.items() if (w := smallest_window(part)) is not None}
    names = tuple(dict.fromkeys(each.pattern for each in scores))
    rows = [int(n) for part in parts.values() for n in part.moments["chance"].count.tolist()]
    basis = Basis.of_layers(parts.values(), (f"the means of {', '.join(names)}", "chance"), rows)
    caveat = (
        "A pattern describes this input, not the purpose of a head. In brackets: no name, because the score is below "
        f"{CLEAR_SCORE} or within {CLEAR_Z:g} standard deviations of chance. Partly: the score is below {WHOLE_SCORE}."
    )
    if any(not each.exact for each in scores):
        caveat += " ~ marks estimates from means."
    return Patterns(basis, caveat, tuple(scores), local)


for _class in (PatternScore, Patterns):
    _class.__module__ = "headscope.decisions"  # their public path
