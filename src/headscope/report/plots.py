"""Static figures: functions that draw into matplotlib axes and return them; matplotlib is imported on first use.

**Colour scales.** ``norm`` is ``"linear"`` (from 0), ``"log"`` (four decades up to the end) or ``"power"`` (the square
root). Without it, the data decide: linear if at least half of the weight of a map is in cells of at least a tenth of
the end, else log. So a head with few large weights is linear, and a long causal text with many small ones is log. Maps
of both kinds that share a scale are drawn with ``"power"``. The end is the largest weight of the rows with at least two
weights above 0: the first row of a causal map is always 1. Larger weights have the colour of the end, and the colour
bar has an arrow there.

**Palettes.** ``cmap`` is ``"blues"`` (white, blue, ink; the default), ``"viridis"``, ``"cividis"``, ``"magma"``, as on
the page, or any other name or ``Colormap`` of matplotlib. NaN is grey.

**Tokens.** An axis shows every token if the labels fit. Otherwise it shows some of them, each with its position, at
steps of 2, 5, 10 and so on. They never overlap, also when the figure is resized. With more than 200 tokens it shows
positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from headscope._support.arguments import as_whole, kind
from headscope.report._figures import SheetFigures
from headscope.report._plot_arguments import (
    check_options,
    check_tokens,
    figures_of,
    patch_grid,
    pixels_of,
    statistics_norm,
    width_in_inches,
)
from headscope.report._plot_axes import axes_or_new, draw_map, label_axes, label_outside, subplots_for
from headscope.report._plot_maps import Head, find_heads, maps_of, stats_of, tokens_of
from headscope.report._plotting import (
    NormName,
    Scale,
    Weights,
    add_colour_bar,
    as_weights,
    bin_means,
    check_flag,
    check_norm,
    choose_scale,
    mappable_of,
    to_colormap,
)
from headscope.report._texts import visible
from headscope.report.colours import ink_on
from headscope.report.observed_model import ObservedModel
from headscope.stats import HeadStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage

__all__ = ["plot_grid", "plot_head", "plot_heads", "plot_patches", "plot_statistics"]

MOST_BINS = 128
"""A longer axis of a map is drawn by this many bins in ``plot_grid``."""

MOST_CELLS = 1024
"""The same in ``plot_head`` and ``plot_heads``: more cells than pixels would be drawn as some of them."""


def plot_head(
    weights: Weights,
    tokens: Sequence[str] | None = None,
    *,
    norm: NormName | None = None,
    cmap: str | Colormap | None = None,
    colorbar: bool | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the map of one head: row = query, column = key.

    Above 1,024 queries or keys, cells are means of bins.

    Shapes: weights [Q, K]; tokens [K], of which the last Q are the queries.

    Args:
        weights: of one head.
        tokens: labels of both axes.
        norm: "linear", "log" or "power"; by default linear or log, as the weights require.
        cmap: "blues" (default), "viridis", "cividis", "magma", or any palette of matplotlib.
        colorbar: draw the colour scale; by default in a new figure only.
        ax: axes to draw into; by default a new figure.

    Raises:
        TypeError: weights are not real numbers, tokens are not strings, or an option has another type.
        ValueError: weights does not have two axes, or has a negative entry; the length of tokens is not K, or there are
            more queries than tokens; no scale or palette has this name.

    Examples:
        >>> import torch
        >>> from headscope.report.plots import plot_head
        >>> ax = plot_head(torch.eye(3), tokens=["a", "b", "c"], norm="power", cmap="viridis")
        >>> [label.get_text() for label in ax.get_xticklabels()]
        ['a', 'b', 'c']
    """
    p = as_weights("weights", weights, "[Q, K]", 2)
    queries, keys = p.shape
    check_tokens(tokens, queries, keys)
    check_flag("colorbar", colorbar)
    scale, palette = choose_scale([p], norm), to_colormap(cmap)
    new = ax is None
    if ax is None:
        import matplotlib.pyplot as plt

        side = min(6.2, max(3.3, 0.155 * max(queries, keys))) if tokens is not None else 4.0
        ax = plt.subplots(figsize=(side + 1.9, side + 1.1), layout="compressed")[1]
    image = draw_map(ax, p, (queries, keys), scale, palette, MOST_CELLS)
    label_axes(ax, tokens, queries, keys, 8 if tokens is not None else None)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    if new if colorbar is None else colorbar:
        add_colour_bar(image, ax, scale, "weight")
    return ax


