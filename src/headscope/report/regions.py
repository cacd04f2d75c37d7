"""Where a head attends in an image: its mass on each region compared with an even spread.

All definitions are in docs/concepts/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

__all__ = ["REGIONS", "image_regions", "looks_most_at", "measure", "object_mask"]

REGIONS = ("centre", "edges", "boundary", "texture", "near", "far", "layout")
"""The regions with ratios against chance; of equal ratios, the earlier one wins."""

EXPLAINED = 0.5
"""Share of a map's variance that position must explain before ``looks_most_at`` names the layout."""

AREA = 0.25
"""Largest share of the patches in a region; regions of equal size have comparable ratios."""


def measure(
    p: Tensor, image: NDArray[np.uint8], grid: tuple[int, int], *, position_map: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the ratio of the mass on each region to that of an even spread over all patches.

    Shapes: p [H, T, T] with T = rows · columns of the grid -> name -> float64 [H].

    Args:
        p: weights, row = query; rows with NaN or infinity are left out.
        image: uint8 [h, w] or [h, w, 3], the object brighter than its ground.
        grid: rows and columns of patches; h and w are multiples of them.
        position_map: what position alone explains, [H, T, T], such as the mean weights over other images; by default
            estimated for each query from the rows of the other queries, as a function of the offset to the key.

    Returns:
        ``REGIONS`` as ratios between 0 and 1 / area (1 = chance); and
        distance_ratio: mean distance divided by that of an even spread;
        layout_r2: share of the map's variance around an even spread that position alone explains; below 0 if position
        explains it worse than an even spread.
        NaN if an image does not have the region (an even image has no edges), or if all rows are left out.

    Raises:
        ValueError: a shape does not match, or the image has another dtype or shape.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from headscope.report.regions import measure
        >>> image = np.array([[255, 0], [0, 0]], dtype=np.uint8)
        >>> measured = measure(torch.eye(4)[None], image, (2, 2))
        >>> measured["near"].tolist(), measured["far"].tolist()
        ([4.0], [0.0])
    """
    height, width = grid
    tokens = height * width
    if p.ndim != 3 or p.shape[1:] != (tokens, tokens):
        raise ValueError(f"p: expected [H, {tokens}, {tokens}] for a grid of {height} x {width}; p {list(p.shape)}")
    if position_map is not None and position_map.shape != p.shape:
        raise ValueError(
            f"position_map: expected the shape of p; position_map {list(position_map.shape)}, p {list(p.shape)}"
        )
    p = p.detach().double()
    usable = p.isfinite().all(-1)  # [H, T]
    p = torch.where(usable[..., None], p, 0.0)
    distance = _distances(grid)
    expected = _by_offset(p, usable, grid) if position_map is None else position_map.double()
    members: dict[str, Tensor] = {name: torch.from_numpy(part) for name, part in image_regions(image, grid).items()}
    members |= {"layout": _largest(expected), "near": _largest(-distance), "far": _largest(distance)}
    count = usable.sum(-1).double()
    values = {name: p.new_full((len(p),), torch.nan) for name in REGIONS}
    for name, member in members.items():
        share = member.mean(-1)  # of the patches
        values[name] = ((p * member).sum(-1) / share * usable).sum(-1) / count
    even = distance.mean(-1)  # [T]
    values["distance_ratio"] = (p * distance).sum((1, 2)) / (even * usable).sum(-1)
    weighted_rows = usable[..., None]
    unexplained = ((p - expected).square() * weighted_rows).sum((1, 2))
    spread = ((p - 1 / tokens).square() * weighted_rows).sum((1, 2))
    values["layout_r2"] = torch.where(spread > 0, 1 - unexplained / spread, torch.nan)
    return values


def looks_most_at(measured: Mapping[str, Tensor]) -> list[tuple[str, float] | None]:
    """Return for each head the region with the largest ratio, and the ratio; None if the image has no region.

    The layout counts only if it explains ``EXPLAINED`` of the map's variance: it is estimated from the head itself, so
    its ratio can be large even if it explains little.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from headscope.report.regions import looks_most_at, measure
        >>> image = np.array([[255, 0], [0, 0]], dtype=np.uint8)
        >>> looks_most_at(measure(torch.eye(4)[None], image, (2, 2)))
        [('near', 4.0)]
    """
    heads = len(next(iter(measured.values())))
    largest: list[tuple[str, float] | None] = []
    for head in range(heads):
        by_position = float(measured["layout_r2"][head]) >= EXPLAINED
        names = [name for name in REGIONS if name != "layout" or by_position]
        ratios = [(name, float(measured[name][head])) for name in names if not measured[name][head].isnan()]
        largest.append(max(ratios, key=lambda pair: pair[1], default=None))
    return largest


def image_regions(image: NDArray[np.uint8], grid: tuple[int, int]) -> dict[str, NDArray[np.float64]]:
    """Return the membership of each patch in the regions that are equal for all queries, float64 [T] in [0, 1].

    The regions are centre, edges, boundary and texture; those that the image does not have are left out.

    Examples:
        >>> import numpy as np
        >>> from headscope.report.regions import image_regions
        >>> image = np.array([[255, 0], [0, 0]], dtype=np.uint8)
        >>> image_regions(image, (2, 2))["boundary"].tolist()
        [1.0, 0.0, 0.0, 0.0]
    """
    light = _light(image, grid)
    scores = {
        "centre": _centre(_by_patch(light, grid)),
        "edges": _by_patch(_gradient(light), grid),
        "boundary": _boundary(_by_patch(light, grid)),
        "texture": _by_patch(_variance(light), grid),
    }
    members: dict[str, NDArray[np.float64]] = {}
    for name, score in scores.items():
        score = score.reshape(-1)
        if score.max() > score.min():
            member = _largest(torch.from_numpy(score)).numpy()
            members[name] = member if name == "centre" else np.where(score > 0, member, 0.0)
    return members


def object_mask(image: NDArray[np.uint8], grid: tuple[int, int]) -> NDArray[np.bool_] | None:
    """Return the patches of the object, [T]: brighter than Otsu's threshold; None if all have equal brightness.

    Examples:
        >>> import numpy as np
        >>> from headscope.report.regions import object_mask
        >>> image = np.array([[255, 0], [0, 0]], dtype=np.uint8)
        >>> object_mask(image, (2, 2)).tolist()
        [True, False, False, False]
    """
    brightness = _by_patch(_light(image, grid), grid).reshape(-1)
    return None if brightness.max() == brightness.min() else brightness > _threshold(brightness)


def pixels_of(image: ArrayLike) -> NDArray[np.uint8]:
    """Return an image as an array.

    Raises:
        ValueError: it is not uint8 [h, w] or [h, w, 3].
    """
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,)):
        raise ValueError(f"image: got {pixels.dtype} {list(pixels.shape)}, expected uint8 [h, w] or [h, w, 3]")
    return pixels


def _light(image: NDArray[np.uint8], grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return the brightness of each pixel, [h, w]."""
    height, width = grid
    image = pixels_of(image)
    if 0 in image.shape or image.shape[0] % height or image.shape[1] % width:
        raise ValueError(
            f"image: expected [h, w] or [h, w, 3], multiples of the grid {height} x {width}; image {list(image.shape)}"
        )
    light = image.astype(np.float64)
    return light if light.ndim == 2 else light.mean(-1)


def _centre(brightness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearness to the object's centre, the mean position weighted by brightness above the darkest."""
    weight = brightness - brightness.min()
    row, column = np.indices(brightness.shape)
    if not weight.any():
        return np.zeros_like(brightness)
    y, x = (weight * row).sum() / weight.sum(), (weight * column).sum() / weight.sum()
    return -((row - y) ** 2 + (column - x) ** 2)


def _gradient(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the size of the gradient at each pixel: central differences, one-sided at the edges."""
    steps = [np.gradient(light, axis=axis) if light.shape[axis] > 1 else np.zeros_like(light) for axis in (0, 1)]
    return np.hypot(*steps)


def _variance(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the variance of the 3 x 3 pixels around each pixel, fewer at the edges."""
    padded = np.pad(light, 1, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))  # [h, w, 3, 3]
    return np.nanvar(around, axis=(2, 3))


def _boundary(brightness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how many of a patch's 8 neighbours are on the other side of the threshold between object and ground."""
    bright = brightness > _threshold(brightness)
    padded = np.pad(bright.astype(np.int8), 1, constant_values=-1)  # -1: outside the image
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))  # [rows, columns, 3, 3]
    return ((around >= 0) & (around != bright[..., None, None])).sum((2, 3)).astype(np.float64)


def _threshold(values: NDArray[np.float64]) -> float:
    """Return the threshold with the largest between-class variance (Otsu 1979)."""
    levels = np.unique(values)
    best, threshold = -1.0, float(levels[-1])
    for level in levels[:-1]:
        low, high = values[values <= level], values[values > level]
        between = len(low) * len(high) * (low.mean() - high.mean()) ** 2
        if between > best:
            best, threshold = float(between), float(level)
    return threshold


def _by_patch(values: NDArray[np.float64], grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return the mean over the pixels of each patch, [rows, columns]."""
    height, width = grid
    rows, columns = values.shape[0] // height, values.shape[1] // width
    return values.reshape(height, rows, width, columns).mean((1, 3))  # [rows, columns]


def _largest(score: Tensor) -> Tensor:
    """Return the membership, 0 to 1, in the ``AREA`` of the last axis with the largest scores; ties share."""
    score = score.double()
    span = (score.amax(-1, keepdim=True) - score.amin(-1, keepdim=True)).clamp_min(1e-300)
    score = ((score - score.amin(-1, keepdim=True)) / span).round(
        decimals=9
    )  # so that rounding errors do not break ties
    area = AREA * score.shape[-1]
    limit = score.sort(-1, descending=True).values[..., math.ceil(area) - 1, None]
    above, tied = score > limit, score == limit
    part = (area - above.sum(-1, keepdim=True)) / tied.sum(-1, keepdim=True)
    return torch.where(above, 1.0, torch.where(tied, part, 0.0)).double()


def _places(grid: tuple[int, int]) -> Tensor:
    """Return row and column of each patch, [T, 2]."""
    return torch.cartesian_prod(*(torch.arange(size, device="cpu") for size in grid))


def _distances(grid: tuple[int, int]) -> Tensor:
    """Return the Euclidean distance of each pair of patches, [T, T], in patches."""
    places = _places(grid).double()
    return (places[:, None] - places[None]).norm(dim=-1)


def _by_offset(p: Tensor, usable: Tensor, grid: tuple[int, int]) -> Tensor:
    """Predict each weight from the rows of other queries: the mean of all p with the same offset to the key.

    Shape [H, T, T]. If no other usable row has that offset, the prediction is an even spread.
    """
    places = _places(grid)
    way = places[None] - places[:, None] + torch.tensor(grid, device="cpu") - 1  # [T, T, 2], from 0
    which = (way[..., 0] * (2 * grid[1] - 1) + way[..., 1]).flatten()  # [T * T]
    ways = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    there = usable[..., None].expand_as(p).double()
    total, count = (
        x.new_zeros(len(p), ways).index_add(1, which, x.flatten(1))[:, which].reshape(p.shape) for x in (p, there)
    )
    others = count - there
    return torch.where(others > 0, (total - p) / others, 1 / p.shape[-1])
