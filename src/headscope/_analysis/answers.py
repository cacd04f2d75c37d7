"""The parts of every decision besides its answer: its basis, its display, and its export."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headscope._support.arguments import whole
from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.stats import HeadStats

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.stats._layer import LayerStats


class HasStats(Protocol):
    """Anything that holds statistics of heads, such as a recording."""

    @property
    def stats(self) -> HeadStats:
        """The statistics."""
        ...


def stats_of(source: HeadStats | HasStats, argument: str = "stats") -> HeadStats:
    """Return the statistics themselves.

    Raises:
        TypeError: it is neither statistics nor a holder of them.
    """
    stats: object = source if isinstance(source, HeadStats) else getattr(source, "stats", None)
    if not isinstance(stats, HeadStats):
        raise TypeError(f"{argument}: got {type(source).__name__}, expected HeadStats or a recording")
    return stats


@dataclass(frozen=True)
class Basis:
    """The data behind an answer.

    Attributes:
        quantities: the statistics that it uses.
        rows: the smallest and the largest number of rows of a head.
        forwards: the number of pooled calls, in the layer with the most.
        looked_at, of: the number of observed query rows of a head, and of all, all layers together.
        broken: the number of rows that hold NaN or infinity and are excluded, all heads together.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.decisions import patterns
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> basis = patterns(observe(q, q)).basis
        >>> basis.rows, basis.forwards, basis.sampled
        ((4, 4), 1, False)
    """

    quantities: tuple[str, ...]
    rows: tuple[int, int]
    forwards: int
    looked_at: int
    of: int
    broken: int

    @staticmethod
    def of_layers(parts: Collection[LayerStats], quantities: Sequence[str], rows: Sequence[int]) -> Basis:
        """Return the basis of these layers; ``rows`` as counted for each head."""
        return Basis(
            tuple(quantities),
            (min(rows, default=0), max(rows, default=0)),
            max((part.runs for part in parts), default=0),
            sum(part.looked_at for part in parts),
            sum(part.of for part in parts),
            sum(int(part.broken.sum()) for part in parts),
        )

    @property
    def sampled(self) -> bool:
        """Whether only a sample of the query rows was observed."""
        return self.looked_at < self.of

    def __str__(self) -> str:
        least, most = self.rows
        rows = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        text = f"From {', '.join(self.quantities)}; {rows} {plural('row', most)} for each head"
        text += f" in {self.forwards:,} {plural('forward', self.forwards)}"
        if self.sampled:
            text += f", a sample of {self.looked_at / self.of:.2g} of the rows"
        return visible(text + (f"; {self.broken:,} broken rows excluded" if self.broken else "") + ".")


def plural(word: str, count: int) -> str:
    """Return the word for this count."""
    return word if count == 1 else word + "s"


@dataclass(frozen=True)
class Answer(ABC):
    """An answer from statistics, which can be shown and exported."""

    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""

    @abstractmethod
    def cells(self) -> list[tuple[str, ...]]:
        """Return its lines, as text."""

    @abstractmethod
    def caption(self) -> str:
        """Return the caption of the table."""

    def table(self, limit: int | None = None) -> Table:
        """Return the answer as a table, for ``rich.print``; at most ``limit`` lines."""
        columns, cells = self.columns(), self.cells()
        places = [at for at, name in enumerate(columns) if name in LAYERS]
        short, note = short_layers(list(dict.fromkeys(line[at] for line in cells for at in places)))
        lines = [[short[cell] if at in places else cell for at, cell in enumerate(line)] for line in cells]
        return as_table(columns, lines, f"{note}{self.caption()}", limit)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer ready for JSON; undefined values are None."""
        return plain(asdict(self))

    def __rich__(self) -> Table:
        return self.table()


@dataclass(frozen=True)
class Decision(Answer):
    """An answer about one observation.

    Attributes:
        basis: the data behind it.
        caveat: its limits.
    """

    basis: Basis
    caveat: str

    def caption(self) -> str:
        """Return the caption of the table."""
        return f"{self.basis} {self.caveat}"

    def to_dict(self) -> dict[str, Any]:
        """Return the answer ready for JSON; undefined values are None."""
        entries = super().to_dict()
        entries["basis"]["sampled"] = self.basis.sampled
        return entries


def as_table(columns: Sequence[str], cells: Sequence[Sequence[str]], caption: str, limit: int | None = None) -> Table:
    """Return a table of texts, with layer names left-aligned and all else right-aligned."""
    from rich.table import Table
    from rich.text import Text

    shown = cells if limit is None else cells[: whole("limit", limit, 0)]
    left = len(cells) - len(shown)
    text = f"{left:,} more lines. {caption}" if left else caption
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.caption, table.caption_justify = (Text(visible(text)) if text else None), "left"
    for name in columns:
        table.add_column(name, justify="left" if name in TEXTS else "right", overflow="fold")
    for line in shown:
        table.add_row(*(Text(visible(cell)) for cell in line))  # Text: a layer's name is not markup
    return table


LAYERS = ("layer", "other layer")
TEXTS = ("layer", "other layer", "pattern", "next best", "quantity", "head or group")
"""The columns that hold words, not numbers."""


def short_layers(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return layer names without their common prefix and suffix, and a sentence that states these.

    ``model.layers.0.self_attn``, ``model.layers.1.self_attn``, … are 0, 1, …; names without a common form stay whole.
    """
    parts = [name.split(".") for name in names]
    most = min(map(len, parts), default=1) - 1
    start = next((n for n in range(most) if len({part[n] for part in parts}) > 1), most)
    stop = next((n for n in range(most - start) if len({part[-1 - n] for part in parts}) > 1), most - start)
    if len(parts) < 2 or start + stop == 0:
        return {name: name for name in names}, ""
    short = {name: ".".join(part[start : len(part) - stop]) for name, part in zip(names, parts, strict=True)}
    pattern = ".".join([*parts[0][:start], "*", *parts[0][len(parts[0]) - stop :]])
    return short, f"Layers: {pattern}. "


def share(value: float) -> str:
    """Return a number from 0 to 1 as per cent; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.1%}"


def decimal(value: float) -> str:
    """Return a number to two decimals; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.2f}"


Basis.__module__ = "headscope.decisions"  # its public path


def without_rows(shared: Sequence[tuple[LayerStats, LayerStats]]) -> list[tuple[str, list[str]]]:
    """Return the quantities that some layer has on the other side only: the input determines which rows have them."""
    names_of: dict[str, dict[str, None]] = {"before": {}, "after": {}}
    for pair in shared:
        for name in pair[0].moments:
            some = [name in part.moments and bool(part.moments[name].count.any()) for part in pair]
            if name in pair[1].moments and some[0] != some[1]:
                names_of["after" if some[0] else "before"][name] = None
    return [(when, list(names)) for when, names in names_of.items()]
