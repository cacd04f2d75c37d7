"""A trace in the terminal: a few lines for each step, more with explanations, fitted to the console."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headscope._support.ascii import to_ascii
from headscope.report.tables import grid
from headscope.report.words import STAGES
from headscope.tracing._explanations import LETTERS, memory, quantity
from headscope.tracing._view import RenderedRow, RenderedTrace

WIDE = 110  # columns; from here on the values have a column of their own
VALUES = 34  # its width
COLOURS = {"B": "blue", "H": "magenta", "Hkv": "magenta", "Q": "green", "K": "yellow", "K+1": "yellow"}
MARKS = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("○", "dim")}


@dataclass(frozen=True)
class TraceTable:
    """The table of a trace."""

    trace: RenderedTrace
    explain: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _Page(self.trace, self.explain, options.max_width, options.ascii_only).parts()


@dataclass(frozen=True)
class _Page:
    trace: RenderedTrace
    explain: bool
    width: int
    ascii_only: bool

    @property
    def wide(self) -> bool:
        """Whether the values have a column of their own."""
        return self.width >= WIDE

    @cached_property
    def columns(self) -> tuple[int, int, int]:
        """The widths of the step, of its shape, and of the code next to the shape."""
        rows = self.trace.rows
        step, shape = (
            max(len(line) for row in rows for line in make(row).plain.split("\n")) for make in (self.facts, self.shape)
        )
        return step, shape, self.width - step - shape - 6 - (VALUES + 2 if self.wide else 0)

    def text(self, words: str, style: str = "") -> Text:
        return Text(to_ascii(words) if self.ascii_only else words, style)

    def parts(self) -> Iterator[RenderableType]:
        yield self.text(self.trace.title, "bold")
        yield self.legend()
        if self.trace.held is not None:
            yield self.text("values: the first of batch entry 0 and head 0", "dim")
        for stage, title in STAGES.items():
            rows = [row for row in self.trace.rows if row.stage == stage]
            if rows:
                yield Text()
                yield self.text(f"{stage}  {title}", "bold underline")
                yield self.steps(rows)
        yield Text()
        yield self.text(self.trace.summary, {True: "green", False: "bold red", None: "dim"}[self.trace.held])

    def legend(self) -> Text:
        """Return the meaning of each letter, in its colour."""
        used = {part for row in self.trace.rows for letter in row.axes for part in letter.split("·")}
        lines = [Text()]
        for letter in (letter for letter in LETTERS if letter in used):
            entry = Text.assemble(
                ("  " if lines[-1] else ""), (letter, f"bold {colour(letter)}"), f" {LETTERS[letter]}"
            )
            if len(lines[-1]) + len(entry) > self.width:
                lines.append(Text())
                entry = entry[2:]
            lines[-1].append(entry)
        return Text("\n").join(lines)

    def steps(self, rows: list[RenderedRow]) -> RenderableType:
        """Render one stage: each step's name, shape, equation, code, values, and invariant."""
        step, _, _ = self.columns
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=step)
        table.add_column(ratio=1)
        if self.wide:
            table.add_column(width=VALUES, no_wrap=True)
        for row in rows:
            cells = [self.facts(row), Group(*self.formula(row), *self.checks(row))]
            table.add_row(*cells, *([self.values(row, 4)] if self.wide else []))
            if self.explain and row is not rows[-1]:
                table.add_row()
        return table

    def facts(self, row: RenderedRow) -> Text:
        """Return the step's name, and the size of its result."""
        more = self.text(f"\n{quantity(row.elements)} {row.dtype}\n{memory(row.bytes)}", "dim")
        return Text.assemble((row.step, "bold"), more)

    def shape(self, row: RenderedRow) -> Text:
        """Return the sizes, with their letters below."""
        names = [self.text(letter).plain for letter in row.axes]
        sizes, letters = Text("["), Text("[")
        for n, (letter, name, size) in enumerate(zip(row.axes, names, row.shape, strict=True)):
            width = max(len(name), len(str(size)))
            sizes.append(", " if n else "").append(f"{size:>{width}}", f"bold {colour(letter)}")
            letters.append(", " if n else "").append(f"{name:>{width}}", colour(letter))
        return Text("\n").join([sizes.append("]"), letters.append("]")])

    def formula(self, row: RenderedRow) -> Iterator[RenderableType]:
        """Yield shape, equation and code; code that is too wide for the place next to the shape goes below it."""
        _, shape, room = self.columns
        code = [self.text(line, "green") for line in row.code.split("\n")]
        fits = all(len(line) <= room for line in code)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=shape, no_wrap=True)
        table.add_column()
        table.add_row(self.shape(row), Group(self.text(row.equation, "italic"), *(code if fits else ())))
        yield table
        if not fits:
            yield Padding(Group(*code), (0, 0, 0, 2))

    def checks(self, row: RenderedRow) -> Iterator[RenderableType]:
        """Yield the values, unless they have a column; the invariant; the note; and the explanation, if requested."""
        if row.corner and not self.wide:
            rotated = row.step.startswith("rotate")  # the first position does not rotate
            yield self.values(row, 4 if rotated or list(row.axes)[-2:] in (["Q", "K"], ["Q", "K+1"]) else 1)
        mark, style = MARKS[row.held]
        yield self.hanging((mark, style), row.invariant, "bold red" if row.held is False else "")
        if row.note:
            unusual = row.note.startswith("unusual")
            yield self.hanging(("!" if unusual else "·", "yellow"), row.note, "yellow" if unusual else "")
        if self.explain:
            yield self.hanging(("why    ", "bold cyan"), row.why)
            yield self.hanging(("mistake", "bold red"), row.mistake)

    def hanging(self, mark: tuple[str, str], words: str, style: str = "") -> RenderableType:
        """Return words that wrap with an indent after a mark."""
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_row(self.text(*mark), self.text(words, style))
        return table

    def values(self, row: RenderedRow, lines: int) -> Text:
        """Return the corner of the values, aligned in columns."""
        cells = [[to_ascii(cell) if self.ascii_only else cell for cell in line] for line in grid(row.corner or [])]
        width = max(6, *(len(cell) for line in cells for cell in line), 0)
        text = Text()
        for line in cells[:lines]:
            text.append("\n" if text else "")
            for cell in line:
                faint = cell.strip("-0.") == "" or cell in ("−∞", "-inf")
                text.append(f"  {cell:>{width}}", "dim" if faint else "cyan")
            text.append(self.text(" …" if row.shape[-1] > len(line) else "", "dim"))
        return text


def colour(letter: str) -> str:
    """Return the colour of an axis, the same in every row; joined axes have that of the last one."""
    return COLOURS.get(letter.split("·")[-1], "cyan")
