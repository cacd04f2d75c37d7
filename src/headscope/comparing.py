"""Compare two observations head by head: what moved, by how much, and whether it exceeds the thresholds.

docs/guides/decide.md explains how a change is judged, and what the thresholds do not cover.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from headscope._analysis.answers import Answer, Basis, HasStats, decimal, plural, stats_of, without_rows
from headscope._analysis.distances import segment_means, segment_notes, variation_of_heads
from headscope._support.arguments import check_type, kind
from headscope._support.text import visible
from headscope.stats import quantity_of
from headscope.stats._origin import check_comparable
from headscope.stats._origin import notes as unchecked

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.stats import HeadStats
    from headscope.stats._layer import LayerStats, Moments

__all__ = ["Change", "Comparison", "HeadChange", "Thresholds", "compare"]

NAMED = 6  # of what is on one side only, below the table; all of it is in the result


@dataclass(frozen=True)
class Thresholds:
    """The smallest changes that count.

    A mean has moved if its change reaches the threshold of its unit *and* ``errors``.

    Attributes:
        share: for masses and all else from 0 to 1.
        entropy: in nats.
        logits: for ``lse`` and ``max_logit``.
        ratio: for ``effective_keys``, ``distance`` and ``value_norm``: the larger mean over the smaller, above 1.
        errors: how many standard errors of the difference; 0 = any, for rows that are the same on both sides.
        map: total variation between the maps, 0 to 1.
        received: total variation between what the keys receive, 0 to 1.

    Raises:
        TypeError: one of them is not a number.
        ValueError: a number is out of range.

    Examples:
        >>> from headscope.comparing import Thresholds
        >>> Thresholds(entropy=0.5).entropy, Thresholds().entropy
        (0.5, 0.25)
    """

    share: float = 0.05
    entropy: float = 0.25
    logits: float = 1.0
    ratio: float = 1.25
    errors: float = 3.0
    map: float = 0.1
    received: float = 0.1

    def __post_init__(self) -> None:
        for each in fields(self):
            got = getattr(self, each.name)
            if type(got) is bool or not issubclass(type(got), Real):
                raise TypeError(f"{each.name}: got {kind(got)}, expected a number")
            if each.name == "ratio" and not got > 1:
                raise ValueError(f"ratio: got {got}, expected above 1")
            if each.name == "errors" and not got >= 0:
                raise ValueError(f"errors: got {got}, expected at least 0")
            if not got > 0 and each.name != "errors":
                raise ValueError(f"{each.name}: got {got}, expected above 0")


@dataclass(frozen=True)
class Change:
    """One row quantity of one head, before and after.

    Attributes:
        name: the quantity.
        before, after: its means; NaN where no row has it.
        change: after - before.
        std: pooled standard deviation of its rows, to compare the change with their spread; NaN for segments.
        error: standard error of the change, as if rows were independent; NaN for segments.
        rows: the number of rows of either mean.
        size: the change in thresholds of its unit: 1 = equal to the threshold.
        moved: whether size is at least 1 and the change at least ``errors`` standard errors; also True if a value that
            both sides have is not finite, so the two cannot be compared: size is then infinite.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.comparing import compare
        >>> stats = observe(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
        >>> change = compare(stats, stats).heads[0].changes[0]
        >>> change.name, change.change, change.moved
        ('lse', 0.0, False)
    """

    name: str
    before: float
    after: float
    change: float
    std: float
    error: float
    rows: tuple[int, int]
    size: float
    moved: bool


@dataclass(frozen=True)
class HeadChange:
    """One head, before and after.

    Attributes:
        layer, head: which one.
        changes: of each row quantity that both have, and of each pair of segments (``segments/query/key``).
        map: total variation between the two maps; None where they cannot be compared.
        received: total variation between what the keys receive, by position; None likewise.
        broken: how many rows hold NaN or infinity, before and after.
        moved: what of it moved: names of quantities, "map", "received", "broken".

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.comparing import compare
        >>> q = 40 * torch.eye(4)[None, None]
        >>> "entropy" in compare(observe(0 * q, 0 * q), observe(q, q)).heads[0].moved
        True
    """

    layer: str
    head: int
    changes: tuple[Change, ...]
    map: float | None
    received: float | None
    broken: tuple[int, int]
    moved: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Comparison(Answer):
    """The changes between two observations; see ``compare``.

    Attributes:
        before, after: the data behind each side.
        thresholds: the smallest changes that counted.
        heads: every head that both have, in the order of the first.
        only_before, only_after: layers, heads and quantities that one of them has.
        notes: how the two differ otherwise: rows, lengths, samples.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.comparing import compare
        >>> stats = observe(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))
        >>> comparison = compare(stats, stats)
        >>> comparison.differs, len(comparison.heads)
        (False, 2)
    """

    before: Basis
    after: Basis
    thresholds: Thresholds
    heads: tuple[HeadChange, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def moved(self) -> tuple[HeadChange, ...]:
        """The heads that moved."""
        return tuple(head for head in self.heads if head.moved)

    @property
    def differs(self) -> bool:
        """Whether anything moved, or is on one side only."""
        return bool(self.moved or self.only_before or self.only_after)

    def __repr__(self) -> str:
        return f"Comparison({len(self.moved)} of {len(self.heads)} {plural('head', len(self.heads))} moved)"

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head", "quantity", "before", "after", "change", "± error", "× threshold")

    def cells(self) -> list[tuple[str, ...]]:
        """Return a line for each change, the largest in thresholds first."""
        lines = [line for head in self.moved for line in self._lines(head)]
        return [cells for _, cells in sorted(lines, key=lambda line: -line[0])]

    def _lines(self, head: HeadChange) -> Iterator[tuple[float, tuple[str, ...]]]:
        place = (head.layer, str(head.head))
        for each in head.changes:
            if each.moved:
                numbers = (_number(each.before), _number(each.after), f"{each.change:+.4g}", _number(each.error, 2))
                yield each.size, (*place, each.name, *numbers, decimal(each.size))
        limits = self.thresholds
        for name, apart, limit in (("map", head.map, limits.map), ("received", head.received, limits.received)):
            if name in head.moved and apart is not None:
                yield apart / limit, (*place, name, "", "", decimal(apart), "", decimal(apart / limit))
        if "broken" in head.moved:
            before, after = head.broken
            yield math.inf, (*place, "broken rows", f"{before:,}", f"{after:,}", f"{after - before:+,}", "", "")

    def caption(self) -> str:
        """Return the caption of the table."""
        count = len(self.moved)
        parts = [f"{count} of {len(self.heads)} {plural('head', len(self.heads))} moved."]
        if not count and (largest := self._largest()) is not None:
            head, change = largest
            parts.append(
                f"The largest change is {change.name} of {head.layer} head {head.head}: {change.change:+.3g}, "
                f"{change.size:.2f} of its threshold."
            )
        for side, only in (("before", self.only_before), ("after", self.only_after)):
            more = f" and {len(only) - NAMED:,} more" if len(only) > NAMED else ""
            parts += [f"Only {side}: {', '.join(only[:NAMED])}{more}."] if only else []
        parts += [f"{note}." for note in self.notes]
        return visible(" ".join(parts))

    def _largest(self) -> tuple[HeadChange, Change] | None:
        every = [(head, change) for head in self.heads for change in head.changes if not math.isnan(change.size)]
        return max(every, key=lambda each: each[1].size, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer ready for JSON; undefined values are None."""
        entries = super().to_dict()
        for side in ("before", "after"):
            entries[side]["sampled"] = getattr(self, side).sampled
        return {"differs": self.differs, "moved": len(self.moved), **entries}


