"""Findings for a terminal and for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from headscope.checking._findings import Finding, Findings

MARKS = {"wrong": ("✗", "bold red"), "unusual": ("·", "bold yellow"), "slow": ("·", "bold cyan")}
HUES = {"wrong": "#d64545", "unusual": "#b07a10", "slow": "#2a7f9e"}

STYLE = """
.headscope-check { font-size: 13px; line-height: 1.45; max-width: 60rem; }
.headscope-check h4 { margin: .8em 0 .2em; font-size: inherit; }
.headscope-check p { margin: .15em 0; }
.headscope-check pre { margin: .3em 0; padding: 0; background: none; color: inherit; border: 0;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; }
.headscope-check .faint { opacity: .7; }
"""


class Page:
    """Findings as rich prints them."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.findings.summary, style="bold")
        for finding in self.findings:
            yield Text("")
            yield from _finding(finding)
        for title, lines in _rest(self.findings):
            yield Text("")
            yield Text(title, style="dim")
            for line in lines:
                yield Padding(Text(line, style="dim"), (0, 0, 0, 2))


def _finding(finding: Finding) -> RenderResult:
    mark, style = MARKS[finding.severity]
    yield Text.assemble((f"{mark} {finding.name}", style), f"  {finding.severity}")
    for said, look in ((finding.seen, ""), (finding.why, ""), (finding.fix, "")):
        yield Padding(Text(said, style=look), (0, 0, 0, 2))
    yield Padding(Text(finding.code, style="bold"), (0, 0, 0, 4))


def _rest(findings: Findings) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    if findings.understood:
        found.append(("understood", list(findings.understood)))
    if findings.not_tested:
        found.append(("not tested, because", [f"{what}: {why}" for what, why in findings.not_tested.items()]))
    return found


def fragment(findings: Findings) -> str:
    """The findings as a fragment of HTML; every text is escaped, nothing is loaded."""
    parts = [f'<div class="headscope-check"><style>{STYLE}</style><p><b>{escape(findings.summary)}</b></p>']
    for finding in findings:
        hue = HUES[finding.severity]
        parts.append(
            f'<h4 style="color: {hue}">{escape(finding.name)} <span class="faint">{finding.severity}</span></h4>'
            f"<p>{escape(finding.seen)}</p><p>{escape(finding.why)}</p><p>{escape(finding.fix)}</p>"
            f"<pre>{escape(finding.code)}</pre>"
        )
    for title, lines in _rest(findings):
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        parts.append(f'<details class="faint"><summary>{escape(title)}</summary><ul>{items}</ul></details>')
    return "".join(parts) + "</div>"
