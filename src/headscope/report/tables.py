"""Tables as one self-contained HTML page, in the look of the sheet's page; it runs no script."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headscope.report.page import MARKER, asset, digest
from headscope.report.recording import NOT_EXPLANATION, visible

__all__ = ["Section", "render_tables"]


@dataclass(frozen=True)
class Section:
    """One table of a page.

    Attributes:
        title, says: what it is; caption: what stands below it.
        columns, cells: headings and lines, as text.
        words: the columns that hold words and not numbers.
    """

    title: str
    says: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    caption: str
    words: Collection[str] = ()


def render_tables(
    title: str, lead: str, sections: Sequence[Section], footer: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """The page as HTML, every text of it escaped; to be written by ``report.page.write``."""
    from jinja2 import Environment
    from markupsafe import Markup

    style = asset("page.css")
    environment = Environment(autoescape=True, trim_blocks=False, keep_trailing_newline=True)
    html = environment.from_string(asset("tables.html.jinja")).render(
        marker=Markup(MARKER),
        title=visible(title, limit=160, blanks=False),
        lead=lead,
        style=Markup(style),
        style_hash=digest(style),
        sections=[_shown(section) for section in sections],
        footer=[
            (visible(name, blanks=False), visible(value, limit=500, blanks=False)) for name, value in footer.items()
        ],
        notes=[visible(note, limit=500, blanks=False) for note in notes],
        explanation=NOT_EXPLANATION,
    )
    return html.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be written


def _shown(section: Section) -> Section:
    """With every text fit to be seen."""
    cells = [[visible(cell, limit=120, blanks=False) if cell else "" for cell in line] for line in section.cells]
    caption = visible(section.caption, limit=4000, blanks=False) if section.caption else ""
    return Section(section.title, section.says, section.columns, cells, caption, section.words)
