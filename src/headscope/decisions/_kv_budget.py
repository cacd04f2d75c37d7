"""The attention mass that caches of fewer keys retain."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from headscope._analysis.answers import Basis, Decision, HasStats, share, stats_of
from headscope._support.arguments import as_whole
from headscope.stats import HeadStats

if TYPE_CHECKING:
    from headscope.stats._layer import LayerStats

__all__ = ["HeadBudget", "KVBudget", "kv_budget"]


@dataclass(frozen=True)
class HeadBudget:
    """The share of mass that budgets of keys retain, for one query head or the query heads that share keys.

    Attributes:
        layer: its name.
        name: "head 5", or "kv 1 (heads 4-7)" for the key/value head of a group.
        keys: the number of keys that received any weight.
        kept: the share of the received mass on the keys that receive the most, for each budget; NaN if nothing was
            received.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.decisions import kv_budget
        >>> q = torch.zeros(1, 2, 4, 8)  # equal logits: even rows
        >>> head = kv_budget(observe(q, q), keys=(1, 4)).heads[0]
        >>> head.name, head.keys, [round(share, 3) for share in head.kept]
        ('head 0', 4, [0.25, 1.0])
    """

    layer: str
    name: str
    keys: int
    kept: tuple[float, ...]


@dataclass(frozen=True)
class KVBudget(Decision):
    """The attention mass that smaller caches retain; see ``kv_budget``.

    Attributes:
        budgets: the numbers of keys that each head or group may retain.
        pooled: whether several forwards or batch entries are summed by position; each figure is then a lower bound for
            budgets chosen for each sequence separately.
        heads: query heads and, on request, groups, in the order of the model.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.decisions import kv_budget
        >>> q = torch.zeros(1, 2, 4, 8)  # equal logits: even rows
        >>> answer = kv_budget(observe(q, q), keys=(1, 4))
        >>> answer.pooled, answer.cells()[0]
        (False, ('0', 'head 0', '4', '25.0%', '100.0%'))
    """

    budgets: tuple[int, ...]
    pooled: bool
    heads: tuple[HeadBudget, ...]

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head or group", "keys", *(f"{budget:,}" for budget in self.budgets))

    def cells(self) -> list[tuple[str, ...]]:
        """Return the lines in the order of the model."""
        return [(each.layer, each.name, f"{each.keys:,}", *map(share, each.kept)) for each in self.heads]


def kv_budget(
    stats: HeadStats | HasStats,
    keys: Collection[int] = (64, 256, 1024),
    *,
    kv_heads: int | Mapping[str, int] | None = None,
) -> KVBudget:
    """Return the attention mass that a cache of the k keys with the most received weight (heavy hitters) retains.

    Args:
        stats: with ``received``.
        keys: budgets k, each from 1.
        kv_heads: the number of key/value heads, or that for each layer by name: adds a line for each group, whose query
            heads retain the same keys. By default only separate query heads.

    Exact for one sequence. ``received`` is summed by position, so for several sequences one set of positions serves
    all, which retains at most as much as a choice for each.

    Raises:
        TypeError: one budget instead of a collection.
        ValueError: nothing was received, a budget below 1, or heads that do not divide into ``kv_heads`` groups.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.decisions import kv_budget
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> answer = kv_budget(observe(q, q), keys=(1, 4), kv_heads=1)
        >>> [line.name for line in answer.heads]
        ['head 0', 'head 1', 'kv 0 (heads 0-1)']
    """
    if as_whole(keys) is not None:
        raise TypeError(f"keys: got {keys}, expected a tuple of budgets, such as ({keys},)")
    budgets = tuple(as_whole(k) or 0 for k in keys)
    if not budgets or min(budgets) < 1:
        raise ValueError(f"keys: got {tuple(keys)}, expected whole numbers from 1")
    observed = stats_of(stats)
    parts = {layer: part for layer, part in observed.parts.items() if _has_received(part)}
    if not parts:
        raise ValueError("kv_budget: requires the mass that keys received; observe with Observe(received=True)")
    if isinstance(kv_heads, Mapping) and (unknown := [layer for layer in kv_heads if layer not in observed.parts]):
        raise ValueError(f"kv_heads: got {', '.join(unknown)}, expected layers: {', '.join(observed.layers)}")
    lines: list[HeadBudget] = []
    for layer, part in parts.items():
        groups = kv_heads.get(layer) if isinstance(kv_heads, Mapping) else kv_heads
        lines += _budgets(layer, part, budgets, groups)
    rows = [n for part in parts.values() for n in part.rows.tolist()]
    pooled = any(part.runs > 1 or part.of > _queries(part) for part in parts.values())
    caveat = "The keys are chosen with hindsight, which a cache does not have while it fills."
    if pooled:
        caveat += (
            " Several forwards or batch entries are summed by position: for steps of one sequence the figures "
            "are exact, for"
        )
        caveat += " several sequences they are lower bounds."
    basis = Basis.of_layers(parts.values(), ("received",), rows)
    if basis.sampled:
        caveat += " In a sample of the rows too few keys receive weight: with few rows these figures are too high."
    if missing := [layer for layer in observed.layers if layer not in parts]:
        caveat += f" Excluded, because received was not observed: {', '.join(missing)}."
    return KVBudget(basis, caveat, budgets, pooled, tuple(lines))


def _has_received(part: LayerStats) -> bool:
    return part.received is not None and part.eligible is not None


def _queries(part: LayerStats) -> int:
    """Return the number of queries of a batch entry in one run; for an older file, which lacks it, an upper bound."""
    if part.lengths is not None:
        return part.lengths[0]
    return 0 if part.received is None else part.received.shape[-1]


def _budgets(layer: str, part: LayerStats, budgets: tuple[int, ...], groups: int | None) -> Iterator[HeadBudget]:
    assert part.received is not None
    assert part.eligible is not None
    for head, (received, eligible) in enumerate(zip(part.received, part.eligible, strict=True)):
        yield _head_budget(layer, f"head {head}", received, eligible, budgets)
    if groups is None:
        return
    if groups < 1 or part.heads % groups:
        raise ValueError(f"kv_heads: got {groups}, expected a number that divides the {part.heads} heads of {layer}")
    size = part.heads // groups
    sums = (x.unflatten(0, (groups, size)).sum(1) for x in (part.received, part.eligible))
    for group, (received, eligible) in enumerate(zip(*sums, strict=True)):
        first, last = group * size, (group + 1) * size - 1
        name = f"kv {group} (head {first})" if size == 1 else f"kv {group} (heads {first}-{last})"
        yield _head_budget(layer, name, received, eligible, budgets)


def _head_budget(layer: str, name: str, received: Tensor, eligible: Tensor, budgets: tuple[int, ...]) -> HeadBudget:
    most_first = received.sort(descending=True).values.cumsum(0)  # [K]
    count = int((eligible > 0).sum())
    total = float(received.sum())
    shares = tuple(float(most_first[min(k, len(most_first)) - 1]) / total if total > 0 else math.nan for k in budgets)
    return HeadBudget(layer, name, count, tuple(min(each, 1.0) for each in shares))


for _class in (HeadBudget, KVBudget):
    _class.__module__ = "headscope.decisions"  # their public path
