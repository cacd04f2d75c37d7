"""What a page of the viewer shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from headscope.report._viewer.packing import Source
from headscope.report.tables import Section

Columns = Mapping[str, Sequence[float | int | None]]
"""``mean``, ``std``, ``min``, ``max`` and ``count`` of a quantity, each one figure a head."""

Scored = tuple[str, float, int, bool]
"""A pattern, its score, on how many rows, and whether it is exact."""


@dataclass(frozen=True, eq=False)
class Picture:
    """The image whose patches the keys are.

    Attributes:
        pixels: uint8 [h, w] or [h, w, 3].
        grid: rows and columns of patches.
        special: how many keys stand before the patches and are none: CLS and registers.
        outline: for each patch whether it is of the object, row by row; empty = not known.
        regions: region -> how far each patch belongs to it, 0 to 1.
        looks: for each layer the region that each head looks at most, and how many times as much as by chance.
    """

    pixels: NDArray[Any]
    grid: tuple[int, int]
    special: int = 0
    outline: Sequence[int] = ()
    regions: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    looks: Sequence[Sequence[tuple[str, float] | None]] = ()


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer as the page has it.

    Attributes:
        name, short: its path, and as much of it as tells it from the others.
        facts: what the script reads beside the blocks: kind, lengths, runs, lookedAt, of, rows, broken.
        source: what the blocks are made of.
        statistics: quantity -> its columns.
        patterns: of each head, the best first.
    """

    name: str
    short: str
    facts: Mapping[str, Any]
    source: Source
    statistics: Mapping[str, Columns]
    patterns: Sequence[Sequence[Scored]]


@dataclass(frozen=True, eq=False)
class Shown:
    """All that a page shows; every text may come from outside, for it is escaped where it is written.

    Attributes:
        names: the quantities, in the order of the table.
        texts: of each token, or None.
        trace: rows of ``Trace.to_dict()``; trace_title: what they are of.
        tables: more that was found, as text.
    """

    title: str
    layers: Sequence[Layer]
    names: Sequence[str]
    texts: Sequence[str] | None
    footer: Mapping[str, str]
    lead: str = ""
    notes: Sequence[str] = ()
    trace: Sequence[Mapping[str, Any]] = ()
    trace_title: str = ""
    picture: Picture | None = None
    tables: Sequence[Section] = ()
