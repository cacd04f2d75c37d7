"""The content of a recording's page."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from headscope import decisions
from headscope._analysis.answers import short_layers
from headscope._support.arguments import as_whole, check_type, whole
from headscope.report._texts import broken_layers
from headscope.report._viewer import texts
from headscope.report._viewer.compared import Numbers, compared, distances, origin_of
from headscope.report._viewer.exact_heads import choose_heads, exact_heads
from headscope.report._viewer.few_rows import few_rows_of_part
from headscope.report._viewer.model import Against, Columns, Layer, Picture, Scored, Shown
from headscope.report._viewer.packing import Strips, most_received, sources, standing
from headscope.report._viewer.packing import exact as holds_every_weight
from headscope.report._viewer.places import Place, places_of
from headscope.report._viewer.segments import segment_facts
from headscope.report._viewer.strips import empty_strips, strips_of
from headscope.report.fixed_keys import FIXED_KEY
from headscope.report.highlights import Highlight, fixed_names, recording_highlights
from headscope.report.observed_model import Errors, ObservedModel, TracedSteps
from headscope.report.regions import pixels_of
from headscope.report.words import STATISTICS, WEAK
from headscope.stats import LayerStats, Observe, second_name
from headscope.stats._kept_weights import KeptWeights, weights_if_any, weights_of
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
    trace: TracedSteps | None = None,
    exact: Sequence[tuple[int | str, int]] | None = None,
    against: ObservedModel | None = None,
    labels: tuple[str, str] | None = None,
) -> Shown:
    """Return what the page of a recording shows; for the options see ``render_recording``."""
    check_type("title", title, str, "a str", repr)
    if trace is not None:
        check_type("trace", trace, TracedSteps, "what headscope.trace returns")
        if all(row["corner"] is None for row in trace.to_dict()["rows"]):
            raise ValueError(f"trace: {trace.title} has sizes only, expected values: trace(module, x)")
    stats, about = recording.stats, recording.about
    parts = list(stats.parts.values())
    other = None if against is None else _against(recording, against, labels)
    picture = _picture_of(recording, image, grid, special)
    unit = "patch" if picture is not None and picture.special == 0 else "token"
    patterns, also = _patterns(recording, unit)
    short, common = short_layers(recording.stats.layers)
    of_heads = _strips(stats.parts, patterns, strips, about.kinds)
    highlights = recording_highlights(recording, unit=unit)
    computed = exact_heads(stats.parts, patterns, exact, windows_in_order(parts, about.run_texts, highlights))
    numbers, heads = Numbers(), sum(part.heads for part in parts)
    statistics = [_statistics(part) for part in parts]
    layers = [
        Layer(
            name,
            short[name],
            _facts(part, about.kinds.get(name, "self")) | _comparable(part, numbers, heads),
            source,
            statistics[n],
            patterns[n] if patterns else [()] * part.heads,
            also[n],
            few_rows_of_part(part, statistics[n]),
        )
        for n, ((name, part), source) in enumerate(zip(stats.parts.items(), sources(parts, of_heads), strict=True))
    ]
    return Shown(
        title=title or about.model or texts.DEFAULT_TITLE,
        layers=layers,
        names=_in_order(stats.names),
        texts=about.texts,
        footer=_footer(recording, common),
        lead=_lead(recording),
        notes=[*_notes(recording), *computed.notes],
        picture=picture,
        trace=() if trace is None else trace.to_dict()["rows"],
        trace_title="" if trace is None else trace.title,
        run_texts=about.run_texts,
        exact=computed,
        highlights=highlights,
        origin=origin_of(recording),
        numbers=numbers.lists,
        against=other,
    )


def windows_in_order(
    parts: Sequence[LayerStats], run_texts: Sequence[Sequence[str]], highlights: Sequence[Highlight]
) -> list[int]:
    """Return the windows of a text: those with most of the cards' examples first; none if it was read in one pass."""
    if any(part.runs != len(run_texts) for part in parts):
        return []
    examples = [each.run for each in highlights if each.cell is not None]
    return sorted(range(len(run_texts)), key=lambda window: -examples.count(window))


def worth_keeping(recording: ObservedModel) -> tuple[list[Place], list[int]]:
    """Return the heads whose q and k a page should hold, and the passes to take them from, the best first."""
    stats, about = recording.stats, recording.about
    parts = list(stats.parts.values())
    patterns, _ = _patterns(recording, "token")
    heads = [part.heads if part.map is not None else 0 for part in parts]
    windows = windows_in_order(parts, about.run_texts, recording_highlights(recording))
    return choose_heads(heads, patterns), windows or [max(part.runs for part in parts) - 1]