def _number(value: float, digits: int = 4) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def compare(
    before: HeadStats | HasStats, after: HeadStats | HasStats, thresholds: Thresholds | None = None
) -> Comparison:
    """Compare two observations head by head: two checkpoints, or two inputs.

    Layers are matched by name and heads by number. Whatever only one side has is listed, never omitted silently.

    Args:
        before, after: changes are after - before.
        thresholds: the smallest changes that count; by default ``Thresholds()``.

    Raises:
        TypeError: neither statistics nor a recording.
        ValueError: recordings of different architectures, or of different heads of a layer.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.comparing import compare
        >>> q = 40 * torch.stack([torch.zeros(4, 4), torch.eye(4)])[None]
        >>> [head.head for head in compare(observe(0 * q, 0 * q), observe(q, q)).moved]
        [1]
    """
    limits = Thresholds() if thresholds is None else thresholds
    check_type("thresholds", limits, Thresholds, "Thresholds")
    old, new = stats_of(before, "before"), stats_of(after, "after")
    shared = [layer for layer in old.parts if layer in new.parts]
    check_comparable(
        old.origin, new.origin, {layer: (old.parts[layer].heads, new.parts[layer].heads) for layer in shared}
    )
    heads: list[HeadChange] = []
    only: tuple[list[str], list[str]] = ([], [])
    for mine, one, other in ((only[0], old, new), (only[1], new, old)):
        for layer, part in one.parts.items():
            mine += _missing(layer, part, other.parts.get(layer))
    for layer, part in old.parts.items():
        if layer in new.parts:
            heads += _heads(layer, part, new.parts[layer], limits)
    return Comparison(_basis(old), _basis(new), limits, tuple(heads), tuple(only[0]), tuple(only[1]), _notes(old, new))


