"""What chance gives between segments: the share of the visible keys of each row that a segment has.

The weight of a row on a segment is Σ p_j a_j, with a_j = 1 for the keys of the segment. ``exchange`` defines the mean
and the variance of such a sum if the keys of the row are exchanged. With m of n visible keys in the segment, ā = m / n
and Σ(a - ā)² / (n - 1) = m (1 - m / n) / (n - 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from headscope._attend.blocks import slices
from headscope._observe import inputs
from headscope._observe.block_weights import cut, wide
from headscope._observe.scene import Scene
from headscope._observe.visibility import visible_block, visible_rows


def counts_of_segments(scene: Scene, spans: Tensor | None, size: int) -> Tensor | None:
    """Return how many visible keys of each segment the rows have, int32 [B or 1, H or 1, R or 1, S]; None without any.

    Args:
        scene: the observation.
        spans: the visible spans of the rows, int64 [B or 1, R or 1, n, 2]; None = the mask has more than these.
        size: the number of segments.
    """
    if scene.key_segments is None:
        return None
    call, device = scene.call, scene.q.device
    if 0 in (call.batch, call.keys, len(scene.rows)):
        return torch.zeros(1, 1, 1, size, dtype=torch.int32, device=device)
    keys = scene.key_segments
    batch = max(len(keys), 1 if spans is None else len(spans))
    if spans is None:
        return _of_blocks(scene, size)
    counts: list[Tensor] = []
    for b in range(batch):
        member = keys[b if len(keys) > 1 else 0][:, None] == torch.arange(size, device=device)  # [K, S]
        before = torch.zeros(call.keys + 1, size, dtype=torch.int32, device=device)
        torch.cumsum(member, 0, dtype=torch.int32, out=before[1:])
        low, high = spans[b if len(spans) > 1 else 0].clamp(0, call.keys).unbind(-1)  # [R or 1, n]
        counts.append((before[torch.maximum(low, high)] - before[low]).sum(1, dtype=torch.int32))
    return torch.stack(counts)[:, None]


def _of_blocks(scene: Scene, size: int) -> Tensor:
    """Return the counts for any mask, block by block."""
    call, device, keys = scene.call, scene.q.device, scene.key_segments
    assert keys is not None  # they are requested
    of_heads, all_keys = slice(0, call.heads), slice(0, call.keys)
    counts: list[Tensor] = []
    rows = max(1, inputs.BLOCK // max(1, call.heads * call.keys))
    for b, r in product(slices(call.batch, 1), slices(len(scene.rows), rows)):
        if scene.whole:
            pairs = visible_block(scene.plan, scene.inputs.bias, (b, of_heads, r, all_keys), device)
        else:
            index = scene.index[r][None, None]
            pairs = visible_rows(scene.plan, scene.inputs.bias, b, of_heads, index, all_keys)
        if pairs is None:
            pairs = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        pairs = pairs.expand(1, pairs.shape[1], r.stop - r.start, call.keys)
        member = cut(keys, b)[0, :, None] == torch.arange(size, device=device)
        counts.append((pairs.to(torch.float32) @ member.to(torch.float32)).to(torch.int32))
    per_entry = len(counts) // call.batch
    entries = [torch.cat(counts[n : n + per_entry], 2) for n in range(0, len(counts), per_entry)]
    return torch.cat(entries)


def sum_segment_nulls(counts: Tensor, scene: Scene, rows: Mapping[str, Tensor], even_share: float) -> Tensor:
    """Return the sums over the rows of each segment of their means and variances, [2, H, S, S].

    Args:
        counts: see ``counts_of_segments``.
        scene: the observation.
        rows: the row quantities [B, H, R], NaN in rows that do not count.
        even_share: see ``exchange.EVEN``.
    """
    assert scene.row_segments is not None  # they are requested
    accumulate, size = wide(rows["mass"].device), counts.shape[-1]
    mass, even, keys = (rows[name].to(accumulate) for name in ("mass", "chance", "effective_keys"))
    mass, even = mass.nan_to_num(0.0), even.nan_to_num(0.0)
    squares = (1 / keys).nan_to_num(0.0)
    uneven = squares - mass.square() * even
    uneven = torch.where((uneven > even_share * squares) & (even < 1), uneven / (1 - even), 0.0)
    visible = (1 / even).round()  # even is 1 / visible, to the precision of the rows; infinite for rows without keys
    sums = torch.zeros(2, mass.shape[1], size, size, dtype=accumulate, device=mass.device)
    for b in range(len(mass)):
        of_rows = scene.row_segments[b if len(scene.row_segments) > 1 else 0]  # [R]
        share = counts[b if len(counts) > 1 else 0].to(accumulate) / visible[b][..., None]  # [H, R, S]
        share = share.clamp(max=1)  # 1 if all are of the segment, to the bit: no variance below 0
        member = (of_rows[:, None] == torch.arange(size, device=mass.device)).to(accumulate)  # [R, S]
        for n, each in enumerate((mass[b][..., None] * share, uneven[b][..., None] * share * (1 - share))):
            sums[n] += member.mT @ each
    return sums
