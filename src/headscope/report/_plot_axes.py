"""How plots draw a map into axes, label it, and lay several maps out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headscope.report._plot_maps import LayerMaps
from headscope.report._plotting import Scale, bin_means
from headscope.report._texts import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage


COLUMN = 5.0
"""Inches: a narrower figure has two maps in a row."""


def draw_map(
    ax: Axes, p: NDArray[np.float64], lengths: tuple[int, int], scale: Scale, palette: Colormap, most: int
) -> AxesImage:
    """Draw one map, with positions of queries and keys along its axes."""
    queries, keys = lengths
    values = bin_means(bin_means(p, 0, most), 1, most)
    around = (-0.5, keys - 0.5, queries - 0.5, -0.5)
    aspect = "equal" if max(queries, keys) <= 4 * min(queries, keys) else "auto"
    return ax.imshow(values, cmap=palette, norm=scale.to_norm(), extent=around, aspect=aspect, interpolation="nearest")


def label_axes(
    ax: Axes, tokens: Sequence[str] | None, queries: int, keys: int, size: float | None, most: int = 24
) -> None:
    """Give both axes their tokens; the queries are the last ones."""
    from headscope.report._token_axis import label_axis

    labels = None if tokens is None else [visible(token, limit=most) for token in tokens]
    label_axis(ax, "x", labels, keys, size)
    label_axis(ax, "y", None if labels is None else labels[max(0, keys - queries) :], queries, size)


def label_outside(ax: Axes, tokens: Sequence[str] | None, layer: LayerMaps, hide: tuple[bool, bool]) -> None:
    """Label the axes of one of several maps; ``hide``: its labels of keys, and of queries, stand at another map."""
    label_axes(ax, tokens, *layer.sizes, 6, most=12)
    unit = " bin" if layer.lengths is None else ""
    if not hide[0]:
        ax.set_xlabel(f"key{unit}", fontsize=7)
    if not hide[1]:
        ax.set_ylabel(f"query{unit}", fontsize=7)
    ax.tick_params(axis="x", labelbottom=not hide[0])
    ax.tick_params(axis="y", labelleft=not hide[1])


def subplots_for(axes: NDArray[Any] | None, count: int, inches: float, letters: int, alike: bool) -> NDArray[Any]:
    """Return axes for so many maps, [rows, columns], with room for labels of so many letters.

    Maps with the same axes (``alike``) have their labels of keys at the last one of each column.
    """
    if axes is not None:
        if axes.size < count:
            raise ValueError(f"axes: got {axes.size} axes, expected at least {count}, one for each head")
        return axes
    import matplotlib.pyplot as plt

    down = -(-count // (2 if inches < COLUMN else 4))
    across = -(-count // down)  # 5 heads are 3 and 2, not 4 and 1
    labels = 0.3 + letters * 0.05  # inches, at 6 points
    side = max(0.4, (inches - labels - 0.65 - 0.1 * across) / across)
    lines = min(down, 2 if count % across else 1) if alike else down  # of labels of keys
    size = (inches, down * (side + 0.25) + lines * labels + 0.1)
    return plt.subplots(down, across, squeeze=False, figsize=size, layout="compressed")[1]


def axes_or_new(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(layout="compressed")[1]  # a colour bar is as high as the map
