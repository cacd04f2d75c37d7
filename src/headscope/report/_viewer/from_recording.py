"""What the viewer's page shows of a recording."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from headscope import decisions
from headscope._analysis.answers import plural, short_layers
from headscope._support.arguments import as_whole, check_type, whole
from headscope.report._texts import broken_layers, stands_on
from headscope.report._viewer.model import Columns, Layer, Picture, Scored, Shown
from headscope.report._viewer.packing import Strips, exact, sources
from headscope.report._viewer.strips import empty_strips, strips_of
from headscope.report.observed_model import ObservedModel
from headscope.report.regions import pixels_of
from headscope.stats import Observe
from headscope.stats._kept_weights import weights_if_any, weights_of
from headscope.stats._layer import LayerStats
from headscope.stats._origin import Part

MOST_STRIPS = 16
"""How many heads may have strips."""


def shown(
    recording: ObservedModel,
    *,
    title: str = "",
    image: Any = None,
    grid: tuple[int, int] | None = None,
    special: int | None = None,
    strips: Sequence[tuple[int | str, int]] | None = None,
) -> Shown:
    """See ``render_recording``."""
    check_type("title", title, str, "a str", repr)
    stats, about = recording.stats, recording.about
    parts = list(stats.parts.values())
    if image is not None and about.texts is not None:
        raise ValueError(f"image: the recording has the texts of {len(about.texts)} tokens; expected one of patches")
    picture = None if image is None else _picture(parts, image, grid, special)
    if image is None and (grid is not None or special is not None):
        raise ValueError("grid, special: expected an image with them")
    patterns = _patterns(recording)
    short, common = short_layers(recording.stats.layers)
    of_heads = _strips(stats.parts, patterns, strips, about.kinds)
    layers = [
        Layer(
            name,
            short[name],
            {
                "kind": about.kinds.get(name, "self"),
                "lengths": part.lengths,
                "runs": part.runs,
                "lookedAt": part.looked_at,
                "of": part.of,
                "rows": part.rows.tolist(),
                "broken": part.broken.tolist(),
            },
            source,
            _statistics(part),
            patterns[n] if patterns else [()] * part.heads,
        )
        for n, ((name, part), source) in enumerate(zip(stats.parts.items(), sources(parts, of_heads), strict=True))
    ]
    return Shown(
        title=title or about.model or "Attention heads",
        layers=layers,
        names=stats.names,
        texts=about.texts,
        footer=_footer(recording, common),
        lead=_lead(recording),
        notes=_notes(recording),
        picture=picture,
    )


# ---------------------------------------------------------------- figures


def _number(value: float) -> float | None:
    """With seven digits, which are more than are shown."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _statistics(part: LayerStats) -> dict[str, Columns]:
    statistics: dict[str, Columns] = {}
    for name, moments in part.moments.items():
        std = (moments.M2 / moments.count).sqrt()
        columns = {"mean": moments.mean, "std": std, "min": moments.min, "max": moments.max}
        figures = {what: [_number(x) for x in column.tolist()] for what, column in columns.items()}
        statistics[name] = {**figures, "count": moments.count.tolist()}
    return statistics


def _patterns(recording: ObservedModel) -> list[list[list[Scored]]]:
    """For each layer and head its patterns, the one that it matches best first."""
    if "chance" not in recording.stats.names:  # nothing by which a pattern could be told
        return []
    scored = decisions.patterns(recording.stats)
    scores: dict[tuple[str, int], list[Scored]]
    scores = {(layer, head): [] for layer, part in recording.stats.parts.items() for head in range(part.heads)}
    for each in scored.scores:
        scores[each.layer, each.head].append((each.pattern, round(each.score, 6), each.rows, each.exact))
    for each in scores.values():
        each.sort(key=lambda score: -score[1])  # stable: of equal ones the more specific stays first
    return [[scores[layer, head] for head in range(part.heads)] for layer, part in recording.stats.parts.items()]


# ---------------------------------------------------------------- strips