def _picture_of(
    recording: ObservedModel, image: Any, grid: tuple[int, int] | None, special: int | None
) -> Picture | None:
    """Return the image of the recording's patches, if it is given."""
    texts = recording.about.texts
    if image is not None and texts is not None:
        raise ValueError(f"image: expected a recording of patches, got one with the texts of {len(texts)} tokens")
    if image is None and (grid is not None or special is not None):
        raise ValueError("grid, special: expected together with image=, got no image")
    return None if image is None else _picture(list(recording.stats.parts.values()), image, grid, special)


def _against(recording: ObservedModel, against: ObservedModel, labels: tuple[str, str] | None) -> Against:
    comparison = compared(recording, against)
    other = shown(against, strips=(), exact=())
    names = texts.LABELS if labels is None else labels
    return Against(other, (names[0], names[1]), distances(comparison, list(against.stats.parts)))


# ---------------------------------------------------------------- statistics


def _in_order(names: Collection[str]) -> list[str]:
    """Return the quantities in the order of columns; those for a distance follow."""
    return [*(name for name in STATISTICS if name in names), *(name for name in names if name not in STATISTICS)]


def _number(value: float) -> float | None:
    """Return a value with seven digits, more than the page shows."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _statistics(part: LayerStats) -> dict[str, Columns]:
    statistics: dict[str, Columns] = {}
    for name, moments in part.moments.items():
        std = (moments.M2 / moments.count).sqrt()
        columns = {"mean": moments.mean, "std": std, "min": moments.min, "max": moments.max}
        figures = {what: [_number(x) for x in column.tolist()] for what, column in columns.items()}
        statistics[name] = {**figures, "count": moments.count.tolist()}
    return statistics


def tiled_weights(part: LayerStats) -> KeptWeights | None:
    """Return the weights of a layer's last call, from which tiles are computed; None: q and k were not kept."""
    return weights_of(part.last_tiles) if part.tiles else None


def _facts(part: LayerStats, kind: str) -> dict[str, Any]:
    """Return what the script reads of a layer together with its blocks."""
    return {
        "kind": kind,
        "lengths": part.lengths,
        "runs": part.runs,
        "lookedAt": part.looked_at,
        "of": part.of,
        "rows": part.rows.tolist(),
        "broken": part.broken.tolist(),
        "segments": segment_facts(part),
    }


def _comparable(part: LayerStats, numbers: Numbers, heads: int) -> dict[str, Any]:
    """Return what the script needs to compare a layer with one of another recording; ``heads``: those of all layers.

    ``bins``: n of the map. ``counts``, ``eligible``: for each head which list of ``numbers``; None where each visible
    bin has one pair, where the page pools received weight, or where it has no room.
    """
    counts = eligible = None
    if part.map is not None and not holds_every_weight(part):
        rows, columns = standing(part.map.bins, part.lengths)
        counts = numbers.add(part.map.count.cpu().numpy()[np.ix_(np.arange(part.heads), rows, columns)])
    if part.eligible is not None and part.eligible.shape[1] <= most_received(heads):
        eligible = numbers.add(part.eligible.cpu().numpy())
    bins = None if part.map is None else part.map.bins
    return {"first": part.first, "bins": bins, "counts": counts, "eligible": eligible}


def _patterns(
    recording: ObservedModel, unit: str
) -> tuple[list[list[list[Scored]]], list[list[tuple[str, float] | None]]]:
    """Return the patterns of each layer and head, the best match first; and what the head shows, too."""
    if "chance" not in recording.stats.names:  # without it no pattern can be scored
        return [], [[None] * part.heads for part in recording.stats.parts.values()]
    scored = decisions.patterns(recording.stats)
    scores: dict[tuple[str, int], list[Scored]]
    scores = {(layer, head): [] for layer, part in recording.stats.parts.items() for head in range(part.heads)}
    fixed = fixed_names(recording.stats, skips_first=unit == "token")
    second: dict[tuple[str, int], tuple[str, float]] = {}
    for place, key in fixed.items():
        scores[place].append((FIXED_KEY, round(key.score, 6), key.rows, False))
    for ranked in scored.ranked():
        place = ranked[0].layer, ranked[0].head
        also = second_name(fixed[place].match if place in fixed else ranked[0], ranked)
        if also is not None:
            second[place] = also.pattern, also.score
        for each in ranked:
            if each.is_name or each.score < WEAK:  # the page names what is large
                scores[place].append((each.pattern, round(each.score, 6), each.rows, each.exact))
    places = [[(layer, head) for head in range(part.heads)] for layer, part in recording.stats.parts.items()]
    return [[scores[each] for each in heads] for heads in places], [
        [second.get(each) for each in heads] for heads in places
    ]


