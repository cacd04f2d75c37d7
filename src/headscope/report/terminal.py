"""A sheet in the terminal: rich renderables that adapt to the console's width, colours and encoding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headscope.report._ink import HIDDEN, SHADES, Ability, Ink, ability
from headscope.report.sheet import Sheet
from headscope.report.words import REGIONS, STATISTICS, strength
from headscope.stats import join_names

__all__ = ["image_picture", "map_picture", "statistics_table", "tokens_line"]

WORTH = (
    *("normalized_entropy", "max_weight", "effective_keys", "distance"),
    *("previous", "self", "duplicate", "induction", "first"),
)
"""The statistics of the table; a narrow console shows the first ones."""

LONGEST_HEADING = 10
"""Characters; a longer heading takes two lines."""

Values = NDArray[np.float64]


def tokens_line(sheet: Sheet) -> RenderableType:
    """Return the tokens in order, each after its position.

    Examples:
        >>> import torch
        >>> from headscope.report import terminal, text_sheet
        >>> from rich.console import Console
        >>> sheet = text_sheet("A few tokens", ["two", " ", "words"], [torch.eye(3)[None]])
        >>> Console(width=60, color_system=None).print(terminal.tokens_line(sheet))
        0 two  1 ␣  2 words
    """
    return _Tokens(sheet.labels)


def statistics_table(sheet: Sheet) -> RenderableType:
    """Return a table with a line for each head: best-matching pattern (or region of the image), and a few statistics.

    Columns that do not fit the width are left out, from the right.

    Examples:
        >>> import torch
        >>> from headscope.report import terminal, text_sheet
        >>> from rich.console import Console
        >>> sheet = text_sheet("Each token attends to itself", [*"abcde"], [torch.eye(5)[None]])
        >>> Console(width=60, color_system=None).print(terminal.statistics_table(sheet))
                                 normalized              effective
        head  best match  score     entropy  max weight       keys
        0.0   self         1.00        0.00        1.00        1.0
    """
    return _Statistics(sheet)


def map_picture(sheet: Sheet, layer: int, head: int) -> RenderableType:
    """Return the map of one head, queries down and keys across; if it does not fit, the maximum of each bin.

    Examples:
        >>> import torch
        >>> from headscope.report import terminal, text_sheet
        >>> from rich.console import Console
        >>> sheet = text_sheet("Each token attends to itself", ["a", "b"], [torch.eye(2)[None]])
        >>> Console(width=60, color_system=None).print(terminal.map_picture(sheet, layer=0, head=0))
             a    b
        a 1.00
        b 0.00 1.00
        Each row shows where one token looks; strongest weight 1.00.
    """
    return _Map(sheet, layer, head)


def image_picture(sheet: Sheet, layer: int, head: int, *, query: int | None = None) -> RenderableType:
    """Return the image, and next to it the weights of the patch ``query``; by default the mean over all queries.

    Raises:
        ValueError: the sheet is not of an image, or the patch does not exist.

    Examples:
        >>> import torch
        >>> from headscope.report import image_sheet, terminal
        >>> from rich.console import Console
        >>> sheet = image_sheet("Two patches", torch.tensor([[0, 255]]).byte().numpy(), (1, 2), [torch.eye(2)[None]])
        >>> Console(width=60, color_system=None).print(terminal.image_picture(sheet, 0, 0, query=0))
        []@@    []
        The image, and where the patch [] (row 0, column 0) looks...
    """
    if sheet.image is None or sheet.grid is None:
        raise ValueError(f"sheet: expected the sheet of an image, got kind {sheet.kind!r}")
    if query is not None and not 0 <= query < len(sheet.tokens):
        raise ValueError(f"query: expected 0 to {len(sheet.tokens) - 1}, got {query}")
    return _ImagePicture(sheet, layer, head, query)


# ---------------------------------------------------------------- tokens, table


@dataclass(frozen=True)
class _Tokens:
    labels: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        able = ability(console, options)
        line = Text()
        for n, label in enumerate(self.labels):
            token = Text().append(f"{n} ", "dim").append(able.label(label), "bold")
            if line and line.cell_len + 2 + token.cell_len > options.max_width:
                yield line
                line = Text()
            line.append("  " if line else "").append_text(token)
        yield line


@dataclass(frozen=True)
class _Column:
    """A column of the table: heading, and text and style of each head; rich's own tables are ten times slower."""

    heading: str
    cells: list[str]
    styles: list[str]
    words: bool = False

    @cached_property
    def lines(self) -> tuple[str, str]:
        """The heading in two lines, the upper one empty if it is short."""
        if len(self.heading) <= LONGEST_HEADING:
            return "", self.heading
        upper, _, lower = self.heading.rpartition(" ")
        return upper, lower

    @cached_property
    def width(self) -> int:
        return max(map(len, (*self.lines, *self.cells)))

    def aligned(self, text: str) -> str:
        """Return text padded to the width of the column: words on the left, numbers on the right."""
        return text.ljust(self.width) if self.words else text.rjust(self.width)


