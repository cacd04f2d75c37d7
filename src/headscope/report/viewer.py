"""A recording as one self-contained page in which every head can be looked at, whatever the length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from headscope.report._viewer_data import pack
from headscope.report.page import MARKER, asset, digest, embedded, write
from headscope.report.recording import NOT_EXPLANATION, visible
from headscope.report.words import PATTERNS, STATISTICS
from headscope.watching import Recording

__all__ = ["render_recording", "save_recording"]

LABEL = 24  # characters of a token on an axis
LONGEST = 200  # characters of a token anywhere


def save_recording(recording: Recording, path: str | Path, *, title: str = "", force: bool = False) -> Path:
    """Write the page of a recording, whole or not at all; see ``render_recording``.

    Raises:
        SaveError: the path is a directory, holds a file that is no headscope page, or cannot be written.
        ValueError: the maps do not fit one page.
        WatchError: nothing has been seen so far.
    """
    return write(render_recording(recording, title=title), path, force=force)


def render_recording(recording: Recording, *, title: str = "") -> str:
    """The page as HTML: it holds all it needs and asks for nothing from anywhere.

    Args:
        recording: what was seen; maps are shown if it was observed with ``Observe(map=...)``.
        title: one line; by default the model.

    Raises:
        ValueError: the maps do not fit one page.
        WatchError: nothing has been seen so far.
    """
    from jinja2 import Environment  # only who writes a page waits for it
    from markupsafe import Markup

    style, script = asset("viewer.css"), asset("viewer.js")
    data, blocks = _data(recording)
    environment = Environment(autoescape=True, trim_blocks=False, keep_trailing_newline=True)
    html = environment.from_string(asset("viewer.html.jinja")).render(
        marker=Markup(MARKER),
        title=visible(title or recording.about.model or "Attention heads", limit=160, blanks=False),
        style=Markup(style),
        style_hash=digest(style),
        script=Markup(script),
        script_hash=digest(script),
        data=Markup(embedded(data)),
        blocks=Markup(blocks),
        notes=[visible(note, limit=500, blanks=False) for note in _notes(recording)],
        footer=[(name, visible(value, limit=1000, blanks=False)) for name, value in _footer(recording)],
        explanation=NOT_EXPLANATION,
    )
    return html.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be written


# ---------------------------------------------------------------- the data


def _data(recording: Recording) -> tuple[dict[str, Any], str]:
    """What the script reads, and the blocks as base64."""
    stats, about = recording.stats, recording.about
    parts = list(stats.parts.values())
    packed = pack(parts)
    short, _ = _short_layers(recording)
    layers = [
        {
            "name": visible(name, limit=LONGEST, blanks=False),
            "short": visible(short[name], limit=60, blanks=False),
            "kind": about.kinds.get(name, "self"),
            "heads": part.heads,
            "lengths": part.lengths,
            "runs": part.runs,
            "lookedAt": part.looked_at,
            "of": part.of,
            "rows": part.rows.tolist(),
            "broken": part.broken.tolist(),
            "blocks": blocks,
            **said,
        }
        for (name, part), said, blocks in zip(stats.parts.items(), packed.layers, packed.blocks, strict=True)
    ]
    data = {
        "layers": layers,
        "masks": packed.masks,
        "bits": packed.bits,
        "names": [_named(name) for name in stats.names],
        "statistics": _statistics(recording),
        "patterns": _patterns(recording),
        "patternWords": PATTERNS,
        "tokens": _tokens(about.texts),
    }
    return data, packed.content


def _named(name: str) -> dict[str, str]:
    word = STATISTICS.get(name)
    return {
        "name": name,
        "heading": word.heading if word else name.replace("_", " "),
        "meaning": word.meaning if word else "",
    }


def _number(value: float) -> float | None:
    """With seven digits, which are more than are shown."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _statistics(recording: Recording) -> list[dict[str, dict[str, list[Any]]]]:
    """For each layer name -> count, mean, std, min and max, one of each a head."""
    found: list[dict[str, dict[str, list[Any]]]] = []
    for part in recording.stats.parts.values():
        of_layer: dict[str, dict[str, list[Any]]] = {}
        for name, moments in part.moments.items():
            std = (moments.M2 / moments.count).sqrt()
            columns = {"mean": moments.mean, "std": std, "min": moments.min, "max": moments.max}
            of_layer[name] = {what: [_number(x) for x in column.tolist()] for what, column in columns.items()}
            of_layer[name]["count"] = moments.count.tolist()
        found.append(of_layer)
    return found