# ---------------------------------------------------------------- strips


def _strips(
    parts: Mapping[str, LayerStats],
    patterns: Sequence[Sequence[Sequence[Scored]]],
    request: Sequence[tuple[int | str, int]] | None,
    kinds: Mapping[str, str],
) -> list[Strips | None]:
    """Return the strips of each layer, for the requested heads or else for those that match a pattern best.

    A layer whose map holds every weight has empty strips: they give the positions of its queries and no codes.
    """
    names = list(parts)
    if request is None:
        chosen = _telling(parts, patterns, kinds)
    else:
        chosen = places_of("strips", request, parts, MOST_STRIPS)
        for layer, _ in chosen:
            if kinds.get(names[layer]) == "cross":
                why = "in cross-attention no key is near a query"
                raise ValueError(f"strips: expected layers of self-attention, got layer {layer}: {why}")
    whole = [holds_every_weight(part) for part in parts.values()]
    count = sum(not whole[layer] for layer, _ in chosen)
    strips_of_layers: list[Strips | None] = []
    for n, (name, part) in enumerate(parts.items()):
        heads = [head for layer, head in chosen if layer == n]
        weights = None
        if heads:  # weights that cannot be computed are an error only if they were requested
            weights = weights_if_any(part.last_tiles) if request is None else weights_of(part.last_tiles)
        elif whole[n] and part.tiles and kinds.get(name) != "cross":
            weights = weights_if_any(part.last_tiles)
        if weights is None:
            strips = None
        else:
            strips = empty_strips(weights, range(part.heads)) if whole[n] else strips_of(weights, heads, count)
        if request is not None and heads and strips is None:
            raise ValueError(f"strips: expected layers whose last call has inputs, queries and keys, got layer {n}")
        strips_of_layers.append(strips)
    return strips_of_layers


def _telling(
    parts: Mapping[str, LayerStats], patterns: Sequence[Sequence[Sequence[Scored]]], kinds: Mapping[str, str]
) -> list[Place]:
    """Return the heads that match a pattern other than uniform best, of self-attention with q, k and a pooled map."""
    scores: list[tuple[float, int, int]] = []
    for n, (name, part) in enumerate(parts.items()):
        if part.tiles and kinds.get(name) != "cross" and not holds_every_weight(part):
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
        raise ValueError(
            "image: expected as many queries as keys, and the same number in all layers; " + _sizes(lengths)
        )
    keys = common[1]
    if special is not None:
        special = whole("special", special, 0)
        if special >= keys:
            raise ValueError(f"special: expected 0 to {keys - 1}, fewer than the {keys} keys, got {special}")
    if grid is None:
        side = math.isqrt(keys - (special or 0))
        if special is not None and side**2 != keys - special:
            raise ValueError(
                f"grid: missing; the {keys - special} keys after the {special} special ones do not form a square, so "
                "pass its rows and columns"
            )
        rows, columns = side, side
    else:
        rows, columns = _sides(grid)
    before = keys - rows * columns if special is None else special
    if before < 0 or before + rows * columns != keys:
        raise ValueError(
            f"grid: expected rows x columns that match the {keys} keys, got {rows} x {columns} patches"
            f"{'' if special is None else f' and {special} keys before them'}"
        )
    if special is None and not few_before(rows, columns, keys):
        raise ValueError(
            f"grid: {rows} x {columns} patches leave {before} of the {keys} keys over, enough for a row or column of "
            f"patches; pass special={before} if all of them come before the patches"
        )
    return Picture(pixels, (rows, columns), before)


def _sizes(lengths: Collection[tuple[int, int] | None]) -> str:
    """Return the sizes of the calls, for a message."""
    known = sorted(each for each in lengths if each is not None)
    return "got " + ", ".join([texts.lengths(*each) for each in known] + [texts.DIFFERENT_LENGTHS] * (None in lengths))


def few_before(rows: int, columns: int, keys: int) -> bool:
    """Return whether the keys before the patches are few enough to be CLS and registers: less than a row or column."""
    return keys - rows * columns < max(rows, columns)


def _sides(grid: object) -> tuple[int, int]:
    expected = "rows and columns of patches, each at least 1"
    if isinstance(grid, str) or not isinstance(grid, Iterable):
        raise TypeError(f"grid: expected {expected}, got {grid!r}")
    sides: list[object] = [*grid]
    numbers = [number for side in sides if (number := as_whole(side)) is not None]
    if len(numbers) < len(sides):
        raise TypeError(f"grid: expected {expected}, got {grid!r}")
    if len(numbers) != 2 or min(numbers) < 1:
        raise ValueError(f"grid: expected {expected}, got {grid}")
    return numbers[0], numbers[1]


