"""The names of figures as they are shown, each with its meaning in one line; docs/concepts/statistics.md has more."""

from __future__ import annotations

from typing import NamedTuple

from headscope.stats import ROW_QUANTITIES, quantity_of

__all__ = ["PATTERNS", "REGIONS", "STAGES", "STATISTICS", "STRONG", "WEAK", "Word", "strength", "word"]


class Word(NamedTuple):
    """How a figure is headed, what it means, and with how many decimals it is shown."""

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
    "entropy", "normalized_entropy", "max_weight", "effective_keys", "mass", "distance", "self", "previous", "next",
    "first", "duplicate", "induction", "lse", "max_logit", "chance", "value_norm",
)  # fmt: skip
"""The order of columns; other quantities follow."""

STATISTICS = {
    name: _word_of(name) for name in (*_COLUMNS, *(each.name for each in ROW_QUANTITIES if not each.has_distance))
}

REGIONS = {
    "centre": Word("centre", "The quarter of the patches nearest to the centre of brightness."),
    "edges": Word("edges", "The quarter where brightness changes most from patch to patch."),
    "boundary": Word("boundary", "The quarter that touches most patches on the other side of the object's outline."),
    "texture": Word("texture", "The quarter where brightness varies most within 3 × 3 pixels."),
    "near": Word("near", "For each patch the quarter nearest to it."),
    "far": Word("far", "For each patch the quarter farthest from it."),
    "layout": Word("layout", "For each patch the quarter that position alone predicts, whatever the image."),
    "distance_ratio": Word("distance ratio", "Mean distance over that of an even spread: below 1 is nearer."),
    "layout_r2": Word("layout R²", "Share of the map's variance that position alone explains."),
}

PATTERNS = {
    "previous": "all weight on the token before",
    "next": "all weight on the token after",
    "self": "all weight on the query's own place",
    "first": "all weight on the first token",
    "duplicate": "all weight on other places that hold the same token",
    "induction": "all weight on what followed the same token elsewhere",
    "local": "weight spread evenly over the places within 3",
    "uniform": "weight spread evenly over everything",
}


def word(name: str) -> Word:
    """Return heading and meaning of a figure; one without a definition has its name for a heading, and no meaning."""
    return REGIONS.get(name) or _word_of(name)


WEAK, STRONG = 0.3, 0.5
"""Scores below the first are dimmed, from the second on they are bold."""


def strength(score: float | None) -> str:
    """The style in which what has this score is printed."""
    return "dim" if score is None or score < WEAK else "bold" if score >= STRONG else ""