def plot_heads(
    weights: Tensor | NDArray[Any] | Sequence[Weights] | HeadStats | ObservedModel | SheetFigures,
    heads: Sequence[Head],
    *,
    tokens: Sequence[str] | None = None,
    scale: Literal["shared", "own"] = "shared",
    norm: NormName | None = None,
    cmap: str | Colormap | None = None,
    colorbar: bool = True,
    titles: Sequence[str] | None = None,
    width: Literal["column", "page"] | float = "page",
    axes: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Draw the maps of chosen heads side by side, as papers print them: titles, tokens, one colour scale.

    The figure is as wide as a column or a page of a paper, with text of 6 to 7 points. Unused places are empty.

    Shapes: weights as for ``plot_grid``; the result [rows, columns].

    Args:
        weights: of each layer; or a sheet, whose tokens are the labels; or statistics or a recording with
            ``Observe(map=n)``.
        heads: each as "3.5", or as the number or name of a layer and the number of a head, (3, 5).
        tokens: labels of both axes; by default those of the sheet or the recording.
        scale: "shared" compares the heads; "own" ends at the largest weight of each, and the colour bar shows shares
            of it.
        norm: "linear", "log" or "power", for all heads; by default linear or log, or power where heads of both kinds
            are together.
        cmap: "blues" (default), "viridis", "cividis", "magma", or any palette of matplotlib.
        colorbar: draw the colour scale.
        titles: one for each head; by default "head 3.5".
        width: of a new figure: "column" (3.3 inches), "page" (6.9 inches), or inches.
        axes: array of axes to draw into; by default a new figure, with at most 2 heads in a row of a column and 4 of a
            page.

    Raises:
        TypeError: an argument has another type.
        ValueError: a head does not exist, a layer has no map, an entry is negative, sizes do not match, or an option
            has another value.

    Examples:
        >>> import torch
        >>> from headscope.report.plots import plot_heads
        >>> axes = plot_heads(torch.eye(3).expand(2, 4, 3, 3), ["1.3", (0, 2)], width="column")
        >>> axes.shape, [ax.get_title() for ax in axes[0]]
        ((1, 2), ['head 1.3', 'head 0.2'])
    """
    layers, texts = maps_of("weights", weights)
    places = find_heads(heads, layers)
    inches = width_in_inches(width)
    check_options(scale, colorbar, titles, len(places))
    shown = [(layers[layer], layers[layer].maps[head]) for layer, head in places]
    for layer, _ in shown:
        check_tokens(tokens, *layer.sizes)
    labels = [tokens_of(layer, texts) if tokens is None else tokens for layer, _ in shown]
    common, palette = choose_scale([p for _, p in shown], norm), to_colormap(cmap)
    letters = max((min(12, len(visible(each))) for tokens in labels for each in tokens or ("1000",)), default=4)
    new = axes is None
    alike = new and len({(each, layer.sizes) for (layer, _), each in zip(shown, map(id, labels), strict=True)}) == 1
    axes = subplots_for(axes, len(places), inches, letters, alike)
    images: list[AxesImage] = []
    for number, (layer, p) in enumerate(shown):
        ax: Axes = axes.flat[number]
        one = common if scale == "shared" else replace(choose_scale([p], norm), name=common.name)
        images.append(draw_map(ax, p, layer.sizes, one, palette, MOST_CELLS))
        at, head = places[number]
        ax.set_title(titles[number] if titles else f"head {at}.{head}", fontsize=7, pad=3, parse_math=False)
        above_another = alike and number + axes.shape[1] < len(places)
        label_outside(ax, labels[number], layer, (above_another, alike and number % axes.shape[1] > 0))
    for ax in axes.flat[len(places) :]:
        ax.set_axis_off()
    if colorbar:
        mappable, label = (
            (images[0], "weight") if scale == "shared" else (mappable_of(common, palette), "share of largest")
        )
        bar = add_colour_bar(mappable, [*axes.flat] if new else [*axes.flat[: len(places)]], common, label)
        bar.ax.tick_params(labelsize=6)
        bar.ax.yaxis.label.set_fontsize(6)
    return axes


def plot_grid(
    weights: Tensor | NDArray[Any] | Sequence[Weights] | HeadStats | ObservedModel | SheetFigures,
    *,
    norm: NormName | None = None,
    cmap: str | Colormap | None = None,
    colorbar: bool = False,
    axes: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Draw the map of every head: a row of axes for each layer, a column for each head.

    Each map has its own colour scale; its title has the kind of the scale and its end. With ``colorbar``, all maps have
    one kind of scale, and the bar shows shares of the ends. Above 128 queries or keys, a map shows means of 128 bins.

    Shapes: weights [H, Q, K] for each layer, or [layers, H, Q, K]; axes [layers, H].

    Args:
        weights: of each layer; or a sheet; or statistics or a recording with ``Observe(map=n)``, whose bin means are
            drawn, except bins without a query or a key.
        norm: "linear", "log" or "power"; by default linear or log, as each map requires, and with a colour bar power
            where both kinds are together.
        cmap: "blues" (default), "viridis", "cividis", "magma", or any palette of matplotlib.
        colorbar: draw one colour bar for all maps.
        axes: array of axes to draw into, as ``plt.subplots(layers, heads, squeeze=False)`` returns it; by default a new
            figure.

    Raises:
        TypeError: weights has another type, or entries that are not real numbers; an option has another type.
        ValueError: a layer or head is missing, a layer has no map, an entry does not have three axes or is negative,
            ``axes`` is too small, or no scale or palette has this name.

    Examples:
        >>> import torch
        >>> from headscope.report.plots import plot_grid
        >>> axes = plot_grid(torch.eye(3).expand(1, 2, 3, 3))
        >>> axes.shape, [ax.get_title() for ax in axes[0]]
        ((1, 2), ['0.0 (0–1)', '0.1 (0–1)'])
    """
    check_norm(norm)
    check_flag("colorbar", colorbar)
    layers, _ = maps_of("weights", weights)
    palette = to_colormap(cmap)
    sizes = (len(layers), max(len(layer.maps) for layer in layers))
    if axes is None:
        import matplotlib.pyplot as plt

        room = 0.9 if colorbar else 0.0
        size = (1.2 * sizes[1] + 0.6 + room, 1.2 * sizes[0] + 0.6)
        _, axes = plt.subplots(*sizes, squeeze=False, figsize=size, layout="compressed" if colorbar else None)
    if axes.ndim != 2 or axes.shape[0] < sizes[0] or axes.shape[1] < sizes[1]:
        raise ValueError(f"axes: shape is {list(axes.shape)}, expected at least {list(sizes)} (layers, heads)")
    pooled = [[bin_means(bin_means(p, 0, MOST_BINS), 1, MOST_BINS) for p in layer.maps] for layer in layers]
    common = choose_scale([p for layer in pooled for p in layer], norm) if colorbar else None
    for number, layer in enumerate(pooled):
        for unused in axes[number, len(layer) : sizes[1]]:  # another layer has more heads
            unused.set_axis_off()
        for head, p in enumerate(layer):
            ax: Axes = axes[number, head]
            scale = choose_scale([p], norm if common is None else common.name)
            draw_map(ax, p, (p.shape[0], p.shape[1]), scale, palette, MOST_BINS)
            ax.set_title(f"{number}.{head} {scale.title}", fontsize="small", pad=2)
            ax.set_xticks([])
            ax.set_yticks([])
    if common is not None:
        used = [ax for number, layer in enumerate(pooled) for ax in axes[number, : len(layer)]]
        add_colour_bar(mappable_of(common, palette), used, common, "share of each map's largest weight")
    return axes


def plot_statistics(
    statistics: Sequence[Mapping[str, Sequence[float | None]]] | HeadStats | ObservedModel,
    name: str,
    *,
    norm: NormName = "linear",
    cmap: str | Colormap | None = None,
    colorbar: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw one statistic of every head: a row for each layer, a column for each head; NaN where a head has none.

    Args:
        statistics: for each layer a mapping of name -> one value for each head, as ``Sheet.statistics`` or
            ``Sheet.regions``; or statistics or a recording, whose means over rows are drawn.
        name: of the statistic.
        norm: "linear" (default) and "power" are between the smallest and the largest value; "log" spans at most four
            decades.
        cmap: "blues" (default), "viridis", "cividis", "magma", or any palette of matplotlib.
        colorbar: draw the colour scale.
        ax: axes to draw into; by default a new figure.

    Raises:
        TypeError: statistics or an option has another type.
        ValueError: the layers are missing, a layer has no statistic of that name, a value is negative on a log scale,
            or no scale or palette has this name.

    Examples:
        >>> from headscope.report.plots import plot_statistics
        >>> ax = plot_statistics([{"entropy": [0.5, 1.25]}], "entropy")
        >>> [text.get_text() for text in ax.texts]
        ['0.50', '1.25']
    """
    check_norm(norm)
    check_flag("colorbar", colorbar)
    if not isinstance(statistics, Sequence):
        parts = stats_of("statistics", statistics).parts.values()
        statistics = [{each: part.moments[each].mean.tolist() for each in part.moments} for part in parts]
    figures = figures_of(statistics, name)
    palette = to_colormap(cmap)
    ax = axes_or_new(ax)
    image = ax.imshow(figures, cmap=palette, norm=statistics_norm(figures, norm), interpolation="nearest")
    places = np.ma.filled(image.norm(figures), np.nan)
    for (layer, head), figure in np.ndenumerate(figures):
        if np.isfinite(figure):
            red, green, blue = (round(255 * part) for part in palette(float(places[layer, head]))[:3])
            ink = ink_on((red, green, blue))
            ax.text(head, layer, f"{figure:.2f}", ha="center", va="center", color=ink, fontsize="small")
    ax.set_xticks(range(figures.shape[1]))
    ax.set_yticks(range(len(figures)))
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    ax.set_title(name.replace("_", " "))
    if colorbar:
        shown = Scale("power" if norm == "power" else "linear", 1.0, above=False)
        add_colour_bar(image, ax, shown, name.replace("_", " "))
    return ax


def plot_patches(
    weights: Weights,
    image: ArrayLike,
    *,
    query: int | None = None,
    grid: tuple[int, int] | None = None,
    norm: NormName | None = None,
    cmap: str | Colormap | None = None,
    colorbar: bool | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw where one head attends in an image, over the image.

    Shapes: weights [T, T] with T = rows · columns of the grid; image [h, w] or [h, w, 3].

    Args:
        weights: of one head, row = query.
        image: the image of the patches.
        query: patch whose row is drawn and framed, 0 to T - 1; by default the mean of all rows.
        grid: rows and columns of patches; by default a square.
        norm: "linear", "log" or "power"; by default linear or log, as the weights require.
        cmap: "blues" (default), "viridis", "cividis", "magma", or any palette of matplotlib.
        colorbar: draw the colour scale; by default in a new figure only.
        ax: axes to draw into; by default a new figure.

    Raises:
        TypeError: query or grid is not made of whole numbers, or weights or image of real ones; an option has another
            type.
        ValueError: sizes do not match, the patch does not exist, a weight is negative, or no scale or palette has this
            name.

    Examples:
        >>> import torch
        >>> from headscope.report.plots import plot_patches
        >>> ax = plot_patches(torch.eye(4), torch.rand(8, 8), query=3)
        >>> [tuple(image.get_array().shape) for image in ax.images]
        [(8, 8), (2, 2)]
    """
    p = as_weights("weights", weights, "[T, T]", 2)
    rows, columns = patch_grid(grid, len(p))
    if p.shape != (rows * columns, rows * columns):
        expected = f"expected [T, T] with T = {rows * columns}"
        raise ValueError(f"grid: {rows} x {columns} patches do not match weights, {expected}; weights {list(p.shape)}")
    row = None if query is None else as_whole(query)
    if query is not None and row is None:
        raise TypeError(f"query: got {kind(query)}, expected a whole number")
    if row is not None and not 0 <= row < len(p):
        raise ValueError(f"query: got {row}, expected 0 to {len(p) - 1}")
    check_flag("colorbar", colorbar)
    pixels = pixels_of(image)
    looked = (p.mean(0) if row is None else p[row]).reshape(rows, columns)
    scale, palette = choose_scale([looked.reshape(1, -1)], norm), to_colormap(cmap)
    new = ax is None
    ax = axes_or_new(ax)
    around = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    ax.imshow(pixels, cmap="gray", extent=around, interpolation="nearest")
    drawn = ax.imshow(looked, cmap=palette, norm=scale.to_norm(), alpha=0.7, extent=around, interpolation="nearest")
    if row is not None:
        from matplotlib.patches import Rectangle

        top, left = divmod(row, columns)
        ax.add_patch(Rectangle((left - 0.5, top - 0.5), 1, 1, fill=False, edgecolor="#d7301f", linewidth=2))
    ax.set_xticks([])
    ax.set_yticks([])
    if new if colorbar is None else colorbar:
        add_colour_bar(drawn, ax, scale, "weight")
    return ax
