"""Patterns without a score, because too few rows show them, and the heads that follow them all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headscope._analysis.pattern_means import pattern_means
from headscope.report._viewer.model import Columns, FewRows, Layer
from headscope.stats import CLEAR_SCORE, CLEAR_Z, MINIMUM_ROWS, LayerStats, pattern_scores

_Statistics = Mapping[str, Columns]


class _Of(NamedTuple):
    """The rows with keys of a pattern, and how far the mass on them is from chance, of each head."""

    rows: Sequence[float]
    z: Sequence[float]


def few_rows_of_weights(
    weights: NDArray[np.float32], visible: NDArray[np.bool_] | None, tokens: Sequence[str], statistics: _Statistics
) -> dict[str, FewRows]:
    """Return pattern -> its rows, from the weights of a layer, [H, T, T]; equal tokens have equal texts."""
    if not any(name in statistics for name in MINIMUM_ROWS):
        return {}
    numbers = {text: n for n, text in enumerate(dict.fromkeys(tokens))}
    scores = pattern_scores(
        torch.from_numpy(weights)[None],
        seen=None if visible is None else torch.from_numpy(visible)[None],
        tokens=torch.tensor([numbers[text] for text in tokens], device="cpu"),
        least_rows={},
    )
    found = {
        name: _Of(scores.rows[name].tolist(), scores.z[name].tolist()) for name in MINIMUM_ROWS if name in scores.rows
    }
    return _few(found, statistics)


def few_rows_of_part(part: LayerStats, statistics: _Statistics) -> dict[str, FewRows]:
    """Return pattern -> its rows, from the statistics of a layer."""
    if not any(
        name in part.moments and _most(part.moments[name].count.tolist()) < least
        for name, least in MINIMUM_ROWS.items()
    ):
        return {}
    scores = pattern_means(part)
    found = {name: _Of(scores[name].rows.tolist(), scores[name].z.tolist()) for name in MINIMUM_ROWS if name in scores}
    return _few(found, statistics)


def few_rows_of_page(layers: Sequence[Layer]) -> dict[str, dict[str, Any]]:
    """Return pattern -> what the page says of it, of the patterns that no head of any layer has a score for."""
    found: dict[str, dict[str, Any]] = {}
    for name, least in MINIMUM_ROWS.items():
        with_it = [(n, layer) for n, layer in enumerate(layers) if name in layer.statistics]
        if not with_it or not all(name in layer.few for _, layer in with_it):
            continue
        found[name] = {
            "rows": max(layer.few[name].rows for _, layer in with_it),
            "of": max(layer.facts["lookedAt"] for _, layer in with_it),
            "needs": least,
            "heads": [[n, head] for n, layer in with_it for head in layer.few[name].heads],
        }
    return found


def _most(rows: Sequence[float]) -> int:
    return int(max(rows, default=0))


def _few(found: Mapping[str, _Of], statistics: _Statistics) -> dict[str, FewRows]:
    few: dict[str, FewRows] = {}
    for name, (rows, z) in found.items():
        if name not in statistics or not 0 < _most(rows) < MINIMUM_ROWS[name]:
            continue
        means = statistics[name]["mean"]
        ahead = statistics["next"]["mean"] if name == "induction" and "next" in statistics else [None] * len(means)
        clear = [
            head
            for head, (mean, other, distance) in enumerate(zip(means, ahead, z, strict=True))
            if mean is not None and mean - (other or 0.0) >= CLEAR_SCORE and distance >= CLEAR_Z
        ]
        few[name] = FewRows(_most(rows), clear)
    return few
