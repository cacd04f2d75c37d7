"""The page in which every head can be looked at: of a recording, whatever the length, or of a sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headscope._support.progress import waiting
from headscope.report._viewer.model import Source, pack
from headscope.report.page import MARKER, asset, digest, embedded, write
from headscope.report.sheet import NOT_EXPLANATION, Sheet, visible
from headscope.report.tables import Section
from headscope.report.words import PATTERNS, REGIONS, word
from headscope.watching import Recording

__all__ = [
    "Layer",
    "Picture",
    "Shown",
    "framed",
    "render_recording",
    "render_sheet",
    "render_shown",
    "save_recording",
    "shown_recording",
]

LABEL = 24  # characters of a token on an axis
LONGEST = 200  # characters of a token anywhere

Columns = Mapping[str, Sequence[float | int | None]]
"""``mean``, ``std``, ``min``, ``max`` and ``count`` of a quantity, each one figure a head."""

Scored = tuple[str, float, int, bool]
"""A pattern, its score, on how many rows, and whether it is exact."""


@dataclass(frozen=True, eq=False)
class Picture:
    """The image whose patches the keys are.

    Attributes:
        pixels: uint8 [h, w] or [h, w, 3].
        grid: rows and columns of patches.
        special: how many keys stand before the patches and are none: CLS and registers.
        outline: for each patch whether it is of the object, row by row; empty = not known.
        regions: region -> how far each patch belongs to it, 0 to 1.
        looks: for each layer the region that each head looks at most, and how many times as much as by chance.
    """

    pixels: NDArray[Any]
    grid: tuple[int, int]
    special: int = 0
    outline: Sequence[int] = ()
    regions: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    looks: Sequence[Sequence[tuple[str, float] | None]] = ()


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer as the page has it.

    Attributes:
        name, short: its path, and as much of it as tells it from the others.
        facts: what the script reads beside the blocks: kind, lengths, runs, lookedAt, of, rows, broken.
        source: what the blocks are made of.
        statistics: quantity -> its columns.
        patterns: of each head, the best first.
    """

    name: str
    short: str
    facts: Mapping[str, Any]
    source: Source
    statistics: Mapping[str, Columns]
    patterns: Sequence[Sequence[Scored]]


