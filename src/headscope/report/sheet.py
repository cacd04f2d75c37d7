"""A sheet: all that a page or a terminal shows of one forward pass, every number of it measured."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope import __version__
from headscope._support.arguments import check_type
from headscope.report import regions
from headscope.report._figures import Look, Numbers, SheetFigures
from headscope.report._texts import NOT_EXPLANATION, broken_layers, few, visible
from headscope.report._viewer import texts
from headscope.report.fixed_keys import match_fixed_keys
from headscope.report.viewer import framed, render_sheet
from headscope.stats import Match, best_matches, broken_rows, head_means, pattern_scores, row_statistics, second_matches

__all__ = ["NOT_EXPLANATION", "Look", "Sheet", "broken_layers", "image_sheet", "text_sheet", "versions", "visible"]


@dataclass(frozen=True, eq=False)
class Sheet(SheetFigures):
    """One forward pass, measured; a notebook shows its page.

    Layers, heads and tokens are counted from 0, as in code. Statistics are per head, over the rows of this input.

    Attributes:
        title: what was run, one line.
        kind: "text", or "image" where the tokens are patches of a grid.
        tokens: the text of each token, or the place of each patch.
        weights: for each layer the weights, float32 [H, T, T]: row = query, column = key.
        seen: for each layer the visible pairs, boolean [H, T, T], True = attend; None = all.
        statistics: for each layer name -> one mean per head.
        rows: for each layer name -> the number of rows of each mean.
        patterns: for each layer the best-matching pattern of each head, with its score, or None.
        also: for each layer the second pattern of each head that has one beyond chance, or None.
        trace: the steps of the forward pass, as ``Trace.to_dict()`` gives its rows.
        trace_title: the heading of the trace.
        footer: model, input, options, rows, versions: label -> text.
        notes: what a reader must know about this input, such as that it was cut.
        image: the image of the patches, uint8 [h, w] or [h, w, 3].
        grid: rows and columns of patches.
        regions: for each layer region -> one ratio per head; 1 = chance.
        looks: for each layer the region that each head attends to most, with its ratio.
        region_maps: region -> the share of each patch that belongs to it, 0 to 1, if it is the same for all queries.
        opens_on: the layer and head that the page opens first; None = the most striking one.
        tiles: for each layer access to its weights from q and k, or None; the page explains weights of up to 8 heads.

    Examples:
        >>> import torch
        >>> from headscope.report import text_sheet
        >>> sheet = text_sheet("Each token attends to itself", ["a", "b", "c"], [torch.eye(3)[None]])
        >>> sheet.kind, sheet.labels, sheet.statistics[0]["self"]
        ('text', ['a', 'b', 'c'], [1.0])
    """

    def _repr_html_(self) -> str:
        return framed(render_sheet(self))


def text_sheet(
    title: str,
    tokens: Sequence[str],
    weights: Sequence[Tensor],
    *,
    ids: Sequence[int] | None = None,
    causal: bool = True,
    seen: Sequence[Tensor] | None = None,
    trace: Sequence[Mapping[str, Any]] = (),
    trace_title: str = "",
    footer: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Sheet:
    """Measure a forward pass over text.

    Shapes: weights, one tensor per layer, [H, T, T] or [1, H, T, T]; seen, one per layer, broadcasts to [H, T, T];
    tokens and ids of length T.

    Args:
        title: what was run, one line.
        tokens: the text of each token.
        weights: the weights of each layer, row = query.
        ids: token ids; duplicate and induction need them.
        causal: whether a query attends to its own token and earlier ones only.
        seen: for each layer the visible pairs, boolean, True = attend; overrides ``causal``, for other masks or masks
            that differ by layer, such as a sliding window.
        trace: rows of ``Trace.to_dict()``.
        trace_title: the heading of the trace.
        footer: model, input and options; the number of tokens of the averages and the versions are added.
        notes: what a reader must know about this input.

    Raises:
        ValueError: tokens or weights are empty, or sizes do not match.

    Examples:
        >>> import torch
        >>> from headscope.report import text_sheet
        >>> sheet = text_sheet("Each token attends to itself", ["a", "b", "c"], [torch.eye(3)[None]])
        >>> sheet.patterns[0][0].pattern
        'self'
    """
    maps = [_map(layer, weight, len(tokens)) for layer, weight in enumerate(weights)]
    _check(tokens, maps)
    if ids is not None and len(ids) != len(tokens):
        raise ValueError(f"ids: expected {len(tokens)} entries, one per token, got {len(ids)}")
    sights = _sights(seen, causal, maps)
    measured = _measure(maps, sights, {"tokens": None if ids is None else torch.tensor(list(ids), device="cpu")})
    return Sheet(
        title,
        "text",
        tuple(tokens),
        [weight[0].numpy() for weight in maps],
        [None if sight is None else sight.numpy() for sight in sights],
        *measured,
        trace=[dict(row) for row in trace],
        trace_title=trace_title,
        footer={**(footer or {}), texts.AVERAGES: _averages(maps, "token", "tokens"), texts.VERSIONS: versions()},
        notes=[*notes, *_broken(maps)],
    )


def image_sheet(
    title: str,
    image: NDArray[np.uint8],
    grid: tuple[int, int],
    weights: Sequence[Tensor],
    *,
    position_maps: Sequence[Tensor] | None = None,
    trace: Sequence[Mapping[str, Any]] = (),
    trace_title: str = "",
    footer: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Sheet:
    """Measure a forward pass over the patches of an image.

    Shapes: weights, one tensor per layer, [H, T, T] or [1, H, T, T] with T = rows · columns of the grid, row by row.

    Args:
        title: what was run, one line.
        image: the input of the model, uint8 [h, w] or [h, w, 3], the object brighter than its background; h and w are
            multiples of the grid's rows and columns.
        grid: rows and columns of patches.
        weights: the weights of each layer, row = query.
        position_maps: the mean weights of each layer over other images, shaped as ``weights``, which position alone
            explains; without them they are estimated from the map of this image (docs/concepts/statistics.md,
            "layout").
        trace, trace_title, footer, notes: as for ``text_sheet``.

    Raises:
        ValueError: weights are empty, sizes do not match, or the image has another dtype or shape.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from headscope.report import image_sheet
        >>> image = np.array([[255, 0], [0, 0]], dtype=np.uint8)
        >>> sheet = image_sheet("Each patch attends to itself", image, (2, 2), [torch.eye(4)[None]])
        >>> sheet.tokens[3], sheet.looks[0][0]
        ('row 1, column 1', ('near', 4.0))
    """
    height, width = grid
    image = regions.pixels_of(image)
    maps = [_map(layer, weight, height * width) for layer, weight in enumerate(weights)]
    places = [f"row {row}, column {column}" for row in range(height) for column in range(width)]
    _check(places, maps)
    if position_maps is not None and len(position_maps) != len(maps):
        raise ValueError(f"position_maps: expected {len(maps)} layers as in weights, got {len(position_maps)}")
    at = torch.tensor([(row, column) for row in range(height) for column in range(width)], device="cpu")
    figures = _measure(maps, [None] * len(maps), {"k_pos": at})
    if position_maps is None:
        expected = [None] * len(maps)
    else:
        expected = [_position_map(layer, *both) for layer, both in enumerate(zip(position_maps, maps, strict=True))]
    regions_of = [
        regions.measure(weight[0], image, grid, position_map=expectation)
        for weight, expectation in zip(maps, expected, strict=True)
    ]
    return Sheet(
        title,
        "image",
        tuple(places),
        [weight[0].numpy() for weight in maps],
        [None] * len(maps),
        *figures,
        trace=[dict(row) for row in trace],
        trace_title=trace_title,
        footer={**(footer or {}), texts.AVERAGES: _averages(maps, "patch", "patches"), texts.VERSIONS: versions()},
        notes=[*notes, *_broken(maps)],
        image=image,
        grid=grid,
        regions=[{name: _numbers(values) for name, values in measured.items()} for measured in regions_of],
        looks=[regions.looks_most_at(measured) for measured in regions_of],
        region_maps={name: part.tolist() for name, part in regions.image_regions(image, grid).items()},
    )


def versions() -> str:
    """Return the versions of headscope, torch and Python, in one line.

    Examples:
        >>> from headscope.report.sheet import versions
        >>> [each.split()[0] for each in versions().split(", ")]
        ['headscope', 'torch', 'Python']
    """
    return f"headscope {__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def _map(layer: int, weight: Tensor, tokens: int) -> Tensor:
    """Return the weights of a layer as [1, H, T, T] on the host, float32."""
    check_type("weights: each entry", weight, Tensor, "a tensor [H, T, T]")
    shape = list(weight.shape)
    if weight.ndim == 3:
        weight = weight[None]
    if weight.ndim != 4 or weight.shape[0] != 1 or weight.shape[2:] != (tokens, tokens):
        raise ValueError(
            f"weights: layer {layer} is {shape}, expected [H, {tokens}, {tokens}], one row and column per token"
        )
    return weight.detach().to("cpu", torch.float32)


def _position_map(layer: int, position_map: Tensor, weight: Tensor) -> Tensor:
    """Return the position map of a layer as [H, T, T] on the host."""
    sizes = weight.shape[1:]
    if position_map.shape not in (sizes, weight.shape):
        raise ValueError(
            f"position_maps: layer {layer} is {list(position_map.shape)}, expected {list(sizes)} as in weights"
        )
    return position_map.detach().to("cpu").reshape(sizes)


def _check(tokens: Sequence[str], maps: Sequence[Tensor]) -> None:
    if not tokens:
        raise ValueError("tokens: expected at least 1, got none")
    if not maps:
        raise ValueError("weights: expected at least 1 layer, got none")


def _sights(visible: Sequence[Tensor] | None, causal: bool, maps: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the visible pairs of each layer, boolean [H, T, T] on the host; None = all."""
    if visible is None:
        before = torch.ones(maps[0].shape[2:], dtype=torch.bool, device="cpu").tril()
        return [before.expand(weight.shape[1:]) if causal else None for weight in maps]
    if len(visible) != len(maps):
        raise ValueError(f"seen: expected {len(maps)} layers as in weights, got {len(visible)}")
    return [_sight(layer, *both) for layer, both in enumerate(zip(visible, maps, strict=True))]


