"""The names of quantities as they are shown, each with its meaning in one line.

The definitions are in docs/concepts/statistics.md.
"""

from __future__ import annotations

from typing import NamedTuple

from headscope.stats import ROW_QUANTITIES, quantity_of

__all__ = ["PATTERNS", "REGIONS", "STAGES", "STATISTICS", "STRONG", "WEAK", "Word", "strength", "word"]


class Word(NamedTuple):
    """A quantity's heading, meaning, and number of decimals.

    Examples:
        >>> from headscope.report.words import REGIONS
        >>> REGIONS["near"].heading, REGIONS["near"].decimals
        ('near', 2)
    """

    heading: str
    meaning: str
    decimals: int = 2


def _word_of(name: str) -> Word:
    quantity = quantity_of(name)
    if quantity is None:
        return Word(name.replace("_", " "), "")
    meaning = quantity.meaning.format(name.rpartition("_")[2])
    return Word(quantity.heading or name.replace("_", " "), meaning, quantity.decimals)


STAGES = {
    1: "Input",
    2: "Linear projections for Q, K and V",
    3: "Split into heads",
    4: "Scaled dot-product attention",
    5: "Concatenation of heads",
    6: "Final linear projection",
}
"""The stages of a trace."""

_COLUMNS = (
    "entropy", "normalized_entropy", "max_weight", "effective_keys", "mass", "distance", "previous", "next", "self",
    "duplicate", "induction", "first", "lse", "max_logit", "chance", "value_norm",
)  # fmt: skip
"""The order of columns; other quantities follow."""

STATISTICS = {
    name: _word_of(name) for name in (*_COLUMNS, *(each.name for each in ROW_QUANTITIES if not each.has_distance))
}

REGIONS = {
    "centre": Word("centre", "The quarter of the patches nearest to the centre of brightness."),
    "edges": Word("edges", "The quarter where brightness changes most from patch to patch."),
    "boundary": Word("outline", "The quarter that touches most patches on the other side of the object's outline."),
    "texture": Word("texture", "The quarter where brightness varies most within 3 × 3 pixels."),
    "near": Word("near", "The quarter nearest to each patch."),
    "far": Word("far", "The quarter farthest from each patch."),
    "layout": Word("layout", "The quarter that position alone predicts for each patch, whatever the image."),
    "distance_ratio": Word("distance ratio", "Mean distance divided by that of an even spread: below 1 is nearer."),
    "layout_r2": Word("layout R²", "Share of the map's variance that position alone explains."),
}

PATTERNS = {
    "previous": "all weight on the token before",
    "next": "all weight on the token after",
    "self": "all weight on the token itself",
    "duplicate": "all weight on other copies of the same token",
    "induction": "all weight on the token after another copy of this one",
    "fixed key": "most weight on one key that is not the first",
    "first": "all weight on the first token",
    "local": "weight spread evenly over the tokens within 3 positions",
    "uniform": "weight spread evenly over all tokens",
}


def word(name: str) -> Word:
    """Return heading and meaning of a quantity; an unknown one has its name as heading and no meaning.

    Examples:
        >>> from headscope.report.words import word
        >>> word("max_weight").heading, word("my_figure").heading
        ('max weight', 'my figure')
    """
    return REGIONS.get(name) or _word_of(name)


WEAK, STRONG = 0.3, 0.5
"""Scores below the first are dim, from the second on bold."""


def strength(score: float | None) -> str:
    """Return the style of text with this score.

    Examples:
        >>> from headscope.report.words import strength
        >>> strength(0.1), strength(0.4), strength(0.7)
        ('dim', '', 'bold')
    """
    return "dim" if score is None or score < WEAK else "bold" if score >= STRONG else ""