def _basis(stats: HeadStats) -> Basis:
    parts = stats.parts.values()
    return Basis.of_layers(parts, stats.names, [n for part in parts for n in part.rows.tolist()])


def _missing(layer: str, part: LayerStats, other: LayerStats | None) -> Iterator[str]:
    """Return what the other side lacks of a layer."""
    if other is None:
        yield f"layer {layer}"
        return
    if part.heads > other.heads:
        last = part.heads - 1
        yield f"head {last} of {layer}" if last == other.heads else f"heads {other.heads} to {last} of {layer}"
    for name in part.moments:
        if name not in other.moments:
            yield f"{name} of {layer}"
    for name in ("map", "received", "segments", "received_max"):
        if getattr(part, name) is not None and getattr(other, name) is None:
            yield f"{name} of {layer}"


def _heads(layer: str, old: LayerStats, new: LayerStats, limits: Thresholds) -> Iterator[HeadChange]:
    count = min(old.heads, new.heads)
    places = _same_places(old, new)
    maps, received = (_maps(old, new, count), _received(old, new, count)) if places else (None, None)
    for head in range(count):
        changes = tuple(
            _change(name, old.moments[name], new.moments[name], head, limits)
            for name in old.moments
            if name in new.moments and _unit(name) != "input" and _is_one_measure(name, old, new)
        ) + _between_segments(old, new, head, limits)
        moved = [each.name for each in changes if each.moved]
        apart = {"map": maps, "received": received}
        distances = {name: None if x is None or bool(x[head].isnan()) else float(x[head]) for name, x in apart.items()}
        moved += [name for name, far in distances.items() if far is not None and far >= getattr(limits, name)]
        broken = int(old.broken[head]), int(new.broken[head])
        moved += ["broken"] if (broken[0] > 0) != (broken[1] > 0) else []
        yield HeadChange(layer, head, changes, distances["map"], distances["received"], broken, tuple(moved))


def _is_one_measure(name: str, old: LayerStats, new: LayerStats) -> bool:
    """Return whether a name means the same on both sides: ``first`` depends on the number of first keys."""
    if name != "first" and not name.startswith("streaming_"):
        return True
    return old.first == new.first or old.first is None or new.first is None


def _change(name: str, old: Moments, new: Moments, head: int, limits: Thresholds) -> Change:
    counts = int(old.count[head]), int(new.count[head])
    before, after = float(old.mean[head]), float(new.mean[head])
    squares = [float(each.M2[head]) for each in (old, new)]
    std = math.sqrt(max(sum(squares), 0.0) / sum(counts)) if all(counts) else math.nan
    error = (
        math.sqrt(max(sum(s / n**2 for s, n in zip(squares, counts, strict=True)), 0.0)) if all(counts) else math.nan
    )
    size = _size(name, before, after, limits)
    moved = size >= 1 and abs(after - before) >= limits.errors * error  # NaN: one side does not have a row with it
    if all(counts) and not (math.isfinite(after - before) and (math.isfinite(error) or before == after)):
        size, moved = math.inf, True  # such numbers cannot be compared, so they may differ
    return Change(name, before, after, after - before, std, error, counts, size, moved)


def _between_segments(old: LayerStats, new: LayerStats, head: int, limits: Thresholds) -> tuple[Change, ...]:
    """Return the change of the weight between each two segments; without spread, because single rows are not known."""
    changes: list[Change] = []
    for name, before, after, rows in segment_means(old, new, head):
        size = abs(after - before) / limits.share
        changes.append(Change(name, before, after, after - before, math.nan, math.nan, rows, size, size >= 1))
    return tuple(changes)


