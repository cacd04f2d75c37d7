"""What ``watch`` shows of the weight between segments: means over heads, and the head with the most for each pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.cli._shared.headings import heading

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from headscope.report.tables import Section
    from headscope.stats import HeadStats

MOST_COLUMNS = 8  # segments of a table in the terminal
MOST_LAYERED = 16  # segments of a table with a line for each layer and segment
PAIRS = 8  # in the terminal
READ = "The mean mass that the queries of a segment (line) give to the keys of another (column)"
LENGTHS = "A longer segment receives more from a head that spreads evenly"
CHANCE = "chance is its share of the visible keys"


@dataclass(frozen=True)
class HighestHead:
    """The head that gives the most of a pair of segments, beside the part without the first token, and chance."""

    query: str
    key: str
    layer: str
    head: int
    mean: float
    without_first: float | None = None
    chance: float | None = None


@dataclass(frozen=True)
class SegmentSummary:
    """The weight between segments, over heads.

    Attributes:
        names: of the segments.
        count: the number of queries of each.
        mean: over the heads of all layers: query, key; NaN for a segment without queries.
        layers: layer -> the mean over its heads.
        highest: for each two different segments the head with the most, the largest first.
        without_first: as ``mean``, without the weight on the first token; None if that is unknown.
        chance: as ``mean``, if the keys of each row are exchanged: the share of the visible keys; None if unknown.
    """

    names: tuple[str, ...]
    count: list[int]
    mean: list[list[float]]
    layers: dict[str, list[list[float]]]
    highest: list[HighestHead]
    without_first: list[list[float]] | None = None
    chance: list[list[float]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the summary, ready for JSON."""
        return plain(asdict(self))


def summarize_segments(stats: HeadStats) -> SegmentSummary | None:
    """Return the summary of the segments; None if no layer has any."""
    import torch

    masses = {layer: part.segments for layer, part in stats.parts.items() if part.segments is not None}
    if not masses:
        return None
    first = next(iter(masses.values()))
    heads = [(layer, head) for layer, mass in masses.items() for head in range(mass.mean.shape[0])]
    every = torch.cat([mass.mean for mass in masses.values()])  # [all heads, S, S]
    count = torch.stack([mass.count.amax(0) for mass in masses.values()]).amax(0)
    layers = {layer: mass.mean.nanmean(0).tolist() for layer, mass in masses.items()}
    without = None
    if all(mass.first_sum is not None for mass in masses.values()):
        without = torch.cat([mass.without_first() for mass in masses.values()])
    nulls = [mass.null for mass in masses.values()]
    chance = None if None in nulls else torch.cat([null.mean for null in nulls if null is not None])
    highest = _find_highest(every, without, chance, heads, first.names)
    rest, even = (None if each is None else each.nanmean(0).tolist() for each in (without, chance))
    return SegmentSummary(first.names, count.tolist(), every.nanmean(0).tolist(), layers, highest, rest, even)


def _find_highest(
    every: Tensor,
    without: Tensor | None,
    chance: Tensor | None,
    heads: list[tuple[str, int]],
    names: tuple[str, ...],
) -> list[HighestHead]:
    top, at = every.nan_to_num(nan=-1.0).max(0)
    highest: list[HighestHead] = []
    for a, b in product(range(len(names)), repeat=2):
        if a != b and top[a, b] > 0:
            place, mean = int(at[a, b]), float(top[a, b])
            rest, even = (None if each is None else float(each[place, a, b]) for each in (without, chance))
            highest.append(HighestHead(names[a], names[b], *heads[place], mean, rest, even))
    return sorted(highest, key=lambda each: -each.mean)


