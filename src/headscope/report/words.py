"""The names of figures as they are shown, each with its meaning in one line; docs/statistics.md says them in full."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PATTERNS", "REGIONS", "STAGES", "STATISTICS", "STRONG", "WEAK", "Word", "strength", "word"]


class Word(NamedTuple):
    """How a figure is headed, what it means, and with how many decimals it is shown."""

    heading: str
    meaning: str
    decimals: int = 2


STAGES = {
    1: "Input",
    2: "Linear projections for Q, K and V",
    3: "Split into heads",
    4: "Scaled dot-product attention",
    5: "Concatenation of heads",
    6: "Final linear projection",
}
"""The stages of a trace."""

STATISTICS = {
    "entropy": Word("entropy", "How spread out a row is, in nats: 0 on one key, ln n evenly over n keys."),
    "normalized_entropy": Word("entropy / ln n", "Entropy as a share of the most that a row's n visible keys allow."),
    "max_weight": Word("max weight", "The largest weight of a row."),
    "effective_keys": Word("effective keys", "1 / Σ p²: over how many keys a row is spread.", 1),
    "mass": Word("mass", "Σ p: below 1 only where a learned sink takes a share."),
    "distance": Word("distance", "Mean distance from query to key, in positions or patches.", 1),
    "self": Word("self", "Weight on the query's own place."),
    "previous": Word("previous", "Weight on the token just before."),
    "next": Word("next", "Weight on the token just after."),
    "first": Word("first", "Weight on the first token, where heads often put what they do not need."),
    "duplicate": Word("duplicate", "Weight on other places that hold the same token."),
    "induction": Word("induction", "Weight on what followed the same token elsewhere."),
    "lse": Word("lse", "log Σ exp of a row's scores: how large they are altogether."),
    "max_logit": Word("max logit", "The largest score of a row, before the softmax."),
    "chance": Word("chance", "1 / n: the weight of each of n visible keys if all had the same."),
    "value_norm": Word("value norm", "Mean length of the value vectors, by weight."),
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

WITHIN = {
    "window": Word("window", "Weight on the keys within {} of the query."),
    "streaming": Word("streaming", "Weight on the first keys and those within {} of the query."),
}
"""Of those that are made for several distances, such as ``window_64``."""


def word(name: str) -> Word:
    """Heading and meaning of a figure; one that is not known is its name, and means nothing."""
    found = (STATISTICS | REGIONS).get(name)
    if found is not None:
        return found
    kind, _, distance = name.rpartition("_")
    meaning = WITHIN[kind].meaning.format(distance) if kind in WITHIN else ""
    return Word(name.replace("_", " "), meaning)


WEAK, STRONG = 0.3, 0.5
"""Scores below the first are dimmed, from the second on they are bold."""


def strength(score: float | None) -> str:
    """The style in which what has this score is printed."""
    return "dim" if score is None or score < WEAK else "bold" if score >= STRONG else ""