@dataclass(frozen=True)
class _Statistics:
    sheet: Sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        able = ability(console, options)
        columns: list[_Column] = []
        room = options.max_width
        for column in _columns(self.sheet, able):
            room -= column.width + 2
            if room < -2:  # the last needs no gap
                break
            columns.append(column)
        for line in (0, 1):
            if line or any(column.lines[line] for column in columns):
                yield Text("  ".join(column.aligned(column.lines[line]) for column in columns), "bold")
        number = 0
        for weights in self.sheet.weights:
            if number:
                yield ""  # between layers
            for _ in weights:
                line = Text()
                for column in columns:
                    line.append("  " if line else "")
                    line.append(column.aligned(column.cells[number]), column.styles[number])
                yield line
                number += 1


def _columns(sheet: Sheet, able: Ability) -> list[_Column]:
    """Return the columns, the most useful first."""
    heads = [(layer, head) for layer, weights in enumerate(sheet.weights) for head in range(len(weights))]
    columns = [_Column("head", [f"{layer}.{head}" for layer, head in heads], [""] * len(heads), words=True)]
    if sheet.kind == "image":
        looks = [sheet.named_looks[layer][head] for layer, head in heads]
        names = ["-" if look is None else look[0] for look in looks]
        columns += [_Column("looks at", names, [strength(look and look[1] - 1) for look in looks], words=True)]
        columns += [_figures("x chance", [look and look[1] for look in looks], 2)]
        for name, word in REGIONS.items():
            figures = [sheet.regions[layer][name][head] for layer, head in heads]
            columns.append(_figures(able.label(word.heading), figures, word.decimals))
        return columns
    matches = [sheet.patterns[layer][head] for layer, head in heads]
    second = [sheet.also[layer][head] if sheet.also else None for layer, head in heads]
    names = [join_names((match and match.name) or "-", also) for match, also in zip(matches, second, strict=True)]
    columns += [_Column("best match", names, [strength(match and match.score) for match in matches], words=True)]
    columns += [_figures("score", [match and match.score for match in matches], 2)]
    for name in WORTH:
        figures = [sheet.statistics[layer].get(name, [None] * sheet.heads)[head] for layer, head in heads]
        if any(figure is not None for figure in figures):
            columns.append(_figures(STATISTICS[name].heading, figures, STATISTICS[name].decimals))
    return columns


def _figures(heading: str, figures: Sequence[float | None], decimals: int) -> _Column:
    cells = ["-" if figure is None else f"{figure:.{decimals}f}" for figure in figures]
    return _Column(heading, cells, [""] * len(cells))


# ---------------------------------------------------------------- a map