def _size(name: str, before: float, after: float, limits: Thresholds) -> float:
    """Return a change in thresholds of its unit."""
    unit = _unit(name)
    if unit == "ratio":
        low, high = sorted((before, after))
        if math.isnan(low + high):
            return math.nan
        return 0.0 if low == high else math.inf if low <= 0 else math.log(high / low) / math.log(limits.ratio)
    limit = {"nats": limits.entropy, "logits": limits.logits}.get(unit, limits.share)
    return abs(after - before) / limit


def _unit(name: str) -> str:
    """Return the unit of a row quantity's changes; see ``Quantity``."""
    quantity = quantity_of(name)
    return "share" if quantity is None else quantity.unit


def _same_places(old: LayerStats, new: LayerStats) -> bool:
    """Return whether the same share of the rows was observed.

    Maps and received of a sample hold the sampled rows only: if a head attends to a different key in each row, they
    differ much from those of all its rows.
    """
    return old.looked_at * new.of == new.looked_at * old.of


def _maps(old: LayerStats, new: LayerStats, count: int) -> Tensor | None:
    if old.map is None or new.map is None or not _same_bins(old, new):
        return None
    return variation_of_heads(*(x.sum[:count].flatten(1) for x in (old.map, new.map)))


def _same_bins(old: LayerStats, new: LayerStats) -> bool:
    """Return whether the bins of two maps hold the same shares of the queries and keys.

    Texts of two lengths do not, if one of them has fewer tokens than the map has bins: some bins are then empty.
    """
    if old.map is None or new.map is None or old.map.bins != new.map.bins:
        return False
    bins = old.map.bins
    sides = [tuple(min(length, bins) for length in part.lengths or (bins, bins)) for part in (old, new)]
    return sides[0] == sides[1]


def _received(old: LayerStats, new: LayerStats, count: int) -> Tensor | None:
    if old.received is None or new.received is None:
        return None
    wide = max(old.received.shape[-1], new.received.shape[-1])
    sides = (torch.nn.functional.pad(x[:count], (0, wide - x.shape[-1])) for x in (old.received, new.received))
    return variation_of_heads(*sides)


def _notes(old: HeadStats, new: HeadStats) -> tuple[str, ...]:
    """Describe how the observed rows of the two differ."""
    shared = [(old.parts[layer], new.parts[layer]) for layer in old.parts if layer in new.parts]
    notes: list[str] = []
    for what in ("forwards", "rows looked at", "keys", "first keys", "bins of the map"):
        numbers = [tuple(_looked_at(part).get(what) for part in pair) for pair in shared]
        sides = [{n for n in side if n is not None} for side in zip(*numbers, strict=True)]
        if any(a != b for a, b in numbers) and all(sides):
            notes.append(f"Different {what}: {_range(sides[0])} before, {_range(sides[1])} after")
    if not notes and any(_other_sights(a, b) for a, b in shared):  # other lengths would be the reason
        notes.append("The rows may have different numbers of visible keys: different masks or lengths")
    notes += [f"No row {when} has {', '.join(names)}" for when, names in without_rows(shared) if names]
    notes += segment_notes((a.segments, b.segments) for a, b in shared)
    if old.sampled != new.sampled:
        notes.append(f"Only {'before' if old.sampled else 'after'} is a sample of the rows")
    if not all(_same_places(a, b) for a, b in shared):
        notes.append("Maps and received are not compared where different shares of the rows were observed")
    if any(a.map and b.map and a.map.bins == b.map.bins and not _same_bins(a, b) for a, b in shared):
        notes.append("Maps are not compared where the lengths differ and a text is shorter than the map has bins")
    return (*notes, *unchecked(old.origin, new.origin))


def _looked_at(part: LayerStats) -> dict[str, int]:
    """Return how much data a layer's statistics are based on."""
    basis = {"forwards": part.runs, "rows looked at": part.looked_at}
    basis |= {"keys": part.received.shape[-1]} if part.received is not None else {}
    basis |= {"first keys": part.first} if part.first is not None else {}
    return basis | ({"bins of the map": part.map.bins} if part.map is not None else {})


def _range(numbers: set[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _other_sights(a: LayerStats, b: LayerStats) -> bool:
    if "chance" not in a.moments or "chance" not in b.moments or a.heads != b.heads:
        return False
    one, other = (part.moments["chance"] for part in (a, b))
    same = (one.count == other.count).cpu()  # others have broken rows
    means = (moments.mean.cpu()[same].double() for moments in (one, other))  # float32 where a device has no float64
    return not torch.allclose(*means, rtol=1e-6, equal_nan=True)
