"""What ``text`` and ``image`` print in common: headings, the steps of a layer, legends and the closing lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from headscope._support.ascii import to_ascii
from headscope._support.text import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from headscope.report import Sheet
    from headscope.report.highlights import Highlight
    from headscope.report.words import Word
    from headscope.tracing import Trace

LETTERS = "B batch  Q queries  K keys  H heads  D head width  E model width"
CAVEAT = "Attention shows where a head reads, not why the model answered."
"""What every run ends with; ``--explain`` prints ``NOT_EXPLANATION`` instead."""


def attention_in_words(unit: str) -> str:
    """Return what attention is, for beginners; ``unit`` is "token" or "patch"."""
    units = {"token": "tokens", "patch": "patches"}[unit]
    return f"Attention lets each {unit} read from other {units}. A head is one learned way of choosing which."


def heading(out: Console, name: str, caption: str) -> None:
    """Print a blank line and a heading: the name of what follows, and what it shows."""
    from rich.text import Text

    out.print()
    out.print(Text.assemble((visible(name), "bold cyan"), "  ", (visible(caption), "italic")))


def show_highlights(out: Console, highlights: Sequence[Highlight]) -> None:
    """Print the sentences about the heads that stand out."""
    from rich.table import Table
    from rich.text import Text

    if not highlights:
        return
    heading(out, "What to look at first", "the best head of each pattern, beyond chance")
    bullets = Table.grid(padding=(0, 1, 0, 0))
    for each in highlights:
        bullets.add_row("•", Text(visible(f"{each.sentence}.")))
    out.print(bullets)


def show_steps(out: Console, trace: Trace, layer: int, layers: int, explain: bool) -> None:
    """Print the steps of one layer's attention, one line each or in full."""
    from rich.text import Text

    heading(out, f"Layer {layer}, step by step", f"how positions read from each other; layer {layer} of 0–{layers - 1}")
    if explain:
        out.print(trace.table(explain=True))
        return
    out.print(_steps(trace, to_ascii if out.options.ascii_only else str))
    out.print(Text(LETTERS, style="dim"))
    held = sum(row.held is True for row in trace.rows)
    failed = "".join(f"; failed: {row.step}, {row.invariant}" for row in trace.failed)
    checked = f"✓ {held} of {len(trace.rows)} steps passed a check of their values{failed}."
    out.print(Text(f"{checked} Details: --explain", style="dim"))


def _steps(trace: Trace, written: Callable[[str], str]) -> RenderableType:
    """Return a table with one line for each step: name, axes of the result, equation, and whether its invariant held.

    Args:
        trace: the trace.
        written: converts text to what the console can show.
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
    """Return a legend of those names that have an entry in ``words``."""
    from rich.text import Text

    line = Text(style="dim")
    for name in names:
        if name in words:
            word = words[name]
            meaning = word if isinstance(word, str) else word.meaning[0].lower() + word.meaning[1:].rstrip(".")
            line.append("; " if line else "").append(name, style="bold").append(f": {meaning}")
    return line.append(".") if line else line


def show_closing(out: Console, sheet: Sheet, page: str | None, explain: bool) -> None:
    """Print what attention weights do not show, and where the page is."""
    from rich.text import Text

    from headscope.report import NOT_EXPLANATION

    out.print()
    out.print(Text(NOT_EXPLANATION if explain else CAVEAT, style="dim"))
    if page is not None:
        count = sum(len(weights) for weights in sheet.weights)
        out.print(
            Text.assemble("Open in a browser: ", (visible(page), "bold"), f" (all {count} heads)"), soft_wrap=True
        )