@dataclass(frozen=True)
class _Map:
    sheet: Sheet
    layer: int
    head: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        able = ability(console, options)
        values, most = _values(self.sheet, self.layer, self.head)
        labels = [able.label(label) for label in self.sheet.labels]
        length = len(labels)
        side = min(max(cell_len(label) for label in labels), max(4, options.max_width // 5), 16)
        room = max(1, options.max_width - side - 1)
        ink = Ink(able, most, root=length > 40)
        scale = ", square-root scale" if ink.root else ""
        note = f"Each row shows where one token looks; strongest weight {most:.2f}{scale}."
        if 5 * length <= room:
            lines = _numbered(values, ink, labels, side)
        elif 2 * length <= room:
            lines = _two_wide(values, ink, labels, side)
        else:
            bins = min(length, room)
            lines = _one_wide(_pooled(values, bins), ink, labels, side)
            if bins < length:
                note += f" {length} tokens in {bins} cells: each cell shows its largest weight."
        if not able.colour and 5 * length > room:
            note += f" From weak to strong: {SHADES.strip()}"
        yield from lines
        yield Text(note, "dim")


def _values(sheet: Sheet, layer: int, head: int) -> tuple[Values, float]:
    """Return one head's weights, ``HIDDEN`` where masked, and the largest one in rows with several visible keys."""
    values = sheet.weights[layer][head].astype(np.float64)
    values[np.isinf(values)] = math.nan
    sight = sheet.seen[layer]
    visible = np.ones(values.shape, dtype=np.bool_) if sight is None else sight[head]
    return np.where(visible, values, HIDDEN), largest(values[visible & (visible.sum(-1, keepdims=True) > 1)])


def _pooled(values: Values, bins: int) -> Values:
    """Return the maximum of each bin [⌊bT/n⌋, ⌊(b+1)T/n⌋) of both axes; NaN where a bin holds one."""
    start = [b * len(values) // bins for b in range(bins)]
    return np.maximum.reduceat(np.maximum.reduceat(values, start, axis=0), start, axis=1)


def _fit(label: str, cells: int, able: Ability) -> str:
    """Return a label padded on the left, or cut, to exactly ``cells`` columns."""
    if cell_len(label) > cells:
        label = set_cell_size(label, cells - 1) + ("…" if able.wide else "~")
    return " " * (cells - cell_len(label)) + label


def _row(label: str, side: int, able: Ability) -> Text:
    """Return the start of a line: the token of the query."""
    return Text().append(_fit(label, side, able) + " ", "dim")


def _numbered(values: Values, ink: Ink, labels: list[str], side: int) -> Iterator[Text]:
    """Yield lines with every weight as a number on its colour, for a few tokens."""
    yield Text(" " * (side + 1) + "".join(_fit(label, 4, ink.able) + " " for label in labels), "dim")
    for label, row in zip(labels, values, strict=True):
        line = _row(label, side, ink.able)
        for value in row:
            line.append_text(ink.cell(value, 5, " " if value == HIDDEN else f"{value:.2f}"))
        yield line


def _two_wide(values: Values, ink: Ink, labels: list[str], side: int) -> Iterator[Text]:
    """Yield lines with two characters for each weight, and the token of each column written downwards."""
    height = min(8, max(len(label) for label in labels))
    for line in range(height):
        letters = (label[:height].rjust(height)[line] for label in labels)
        yield Text(" " * (side + 1) + "".join(_fit(letter, 2, ink.able) for letter in letters), "dim")
    for label, row in zip(labels, values, strict=True):
        yield _row(label, side, ink.able).append_text(Text().join(ink.cell(value, 2) for value in row))


def _one_wide(values: Values, ink: Ink, labels: list[str], side: int) -> Iterator[Text]:
    """Yield lines with one character for each weight, or for two; above the columns their positions."""
    bins, length = len(values), len(labels)
    ruler = ""
    for b in range(0, bins, 10):
        number = str(b * length // bins)
        if b + len(number) <= bins:  # a number that is cut would be wrong
            ruler = ruler.ljust(b) + number
    yield Text(" " * (side + 1) + ruler, "dim")
    halves = ink.able.colour and ink.able.wide
    for top in range(0, bins, 2 if halves else 1):
        line = _row(labels[top * length // bins], side, ink.able)
        below = values[top + 1] if top + 1 < bins else np.full(bins, HIDDEN)
        for one, other in zip(values[top], below, strict=True):
            line.append_text(ink.halves(one, other) if halves else ink.cell(one, 1))
        yield line


# ---------------------------------------------------------------- an image


@dataclass(frozen=True)
class _ImagePicture:
    sheet: Sheet
    layer: int
    head: int
    query: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        able = ability(console, options)
        looked = looked_at(self.sheet, self.layer, self.head, self.query)
        columns = looked.shape[1]
        marked = None if self.query is None else divmod(self.query, columns)
        grey = patches(brightness(self.sheet), Ink(able, 255.0, grey=True), marked)
        picture = patches(looked, Ink(able, largest(looked)), marked)
        pictures = Table.grid(padding=(0, 4, 0, 0))
        if 4 * columns + 4 <= options.max_width:
            pictures.add_row(grey, picture)
        else:
            pictures.add_row(grey)
            pictures.add_row(picture)
        yield pictures
        yield Text(_caption(self.sheet, looked, self.query), "dim")


def looked_at(sheet: Sheet, layer: int, head: int, query: int | None) -> Values:
    """Return the weight on each patch, of one query or the mean over queries with finite weights; [rows, columns]."""
    assert sheet.grid is not None  # image_picture has checked
    weights = sheet.weights[layer][head].astype(np.float64)
    if query is not None:
        return np.where(np.isfinite(weights[query]), weights[query], math.nan).reshape(sheet.grid)
    whole = weights[np.isfinite(weights).all(-1)]
    return (whole.mean(0) if len(whole) else np.full(len(weights), math.nan)).reshape(sheet.grid)


def largest(values: Values) -> float:
    """Return the largest finite value, or 1 where none is above 0: the value with the full colour."""
    return float(values.max(initial=0.0, where=np.isfinite(values))) or 1.0


def brightness(sheet: Sheet) -> Values:
    """Return the mean brightness of each patch, [rows, columns]."""
    assert sheet.image is not None  # image_picture has checked
    assert sheet.grid is not None
    rows, columns = sheet.grid
    height, width = sheet.image.shape[:2]
    pixels = sheet.image.astype(np.float64).reshape(rows, height // rows, columns, width // columns, -1)
    return pixels.mean((1, 3, 4))  # [rows, columns]


def patches(values: Values, ink: Ink, marked: tuple[int, int] | None) -> Text:
    """Return a picture with two characters for each patch."""
    lines = [
        Text().join(ink.cell(value, 2, "[]" if (row, column) == marked else "") for column, value in enumerate(line))
        for row, line in enumerate(values)
    ]
    return Text("\n").join(lines)


def _caption(sheet: Sheet, looked: Values, query: int | None) -> str:
    who = "all patches look on average" if query is None else f"the patch [] ({sheet.tokens[query]}) looks"
    if not np.isfinite(looked).any():
        return f"The image, and where {who}: the weights are not finite."
    best = int(np.nanargmax(looked))
    value = float(looked.flat[best])
    times = value * looked.size
    strongest = f"{sheet.tokens[best]} with {value:.3f}, {times:.1f} times the average patch"
    return f"The image, and where {who}. Strongest: {strongest}."
