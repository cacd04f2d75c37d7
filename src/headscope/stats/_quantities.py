"""The row quantities, each defined once: name, formula, rows without it, histogram, and a reference in float64.

To add a quantity: define it here, compute it in ``_observe/portable.py`` (or ``place_quantities.py``) and in the native
kernels, and give it a row in docs/concepts/statistics.md. While the native kernels lack it, the portable form observes
it. tests/stats/test_quantities.py fails while any of these is missing, and names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Requirement = Literal["weights", "positions", "line", "tokens", "values", "selection"]
"""The requirements of a quantity: none, self-attention, positions on a line, tokens, values, or selected keys."""

Unit = Literal["share", "nats", "logits", "ratio", "input"]

UNIT = tuple(k / 20 for k in range(21))
NATS = tuple(k / 2 for k in range(33))
LOGITS = tuple(float(k) for k in range(-128, 129, 4))
DOUBLING = (0.0, *(2.0**k for k in range(-10, 21)))
KEYS = tuple(2.0**k for k in range(21))


@dataclass(frozen=True, eq=False)
class Row:
    """One row over its n visible keys, in float64: the input of references.

    Attributes:
        p, s: weights and final logits, [n].
        lse: log-sum-exp of the row, the sink's logit included.
        gap: position of each key minus that of the query, [n].
        first: which keys are among the first real ones, boolean [n].
        duplicate, induction: which keys have the query's own token, or come right after an occurrence of it, boolean
            [n].
        norms: lengths of the value vectors, [n].
        distance: w of ``window_w`` and ``streaming_w``.
        selected: which keys are selected, boolean [n]; None = there is no selection.
    """

    p: Tensor
    s: Tensor
    lse: float
    gap: Tensor
    first: Tensor
    duplicate: Tensor
    induction: Tensor
    norms: Tensor
    distance: float = 0.0
    selected: Tensor | None = None

    def mass(self, keys: Tensor) -> float:
        """Return the weight on these keys; NaN if there are none."""
        return float(self.p[keys].sum()) if bool(keys.any()) else math.nan


@dataclass(frozen=True, eq=False)
class Quantity:
    """The definition of one row quantity.

    Attributes:
        name: its name; a quantity with a distance appends ``_{w}``.
        formula: its formula, over the visible keys j of a row.
        reference: its value for one row, in float64; NaN for a row that does not have it.
        meaning: one sentence for readers of a page; ``{}`` is replaced by the distance.
        absent: which rows do not have it; empty = every counted row has it.
        edges: of its histogram.
        bounds: the smallest and the largest possible value of a row.
        requires: the requirements for rows to have it.
        unit: of its changes; "input" = it depends on the mask only.
        has_distance: whether it exists for each of ``Observe.windows``.
        on_request: whether it is measured only if ``Observe.extra`` names it.
        heading: of a column; empty = the name in words.
        decimals: the number of decimals shown.
        has_null: whether it depends on which keys have the weight, so that exchanging keys gives what chance gives.

    Examples:
        >>> from headscope.stats import quantity_of
        >>> quantity = quantity_of("entropy")
        >>> quantity.formula, quantity.unit
        ('-Σ_j p ln p', 'nats')
    """

    name: str
    formula: str
    reference: Callable[[Row], float]
    meaning: str
    absent: str = ""
    edges: tuple[float, ...] = UNIT
    bounds: tuple[float, float] = (0.0, 1.0)
    requires: Requirement = "weights"
    unit: Unit = "share"
    has_distance: bool = False
    on_request: bool = False
    heading: str = ""
    decimals: int = 2
    has_null: bool = False


def _entropy(row: Row) -> float:
    return float(torch.special.entr(row.p).sum())


def _normalized_entropy(row: Row) -> float:
    return _entropy(row) / math.log(len(row.p)) if len(row.p) >= 2 else math.nan


def _second_weight(row: Row) -> float:
    return float(row.p.topk(2).values[1]) if len(row.p) >= 2 else 0.0


def _recall(row: Row) -> float:
    mass = float(row.p.sum())
    return math.nan if row.selected is None or mass == 0 else min(1.0, float(row.p[row.selected].sum()) / mass)


def _recall_kl(row: Row) -> float:
    recall = _recall(row)
    return math.inf if recall == 0 else -math.log(recall)


def _largest_selected(row: Row) -> float:
    if row.selected is None or float(row.p.sum()) == 0:
        return math.nan
    return float(row.selected[(row.p == row.p.max()).nonzero()[0, 0]])


_NO_KEY = "no such key is visible"
_NO_MASS = "the mass is 0 (only with sinks)"
_NO_POSITION = "the query has no position, or no key has"

_ANY = (-math.inf, math.inf)
_FROM_0 = (0.0, math.inf)
_MOST_NORMALIZED = 2 / (math.e * math.log(2))  # of two keys next to a sink: p = 1 / e each

ROW_QUANTITIES = (
    Quantity(
        "lse", "log Σ_j exp s, the sink's logit included", lambda row: row.lse,
        "log Σ exp of a row's scores: their overall size.",
        edges=LOGITS, bounds=_ANY, unit="logits",
    ),
    Quantity(
        "max_logit", "max_j s", lambda row: float(row.s.max()), "The largest score of a row, before the softmax.",
        edges=LOGITS, bounds=_ANY, unit="logits",
    ),
    Quantity(
        "entropy", "-Σ_j p ln p", _entropy, "How spread out a row is, in nats: 0 = one key, ln n = evenly over n keys.",
        edges=NATS, bounds=(0.0, 100.0), unit="nats",  # 100 nats take e^100 keys
    ),
    Quantity(
        "normalized_entropy", "entropy / ln n", _normalized_entropy,
        "entropy / ln n: 1 = spread evenly over a row's n visible keys, 0 = all on one key.", "n < 2",
        bounds=(0.0, _MOST_NORMALIZED),
    ),
    Quantity("max_weight", "max_j p", lambda row: float(row.p.max()), "The largest weight of a row."),
    Quantity(
        "second_weight", "the second largest p", _second_weight, "The second largest weight of a row.", on_request=True
    ),
    Quantity(
        "effective_keys", "1 / Σ_j p²", lambda row: 1 / float(row.p.square().sum()),
        "1 / Σ p²: the number of keys over which a row is spread.", "Σ p² is 0 or denormal",
        edges=KEYS, bounds=(1.0, math.inf), unit="ratio", decimals=1,
    ),
    Quantity(
        "mass", "Σ_j p", lambda row: float(row.p.sum()), "Σ p: below 1 only where a learned sink takes a share."
    ),
    Quantity(
        "first", "mass on the first n real keys", lambda row: float(row.p[row.first].sum()),
        'Weight on the first token, the "attention sink": many heads put unused weight there.', has_null=True,
    ),
    Quantity(
        "chance", "1 / n", lambda row: 1 / len(row.p),
        "1 / n: the weight of each of n visible keys if all were equal.", unit="input",
    ),
    Quantity(
        "distance", "Σ_j p · ‖pos_i - pos_j‖", lambda row: float((row.p * row.gap.abs()).sum()),
        "Mean distance from query to key, in positions or patches.", _NO_POSITION,
        edges=DOUBLING, bounds=_FROM_0, requires="positions", unit="ratio", decimals=1, has_null=True,
    ),
    Quantity(
        "self", "p at pos_i", lambda row: row.mass(row.gap == 0), "Weight on the query's own position.", _NO_KEY,
        requires="positions", has_null=True,
    ),
    Quantity(
        "previous", "p at pos_i - 1", lambda row: row.mass(row.gap == -1), "Weight on the token just before.", _NO_KEY,
        requires="line", has_null=True,
    ),
    Quantity(
        "next", "p at pos_i + 1", lambda row: row.mass(row.gap == 1), "Weight on the token just after.", _NO_KEY,
        requires="line", has_null=True,
    ),
    Quantity(
        "window", "mass within w of pos_i", lambda row: float(row.p[row.gap.abs() <= row.distance].sum()),
        "Weight on the keys within {} of the query.", _NO_POSITION, requires="positions",
        has_distance=True, has_null=True,
    ),
    Quantity(
        "streaming", "mass within w of pos_i or on the first keys",
        lambda row: float(row.p[(row.gap.abs() <= row.distance) | row.first].sum()),
        "Weight on the first keys and those within {} of the query.", _NO_POSITION,
        requires="positions", has_distance=True, has_null=True,
    ),
    Quantity(
        "duplicate", "mass on other keys with the token of i", lambda row: row.mass(row.duplicate),
        "Weight on other positions with the same token.", _NO_KEY, requires="tokens", has_null=True,
    ),
    Quantity(
        "induction", "mass on keys after a place of the token of i", lambda row: row.mass(row.induction),
        "Weight on the tokens that followed the same token elsewhere.", _NO_KEY, requires="tokens", has_null=True,
    ),
    Quantity(
        "value_norm", "Σ_j p · ‖v_j‖", lambda row: float((row.p * row.norms).sum()),
        "Mean length of the value vectors, by weight.", "a visible value vector is not finite",
        edges=DOUBLING, bounds=_FROM_0, requires="values", unit="ratio",
    ),
    Quantity(
        "recall", "Σ of p over selected keys / Σ_j p", _recall,
        "The share of a row's weight on the selected keys: 1 = all of it.", _NO_MASS, requires="selection",
    ),
    Quantity(
        "recall_kl", "-ln recall", _recall_kl,
        "-ln recall, in nats: the divergence of the selected weights, scaled to a sum of 1, from all weights.",
        _NO_MASS, edges=DOUBLING, bounds=_FROM_0, requires="selection", unit="nats",
    ),
    Quantity(
        "largest_selected", "1 if the key with the largest p is selected, else 0", _largest_selected,
        "Whether the key with the largest weight is selected: 1 = yes, 0 = no.", _NO_MASS, requires="selection",
    ),
)  # fmt: skip
"""All quantities, in the order of statistics."""

MAY_BE_INFINITE = ("recall_kl",)
"""Quantities of which single rows may be infinite; means and histograms leave these rows out."""

_BY_NAME = {each.name: each for each in ROW_QUANTITIES}


def quantity_of(name: str) -> Quantity | None:
    """Return the definition of a row quantity by its name, also of one for a distance; None = it does not exist.

    Examples:
        >>> from headscope.stats import quantity_of
        >>> quantity_of("window_8").name, quantity_of("window")
        ('window', None)
    """
    if name in _BY_NAME:
        return None if _BY_NAME[name].has_distance else _BY_NAME[name]
    kind, _, distance = name.rpartition("_")
    quantity = _BY_NAME.get(kind)
    return quantity if quantity is not None and quantity.has_distance and distance else None


def histogram_edges(name: str) -> tuple[float, ...]:
    """Return the edges of a quantity's histogram.

    Bin k holds [edge k, edge k + 1); the outer two bins also hold what lies beyond.

    Examples:
        >>> from headscope.stats import histogram_edges
        >>> histogram_edges("entropy")[:4]
        (0.0, 0.5, 1.0, 1.5)
    """
    quantity = quantity_of(name)
    return UNIT if quantity is None else quantity.edges


def quantity_names(having: Collection[str], windows: Sequence[float], extra: Collection[str] = ()) -> list[str]:
    """Return the row quantities that rows have, in order.

    Args:
        having: the requirements, as in ``Quantity.requires``, that the rows meet.
        windows: the distances of quantities with a distance.
        extra: the optional quantities.

    Examples:
        >>> from headscope.stats import quantity_names
        >>> quantity_names(["positions"], windows=[8])
        ['distance', 'self', 'window_8', 'streaming_8']
    """
    names: list[str] = []
    for each in ROW_QUANTITIES:
        if each.requires in having and (not each.on_request or each.name in extra):
            names += [f"{each.name}_{w:g}" for w in windows] if each.has_distance else [each.name]
    return names


Quantity.__module__ = "headscope.stats"  # its public path
