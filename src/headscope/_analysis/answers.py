"""What every decision carries beside its answer: what it rests on, how it is shown, and how it is handed on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.stats import HeadStats

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.stats._layer import LayerStats


class HasStats(Protocol):
    """Anything that holds statistics of heads, a recording say."""

    @property
    def stats(self) -> HeadStats:
        """The statistics."""
        ...


def stats_of(source: HeadStats | HasStats, argument: str = "stats") -> HeadStats:
    """The statistics themselves.

    Raises:
        TypeError: it is neither statistics nor a holder of them.
    """
    stats: object = source if isinstance(source, HeadStats) else getattr(source, "stats", None)
    if not isinstance(stats, HeadStats):
        raise TypeError(f"{argument}: got {type(source).__name__}, expected HeadStats or a recording")
    return stats


@dataclass(frozen=True)
class Basis:
    """What a claim rests on.

    Attributes:
        quantities: the statistics that it is made from.
        rows: the fewest and the most rows that a head's figures stand on.
        forwards: how many observed calls are pooled, in the layer with the most.
        looked_at, of: how many query rows a head was looked at in, and how many there were, all layers together.
        broken: how many rows hold NaN or infinity and take part in nothing, all heads together.
    """

    quantities: tuple[str, ...]
    rows: tuple[int, int]
    forwards: int
    looked_at: int
    of: int
    broken: int

    @staticmethod
    def of_layers(parts: Collection[LayerStats], quantities: Sequence[str], rows: Sequence[int]) -> Basis:
        """Of these layers; ``rows`` as counted for each head."""
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
        """Whether not all query rows were looked at."""
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
    """The word for so many."""
    return word if count == 1 else word + "s"


@dataclass(frozen=True)
class Answer(ABC):
    """An answer drawn from statistics, that can be shown and handed on."""

    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""

    @abstractmethod
    def cells(self) -> list[tuple[str, ...]]:
        """Its lines, as text."""

    @abstractmethod
    def caption(self) -> str:
        """What stands below the table."""

    def table(self, limit: int | None = None) -> Table:
        """The answer as a table, for ``rich.print``; at most ``limit`` lines."""
        columns, cells = self.columns(), self.cells()
        places = [at for at, name in enumerate(columns) if name in LAYERS]
        short, note = short_layers(list(dict.fromkeys(line[at] for line in cells for at in places)))
        lines = [[short[cell] if at in places else cell for at, cell in enumerate(line)] for line in cells]
        return as_table(columns, lines, f"{note}{self.caption()}", limit)

    def to_dict(self) -> dict[str, Any]:
        """The answer ready for JSON; what is not defined is None."""
        return plain(asdict(self))

    def __rich__(self) -> Table:
        return self.table()


@dataclass(frozen=True)
class Decision(Answer):
    """An answer about one observation.

    Attributes:
        basis: what it rests on.
        caveat: what it does not say.
    """

    basis: Basis
    caveat: str

    def caption(self) -> str:
        """What stands below the table."""
        return f"{self.basis} {self.caveat}"

    def to_dict(self) -> dict[str, Any]:
        """The answer ready for JSON; what is not defined is None."""
        entries = super().to_dict()
        entries["basis"]["sampled"] = self.basis.sampled
        return entries


def as_table(columns: Sequence[str], cells: Sequence[Sequence[str]], caption: str, limit: int | None = None) -> Table:
    """A table of texts, the layer's name to the left and all else to the right."""
    from rich.table import Table
    from rich.text import Text

    shown = cells[:limit]
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
"""The columns that hold words and not numbers."""


def short_layers(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Layers without what all of them begin and end with, and a sentence that says what that is.

    ``model.layers.0.self_attn``, ``model.layers.1.self_attn``, … are 0, 1, …; names that are not alike stay whole.
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
    """A number from 0 to 1 as per cent; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.1%}"


def decimal(value: float) -> str:
    """A number to two decimals; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.2f}"


Basis.__module__ = "headscope.decisions"  # its public path