def _strips(
    parts: Mapping[str, LayerStats],
    patterns: Sequence[Sequence[Sequence[Scored]]],
    request: Sequence[tuple[int | str, int]] | None,
    kinds: Mapping[str, str],
) -> list[Strips | None]:
    """Of each layer the strips of those of its heads that are to have them.

    Where every weight is in the map there are none; what is said of them still tells where the queries stand.
    """
    names = list(parts)
    if request is None:
        chosen = _telling(parts, patterns, kinds)
    else:
        check_type("strips", request, Sequence, "pairs of a layer and the number of a head", repr)
        if len(request) > MOST_STRIPS:
            raise ValueError(f"strips: got {len(request)} heads, expected at most {MOST_STRIPS}")
        for each in request:
            match each:
                case (int() | str(), int()):
                    pass
                case _:
                    raise ValueError(f"strips: got {each!r}, expected pairs of a layer and the number of a head")
        chosen = [(names.index(layer) if layer in names else layer, head) for layer, head in request]
        for layer, head in chosen:
            if not (isinstance(layer, int) and 0 <= layer < len(names) and 0 <= head < parts[names[layer]].heads):
                raise ValueError(f"strips: got layer {layer}, head {head}, which is not there")
            if not parts[names[layer]].tiles:
                raise ValueError("strips: q and k were not kept; observe with Observe(keep_qk=True)")
            if kinds.get(names[layer]) == "cross":
                why = "in cross-attention no key is near a query"
                raise ValueError(f"strips: got layer {layer}, expected one of self-attention: {why}")
    whole = [exact(part) for part in parts.values()]
    count = sum(not whole[layer] for layer, _ in chosen if isinstance(layer, int))
    strips_of_layers: list[Strips | None] = []
    for n, (name, part) in enumerate(parts.items()):
        heads = [head for layer, head in chosen if layer == n]
        weights = None
        if heads:  # weights that cannot be had are told of if somebody asked
            weights = weights_if_any(part.last_tiles) if request is None else weights_of(part.last_tiles)
        elif whole[n] and part.tiles and kinds.get(name) != "cross":
            weights = weights_if_any(part.last_tiles)
        if weights is None:
            strips = None
        else:
            strips = empty_strips(weights, range(part.heads)) if whole[n] else strips_of(weights, heads, count)
        if request is not None and heads and strips is None:
            raise ValueError(f"strips: got layer {n}, expected one whose last call has inputs, queries and keys")
        strips_of_layers.append(strips)
    return strips_of_layers


def _telling(
    parts: Mapping[str, LayerStats], patterns: Sequence[Sequence[Sequence[Scored]]], kinds: Mapping[str, str]
) -> list[tuple[int | str, int]]:
    """The heads likest to some pattern other than none, of layers of self-attention with q and k and a pooled map."""
    scores: list[tuple[float, int, int]] = []
    for n, (name, part) in enumerate(parts.items()):
        if part.tiles and kinds.get(name) != "cross" and not exact(part):
            for head in range(part.heads):
                best = patterns[n][head][:1] if patterns else []
                scores.append((-best[0][1] if best and best[0][0] != "uniform" else 0.0, n, head))
    return sorted((n, head) for _, n, head in sorted(scores)[:MOST_STRIPS])


# ---------------------------------------------------------------- an image


def _picture(parts: Sequence[LayerStats], image: Any, grid: tuple[int, int] | None, special: int | None) -> Picture:
    pixels = pixels_of(image)
    lengths = {part.lengths for part in parts}
    (common,) = lengths if len(lengths) == 1 else (None,)
    if common is None or common[0] != common[1]:
        raise ValueError("image: expected as many queries as keys in every layer, and the same in all")
    keys = common[1]
    if special is not None:
        special = whole("special", special, 0)
        if special >= keys:
            raise ValueError(
                f"special: got {special}, expected 0 to {keys - 1}, fewer than the {keys} keys that there are"
            )
    if grid is None:
        side = math.isqrt(keys - (special or 0))
        if special is not None and side**2 != keys - special:
            raise ValueError(
                f"grid: missing, for the {keys - special} keys after the {special} special ones are no square"
            )
        rows, columns = side, side
    else:
        rows, columns = _sides(grid)
    before = keys - rows * columns if special is None else special
    if before < 0 or before + rows * columns != keys:
        raise ValueError(
            f"grid: {rows} x {columns} patches{'' if special is None else f' and {special} keys before them'} are "
            f"not the {keys} keys that there are"
        )
    if special is None and not few_before(rows, columns, keys):
        raise ValueError(
            f"grid: {rows} x {columns} patches leave {before} of the {keys} keys, as many as a row or column of "
            f"patches; give special={before} if all of them come before the patches"
        )
    return Picture(pixels, (rows, columns), before)


