"""The results of a class as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headscope.cli._check.results import ClassResults, Result
from headscope.cli._shared.console import few

STYLES = {"passed": "green", "incomplete": "yellow", "failed": "red", "not checked": "magenta"}
MOST_FILES = 4  # of a finding, by name


def render_results(results: ClassResults) -> Iterator[RenderableType]:
    """Yield a table of the submissions, one of the findings, and the number of submissions by outcome."""
    table = _start_table("file", "outcome", "findings")
    for result in results.results:
        outcome = Text(result.outcome, style=STYLES[result.outcome])
        table.add_row(Text(result.label, overflow="fold"), outcome, Text("\n".join(_describe(result)), overflow="fold"))
    yield table
    if misconceptions := results.list_misconceptions():
        yield Text("")
        table = _start_table("finding", "severity", "files", "")
        for each in misconceptions:
            files = Text(few(each.labels, MOST_FILES), style="dim", overflow="fold")
            table.add_row(Text(each.name), each.severity, str(len(each.labels)), files)
        yield table
    count = len(results.results)
    parts = [f"{number} {outcome}" for outcome, number in results.counts.items() if number]
    yield Text("")
    yield Text(f"{count} file{'s' if count > 1 else ''}: {', '.join(parts)}", style="bold")


def _start_table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, justify="right" if title == "files" else "left")
    return table


def _describe(result: Result) -> list[str]:
    """Return the lines of a submission: its findings, and what follows from them or was not tested."""
    if result.findings is None:
        return [result.error]
    names = [", ".join(result.list_names())] if result.list_names() else []
    return [*names, *result.list_remarks(), *result.list_mask_reasons()]
