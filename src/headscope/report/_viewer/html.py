"""The page of the viewer as HTML, and the data that its script reads."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from headscope.report._page_file import MARKER, asset, digest, embedded
from headscope.report._texts import NOT_EXPLANATION, visible
from headscope.report._viewer import texts
from headscope.report._viewer.few_rows import few_rows_of_page
from headscope.report._viewer.model import Against, Picture, Shown
from headscope.report._viewer.packing import pack
from headscope.report.highlights import Highlight
from headscope.report.tables import Section, grid
from headscope.report.words import PATTERNS, REGIONS, STAGES, word
from headscope.stats import quantity_of

LABEL = 24  # characters of a token on an axis, at most
LONGEST = 200  # characters of a token elsewhere, at most
MOST_TOKENS = 1 << 20  # of all runs together; beyond it the page shows positions


def render_shown(shown: Shown, *, served: bool = False, tiles: Sequence[tuple[int, int] | None] = ()) -> str:
    """Return the page as HTML.

    Args:
        shown: the content.
        served: whether the page may request tiles from its server, see ``headscope.report.serving``.
        tiles: for each layer the numbers of queries and keys of the run that its tiles show; None where it has none.

    Raises:
        ValueError: the maps do not fit one page.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.viewer import render_shown, shown_recording
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> render_shown(shown_recording(recording)).splitlines()[:2]
        ['<!DOCTYPE html>', '<!-- headscope report -->']
    """
    from jinja2 import Environment  # slow to import, and only needed to write a page
    from markupsafe import Markup

    style, script = asset("viewer.css"), asset("viewer.js")
    data, blocks = _data(shown)
    other = None if shown.against is None else _other_data(shown.against)
    environment = Environment(autoescape=True, trim_blocks=False, keep_trailing_newline=True)
    html = environment.from_string(asset("viewer.html.jinja")).render(
        marker=Markup(MARKER),
        title=_line(shown.title or texts.DEFAULT_TITLE, 160),
        style=Markup(style),
        style_hash=digest(style),
        script=Markup(script),
        script_hash=digest(script),
        served=served,
        lead=_line(shown.lead, 1000) if shown.lead else "",
        data=Markup(embedded({**data, "served": [*tiles] if served else None})),
        blocks=Markup(blocks),
        other=other and [Markup(each) for each in other],
        exact=Markup(shown.exact.content),
        notes=[_line(note, 500) for note in shown.notes],
        footer=[(_line(name, 40), _line(value, 1000)) for name, value in shown.footer.items()],
        explanation=NOT_EXPLANATION,
        no_script=texts.NO_SCRIPT,
    )
    return html.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be written


def framed(html: str, *, height: int = 900) -> str:
    """Return a page as a frame for a notebook, ``height`` pixels high; its script cannot reach the notebook.

    Examples:
        >>> from headscope.report.viewer import framed
        >>> framed("<p>a page</p>", height=300).partition(" sandbox")[0]
        '<iframe title="headscope"'
        >>> framed("<p>a page</p>", height=300).partition("srcdoc=")[2]
        '"&lt;p&gt;a page&lt;/p&gt;"></iframe>'
    """
    return (
        f'<iframe title="headscope" sandbox="allow-scripts allow-downloads" width="100%" height="{height}" '
        f'style="border: 0" srcdoc="{escape(html, quote=True)}"></iframe>'
    )


def _line(text: str, limit: int) -> str:
    return visible(text, limit=limit, blanks=False)


def _data(shown: Shown) -> tuple[dict[str, Any], str]:
    """Return the data for the script, and the blocks as base64."""
    packed = pack([layer.source for layer in shown.layers])
    layers = [
        {
            "name": _line(layer.name, LONGEST),
            **({} if _line(layer.name, LONGEST) == layer.name else {"key": layer.name}),
            "short": _line(layer.short, 60),
            "heads": layer.source.heads,
            **layer.facts,
            "blocks": blocks,
            **description,
        }
        for layer, description, blocks in zip(shown.layers, packed.layers, packed.blocks, strict=True)
    ]
    data = {
        "about": [
            _line(shown.footer[name], 200) if name in shown.footer else "" for name in (texts.MODEL, texts.INPUT)
        ],
        "layers": layers,
        "masks": packed.masks,
        "bits": packed.bits,
        "names": [_named(name) for name in shown.names],
        "statistics": [dict(layer.statistics) for layer in shown.layers],
        "patterns": [[list(head) for head in layer.patterns] for layer in shown.layers],
        "also": [[each and [each[0], round(each[1], 6)] for each in layer.also] for layer in shown.layers],
        "few": few_rows_of_page(shown.layers),
        "patternWords": PATTERNS,
        "tokens": _tokens(shown.texts),
        "runTokens": _list_run_tokens(shown.run_texts),
        "image": None if shown.picture is None else _picture(shown.picture),
        "trace": None if not shown.trace else {"title": _line(shown.trace_title, 160), "stages": _stages(shown.trace)},
        "tables": [_table(section) for section in shown.tables],
        "exact": shown.exact.description(),
        "highlights": [_highlight(each) for each in shown.highlights],
        "opensOn": None if shown.opens_on is None else list(shown.opens_on),
        "title": _line(shown.title or texts.DEFAULT_TITLE, 160),
        "origin": shown.origin,
        "numbers": shown.numbers,
        "history": None,
    }
    if shown.history is not None:
        layers = [_history_layer(layer) for layer in shown.history.layers]
        empty = {"statistics": [{} for _ in layers], "patterns": [[] for _ in layers]}
        history = shown.history.description
        quantities = [{**_named(each["name"]), **each} for each in history["quantities"]]
        data |= {"layers": layers, **empty, "history": {**history, "quantities": quantities}}
        return data, shown.history.content
    return data, packed.content


OTHER = (
    *("layers", "masks", "bits", "names", "statistics", "patterns", "also", "highlights", "tokens", "runTokens"),
    *("few", "title", "origin", "numbers"),
)


def _other_data(against: Against) -> tuple[str, str]:
    """Return what the script needs of the recording that a page is compared with, as JSON, and its blocks."""
    try:
        data, blocks = _data(against.shown)
    except ValueError as error:
        raise ValueError(f"against: {str(error).removeprefix('recording: ')}") from error
    other = {name: data[name] for name in OTHER} | {"distances": against.distances}
    return embedded(other | {"labels": [_line(label, 160) for label in against.labels]}), blocks


def _history_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer of a training's history, without all that a recording's layer has."""
    nothing: dict[str, Any] = dict.fromkeys(("lengths", "map", "strips", "segments"))
    nothing |= dict.fromkeys(("runs", "lookedAt", "of", "received", "receivedOf", "entropy", "entropyOf", "edges"), 0)
    nothing |= {name: [] for name in ("rows", "broken", "blocks", "top")}
    return {**nothing, **layer, "name": _line(layer["name"], LONGEST), "short": _line(layer["short"], 60)}