def few_before(rows: int, columns: int, keys: int) -> bool:
    """Whether so few keys come before the patches that they pass for CLS and registers, and not for patches."""
    return keys - rows * columns < max(rows, columns)


def _sides(grid: object) -> tuple[int, int]:
    expected = "rows and columns of patches, each at least 1"
    if isinstance(grid, str) or not isinstance(grid, Iterable):
        raise TypeError(f"grid: got {grid!r}, expected {expected}")
    sides: list[object] = [*grid]
    numbers = [number for side in sides if (number := as_whole(side)) is not None]
    if len(numbers) < len(sides):
        raise TypeError(f"grid: got {grid!r}, expected {expected}")
    if len(numbers) != 2 or min(numbers) < 1:
        raise ValueError(f"grid: got {grid}, expected {expected}")
    return numbers[0], numbers[1]


# ---------------------------------------------------------------- what stands around


def _notes(recording: ObservedModel) -> list[str]:
    notes = [broken] if (broken := broken_layers(recording.stats.parts)) else []
    if recording.stats.sampled:
        looked = sum(part.looked_at for part in recording.stats.parts.values())
        of = sum(part.of for part in recording.stats.parts.values())
        each = "of each head" if len(recording.stats.parts) == 1 else "of each head, all layers together,"
        notes.append(f"A sample: {looked:,} of {of:,} query rows {each} were looked at; every figure stands on these.")
    return notes


def reading(recording: ObservedModel) -> str:
    """How the maps are read."""
    mapped = any(part.map is not None for part in recording.stats.parts.values())
    how = "A query looks, a key is looked at."
    if mapped:
        how = "Rows of a map are queries, which look; columns are keys, which are looked at."
    return f"{how} All are counted from 0."


def _lead(recording: ObservedModel) -> str:
    parts = recording.stats.parts.values()
    heads = sum(part.heads for part in parts)
    sizes = f"{len(parts):,} {plural('layer', len(parts))}, {heads:,} {plural('head', heads)}"
    return f"{sizes}. {reading(recording)}"


def _footer(recording: ObservedModel, common: str) -> dict[str, str]:
    about, stats = recording.about, recording.stats
    lengths = {part.lengths for part in stats.parts.values()}
    inputs = ", ".join(
        "calls of different lengths"
        if each is None
        else f"{_count(each[0], 'query', 'queries')} × {_count(each[1], 'key')}"
        for each in sorted(lengths, key=lambda each: each or (0, 0))
    )
    rows = [int(n) for part in stats.parts.values() for n in part.rows.tolist()]
    input_options = about.options.get("input")
    source = f"{input_options['source']}; " if isinstance(input_options, dict) and "source" in input_options else ""
    passes = _count(about.forwards, "forward pass", "forward passes")
    if about.forwards != about.ran:
        passes = f"{about.forwards:,} of {about.ran:,} forward passes looked at"
    return {
        "Model": about.model or "not named",
        **({"Part": _parts(about.part)} if about.part else {}),
        "Input": f"{source}{inputs}; {passes}",
        "Rows": stands_on(rows),
        **({"Layers": common.strip().removeprefix("Layers: ").removesuffix(".")} if common else {}),
        "Options": _options(about.options),
        "Versions": ", ".join(f"{name} {version}" for name, version in about.versions.items()) or "not said",
    }


def _parts(parts: Mapping[str, Part]) -> str:
    """The parts that were recorded, each with the first of its layers."""
    layers: dict[Part, list[str]] = {}
    for name, part in parts.items():
        layers.setdefault(part, []).append(name)
    return "; ".join(
        f"{part} in {names[0]}{f' and {len(names) - 1} more layers' if len(names) > 1 else ''}"
        for part, names in layers.items()
    )


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number:,} {one if number == 1 else more or plural(one, number)}"


def _options(options: Mapping[str, Any]) -> str:
    """What was asked for beyond what is by default; of a tensor that it was given."""
    usual: dict[str, Any] = {each.name: each.default for each in fields(Observe)} | {"every": 1, "accelerate": False}
    return (
        ", ".join(
            f"{name} given" if value == Tensor.__name__ else f"{name}={value}"
            for name, value in options.items()
            if name != "input" and value != usual.get(name) and value not in (None, [], {})
        )
        or "none"
    )
