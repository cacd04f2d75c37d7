"""Weights near the diagonal and on the first keys, of a few heads, at full resolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from headscope.report._viewer.packing import Strips
from headscope.stats._kept_weights import KeptWeights

STRIP_BYTES = 8 * 2**20
"""The most bytes of all strips of a page, before compression."""

WIDEST = 32  # keys near the diagonal
FIRST = 4
STEP = 512  # queries at a time
LOOK = 64  # queries of each stretch that is searched for visible keys after the query


def strips_of(weights: KeptWeights, heads: list[int], of: int) -> Strips | None:
    """Return the strips of these heads of a layer of self-attention; None if it has no weights.

    Args:
        weights: the weights of the layer.
        heads: the numbers of the heads.
        of: how many heads of all layers share ``STRIP_BYTES``.
    """
    width = max(4, min(WIDEST, STRIP_BYTES // max(1, of * weights.queries) - FIRST))
    strips = empty_strips(weights, heads, width)
    if strips is None:
        return None
    return replace(strips, codes={head: strip_of(weights, head, (0, weights.queries), strips) for head in heads})


def empty_strips(weights: KeptWeights, heads: Sequence[int], width: int = WIDEST) -> Strips | None:
    """Return strips without codes: the distances and positions for ``width`` keys; None if the layer has no weights."""
    if 0 in (weights.sizes["q"][0], weights.queries, weights.keys):
        return None
    offset = weights.keys - weights.queries if weights.offset is None else weights.offset
    per_head = any(weights.sizes[name][1] > 1 for name in ("bias", "rest") if name in weights.parts)
    ahead = any(_attends_ahead(weights, head, offset, width // 2) for head in (heads if per_head else heads[:1]))
    low, high = (-(width // 2), width // 2) if ahead else (1 - width, 0)
    return Strips((weights.queries, weights.keys), offset, low, high, min(FIRST, weights.keys), {})


def strip_of(weights: KeptWeights, head: int, rows: tuple[int, int], strips: Strips) -> NDArray[np.uint8]:
    """Return rows of one head as codes [rows, near + first], see ``packing``."""
    offset, low, high = strips.offset, strips.low, strips.high
    parts: list[NDArray[np.uint8]] = []
    for start in range(*rows, STEP):
        stop = min(start + STEP, rows[1])
        begin = max(0, min(start + offset + low, weights.keys - 1))
        end = max(begin + 1, min(stop + offset + high, weights.keys))
        near = weights.piece(0, head, (start, stop), (begin, end))
        i, step = torch.arange(start, stop, device="cpu"), torch.arange(low, high + 1, device="cpu")
        index = i[:, None] + offset + step - begin  # [i, near]
        outside = (index < 0) | (index >= end - begin)
        weights_near = near.gather(1, index.clamp(0, end - begin - 1)).masked_fill(outside, torch.nan)
        both = torch.cat([weights_near, weights.piece(0, head, (start, stop), (0, strips.first))], 1)
        codes = (both.nan_to_num(0.0).clamp(0, 1).sqrt() * 254).round()
        parts.append(codes.masked_fill(both.isnan(), 255).to(torch.uint8).numpy())
    return np.concatenate(parts)


def _attends_ahead(weights: KeptWeights, head: int, offset: int, reach: int) -> bool:
    """Return whether a key up to ``reach`` after its query is visible, for queries at the start, middle and end."""
    for middle in (0, weights.queries // 2, weights.queries):
        start = max(0, min(middle - LOOK // 2, weights.queries - LOOK))
        stop = min(start + LOOK, weights.queries)
        begin, end = (max(0, min(at, weights.keys)) for at in (start + offset + 1, stop + offset + reach))
        visible = ~weights.piece(0, head, (start, stop), (begin, end)).isnan()  # [i, j]
        away = torch.arange(begin, end, device="cpu") - torch.arange(start, stop, device="cpu")[:, None] - offset
        if bool((visible & (away > 0) & (away <= reach)).any()):
            return True
    return False