def _named(name: str) -> dict[str, str]:
    """Return a statistic with its heading: its public name in words, or the name of a region."""
    label, quantity = word(name), quantity_of(name)
    heading = label.heading if name in REGIONS else name.replace("_", " ")
    unit = "share" if quantity is None else quantity.unit
    return {"name": name, "heading": heading, "meaning": label.meaning, "unit": unit}


def _tokens(tokens: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the labels of the tokens, and a longer form of those that a label cuts."""
    if tokens is None:
        return None
    known = {text: (visible(text, limit=LABEL), visible(text, limit=LONGEST)) for text in dict.fromkeys(tokens)}
    longer = {n: known[text][1] for n, text in enumerate(tokens) if known[text][1] != known[text][0]}
    return {"labels": [known[text][0] for text in tokens], "longer": longer}


def _list_run_tokens(runs: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """Return each different text once, and its number for each token of each run; None if a page is too short."""
    if not runs or sum(map(len, runs)) > MOST_TOKENS:
        return None
    numbers: dict[str, int] = {}
    ids = [[numbers.setdefault(text, len(numbers)) for text in run] for run in runs]
    return {"labels": [visible(text, limit=LONGEST) for text in numbers], "ids": ids}


def _picture(picture: Picture) -> dict[str, Any]:
    """Return the image as bytes: the page draws them on a canvas, because its policy lets it load no file."""
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
        "clear": [list(layer) for layer in picture.clear],
        "fixed": [list(layer) for layer in picture.fixed],
    }


def _highlight(highlight: Highlight) -> dict[str, Any]:
    """Return what a card shows; the script writes its sentence."""
    entry = highlight.to_dict()
    del entry["sentence"]
    return entry | {"name": _line(highlight.name, 60), "score": _rounded(highlight.score)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


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
    """Return the steps of a trace, grouped by stage."""
    columns = ("step", "equation", "code", "dtype", "invariant", "why", "mistake", "note")
    stages: list[dict[str, Any]] = []
    for number, rows in itertools.groupby(trace, key=lambda row: row.get("stage")):
        steps: list[dict[str, Any]] = []
        for row in rows:
            corner = row.get("corner")
            # JSON has no infinity; a trace writes it as the string "Infinity"
            values = grid([[float(value) for value in line] for line in corner]) if corner else None
            step = {name: _lines(row[name]) if row.get(name) else "" for name in columns}
            steps.append({**step, "axes": list(row.get("axes", {}).items()), "corner": values, "held": row.get("held")})
        name = STAGES.get(number, "") if isinstance(number, int) else ""
        stages.append({"name": f"{number}. {name}" if name else texts.STEPS, "steps": steps})
    return stages


def _lines(text: str) -> str:
    """Return a text of several lines with every character visible."""
    return "\n".join(_line(line, 400) if line else "" for line in str(text).split("\n"))
