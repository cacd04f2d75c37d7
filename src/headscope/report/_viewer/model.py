"""The content of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from headscope.report._viewer.exact_heads import ExactHeads
from headscope.report._viewer.packing import Source
from headscope.report.highlights import Highlight
from headscope.report.tables import Section


@dataclass(frozen=True, eq=False)
class PackedHistory:
    """The history of a training as the page's script reads it.

    Attributes:
        layers: name, short name and number of heads of each layer, with empty values for all that a history lacks.
        description: what the script reads together with the blocks.
        content: the blocks, base64; see ``from_history.py``.
    """

    layers: Sequence[Mapping[str, Any]]
    description: Mapping[str, Any]
    content: str


Columns = Mapping[str, Sequence[float | int | None]]
"""``mean``, ``std``, ``min``, ``max`` and ``count`` of a quantity, each one value per head."""

Scored = tuple[str, float, int, bool]
"""A pattern, its score, the number of rows that it was scored on, and whether the score is exact."""


@dataclass(frozen=True, eq=False)
class Picture:
    """The image whose patches the keys are.

    Attributes:
        pixels: uint8 [h, w] or [h, w, 3].
        grid: rows and columns of patches.
        special: how many keys come before the patches: CLS and registers.
        outline: for each patch whether it belongs to the object, row by row; empty = not known.
        regions: region -> the share of each patch that belongs to it, 0 to 1.
        looks: for each layer the region that each head attends to most, and the ratio to chance.
        clear: for each layer the region of each head whose ratio chance does not explain: those that cards count.
        fixed: for each layer whether the rows of each head are nearly the same: it has fixed keys.

    Examples:
        >>> import numpy as np
        >>> from headscope.report.viewer import Picture
        >>> picture = Picture(np.zeros((8, 8), dtype=np.uint8), grid=(4, 4), special=1)
        >>> picture.pixels.shape, picture.grid
        ((8, 8), (4, 4))
    """

    pixels: NDArray[Any]
    grid: tuple[int, int]
    special: int = 0
    outline: Sequence[int] = ()
    regions: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    looks: Sequence[Sequence[tuple[str, float] | None]] = ()
    clear: Sequence[Sequence[str | None]] = ()
    fixed: Sequence[Sequence[bool]] = ()


class FewRows(NamedTuple):
    """A pattern that too few rows show for a score.

    Attributes:
        rows: how many show it, at most.
        heads: those with a mean weight on its keys of at least 0.3, and 3 standard deviations from chance.

    Examples:
        >>> from headscope.report._viewer.model import FewRows
        >>> FewRows(5, [3]).rows
        5
    """

    rows: int
    heads: Sequence[int]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a page.

    Attributes:
        name, short: its path, and the shortest form that differs from the other layers.
        facts: what the script reads together with the blocks: kind, lengths, runs, lookedAt, of, rows, broken.
        source: the content of the blocks.
        statistics: quantity -> its columns.
        patterns: for each head, the best match first.
        also: for each head, the second pattern beyond chance.
        few: the patterns that too few rows show for a score.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.viewer import shown_recording
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> shown_recording(recording).layers[0].facts["lengths"]
        (4, 4)
    """

    name: str
    short: str
    facts: Mapping[str, Any]
    source: Source
    statistics: Mapping[str, Columns]
    patterns: Sequence[Sequence[Scored]]
    also: Sequence[tuple[str, float] | None] = ()
    few: Mapping[str, FewRows] = field(default_factory=dict[str, FewRows])


@dataclass(frozen=True, eq=False)
class Against:
    """The recording that a page is compared with.

    Attributes:
        shown: its content.
        labels: the names of both recordings.
        distances: for each of its layers the distances between maps, and between received weight, of each head; None
            for a layer that only it has.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.viewer import shown_recording
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> shown_recording(recording, against=recording, labels=("before", "after")).against.distances[0]["received"]
        [0.0, 0.0]
    """

    shown: Shown
    labels: tuple[str, str]
    distances: Sequence[Mapping[str, Sequence[float | None]] | None]


@dataclass(frozen=True, eq=False)
class Shown:
    """All that a page shows. Texts may come from outside: they are escaped when the page is written.

    Attributes:
        names: the quantities, in the order of the table.
        texts: the text of each token, or None.
        trace: rows of ``Trace.to_dict()``.
        trace_title: their heading.
        tables: the summary, as text.
        opens_on: the layer and head to open first; None = the most striking one.
        run_texts: the text of each token of each run, where runs read different texts.
        exact: the heads whose weights the page computes itself.
        highlights: what to look at first.
        origin: the origin of the recording, ready for JSON; None if it is not known.
        numbers: lists of whole numbers that the facts of layers refer to, see ``progressions``.
        against: the recording that it is compared with.
        history: a training's history, in place of ``layers``.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.viewer import shown_recording
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> shown_recording(recording, title="A new model").title
        'A new model'
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
    opens_on: tuple[int, int] | None = None
    run_texts: Sequence[Sequence[str]] = ()
    exact: ExactHeads = field(default_factory=ExactHeads)
    highlights: Sequence[Highlight] = ()
    origin: Mapping[str, Any] | None = None
    numbers: Sequence[Sequence[int]] = ()
    against: Against | None = None
    history: PackedHistory | None = None
