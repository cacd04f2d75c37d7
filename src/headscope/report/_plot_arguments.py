"""Arguments of plots, checked and converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from headscope._support.arguments import kind, whole
from headscope.report._plotting import NormName, check_flag, check_real, check_texts

WIDTHS = {"column": 3.3, "page": 6.9}
"""Inches of a figure in a paper of two columns."""

CHANNELS = (1, 3, 4)
"""Sizes of an image's third axis."""


def width_in_inches(width: object) -> float:
    """Return the width of a figure in inches."""
    expected = 'expected "column", "page" or inches'
    if isinstance(width, str):
        if width not in WIDTHS:
            raise ValueError(f"width: got {width!r}, {expected}")
        return WIDTHS[width]
    if isinstance(width, bool) or not isinstance(width, (int, float)):
        raise TypeError(f"width: got {kind(width)}, {expected}")
    if not 1 <= width <= 100:
        raise ValueError(f"width: got {width}, expected 1 to 100 inches")
    return float(width)


def check_options(scale: object, colorbar: object, titles: Sequence[str] | None, count: int) -> None:
    if scale not in ("shared", "own"):
        raise ValueError(f'scale: got {scale!r}, expected "shared" or "own"; for "log" or "power" use norm')
    check_flag("colorbar", colorbar)
    if titles is not None:
        if isinstance(titles, str):
            raise TypeError("titles: got str, expected a list with a title for each head")
        check_texts("titles", titles)
        if len(titles) != count:
            raise ValueError(f"titles: expected {count}, one for each head, got {len(titles)}")


def check_tokens(tokens: Sequence[str] | None, queries: int, keys: int) -> None:
    if tokens is None:
        return
    shape = f"weights {[queries, keys]}"
    if len(tokens) != keys:
        raise ValueError(f"tokens: expected {keys} entries, one for each key, got {len(tokens)}; {shape}")
    check_texts("tokens", tokens)
    if queries > keys:
        raise ValueError(f"tokens: expected at most {keys} queries (K), the last tokens, got {queries}; {shape}")


def figures_of(statistics: Sequence[Mapping[str, Sequence[float | None]]], name: str) -> NDArray[np.float64]:
    """Return one statistic as an array, [layers, heads], with NaN where a head has none."""
    if not statistics:
        raise ValueError("statistics: expected at least 1 layer, got none")
    for number, layer in enumerate(statistics):
        if name not in layer:
            raise ValueError(f"name: expected a statistic of layer {number}, one of {', '.join(layer)}; got {name!r}")
    figures = np.full((len(statistics), max(len(layer[name]) for layer in statistics)), np.nan)
    for number, layer in enumerate(statistics):
        for head, figure in enumerate(layer[name]):
            figures[number, head] = np.nan if figure is None else figure
    return figures


def statistics_norm(figures: NDArray[np.float64], norm: NormName | None) -> Any:
    """Return the scale of a statistic, between its smallest and its largest value."""
    from matplotlib.colors import LogNorm, Normalize, PowerNorm

    finite = figures[np.isfinite(figures)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if norm == "log":
        if low < 0:
            raise ValueError(f'norm: "log" requires values of at least 0, got {low:.3g}; use "linear" or "power"')
        positive = finite[finite > 0]
        if positive.size:
            return LogNorm(max(float(positive.min()), 1e-4 * high), high, clip=True)
    return PowerNorm(0.5, low, high, clip=True) if norm == "power" else Normalize(low, high)


def patch_grid(grid: object, patches: int) -> tuple[int, int]:
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


def pixels_of(image: ArrayLike) -> NDArray[Any]:
    """Return an image as an array on the host, [h, w] or [h, w, channels]."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() and image.itemsize < 4 else image).numpy()
    pixels = np.asarray(image)
    check_real("image", pixels)
    if pixels.ndim != 2 and not (pixels.ndim == 3 and pixels.shape[2] in CHANNELS):
        raise ValueError(f"image: shape is {list(pixels.shape)}, expected [h, w] or [h, w, 3]")
    return pixels
