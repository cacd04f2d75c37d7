"""The content of a sheet's page: one forward pass with all of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.report._clear_regions import clear_region, has_fixed_keys
from headscope.report._figures import SheetFigures
from headscope.report._viewer import texts
from headscope.report._viewer.exact_heads import exact_heads_of_sheet
from headscope.report._viewer.few_rows import few_rows_of_weights
from headscope.report._viewer.model import Columns, Layer, Picture, Scored, Shown
from headscope.report._viewer.packing import Map, Rows, Source
from headscope.report.highlights import sheet_highlights
from headscope.report.regions import object_mask
from headscope.report.words import REGIONS, STATISTICS, WEAK
from headscope.stats import Match

MOST = 32 * 2**20
"""How many weights one page may hold."""

EDGES = 16


def shown(sheet: SheetFigures) -> Shown:
    """Return what the page of a sheet shows, see ``render_sheet``.

    Raises:
        ValueError: there are more weights than ``MOST``.
    """
    length, layers = len(sheet.tokens), sheet.layers
    both = zip(sheet.weights, sheet.seen, strict=True)
    cells = sum(len(weights) * length**2 if visible is None else int(visible.sum()) for weights, visible in both)
    if cells > MOST:
        raise ValueError(
            f"sheet: expected at most {MOST:,} weights on one page, got {cells:,}; {length} tokens, "
            f"{layers} layers of {sheet.heads} heads"
        )
    layer_list = [_layer(sheet, n) for n in range(layers)]
    statistics: list[Mapping[str, Columns]] = [layer.statistics for layer in layer_list]
    names = [name for name in (*REGIONS, *STATISTICS) if any(name in layer for layer in statistics)]
    names += [name for name in dict.fromkeys(name for layer in statistics for name in layer) if name not in names]
    return Shown(
        title=sheet.title,
        layers=layer_list,
        names=[name for name in names if not _always_one(name, statistics)],
        texts=sheet.tokens if sheet.kind == "text" else None,
        footer={name: value for name, value in sheet.footer.items() if (name, value) != (texts.OPTIONS, "none")},
        lead=_lead(sheet),
        notes=sheet.notes,
        trace=sheet.trace,
        trace_title=sheet.trace_title,
        picture=_picture(sheet),
        opens_on=sheet.opens_on,
        highlights=sheet_highlights(sheet),
        exact=exact_heads_of_sheet(sheet.tiles, [layer.patterns for layer in layer_list], sheet.opens_on),
    )


def _lead(sheet: SheetFigures) -> str:
    if sheet.kind == "image" and sheet.grid is not None:
        return texts.lead_of_image(sheet.layers, sheet.heads, *sheet.grid)
    return texts.lead_of_text(sheet.layers, sheet.heads, len(sheet.tokens))


def _always_one(name: str, statistics: list[Mapping[str, Columns]]) -> bool:
    """Return whether this is the mass and equals one in every head, so that a column of it is of no use."""
    means = [x for layer in statistics for x in layer.get(name, {}).get("mean", ()) if x is not None]
    return name == "mass" and all(abs(x - 1) <= 1e-3 for x in means)


def _is_shown(match: Match) -> bool:
    """Return whether the page may show this match: it names what is large, and dims the rest."""
    return match.score < WEAK or match.is_name


def _layer(sheet: SheetFigures, n: int) -> Layer:
    weights, visible = sheet.weights[n], sheet.seen[n]
    heads, length, _ = weights.shape
    whole: NDArray[np.bool_] = np.asarray(np.isfinite(weights).all(-1))  # [H, T]
    counted = np.broadcast_to(whole[..., None], weights.shape)
    there = counted if visible is None else visible & counted  # [H, T, T]
    p = np.where(there, weights, 0)
    first = np.divide(p[..., 0], p.sum(-1), out=np.full((heads, length), np.nan), where=p.sum(-1) > 0)
    broken = (~whole).sum(-1)
    matches: list[list[Scored]] = [
        [(match.pattern, match.score, match.rows, True)] if match is not None and _is_shown(match) else []
        for match in sheet.patterns[n]
    ]
    statistics = {name: _columns(figures, sheet.rows[n][name]) for name, figures in sheet.statistics[n].items()} | {
        name: _columns(figures, [length] * heads)
        for name, figures in (sheet.regions[n].items() if sheet.regions else ())
    }
    facts: dict[str, Any] = {
        "kind": "self",
        "lengths": (length, length),
        "runs": 1,
        "lookedAt": length,
        "of": length,
        "rows": (length - broken).tolist(),
        "segments": None,
        "broken": broken.tolist(),
    }
    bins = Map(weights.astype(np.float64), weights, there, [], first, exact=True, ranges=True)
    also = [each and (each.pattern, each.score) for each in (sheet.also[n] if sheet.also else [None] * heads)]
    few = few_rows_of_weights(weights, visible, sheet.tokens, statistics)
    return Layer(str(n), str(n), facts, Source(heads, bins, _rows(p, there)), statistics, matches, also, few)


def _columns(figures: Sequence[float | None], rows: Sequence[int]) -> Columns:
    nothing: list[None] = [None] * len(figures)
    return {"mean": list(figures), "std": nothing, "min": nothing, "max": nothing, "count": list(rows)}


def _rows(p: NDArray[np.float32], there: NDArray[np.bool_]) -> Rows:
    """Return the profiles and the largest weights, from the weights p [H, T, T]."""
    heads, length, _ = p.shape
    wide = p.astype(np.float64)
    eligible = there.sum(1)
    received = np.divide(wide.sum(1), eligible, out=np.full((heads, length), np.nan), where=eligible > 0)
    spread = -np.where(wide > 0, wide * np.log(np.where(wide > 0, wide, 1)), 0).sum(-1)
    entropy = np.where(there.any(-1), spread, np.nan)
    flat = np.where(there, wide, -1).reshape(heads, -1)
    order = np.argsort(-flat, axis=1, kind="stable")[:, :EDGES]
    largest = np.take_along_axis(flat, order, 1)
    missing = largest < 0
    at = np.stack([np.zeros_like(order), np.zeros_like(order), order // length, order % length], -1)
    at[missing] = -1
    none = np.zeros((heads, 0, 0))
    return Rows(received, length, entropy, length, np.where(missing, np.nan, largest), at, none, none)


def _picture(sheet: SheetFigures) -> Picture | None:
    if sheet.kind != "image" or sheet.image is None or sheet.grid is None:
        return None
    inside = object_mask(sheet.image, sheet.grid)
    outline = () if inside is None else [int(patch) for patch in inside]
    heads = [[clear_region(sheet, n, head) for head in range(len(each))] for n, each in enumerate(sheet.named_looks)]
    clear = [[look and look[0] for look in layer] for layer in heads]
    fixed = [[has_fixed_keys(weights) for weights in layer] for layer in sheet.weights]
    return Picture(sheet.image, sheet.grid, 0, outline, sheet.region_maps, sheet.named_looks, clear, fixed)
