"""A trace as an HTML fragment for notebooks: self-contained, with every text escaped, for light and dark themes."""

from __future__ import annotations

from html import escape

from headscope.report.colours import colour_at
from headscope.report.tables import grid
from headscope.report.words import STAGES
from headscope.tracing._explanations import LETTERS, memory, quantity
from headscope.tracing._view import RenderedRow, RenderedTrace

HUES = {"B": 215, "H": 300, "Hkv": 300, "Q": 145, "K": 35, "K+1": 35}  # as in the terminal; all others are 190
MARKS = {True: ("held", "✓"), False: ("failed", "✗"), None: ("open", "○")}

SHADE = ", ".join(map(str, colour_at(0.53)))
"""Of the palette of maps, the colour on which black and white text have the same contrast: the notebook may be dark."""

STYLE = """
.headscope-trace { font-size: 13px; line-height: 1.45; max-width: 76rem; overflow-x: auto; }
.headscope-trace table { border-collapse: collapse; width: 100%; margin: 0; font-size: inherit; color: inherit; }
.headscope-trace tr, .headscope-trace td, .headscope-trace th { background: none !important;
  text-align: left !important; vertical-align: top; padding: .45em .9em .45em 0; border: 0; font-weight: normal; }
.headscope-trace tr { border-top: 1px solid rgba(128, 128, 128, .25); }
.headscope-trace tr.stage { border-top: 2px solid rgba(128, 128, 128, .6); }
.headscope-trace tr.stage th { font-weight: 600; padding-top: 1em; }
.headscope-trace .name, .headscope-trace .title { font-weight: 600; }
.headscope-trace .legend, .headscope-trace .faint { opacity: .65; }
.headscope-trace .faint { white-space: nowrap; }
.headscope-trace code, .headscope-trace pre, .headscope-trace .values td, .headscope-trace .shape td {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px;
  background: none; color: inherit; }
.headscope-trace pre { margin: .2em 0 0; padding: 0; white-space: pre; border: 0; }
.headscope-trace .values, .headscope-trace .shape { width: auto; }
.headscope-trace .values tr, .headscope-trace .shape tr { border: 0; }
.headscope-trace .values td { text-align: right !important; padding: 0 .3em; white-space: nowrap; }
.headscope-trace .shape td { text-align: right !important; padding: 0 .8em 0 0; }
.headscope-trace .held .mark { color: #2c9a55; font-weight: 700; }
.headscope-trace .failed { color: #d64545; font-weight: 600; }
.headscope-trace .note { opacity: .8; }
.headscope-trace .unusual { color: #b07a10; opacity: 1; }
.headscope-trace summary { cursor: pointer; opacity: .65; }
.headscope-trace details p { margin: .3em 0; max-width: 46em; }
"""


def render_html(trace: RenderedTrace) -> str:
    """Render a trace as a table with a row for each step; its explanation unfolds."""
    parts = [
        f'<div class="headscope-trace"><style>{STYLE}</style>',
        f'<div class="title">{escape(trace.title)}</div>',
        f'<div class="legend">{_render_legend(trace)}</div>',
        "<table>",
    ]
    for stage, title in STAGES.items():
        rows = [_render_row(row) for row in trace.rows if row.stage == stage]
        if rows:
            parts.append(f'<tr class="stage"><th colspan="5">{stage} &nbsp; {escape(title)}</th></tr>')
        parts += rows
    summary = "<br>".join(escape(line) for line in trace.summary.splitlines())
    parts.append(f"</table><p>{summary}</p></div>")
    return "\n".join(parts)


def _render_legend(trace: RenderedTrace) -> str:
    used = {part for row in trace.rows for letter in row.axes for part in letter.split("·")}
    entries = (f"<b>{escape(letter)}</b> {escape(LETTERS[letter])}" for letter in LETTERS if letter in used)
    return " &ensp; ".join(entries)


def _render_row(row: RenderedRow) -> str:
    takes = f"{quantity(row.elements)} {row.dtype}<br>{memory(row.bytes)}"
    kind, mark = MARKS[row.held]
    style = "note unusual" if row.note and row.note.startswith("unusual") else "note"
    note = f'<div class="{style}">{escape(row.note)}</div>' if row.note else ""
    cells = (
        f'<span class="name">{escape(row.step)}</span><br><span class="faint">{takes}</span>',
        _render_shape(row),
        f"<i>{escape(row.equation)}</i><pre>{escape(row.code)}</pre>"
        f"<details><summary>why, and the common mistake</summary><p>{escape(row.why)}</p>"
        f"<p><b>Mistake:</b> {escape(row.mistake)}</p></details>",
        _render_values(row),
        f'<div class="{kind}"><span class="mark">{mark}</span> {escape(row.invariant)}</div>{note}',
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _render_shape(row: RenderedRow) -> str:
    colours = [f"hsl({HUES.get(letter.split('·')[-1], 190)} 60% 45%)" for letter in row.axes]
    sizes = (f'<td style="color: {hue}"><b>{size}</b></td>' for hue, size in zip(colours, row.shape, strict=True))
    letters = (f'<td style="color: {hue}">{escape(letter)}</td>' for hue, letter in zip(colours, row.axes, strict=True))
    return f'<table class="shape"><tr>{"".join(sizes)}</tr><tr>{"".join(letters)}</tr></table>'


def _render_values(row: RenderedRow) -> str:
    """Render the corner of the values; weights are shaded by size."""
    if not row.corner:
        return ""
    lines: list[str] = []
    for values, cells in zip(row.corner, grid(row.corner), strict=True):
        line = ""
        for value, cell in zip(values, cells, strict=True):
            shaded = row.step == "weights" and 0 < value <= 1
            shade = f' style="background: rgba({SHADE}, {value:.2f}) !important"' if shaded else ""
            line += f"<td{shade}>{escape(cell)}</td>"
        lines.append(line + ("<td>…</td>" if row.shape[-1] > len(cells) else ""))
    return f'<table class="values">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'
