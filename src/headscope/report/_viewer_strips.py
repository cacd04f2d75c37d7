"""Weights near the diagonal and on the first keys, of a few heads, at full resolution."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headscope._kept_weights import KeptWeights, kept_of
from headscope._stats_parts import LayerStats
from headscope.report._viewer_data import Strips

STRIP_BYTES = 8 * 2**20
"""How much the strips of one page may take before they are compressed."""

WIDEST = 32  # keys near the diagonal
FIRST = 4
STEP = 512  # queries at a time


def strips_of(part: LayerStats, heads: list[int], of: int) -> Strips | None:
    """The strips of these heads of a layer whose q and k are kept, of its last run and first batch entry.

    Args:
        part: the layer.
        heads: which of its heads.
        of: how many heads of all layers share ``STRIP_BYTES``.
    """
    if part.lengths is None or 0 in part.lengths:
        return None
    queries, keys = part.lengths
    width = max(4, min(WIDEST, STRIP_BYTES // max(1, of * queries) - FIRST))
    kept = kept_of(part.tiles[-1])
    above = part.map is not None and bool((part.map.count.triu(1) > 0).any())  # some query sees keys after it
    low, high = (-(width // 2), width // 2) if above else (1 - width, 0)
    first = min(FIRST, keys)
    codes = {head: strip_of(kept, 0, head, (0, queries), low, high, first) for head in heads}
    return Strips(low, high, first, codes)


def strip_of(
    kept: KeptWeights, entry: int, head: int, rows: tuple[int, int], low: int, high: int, first: int
) -> NDArray[np.uint8]:
    """Rows of one head as codes [rows, near + first], see ``_viewer_data``."""
    away = kept.keys - kept.queries  # queries are the last ones
    parts: list[NDArray[np.uint8]] = []
    for start in range(*rows, STEP):
        stop = min(start + STEP, rows[1])
        begin = max(0, min(start + away + low, kept.keys - 1))
        end = max(begin + 1, min(stop + away + high, kept.keys))
        near = kept.piece(entry, head, (start, stop), (begin, end))
        i, step = torch.arange(start, stop, device="cpu"), torch.arange(low, high + 1, device="cpu")
        index = i[:, None] + away + step - begin  # [i, near]
        outside = (index < 0) | (index >= end - begin)
        found = near.gather(1, index.clamp(0, end - begin - 1)).masked_fill(outside, torch.nan)
        both = torch.cat([found, kept.piece(entry, head, (start, stop), (0, first))], 1)
        codes = (both.nan_to_num(0.0).clamp(0, 1).sqrt() * 254).round()
        parts.append(codes.masked_fill(both.isnan(), 255).to(torch.uint8).numpy())
    return np.concatenate(parts)
