"""Weights near the diagonal and on the first keys, of a few heads, at full resolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from headscope.report._viewer.packing import Strips
from headscope.stats._tiles import KeptWeights

STRIP_BYTES = 8 * 2**20
"""How much the strips of one page may take before they are compressed."""

WIDEST = 32  # keys near the diagonal
FIRST = 4
STEP = 512  # queries at a time
LOOK = 64  # queries of each stretch in which keys after a query are looked for


def strips_of(kept: KeptWeights, heads: list[int], of: int) -> Strips | None:
    """The strips of these heads of a layer of self-attention; None where there are no weights.

    Args:
        kept: its weights.
        heads: which of its heads.
        of: how many heads of all layers share ``STRIP_BYTES``.
    """
    width = max(4, min(WIDEST, STRIP_BYTES // max(1, of * kept.queries) - FIRST))
    strips = empty_strips(kept, heads, width)
    if strips is None:
        return None
    return replace(strips, codes={head: strip_of(kept, head, (0, kept.queries), strips) for head in heads})


def empty_strips(kept: KeptWeights, heads: Sequence[int], width: int = WIDEST) -> Strips | None:
    """What the strips of these heads, so many keys wide, are of, still without any; None where there are no weights."""
    if 0 in (kept.sizes["q"][0], kept.queries, kept.keys):
        return None
    offset = kept.keys - kept.queries if kept.offset is None else kept.offset
    apart = any(kept.sizes[name][1] > 1 for name in ("bias", "rest") if name in kept.parts)
    ahead = any(_sees_ahead(kept, head, offset, width // 2) for head in (heads if apart else heads[:1]))
    low, high = (-(width // 2), width // 2) if ahead else (1 - width, 0)
    return Strips((kept.queries, kept.keys), offset, low, high, min(FIRST, kept.keys), {})


def strip_of(kept: KeptWeights, head: int, rows: tuple[int, int], strips: Strips) -> NDArray[np.uint8]:
    """Rows of one head as codes [rows, near + first], see ``_viewer_data``."""
    offset, low, high = strips.offset, strips.low, strips.high
    parts: list[NDArray[np.uint8]] = []
    for start in range(*rows, STEP):
        stop = min(start + STEP, rows[1])
        begin = max(0, min(start + offset + low, kept.keys - 1))
        end = max(begin + 1, min(stop + offset + high, kept.keys))
        near = kept.piece(0, head, (start, stop), (begin, end))
        i, step = torch.arange(start, stop, device="cpu"), torch.arange(low, high + 1, device="cpu")
        index = i[:, None] + offset + step - begin  # [i, near]
        outside = (index < 0) | (index >= end - begin)
        found = near.gather(1, index.clamp(0, end - begin - 1)).masked_fill(outside, torch.nan)
        both = torch.cat([found, kept.piece(0, head, (start, stop), (0, strips.first))], 1)
        codes = (both.nan_to_num(0.0).clamp(0, 1).sqrt() * 254).round()
        parts.append(codes.masked_fill(both.isnan(), 255).to(torch.uint8).numpy())
    return np.concatenate(parts)


def _sees_ahead(kept: KeptWeights, head: int, offset: int, reach: int) -> bool:
    """Whether some query sees a key at most so far after it: of those at the start, in the middle and at the end."""
    for middle in (0, kept.queries // 2, kept.queries):
        start = max(0, min(middle - LOOK // 2, kept.queries - LOOK))
        stop = min(start + LOOK, kept.queries)
        begin, end = (max(0, min(at, kept.keys)) for at in (start + offset + 1, stop + offset + reach))
        seen = ~kept.piece(0, head, (start, stop), (begin, end)).isnan()  # [i, j]
        away = torch.arange(begin, end, device="cpu") - torch.arange(start, stop, device="cpu")[:, None] - offset
        if bool((seen & (away > 0) & (away <= reach)).any()):
            return True
    return False