@dataclass(frozen=True, eq=False)
class Shown:
    """All that a page shows; every text may come from outside, for it is escaped where it is written.

    Attributes:
        names: the quantities, in the order of the table.
        texts: of each token, or None.
        trace: rows of ``Trace.to_dict()``; trace_title: what they are of.
        tables: more that was found, as text.
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


# ---------------------------------------------------------------- the page


def save_recording(recording: Recording, path: str | Path, *, force: bool = False, **options: Any) -> Path:
    """Write the page of a recording, whole or not at all; options are those of ``render_recording``.

    If it takes long, a terminal on stderr shows that it is being written.

    Raises:
        SaveError: the path is a directory, holds a file that is no headscope page, or cannot be written.
        TypeError, ValueError: as ``render_recording``.
        WatchError: nothing has been seen so far.
    """
    with waiting("writing the page"):
        return write(render_recording(recording, **options), path, force=force)


def render_recording(
    recording: Recording,
    *,
    title: str = "",
    image: Any = None,
    grid: tuple[int, int] | None = None,
    special: int | None = None,
    strips: Sequence[tuple[int | str, int]] | None = None,
) -> str:
    """The page as HTML: it holds all it needs and asks for nothing from anywhere.

    Args:
        recording: what was seen; maps are shown if it was observed with ``Observe(map=...)``.
        title: one line; by default the model.
        image: what the model saw, uint8 [h, w] or [h, w, 3], if its keys are the patches of one image.
        grid: rows and columns of patches; by default a square.
        special: how many keys stand before the patches (CLS, registers); by default what the grid leaves over, if that
            is less than a row or column of patches.
        strips: layers and heads whose weights near the diagonal and on the first keys are in the page at full
            resolution, at most 16, of self-attention, if q and k were kept (``Observe(keep_qk=True)``), of the first
            input of the last call; by default those with the highest scores of patterns. A layer each of whose weights
            is in the map has none.

    Raises:
        TypeError: an option of another kind.
        ValueError: the maps do not fit one page, an image or grid does not fit the keys, the keys are tokens with
            texts, or there is no such head.
        WatchError: nothing has been seen so far.
    """
    return render_shown(shown_recording(recording, title=title, image=image, grid=grid, special=special, strips=strips))


def shown_recording(recording: Recording, **options: Any) -> Shown:
    """What the page of a recording shows; options as for ``render_recording``."""
    from headscope.report._viewer.from_recording import shown

    return shown(recording, **options)


def render_sheet(sheet: Sheet) -> str:
    """The page of a sheet as HTML.

    Raises:
        ValueError: its weights do not fit one page.
    """
    from headscope.report._viewer.from_sheet import shown

    return render_shown(shown(sheet))


def render_shown(shown: Shown, *, served: bool = False, tiles: Sequence[tuple[int, int] | None] = ()) -> str:
    """The page as HTML.

    Args:
        shown: what it shows.
        served: whether it may ask the server that it came from for tiles, see ``headscope.report.serving``.
        tiles: of each layer how many queries and keys the run has that its tiles are of; None where it has none.

    Raises:
        ValueError: the maps do not fit one page.
    """
    from jinja2 import Environment  # only who writes a page waits for it
    from markupsafe import Markup

    style, script = asset("viewer.css"), asset("viewer.js")
    data, blocks = _data(shown)
    environment = Environment(autoescape=True, trim_blocks=False, keep_trailing_newline=True)
    html = environment.from_string(asset("viewer.html.jinja")).render(
        marker=Markup(MARKER),
        title=_line(shown.title or "Attention heads", 160),
        style=Markup(style),
        style_hash=digest(style),
        script=Markup(script),
        script_hash=digest(script),
        served=served,
        lead=_line(shown.lead, 1000) if shown.lead else "",
        data=Markup(embedded({**data, "served": [*tiles] if served else None})),
        blocks=Markup(blocks),
        notes=[_line(note, 500) for note in shown.notes],
        footer=[(_line(name, 40), _line(value, 1000)) for name, value in shown.footer.items()],
        explanation=NOT_EXPLANATION,
    )
    return html.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be written


def framed(html: str, *, height: int = 900) -> str:
    """A page inside a frame of a notebook, so many pixels high: its script can reach nothing outside of it."""
    return (
        f'<iframe title="headscope" sandbox="allow-scripts allow-downloads" width="100%" height="{height}" '
        f'style="border: 0" srcdoc="{escape(html, quote=True)}"></iframe>'
    )


# ---------------------------------------------------------------- the data


def _line(text: str, limit: int) -> str:
    return visible(text, limit=limit, blanks=False)


def _data(shown: Shown) -> tuple[dict[str, Any], str]:
    """What the script reads, and the blocks as base64."""
    packed = pack([layer.source for layer in shown.layers])
    layers = [
        {
            "name": _line(layer.name, LONGEST),
            "short": _line(layer.short, 60),
            "heads": layer.source.heads,
            **layer.facts,
            "blocks": blocks,
            **said,
        }
        for layer, said, blocks in zip(shown.layers, packed.layers, packed.blocks, strict=True)
    ]
    data = {
        "layers": layers,
        "masks": packed.masks,
        "bits": packed.bits,
        "names": [_named(name) for name in shown.names],
        "statistics": [dict(layer.statistics) for layer in shown.layers],
        "patterns": [[list(head) for head in layer.patterns] for layer in shown.layers],
        "patternWords": PATTERNS,
        "tokens": _tokens(shown.texts),
        "image": None if shown.picture is None else _picture(shown.picture),
        "trace": None if not shown.trace else {"title": _line(shown.trace_title, 160), "stages": _stages(shown.trace)},
        "tables": [_table(section) for section in shown.tables],
    }
    return data, packed.content


def _named(name: str) -> dict[str, str]:
    found = word(name)
    return {"name": name, "heading": found.heading, "meaning": found.meaning}


def _tokens(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """The tokens as they are shown, and those that are longer than that in more of their length."""
    if texts is None:
        return None
    known = {text: (visible(text, limit=LABEL), visible(text, limit=LONGEST)) for text in dict.fromkeys(texts)}
    longer = {n: known[text][1] for n, text in enumerate(texts) if known[text][1] != known[text][0]}
    return {"labels": [known[text][0] for text in texts], "longer": longer}


def _picture(picture: Picture) -> dict[str, Any]:
    """The image as its bytes: the page may draw them on a canvas, and load no file."""
    import base64

    import numpy as np

    pixels = picture.pixels if picture.pixels.ndim == 3 else np.repeat(picture.pixels[..., None], 3, -1)
    return {
        "height": pixels.shape[0],
        "width": pixels.shape[1],
        "rgb": base64.b64encode(np.ascontiguousarray(pixels).tobytes()).decode("ascii"),
        "grid": list(picture.grid),
        "special": picture.special,
        "outline": list(picture.outline),
        "regions": {name: [round(x, 4) for x in part] for name, part in picture.regions.items()},
        "regionWords": {name: {"heading": word.heading, "meaning": word.meaning} for name, word in REGIONS.items()},
        "looks": [[look and list(look) for look in layer] for layer in picture.looks],
    }


def _table(section: Section) -> dict[str, Any]:
    return {
        "title": _line(section.title, 160),
        "says": _line(section.says, 1000),
        "columns": list(section.columns),
        "words": [column in section.words for column in section.columns],
        "cells": [[_line(cell, 120) if cell else "" for cell in line] for line in section.cells],
        "caption": _line(section.caption, 4000) if section.caption else "",
    }


def _stages(trace: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps of a trace, in runs of one stage."""
    import itertools

    from headscope.tracing._explanations import STAGES, grid

    texts = ("step", "equation", "code", "dtype", "invariant", "why", "mistake", "note")
    stages: list[dict[str, Any]] = []
    for number, rows in itertools.groupby(trace, key=lambda row: row.get("stage")):
        steps: list[dict[str, Any]] = []
        for row in rows:
            corner = row.get("corner")
            # JSON knows no infinity: a trace may write it as "Infinity"
            values = grid([[float(value) for value in line] for line in corner]) if corner else None
            step = {name: _lines(row[name]) if row.get(name) else "" for name in texts}
            steps.append({**step, "axes": list(row.get("axes", {}).items()), "corner": values, "held": row.get("held")})
        name = STAGES.get(number, "") if isinstance(number, int) else ""
        stages.append({"name": f"{number}. {name}" if name else "Steps", "steps": steps})
    return stages


def _lines(text: str) -> str:
    """Text of several lines, every character to be seen."""
    return "\n".join(_line(line, 400) if line else "" for line in str(text).split("\n"))
