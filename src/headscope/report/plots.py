"""Static figures: functions that draw into matplotlib axes and return them; matplotlib is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from headscope._support.arguments import as_whole, kind, whole
from headscope.report._texts import visible
from headscope.report._viewer.packing import standing
from headscope.report.colours import colour_at, ink_on
from headscope.report.observed_model import ObservedModel
from headscope.stats import HeadStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

__all__ = ["plot_grid", "plot_head", "plot_patches", "plot_statistics"]

MOST_LABELS = 40
"""With more tokens than this, the axes show numbers only."""

LINEAR = 64
"""Maps of more queries or keys than this have a logarithmic colour scale in ``plot_grid``."""

DECADES = 1e-4
"""Where a logarithmic scale starts, relative to the largest weight, as on the page."""

MOST_BINS = 128
"""A longer axis of a map is drawn by this many bins in ``plot_grid``."""

CHANNELS = (1, 3, 4)
"""Sizes of an image's third axis."""

Weights = Tensor | ArrayLike


def plot_head(weights: Weights, tokens: Sequence[str] | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the map of one head: row = query, column = key.

    Shapes: weights [Q, K]; tokens [K], of which the last Q are the queries.

    Args:
        weights: of one head.
        tokens: labels of both axes; shown for at most 40.
        ax: axes to draw into; by default a new figure.

    Raises:
        TypeError: weights are not real numbers, or tokens are not strings.
        ValueError: weights does not have two axes, or has a negative entry; the length of tokens is not K, or there are
            more queries than tokens.

    Examples:
        >>> import torch
        >>> from headscope.report.plots import plot_head
        >>> ax = plot_head(torch.eye(3), tokens=["a", "b", "c"])
        >>> [label.get_text() for label in ax.get_xticklabels()]
        ['a', 'b', 'c']
    """
    p = _weights("weights", weights, "[Q, K]", 2)
    queries, keys = p.shape
    if tokens is not None and len(tokens) != keys:
        raise ValueError(
            f"tokens: expected {keys} entries, one for each key, got {len(tokens)}; weights {list(p.shape)}"
        )
    _check_texts("tokens", () if tokens is None else tokens)
    if tokens is not None and queries > keys:
        raise ValueError(
            f"tokens: expected at most {keys} queries (K), the last tokens, got {queries}; weights {list(p.shape)}"
        )
    ax = _axes(ax)
    ax.imshow(p, cmap=_colormap(), vmin=0, interpolation="nearest")
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    if tokens is not None and keys <= MOST_LABELS:
        labels = [visible(token) for token in tokens]
        ax.set_xticks(range(keys), labels, rotation=90, parse_math=False)
        ax.set_yticks(range(queries), labels[max(0, keys - queries) :][:queries], parse_math=False)
    return ax


def plot_grid(
    weights: Tensor | NDArray[Any] | Sequence[Weights] | HeadStats | ObservedModel, *, axes: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Draw the map of every head: a row of axes for each layer, a column for each head.

    Each map has its own colour scale; its title has the largest value. The scale is linear from 0 for maps of up to 64
    queries and keys, and logarithmic over four decades for larger maps and for bins of several tokens: there, a few
    weights near 1 would leave all others white. Above 128 queries or keys, a map shows the means of 128 bins.

    Shapes: weights [H, Q, K] for each layer, or [layers, H, Q, K]; axes [layers, H].

    Args:
        weights: of each layer; or statistics or a recording with ``Observe(map=n)``, whose bin means are drawn, except
            bins without a query or a key.
        axes: array of axes to draw into, as ``plt.subplots(layers, heads, squeeze=False)`` returns it; by default a new
            figure.

    Raises:
        TypeError: weights has another type, or entries that are not real numbers.
        ValueError: a layer or head is missing, a layer has no map, an entry does not have three axes or is negative,
            or ``axes`` is too small.

    Examples:
        >>> import torch
        >>> from headscope.report.plots import plot_grid
        >>> axes = plot_grid(torch.eye(3).expand(1, 2, 3, 3))
        >>> axes.shape, [ax.get_title() for ax in axes[0]]
        ((1, 2), ['0.0 (0–1)', '0.1 (0–1)'])
    """
    pooled: list[bool] = []
    if isinstance(weights, (Tensor, np.ndarray)):
        weights = [*_weights("weights", weights, "[layers, H, Q, K]", 4)]
    elif not isinstance(weights, Sequence):
        weights, pooled = _maps(weights)
    layers = [_weights(f"weights[{n}]", layer, "[H, Q, K]", 3) for n, layer in enumerate(weights)]
    pooled = pooled or [max(layer.shape[1:]) > LINEAR for layer in layers]
    sizes = (len(layers), max((len(layer) for layer in layers), default=0))
    if 0 in sizes:
        raise ValueError(f"weights: expected at least 1 {'head' if layers else 'layer'}, got none")
    if axes is None:
        import matplotlib.pyplot as plt

        _, axes = plt.subplots(*sizes, squeeze=False, figsize=(1.2 * sizes[1] + 0.6, 1.2 * sizes[0] + 0.6))
    if axes.ndim != 2 or axes.shape[0] < sizes[0] or axes.shape[1] < sizes[1]:
        raise ValueError(f"axes: shape is {list(axes.shape)}, expected at least {list(sizes)} (layers, heads)")
    for number, layer in enumerate(layers):
        for unused in axes[number, len(layer) : sizes[1]]:  # another layer has more heads
            unused.set_axis_off()
        for head, p in enumerate(layer):
            ax: Axes = axes[number, head]
            ax.set_title(f"{number}.{head} {_draw_map(ax, p, pooled[number])}", fontsize="small", pad=2)
            ax.set_xticks([])
            ax.set_yticks([])
    return axes


def _draw_map(ax: Axes, p: NDArray[np.float64], log: bool) -> str:
    """Draw one map with its own colour scale, and return the scale as text."""
    if log:
        p = _bin_means(_bin_means(p, 0), 1)
    largest = p.max(initial=0.0, where=np.isfinite(p))
    if not log or largest == 0:
        ax.imshow(p, cmap=_colormap(), vmin=0, interpolation="nearest")
        return f"(0–{largest:.2g})"
    from matplotlib.colors import LogNorm

    least = DECADES * largest  # smaller weights, and 0, have the lightest colour
    ax.imshow(np.maximum(p, least), cmap=_colormap(), norm=LogNorm(least, largest), interpolation="nearest")
    return f"(log, ≤{largest:.2g})"


def _bin_means(p: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the means of ``MOST_BINS`` bins along an axis that is longer; NaN and infinity count only where alone."""
    length = p.shape[axis]
    if length <= MOST_BINS:
        return p
    starts = np.arange(MOST_BINS) * length // MOST_BINS
    finite = np.isfinite(p)
    total = np.add.reduceat(np.where(finite, p, 0.0), starts, axis=axis)
    count = np.add.reduceat(finite.astype(np.int64), starts, axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def plot_statistics(
    statistics: Sequence[Mapping[str, Sequence[float | None]]] | HeadStats | ObservedModel,
    name: str,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw one statistic of every head: a row for each layer, a column for each head; NaN where a head has none.

    Args:
        statistics: for each layer a mapping of name -> one value for each head, as ``Sheet.statistics`` or
            ``Sheet.regions``; or statistics or a recording, whose means over rows are drawn.
        name: of the statistic.
        ax: axes to draw into; by default a new figure.

    Raises:
        TypeError: statistics has another type.
        ValueError: the layers are missing, or a layer has no statistic of that name.

    Examples:
        >>> from headscope.report.plots import plot_statistics
        >>> ax = plot_statistics([{"entropy": [0.5, 1.25]}], "entropy")
        >>> [text.get_text() for text in ax.texts]
        ['0.50', '1.25']
    """
    if not isinstance(statistics, Sequence):
        parts = _stats("statistics", statistics).parts.values()
        statistics = [{each: part.moments[each].mean.tolist() for each in part.moments} for part in parts]
    if not statistics:
        raise ValueError("statistics: expected at least 1 layer, got none")
    for number, layer in enumerate(statistics):
        if name not in layer:
            raise ValueError(f"name: expected a statistic of layer {number}, one of {', '.join(layer)}; got {name!r}")
    heads = max(len(layer[name]) for layer in statistics)
    figures = np.full((len(statistics), heads), np.nan)
    for number, layer in enumerate(statistics):
        for head, figure in enumerate(layer[name]):
            figures[number, head] = np.nan if figure is None else figure
    ax = _axes(ax)
    image = ax.imshow(figures, cmap=_colormap(), interpolation="nearest")
    for (layer, head), figure in np.ndenumerate(figures):
        if np.isfinite(figure):
            ground = colour_at(float(np.asarray(image.norm(figure))))
            ax.text(
                head,
                layer,
                f"{figure:.2f}",
                ha="center",
                va="center",
                color=ink_on(ground),
                fontsize="small",
            )
    ax.set_xticks(range(heads))
    ax.set_yticks(range(len(figures)))
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    ax.set_title(name.replace("_", " "))
    return ax


def plot_patches(
    weights: Weights,
    image: ArrayLike,
    *,
    query: int | None = None,
    grid: tuple[int, int] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw where one head attends in an image, over the image.

    Shapes: weights [T, T] with T = rows · columns of the grid; image [h, w] or [h, w, 3].

    Args:
        weights: of one head, row = query.
        image: the image of the patches.
        query: patch whose row is drawn and framed, 0 to T - 1; by default the mean of all rows.
        grid: rows and columns of patches; by default a square.
        ax: axes to draw into; by default a new figure.

    Raises:
        TypeError: query or grid is not made of whole numbers, or weights or image of real ones.
        ValueError: sizes do not match, the patch does not exist, or a weight is negative.

    Examples:
        >>> import torch
        >>> from headscope.report.plots import plot_patches
        >>> ax = plot_patches(torch.eye(4), torch.rand(8, 8), query=3)
        >>> [tuple(image.get_array().shape) for image in ax.images]
        [(8, 8), (2, 2)]
    """
    p = _weights("weights", weights, "[T, T]", 2)
    rows, columns = _grid(grid, len(p))
    if p.shape != (rows * columns, rows * columns):
        expected = f"expected [T, T] with T = {rows * columns}"
        raise ValueError(f"grid: {rows} x {columns} patches do not match weights, {expected}; weights {list(p.shape)}")
    row = None if query is None else as_whole(query)
    if query is not None and row is None:
        raise TypeError(f"query: got {kind(query)}, expected a whole number")
    if row is not None and not 0 <= row < len(p):
        raise ValueError(f"query: got {row}, expected 0 to {len(p) - 1}")
    pixels = _pixels(image)
    looked = (p.mean(0) if row is None else p[row]).reshape(rows, columns)
    ax = _axes(ax)
    around = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    ax.imshow(pixels, cmap="gray", extent=around, interpolation="nearest")
    ax.imshow(looked, cmap=_colormap(), vmin=0, alpha=0.7, extent=around, interpolation="nearest")
    if row is not None:
        from matplotlib.patches import Rectangle

        top, left = divmod(row, columns)
        ax.add_patch(Rectangle((left - 0.5, top - 0.5), 1, 1, fill=False, edgecolor="#d7301f", linewidth=2))
    ax.set_xticks([])
    ax.set_yticks([])
    return ax


def _check_texts(name: str, texts: Sequence[object]) -> None:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{number}]: got {kind(text)}, expected a str")


def _grid(grid: object, patches: int) -> tuple[int, int]:
    """Return the rows and columns of patches."""
    if not patches:
        raise ValueError("weights: expected at least 1 patch, got none; weights [0, 0]")
    if grid is None:
        return (round(patches**0.5),) * 2
    match grid:
        case [rows, columns]:
            return whole("grid[0]", rows), whole("grid[1]", columns)
        case _:
            raise TypeError(f"grid: got {grid!r}, expected two numbers (rows, columns)")


def _pixels(image: ArrayLike) -> NDArray[Any]:
    """Return an image as an array on the host, [h, w] or [h, w, channels]."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() and image.itemsize < 4 else image).numpy()
    pixels = np.asarray(image)
    _check_real("image", pixels)
    if pixels.ndim != 2 and not (pixels.ndim == 3 and pixels.shape[2] in CHANNELS):
        raise ValueError(f"image: shape is {list(pixels.shape)}, expected [h, w] or [h, w, 3]")
    return pixels


def _stats(name: str, observed: HeadStats | ObservedModel) -> HeadStats:
    stats = observed if isinstance(observed, HeadStats) else getattr(observed, "stats", None)
    if not isinstance(stats, HeadStats):
        raise TypeError(f"{name}: got {kind(observed)}, expected an entry for each layer, HeadStats, or a recording")
    return stats


def _maps(observed: HeadStats | ObservedModel) -> tuple[list[NDArray[np.float64]], list[bool]]:
    """Return the bin means of each layer, [H, rows, columns], without bins that have no query or no key.

    Also return whether each layer's map is large, or has bins of several tokens.
    """
    maps: list[NDArray[np.float64]] = []
    pooled: list[bool] = []
    for name, part in _stats("weights", observed).parts.items():
        if part.map is None:
            raise ValueError(f"weights: {name} has no map; observe with Observe(map=64)")
        rows, columns = standing(part.map.bins, part.lengths)
        maps.append(_array(name, part.map.mean, "[H, n, n]", 3)[:, rows][:, :, columns])
        pooled.append(part.lengths is None or max(part.lengths) > min(part.map.bins, LINEAR))
    return maps, pooled


def _colormap() -> Colormap:
    """Return the palette of maps for matplotlib."""
    from matplotlib.colors import LinearSegmentedColormap

    anchors = [tuple(part / 255 for part in colour_at(step / 16)) for step in range(17)]
    return LinearSegmentedColormap.from_list("headscope blues", anchors, N=512)


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots()[1]


def _weights(name: str, values: Weights, letters: str, axes: int) -> NDArray[np.float64]:
    """Return weights as an array on the host, and check that none is negative."""
    array = _array(name, values, letters, axes)
    if (array < 0).any():
        raise ValueError(f"{name}: expected weights of at least 0, got {array[array < 0][0]:.3g}")
    return array


def _check_real(name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name}: dtype is {array.dtype}, expected real numbers")


def _array(name: str, values: Weights, letters: str, axes: int) -> NDArray[np.float64]:
    """Return values as an array on the host."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values if values.is_complex() else values.double()).numpy()
    array = np.asarray(values)
    _check_real(name, array)
    array = array.astype(np.float64, copy=False)
    if array.ndim != axes:
        raise ValueError(f"{name}: has {array.ndim} axes, expected {axes} ({letters}); {name} {list(array.shape)}")
    return array
