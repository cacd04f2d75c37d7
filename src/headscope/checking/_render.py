"""Findings for a terminal and for a notebook."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from html import escape
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

MARKS = {
    "wrong": ("✗", "bold red"), "fragile": ("!", "bold magenta"),
    "unusual": ("·", "bold yellow"), "slow": ("·", "bold cyan"),
}  # fmt: skip
HUES = {"wrong": "#d64545", "fragile": "#a64d9c", "unusual": "#b07a10", "slow": "#2a7f9e"}

STYLE = """
.headscope-check { font-size: 13px; line-height: 1.45; max-width: 60rem; }
.headscope-check h4 { margin: .8em 0 .2em; font-size: inherit; }
.headscope-check p { margin: .15em 0; }
.headscope-check pre { margin: .3em 0; padding: 0; background: none; color: inherit; border: 0;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; }
.headscope-check .faint { opacity: .7; }
"""


class RenderedFinding(Protocol):
    """The attributes of a finding that are rendered."""

    @property
    def name(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def seen(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def fix(self) -> str: ...
    @property
    def code(self) -> str: ...
    @property
    def condition(self) -> str: ...


class RenderedFindings(Protocol):
    """The attributes of findings that are rendered."""

    @property
    def summary(self) -> str: ...
    @property
    def names(self) -> Iterable[str]: ...
    def __iter__(self) -> Iterator[RenderedFinding]: ...
    @property
    def understood(self) -> Iterable[str]: ...
    @property
    def not_tested(self) -> dict[str, str]: ...
    @property
    def omitted(self) -> Iterable[str]: ...
    @property
    def refused(self) -> Container[str]: ...


class FindingsTable:
    """Findings as a renderable of rich."""

    def __init__(self, findings: RenderedFindings) -> None:
        self.findings = findings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.findings.summary, style="bold")
        for finding in self.findings:
            yield Text("")
            yield from _print_finding(finding, refused=finding.name in self.findings.refused)
        for title, lines in _list_remarks(self.findings):
            yield Text("")
            yield Text(title, style="dim")
            for line in lines:
                yield Padding(Text(line, style="dim"), (0, 0, 0, 2))


def render_text(finding: RenderedFinding, *, refused: bool) -> str:
    """Return a finding as the terminal shows it, without wrapping."""
    title = f"{MARKS[finding.severity][0]} {finding.name}  {_name_severity(finding, refused=refused)}"
    return "\n".join([title, *(f"  {text}" for text in _describe(finding)), f"    {finding.code}"])


def _name_severity(finding: RenderedFinding, *, refused: bool) -> str:
    return f"{finding.severity}, refused" if refused else finding.severity


def _print_finding(finding: RenderedFinding, *, refused: bool) -> RenderResult:
    mark, style = MARKS[finding.severity]
    yield Text.assemble((f"{mark} {finding.name}", style), f"  {_name_severity(finding, refused=refused)}")
    for text in _describe(finding):
        yield Padding(Text(text), (0, 0, 0, 2))
    yield Padding(Text(finding.code, style="bold"), (0, 0, 0, 4))


def _describe(finding: RenderedFinding) -> list[str]:
    """Return the paragraphs of a finding: the evidence, the condition if it is fragile, the reason and the remedy."""
    condition = [f"right here; breaks if {finding.condition}"] if finding.condition else []
    return [finding.seen, *condition, finding.why, finding.fix]


def _list_remarks(findings: RenderedFindings) -> list[tuple[str, list[str]]]:
    """Return the lines below the findings, by title."""
    remarks: list[tuple[str, list[str]]] = []
    if findings.understood:
        remarks.append(("understood", list(findings.understood)))
    if findings.not_tested:
        remarks.append(("not tested", _describe_not_tested(findings)))
    if omitted := list(findings.omitted):
        remarks.append(("omitted", [f"{', '.join(omitted)}: by ignore or only"]))
    return remarks


def _describe_not_tested(findings: RenderedFindings) -> list[str]:
    """Return a line for each reason; tests that wait for a finding are counted, the others are named."""
    by_reason: dict[str, list[str]] = {}
    for test, reason in findings.not_tested.items():
        names = (*findings.names, *findings.omitted)
        cause = next((name for name in names if reason.endswith(f" ({name})")), "")
        by_reason.setdefault(f"skipped until {cause} is fixed" if cause else reason, []).append(test)
    lines: list[str] = []
    for reason, tests in by_reason.items():
        waiting = reason.startswith("skipped until ") and len(tests) > 1
        lines.append(f"{len(tests)} checks {reason}" if waiting else f"{', '.join(tests)}: {reason}")
    return lines


def render_html(findings: RenderedFindings) -> str:
    """Render findings as an HTML fragment; every text is escaped and no resource is loaded."""
    parts = [f'<div class="headscope-check"><style>{STYLE}</style><p><b>{escape(findings.summary)}</b></p>']
    for finding in findings:
        hue, severity = HUES[finding.severity], _name_severity(finding, refused=finding.name in findings.refused)
        parts.append(
            f'<h4 style="color: {hue}">{escape(finding.name)} <span class="faint">{severity}</span></h4>'
            + "".join(f"<p>{escape(text)}</p>" for text in _describe(finding))
            + f"<pre>{escape(finding.code)}</pre>"
        )
    for title, lines in _list_remarks(findings):
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        parts.append(f'<details class="faint"><summary>{escape(title)}</summary><ul>{items}</ul></details>')
    return "".join(parts) + "</div>"
