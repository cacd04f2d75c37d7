"""A sheet as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headscope.report.colours import MAGMA
from headscope.report.recording import NOT_EXPLANATION, Sheet, visible
from headscope.report.regions import object_mask
from headscope.report.words import PATTERNS, REGIONS, STATISTICS, Word

__all__ = ["MARKER", "SaveError", "asset", "check", "digest", "embedded", "framed", "render", "save", "write"]

MARKER = "<!-- headscope report -->"
"""By this, near its start, a page of headscope's own is known."""

MOST_BYTES = 32 * 2**20
"""How much the weights of one page may take, before base64."""

FINE_BYTES = 5 * 2**20
"""Up to this, a weight has 16 bits; beyond, 8."""


class SaveError(OSError):
    """A page cannot be written where it was asked for; the message is one line that says why."""


# ---------------------------------------------------------------- the file


def save(sheet: Sheet, path: str | Path, *, force: bool = False) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Args:
        sheet: what to show.
        path: where; a page of headscope's own that is there is replaced.
        force: replace any other file too.

    Raises:
        SaveError: the path is a directory, holds a file that is no headscope page, or cannot be written.
        ValueError: as ``render``.
    """
    _check_target(Path(path), force)
    return write(render(sheet), path, force=force)


def write(html: str, path: str | Path, *, force: bool = False) -> Path:
    """Write HTML that has the ``MARKER`` in its first 256 bytes; arguments, result and errors are those of ``save``."""
    target = Path(path)
    _check_target(target, force)
    try:
        _replace(target, html.encode("utf-8"))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise SaveError(f"{_shown(target)}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return target


def check(path: str | Path, *, force: bool = False) -> None:
    """Raises: SaveError: ``save`` would not write there, as far as can be told before."""
    _check_target(Path(path), force)
    if not Path(path).parent.is_dir():
        raise SaveError(f"{_shown(Path(path))}: cannot be written: there is no such folder")


def _replace(target: Path, content: bytes) -> None:
    """Write to a file beside the target, then put it in the target's place."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".headscope-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's are for the owner only
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _check_target(target: Path, force: bool) -> None:
    try:
        if target.is_dir():
            raise SaveError(f"{_shown(target)}: is a directory, wanted the name of a file")
        if not target.exists():
            return
        if not target.is_file():  # a device or a pipe: also with force
            raise SaveError(f"{_shown(target)}: is no regular file")
        with target.open("rb") as file:
            ours = MARKER.encode() in file.read(256)
    except SaveError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise SaveError(f"{_shown(target)}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not ours and not force:
        raise SaveError(
            f"{_shown(target)}: holds a file that is no page of headscope's own; choose another name, or force it"
        )


def _shown(path: Path) -> str:
    """A path fit for one line."""
    return visible(str(path), limit=1000, blanks=False)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# ---------------------------------------------------------------- the page


def render(sheet: Sheet) -> str:
    """The page as HTML: it holds all it needs and asks for nothing from anywhere.

    Raises:
        ValueError: the weights would take more than ``MOST_BYTES``.
    """
    from jinja2 import Environment  # only who writes a page waits for it
    from markupsafe import Markup

    style = asset("page.css")
    script = asset("maps.js") + asset("head.js") + asset("page.js")
    data = _data(sheet)
    environment = Environment(autoescape=True, trim_blocks=False, keep_trailing_newline=True)
    columns, table = _table(sheet)
    html = environment.from_string(asset("page.html.jinja")).render(
        marker=Markup(MARKER),
        title=visible(sheet.title, limit=160, blanks=False),
        style=Markup(style),
        style_hash=digest(style),
        script=Markup(script),
        script_hash=digest(script),
        data=Markup(embedded(data)),
        sheet=sheet,
        notes=[visible(note, limit=500, blanks=False) for note in sheet.notes],
        columns=columns,
        table=table,
        trace=_stages(sheet.trace),
        footer=[(visible(k, blanks=False), visible(v, limit=500, blanks=False)) for k, v in sheet.footer.items()],
        explanation=NOT_EXPLANATION,
        storage=_storage(data["encoding"]),
    )
    return html.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be written


def framed(sheet: Sheet, *, height: int = 900) -> str:
    """The page inside a frame of a notebook, so many pixels high: its script can reach nothing outside of it."""
    return (
        f'<iframe title="headscope" sandbox="allow-scripts" width="100%" height="{height}" style="border: 0" '
        f'srcdoc="{escape(render(sheet), quote=True)}"></iframe>'
    )


def asset(name: str) -> str:
    """A file of this room, as text."""
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """How a content security policy names a style or script that may be there."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}"


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: ASCII, without "<", ">" and "&"."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _storage(encoding: Mapping[str, Any]) -> str:
    bits, top = encoding["bits"], encoding["top"]
    worst = 1 / top + 1 / (4 * top**2)  # of p = c² / top², half a step of c at p = 1
    return (
        f"A weight stands in this file as a whole number c of {bits} bits, p = (c / {top})², within {worst:.1g} of it."
    )


# ---------------------------------------------------------------- the data


def _data(sheet: Sheet) -> dict[str, Any]:
    """All that the page's script reads. Weights are encoded; every other figure is the sheet's own."""
    triangle = sheet.seen is not None and bool(np.array_equal(sheet.seen, np.tril(np.ones_like(sheet.seen))))
    length = len(sheet.tokens)
    cells = sum(len(weights) for weights in sheet.weights) * (length * (length + 1) // 2 if triangle else length**2)
    if cells > MOST_BYTES:
        raise ValueError(
            f"sheet: {cells:,} weights do not fit one page, which holds {MOST_BYTES:,}; {length} tokens, "
            f"{sheet.layers} layers of {sheet.heads} heads"
        )
    bits = 16 if 2 * cells <= FINE_BYTES else 8
    top = 2**bits - 2  # the code above it says NaN or infinity
    seen = "all" if sheet.seen is None else "causal" if triangle else _base64(np.packbits(sheet.seen))
    data: dict[str, Any] = {
        "kind": sheet.kind,
        "title": sheet.title,
        "tokens": list(sheet.tokens),
        "labels": sheet.labels,
        "seen": seen,
        "encoding": {"bits": bits, "top": top, "broken": top + 1, "triangle": triangle},
        "weights": [_base64(_codes(weights, bits, triangle)) for weights in sheet.weights],
        "heads": [len(weights) for weights in sheet.weights],
        "statistics": [dict(layer) for layer in sheet.statistics],
        "rows": [dict(layer) for layer in sheet.rows],
        "patterns": [[match and list(match) for match in layer] for layer in sheet.patterns],
        "words": {name: word._asdict() for name, word in (STATISTICS | REGIONS).items()},
        "patternWords": PATTERNS,
        "magma": MAGMA,
        "notes": list(sheet.notes),
        "footer": dict(sheet.footer),
    }
    if sheet.kind == "image" and sheet.image is not None and sheet.grid is not None:
        image = sheet.image if sheet.image.ndim == 3 else np.repeat(sheet.image[..., None], 3, -1)
        inside = object_mask(sheet.image, sheet.grid)
        data |= {
            "object": None if inside is None else [int(patch) for patch in inside],
            "image": {"height": image.shape[0], "width": image.shape[1], "rgb": _base64(image)},
            "grid": list(sheet.grid),
            "regions": [dict(layer) for layer in sheet.regions],
            "looks": [[look and list(look) for look in layer] for layer in sheet.looks],
            "regionMaps": {name: list(part) for name, part in sheet.region_maps.items()},
        }
    return data


def _codes(weights: NDArray[np.float32], bits: int, triangle: bool) -> NDArray[Any]:
    """Weights as whole numbers c with p = (c / top)², little-endian; of a triangle only j ≤ i, row by row."""
    top = 2**bits - 2
    if triangle:
        rows, columns = np.tril_indices(weights.shape[-1])
        weights = weights[:, rows, columns]
    whole = np.isfinite(weights)
    root = np.sqrt(np.where(whole, weights, 0).astype(np.float64).clip(0, 1))
    return np.where(whole, np.rint(root * top), top + 1).astype(f"<u{bits // 8}")


def _base64(values: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")


# ---------------------------------------------------------------- the tables


class Column(NamedTuple):
    """A heading of the table of statistics."""

    heading: str
    meaning: str
    text: bool = False


class Cell(NamedTuple):
    """A figure in the table: what is shown, and what it is sorted by."""

    text: str
    value: float | str
    hint: str = ""
    isword: bool = False


class TableRow(NamedTuple):
    """One head in the table."""

    layer: int
    head: int
    cells: list[Cell]


def _table(sheet: Sheet) -> tuple[list[Column], list[TableRow]]:
    """The table of statistics: all that some head has, but for a mass that is always one."""
    names = [name for name in STATISTICS if _is_shown(name, [layer.get(name) for layer in sheet.statistics])]
    regions = [name for name in REGIONS if any(layer.get(name) for layer in sheet.regions)]
    columns = [Column("head", "")]
    if sheet.kind == "image":
        meaning = "The region on which the most attention falls, against an even spread."
        columns += [Column("looks most at", meaning, text=True), Column("× chance", "")]
        columns += [Column(REGIONS[name].heading, REGIONS[name].meaning) for name in regions]
    columns += [Column("pattern", "The pattern that the head matches best: a likeness, not a purpose.", text=True)]
    columns += [Column("score", "0 = chance or worse, 1 = exactly that pattern.")]
    columns += [Column(STATISTICS[name].heading, STATISTICS[name].meaning) for name in names]
    rows: list[TableRow] = []
    for layer, weights in enumerate(sheet.weights):
        for head in range(len(weights)):
            cells = [Cell(f"layer {layer} head {head}", layer * 100_000 + head)]
            if sheet.kind == "image":
                look = sheet.looks[layer][head]
                cells += [_word(look and look[0]), _cell(look and look[1])]
                cells += [_cell(sheet.regions[layer][name][head], REGIONS[name]) for name in regions]
            match = sheet.patterns[layer][head]
            cells += [_word(match and match.pattern), _cell(match and match.score, rows=match and match.rows)]
            for name in names:
                figure, rows_of = sheet.statistics[layer][name][head], sheet.rows[layer][name][head]
                cells.append(_cell(figure, STATISTICS[name], rows_of))
            rows.append(TableRow(layer, head, cells))
    return columns, rows


def _is_shown(name: str, by_layer: Sequence[Sequence[float | None] | None]) -> bool:
    figures = [figure for layer in by_layer if layer for figure in layer if figure is not None]
    return any(abs(figure - 1) > 1e-3 for figure in figures) if name == "mass" else bool(figures)


def _word(text: str | None) -> Cell:
    return Cell(text or "–", text or "", isword=True)


def _cell(figure: float | None, word: Word | None = None, rows: int | None = None) -> Cell:
    if figure is None:
        return Cell("–", "")
    hint = "" if rows is None else f"on {rows} row{'' if rows == 1 else 's'}"
    return Cell(f"{figure:.{2 if word is None else word.decimals}f}", figure, hint)


class Stage(NamedTuple):
    """A run of steps of the trace."""

    name: str
    rows: list[dict[str, Any]]


def _stages(trace: Sequence[Mapping[str, Any]]) -> list[Stage]:
    from headscope._trace_words import STAGES, grid

    stages: list[Stage] = []
    for number, rows in itertools.groupby(trace, key=lambda row: row.get("stage")):
        shown: list[dict[str, Any]] = []
        for row in rows:
            corner = row.get("corner")
            axes = list(row.get("axes", {}).items())
            # JSON knows no infinity: a trace may write it as "Infinity"
            values = grid([[float(value) for value in line] for line in corner]) if corner else None
            shown.append({**row, "axes": axes, "corner": values})
        name = STAGES.get(number, "") if isinstance(number, int) else ""
        stages.append(Stage(f"{number}. {name}" if name else "Steps", shown))
    return stages
