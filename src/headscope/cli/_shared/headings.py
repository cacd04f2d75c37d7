"""What ``text`` and ``image`` print in common: headings, the steps of a layer, and what the words in a table mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from headscope._support.ascii import to_ascii
from headscope._support.text import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from headscope.report import Sheet
    from headscope.report.words import Word
    from headscope.tracing import Trace

ATTENTION = "In attention each position collects from others what it looks for; a head is one way of looking."
LETTERS = "B batch  Q tokens that look  K those looked at  H heads  D head width  E width"


def heading(out: Console, name: str, caption: str) -> None:
    """A blank line, then what comes: its name, and what it shows."""
    from rich.text import Text

    out.print()
    out.print(Text.assemble((visible(name), "bold cyan"), "  ", (visible(caption), "italic")))


def show_steps(out: Console, trace: Trace, layer: int, layers: int, explain: bool) -> None:
    """One layer's attention: a line a step, or in full."""
    from rich.text import Text

    heading(out, f"Layer {layer}, step by step", f"one of {layers}: how each position collects from the others")
    if explain:
        out.print(trace.table(explain=True))
        return
    out.print(_steps(trace, to_ascii if out.options.ascii_only else str))
    out.print(Text(LETTERS, style="dim"))
    held = sum(row.held is True for row in trace.rows)
    failed = "".join(f"; not: {row.step}, {row.invariant}" for row in trace.failed)
    checked = f"✓ for {held} of {len(trace.rows)} steps a check on the values held{failed}."
    out.print(Text(f"{checked} More: --explain", style="dim"))


def _steps(trace: Trace, written: Callable[[str], str]) -> RenderableType:
    """A trace at one line a step: its name, the axes of the result, the equation, and whether its invariant held.

    Args:
        trace: the trace.
        written: text as the console can show it.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for row in trace.rows:
        held = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("", "")}[row.held]
        sizes = " × ".join(f"{letter} {size}" for letter, size in row.axes.items())
        table.add_row(Text(row.step), Text(written(sizes), style="dim"), Text(written(row.equation)), Text(*held))
    return table


def meanings(names: Iterable[str], words: dict[str, str] | dict[str, Word]) -> Text:
    """What the words in a table mean, those of them that it has."""
    from rich.text import Text

    line = Text(style="dim")
    for name in names:
        if name in words:
            word = words[name]
            meaning = word if isinstance(word, str) else word.meaning[0].lower() + word.meaning[1:].rstrip(".")
            line.append("; " if line else "").append(name, style="bold").append(f": {meaning}")
    return line.append(".") if line else line


def show_closing(out: Console, sheet: Sheet, page: str | None) -> None:
    """What the figures do not say, and where the page is."""
    from rich.text import Text

    from headscope.report import NOT_EXPLANATION

    out.print()
    out.print(Text(NOT_EXPLANATION, style="dim"))
    if page is not None:
        count = sum(len(weights) for weights in sheet.weights)
        out.print(Text.assemble(f"The maps of all {count} heads, to be opened in a browser: ", (visible(page), "bold")))