def _patterns(recording: Recording) -> list[list[list[tuple[str, float, int, bool]]]]:
    """For each layer and head its patterns, the one that it matches best first: name, score, rows, exact."""
    from headscope.decisions import patterns

    if "chance" not in recording.names:  # nothing by which a pattern could be told
        return []
    scored = patterns(recording)
    found: dict[tuple[str, int], list[tuple[str, float, int, bool]]]
    found = {(layer, head): [] for layer, part in recording.stats.parts.items() for head in range(part.heads)}
    for each in scored.scores:
        found[each.layer, each.head].append((each.pattern, round(each.score, 6), each.rows, each.exact))
    for each in found.values():
        each.sort(key=lambda score: -score[1])  # stable: of equal ones the more specific stays first
    return [[found[layer, head] for head in range(part.heads)] for layer, part in recording.stats.parts.items()]


def _tokens(texts: tuple[str, ...] | None) -> dict[str, Any] | None:
    """The tokens as they are shown, and those that are longer than that in more of their length."""
    if texts is None:
        return None
    known: dict[str, str] = {}
    labels = [known.setdefault(text, visible(text, limit=LABEL)) for text in texts]
    longer = {n: visible(text, limit=LONGEST) for n, text in enumerate(texts) if len(text) > LABEL}
    return {"labels": labels, "longer": longer}


def _short_layers(recording: Recording) -> tuple[dict[str, str], str]:
    from headscope._decision_parts import short_layers

    return short_layers(recording.layers)


# ---------------------------------------------------------------- what stands around


def _notes(recording: Recording) -> list[str]:
    notes: list[str] = []
    for name, part in recording.stats.parts.items():
        broken = int(part.broken.sum())
        if broken:
            notes.append(f"{name}: {broken:,} rows of its heads hold NaN or infinity and are in no figure.")
    if recording.stats.sampled:
        looked = sum(part.looked_at for part in recording.stats.parts.values())
        of = sum(part.of for part in recording.stats.parts.values())
        notes.append(f"A sample: {looked:,} of {of:,} query rows were looked at, and every figure stands on these.")
    return notes


def _footer(recording: Recording) -> list[tuple[str, str]]:
    about, stats = recording.about, recording.stats
    lengths = {part.lengths for part in stats.parts.values()}
    inputs = ", ".join(
        "calls of different lengths" if each is None else f"{each[0]:,} queries × {each[1]:,} keys"
        for each in sorted(lengths, key=lambda each: each or (0, 0))
    )
    rows = [int(n) for part in stats.parts.values() for n in part.rows.tolist()]
    options = {name: value for name, value in about.options.items() if value not in (None, False, [], {}, 0)}
    _, layers = _short_layers(recording)
    return [
        ("Model", about.model or "not named"),
        ("Input", f"{inputs}; {about.forwards:,} of {about.ran:,} forward passes looked at"),
        ("Rows", f"each head's figures stand on {_span(rows)} rows at most"),
        *([("Layers", layers.strip())] if layers else []),
        ("Options", ", ".join(f"{name}={value}" for name, value in options.items()) or "none"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in about.versions.items()) or "not said"),
    ]


def _span(numbers: list[int]) -> str:
    least, most = min(numbers, default=0), max(numbers, default=0)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