# ---------------------------------------------------------------- notes, lead and footer


def _notes(recording: ObservedModel) -> list[str]:
    notes = [broken] if (broken := broken_layers(recording.stats.parts)) else []
    if recording.stats.sampled:
        observed = sum(part.looked_at for part in recording.stats.parts.values())
        of = sum(part.of for part in recording.stats.parts.values())
        notes.append(texts.sample(observed, of, len(recording.stats.parts)))
    return notes


def reading(recording: ObservedModel) -> str:
    """Return how to read the maps, in a sentence."""
    mapped = any(part.map is not None for part in recording.stats.parts.values())
    return texts.READING_MAPS if mapped else texts.READING


def _lead(recording: ObservedModel) -> str:
    parts = recording.stats.parts.values()
    return texts.lead_of_recording(len(parts), sum(part.heads for part in parts), reading(recording))


def _footer(recording: ObservedModel, common: str) -> dict[str, str]:
    about, stats = recording.about, recording.stats
    lengths = {part.lengths for part in stats.parts.values()}
    inputs = ", ".join(
        texts.DIFFERENT_LENGTHS if each is None else texts.lengths(*each)
        for each in sorted(lengths, key=lambda each: each or (0, 0))
    )
    rows = [int(n) for part in stats.parts.values() for n in part.rows.tolist()]
    input_options = about.options.get("input")
    source = f"{input_options['source']}; " if isinstance(input_options, dict) and "source" in input_options else ""
    options = list_options(about.options)
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    passes = texts.forward_passes(about.forwards, about.ran, windows=bool(about.run_texts))
    return {
        texts.MODEL: about.model or texts.NO_NAME,
        **({texts.PART: _parts(about.part)} if about.part else {}),
        texts.INPUT: f"{source}{inputs}; {passes}",
        texts.AVERAGES: texts.averages(rows, "query", "queries"),
        **({texts.LAYERS: common.strip().removeprefix("Layers: ").removesuffix(".")} if common else {}),
        **({texts.OTHER_LAYERS: _others(about.other_layers)} if about.other_layers else {}),
        **({texts.VERIFIED: _verified(about.verified)} if about.verified else {}),
        **({texts.OPTIONS: options} if options else {}),
        texts.VERSIONS: versions or texts.NO_VERSIONS,
    }


def _parts(parts: Mapping[str, Part]) -> str:
    """Return the parts that were recorded, each with the first of its layers."""
    layers: dict[Part, list[str]] = {}
    for name, part in parts.items():
        layers.setdefault(part, []).append(name)
    return "; ".join(
        texts.part(str(part), texts.more_layers(names[0], len(names) - 1)) for part, names in layers.items()
    )


def _others(layers: Mapping[str, str]) -> str:
    """Return what the layers without statistics are, each with the first of its layers."""
    names: dict[str, list[str]] = {}
    for name, what in layers.items():
        names.setdefault(what, []).append(name)
    return "; ".join(texts.other_layer(what, texts.more_layers(each[0], len(each) - 1)) for what, each in names.items())


def _verified(layers: Mapping[str, Errors]) -> str:
    """Return how closely the verified rows agree with float64."""
    errors: list[tuple[str, float, float]] = []
    for name, pairs in (
        (texts.OUTPUT, [(each.output, each.output_bound) for each in layers.values()]),
        (texts.STATISTICS, [(each.statistics, each.statistics_bound) for each in layers.values()]),
    ):
        compared = [(error, bound) for error, bound in pairs if error is not None and bound]
        if compared:
            errors.append((name, *max(compared, key=lambda pair: pair[0] / pair[1])))
    unfit = [name for name, each in layers.items() if not each.fits]
    return texts.verified(sum(each.rows for each in layers.values()), len(layers), errors, unfit)


def list_options(options: Mapping[str, Any]) -> str:
    """Return the options that differ from their defaults; of a tensor, that it was one."""
    usual: dict[str, Any] = {each.name: each.default for each in fields(Observe)} | {
        "every": 1,
        "accelerate": False,
        "verify": 0,
    }
    return ", ".join(
        texts.tensor_option(name) if value == Tensor.__name__ else f"{name}={value}"
        for name, value in options.items()
        if name != "input" and value != usual.get(name) and value not in (None, [], {})
    )