def _sight(layer: int, visible: Tensor, weight: Tensor) -> Tensor:
    sizes = weight.shape[1:]
    if visible.dtype != torch.bool:
        raise ValueError(f"seen: layer {layer} is {visible.dtype}, expected torch.bool (True = attend)")
    try:
        return visible.detach().to("cpu").expand(sizes)
    except RuntimeError:
        raise ValueError(
            f"seen: layer {layer} is {list(visible.shape)}, expected {list(sizes)} as in weights"
        ) from None


def _measure(
    maps: Sequence[Tensor], sights: Sequence[Tensor | None], options: dict[str, Any]
) -> tuple[list[dict[str, Numbers]], list[dict[str, list[int]]], list[list[Match | None]], list[list[Match | None]]]:
    """Return the statistics of each layer and their rows, the best match of each head, and the second one."""
    statistics: list[dict[str, Numbers]] = []
    rows: list[dict[str, list[int]]] = []
    patterns: list[list[Match | None]] = []
    also: list[list[Match | None]] = []
    for weight, sight in zip(maps, sights, strict=True):
        means = head_means(row_statistics(weight, seen=sight, **options))
        statistics.append({name: _numbers(values) for name, values in means.mean.items()})
        rows.append({name: counts.tolist() for name, counts in means.rows.items()})
        scores = pattern_scores(weight, seen=sight, **options)
        matches = best_matches(scores) or [None] * weight.shape[1]
        patterns.append(match_fixed_keys(matches, weight[0], sight, skips_first="k_pos" not in options))
        also.append(second_matches(scores, patterns[-1]))
    return statistics, rows, patterns, also


def _numbers(values: Tensor) -> Numbers:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _averages(maps: Sequence[Tensor], one: str, more: str) -> str:
    """Return over how many tokens or patches the statistics are averaged."""
    rows = [weight.shape[2] - broken for weight in maps for broken in broken_rows(weight).tolist()]
    return texts.averages(rows, one, more)


def _broken(maps: Sequence[Tensor]) -> list[str]:
    """Return a line about heads with weights that are not finite, if any: their statistics exclude these rows."""
    counts = {
        (layer, head): count
        for layer, weight in enumerate(maps)
        for head, count in enumerate(broken_rows(weight).tolist())
        if count
    }
    if not counts:
        return []
    text = "contain NaN or infinity and are in no statistic"
    if len(counts) == 1:
        (((layer, head), count),) = counts.items()
        return [f"Layer {layer}, head {head}: {count} of {maps[layer].shape[2]} rows {text}."]
    heads = few([f"layer {layer} head {head}" for layer, head in counts])
    return [f"{sum(counts.values()):,} rows of {len(counts)} heads {text}: {heads}."]
