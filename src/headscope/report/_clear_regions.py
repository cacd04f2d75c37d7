"""The region of an image that a head looks at, where chance does not explain it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headscope.report._figures import Look, SheetFigures
from headscope.report.regions import AREA
from headscope.stats import CLEAR_SCORE, CLEAR_Z

__all__ = ["clear_region", "has_fixed_keys"]

LAYOUT = "layout"

SAME = 0.1
"""Of a head with fixed keys, a row has at most this share of its weight elsewhere than the mean row, on average."""


def has_fixed_keys(weights: NDArray[np.float32]) -> bool:
    """Return whether the rows of a head, [Q, K], are nearly the same, and not spread evenly.

    Examples:
        >>> import numpy as np
        >>> from headscope.report._clear_regions import has_fixed_keys
        >>> rows = np.tile(np.array([0.5, 0, 0, 0.5], dtype=np.float32), (4, 1))
        >>> has_fixed_keys(rows), has_fixed_keys(np.eye(4, dtype=np.float32)), has_fixed_keys(np.full_like(rows, 0.25))
        (True, False, False)
    """
    p = weights.astype(np.float64)
    p = p[np.isfinite(p).all(-1)]
    if not len(p):
        return False
    mean = p.mean(0)
    apart = 0.5 * np.abs(p - mean).sum(-1).mean()  # total variation
    uneven = 0.5 * np.abs(mean - mean.sum() / len(mean)).sum()
    return bool(apart <= SAME < uneven)


def clear_region(sheet: SheetFigures, layer: int, head: int) -> Look | None:
    """Return the region that a head looks at most, with its ratio, if the ratio is clear; else None.

    With a the share of the patches in the region, the score (ratio - 1) · a / (1 - a) is 1 for a head that looks at
    nothing else. It must be at least 0.3, and the mass on the region at least 3 standard deviations above that of
    exchanged keys. Where the region is the same for all queries, the keys of all rows are exchanged alike: the rows of
    a head often have their weight on the same patches, so that they are not independent. For "near" and "far", which
    differ from query to query, the rows are exchanged independently.

    "layout" is not clear: random embeddings of positions lead to it, too. A head with fixed keys has no clear region:
    its rows do not depend on what is in the image at the query.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from headscope.report import image_sheet
        >>> from headscope.report._clear_regions import clear_region
        >>> image = np.zeros((4, 4), dtype=np.uint8)
        >>> image[1:3, 1:3] = 255
        >>> weights = torch.zeros(1, 16, 16)
        >>> weights[:, ::2, [5, 6]] = 0.5
        >>> weights[:, 1::2, [9, 10]] = 0.5
        >>> clear_region(image_sheet("Each patch attends to the square", image, (4, 4), [weights]), 0, 0)
        ('centre', 4.0)
    """
    look = sheet.named_looks[layer][head]
    if look is None or look[0] == LAYOUT or has_fixed_keys(sheet.weights[layer][head]):
        return None
    region, ratio = look
    p = sheet.weights[layer][head].astype(np.float64)
    p = p[np.isfinite(p).all(-1)]
    keys = p.shape[-1]
    part = np.array(sheet.region_maps.get(region, [AREA] * keys))
    area = float(part.mean())
    if not 0 < area < 1 or not len(p):
        return None
    if region in sheet.region_maps:
        spread = float(((part - area) ** 2).sum())
        rows = p.mean(0, keepdims=True)  # one row stands for all
    else:
        spread = keys * area * (1 - area)
        rows = p
    uneven = np.maximum((rows**2).sum(-1) - rows.sum(-1) ** 2 / keys, 0)
    std = math.sqrt(float(uneven.sum()) * spread / (keys - 1)) / len(rows)
    gain = (ratio - 1) * area
    return look if gain / (1 - area) >= CLEAR_SCORE and gain >= CLEAR_Z * std > 0 else None