def show_segments(out: Console, summary: SegmentSummary, short: Mapping[str, str]) -> None:
    """Print the means over heads, and the heads with the most; ``short``: layer -> the name to show."""
    from rich.table import Table
    from rich.text import Text

    def table(columns: tuple[str, ...], cells: list[tuple[str, ...]], texts: int) -> Table:
        drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for n, column in enumerate(columns):
            drawn.add_column(Text(visible(column)), justify="left" if n < texts else "right", overflow="fold")
        for line in cells:
            drawn.add_row(*(Text(visible(cell)) for cell in line))
        return drawn

    heading(out, "Segments", "mean mass from each (line) to each (column), over all heads")
    if len(summary.names) <= MOST_COLUMNS:
        out.print(table(("from", "queries", *summary.names), _list_means(summary), 1))
    for line in _list_sinks(summary):
        out.print(Text(visible(line)))
    shown = summary.highest[:PAIRS]
    if shown:
        cells = _list_highest(shown, short)
        left_out = len(summary.highest) - len(shown)
        more = f" {left_out} more pairs of segments are in --json." if left_out else ""
        chance = f"; {CHANCE}" if _knows_chance(shown) else ""
        out.print(Text(f"For two segments, the head that reads most. {LENGTHS}{chance}.{more}", style="dim"))
        out.print(table(_headings(shown), cells, 3))


def make_sections(summary: SegmentSummary, short: Mapping[str, str], note: str) -> list[Section]:
    """Return the tables of the page; ``short``: layer -> the name to show, ``note``: what they have in common."""
    from headscope.report.tables import Section

    names, words = tuple(map(visible, summary.names)), ("from", "to", "layer")
    caption = " ".join([f"{LENGTHS}.", *_list_sinks(summary)])
    mean = Section(
        "Segments", f"{READ}, over all heads.", ["from", "queries", *names], _list_means(summary), caption, words
    )
    chance = f" {LENGTHS}; {CHANCE}." if _knows_chance(summary.highest) else ""
    highest = Section(
        "Segments: heads", f"For each two segments, the head that gives the most.{chance}",
        [*_headings(summary.highest)], _list_highest(summary.highest, short), note, words,
    )  # fmt: skip
    if len(names) > MOST_LAYERED:
        return [mean, highest]
    cells = [
        (short[layer], name, *map(_decimal, line))
        for layer, lines in summary.layers.items()
        for name, line in zip(names, lines, strict=True)
    ]
    by_layer = Section(
        "Segments: layers", "Means over the heads of a layer.", ["layer", "from", *names], cells, note, words
    )
    return [mean, highest, by_layer]


def _list_means(summary: SegmentSummary) -> list[tuple[str, ...]]:
    return [
        (name, f"{count:,}", *map(_decimal, line))
        for name, count, line in zip(summary.names, summary.count, summary.mean, strict=True)
    ]


def _list_sinks(summary: SegmentSummary) -> list[str]:
    """Return a sentence for the largest means of which more than half is on the first token."""
    if summary.without_first is None:
        return []
    pairs = product(enumerate(summary.names), repeat=2)
    sinks = [
        (mean, rest, visible(query), visible(key))
        for (a, query), (b, key) in pairs
        if _is_sink(mean := summary.mean[a][b], rest := summary.without_first[a][b])
    ]
    return [
        f"From “{query}” to “{key}”: {_decimal(mean)}, and {_decimal(rest)} without the first token."
        for mean, rest, query, key in sorted(sinks, reverse=True)[:PAIRS]
    ]


def _is_sink(mean: float, rest: float | None) -> bool:
    """Return whether more than half of a share is on the first token."""
    return rest is not None and 2 * rest < mean


def _headings(heads: list[HighestHead]) -> tuple[str, ...]:
    """Return the headings of the heads with the most; the last one only where a share is mostly on the first token."""
    chance = ("chance",) if _knows_chance(heads) else ()
    return ("from", "to", "layer", "head", "mass", *chance, *(("without first",) if _has_sink(heads) else ()))


def _list_highest(heads: list[HighestHead], short: Mapping[str, str]) -> list[tuple[str, ...]]:
    knows_chance, has_sink = _knows_chance(heads), _has_sink(heads)
    cells: list[tuple[str, ...]] = []
    for each in heads:
        numbers = [each.mean]
        if each.chance is not None and knows_chance:
            numbers.append(each.chance)
        if each.without_first is not None and has_sink:
            numbers.append(each.without_first)
        cells.append((each.query, each.key, short[each.layer], str(each.head), *map(_decimal, numbers)))
    return cells


def _knows_chance(heads: list[HighestHead]) -> bool:
    return all(each.chance is not None for each in heads)


def _has_sink(heads: list[HighestHead]) -> bool:
    return any(_is_sink(each.mean, each.without_first) for each in heads)


def _decimal(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
