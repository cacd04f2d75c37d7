"""The weight that flows between segments, and the largest weight of each key, accumulated tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._observe.block_weights import Block, Tile, cut
from headscope._observe.place_quantities import gather_mass
from headscope._observe.scene import Scene


@dataclass(frozen=True, eq=False)
class SegmentSums:
    """The sums so far.

    Attributes:
        sum: of the weights, by the segments of query and key, float64 [H, S, S].
        count: of the counted rows of each segment, int64 [H, S].
        first: the part of ``sum`` on the first keys.
    """

    sum: Tensor
    count: Tensor
    first: Tensor

    @staticmethod
    def empty(heads: int, segments: int, device: torch.device, dtype: torch.dtype) -> SegmentSums:
        """Return the sums of nothing."""
        shape = (heads, segments, segments)
        return SegmentSums(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape[:2], dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )

    def add(self, scene: Scene, block: Block, tile: Tile, heads: slice) -> None:
        """Add a block of rows."""
        assert scene.key_segments is not None
        assert scene.row_segments is not None
        size, dtype = self.count.shape[-1], self.sum.dtype
        of_keys = _memberships(cut(scene.key_segments, block.b)[:, block.j], size, tile.p.dtype)  # [b or 1, j, S]
        of_rows = _memberships(cut(scene.row_segments, block.b)[:, block.r], size, dtype)[:, None]  # [b or 1, 1, i, S]
        masses = (tile.p @ of_keys[:, None]).to(dtype)  # [b, h, i, S]
        self.sum[heads] += (of_rows.mT @ masses).sum(0)
        at = cut(scene.first, block.b)  # [b or 1, n]
        inside = (at >= block.j.start) & (at < block.j.stop)
        index = torch.where(inside, at - block.j.start, 0)
        batch = max(len(of_keys), len(index))
        of_first = of_keys.expand(batch, -1, -1).gather(1, index.expand(batch, -1)[..., None].expand(-1, -1, size))
        masses = gather_mass(tile.p, at[:, None, None], block.j) @ of_first[:, None]
        self.first[heads] += (of_rows.mT @ masses.to(dtype)).sum(0)
        self.count[heads] += (tile.counted[..., None, :].to(dtype) @ of_rows)[..., 0, :].sum(0).long()


def _memberships(ids: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return 1 where an entry belongs to a segment, else 0: [b, n] -> [b, n, S]."""
    return (ids[..., None] == torch.arange(size, device=ids.device)).to(dtype)


def empty_maxima(call: Call, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the largest weight of each key before any row, NaN, [H, K]."""
    return torch.full((call.heads, call.keys), math.nan, dtype=dtype, device=device)


def add_to_maxima(maxima: Tensor, tile: Tile) -> None:
    """Update the largest weight of these heads and keys, [h, j], by a tile: rows that do not count are left out."""
    shown = tile.p if tile.hidden is None else tile.p + tile.hidden  # -inf where a key is masked
    largest = shown.masked_fill(~tile.counted[..., None], -math.inf).amax((0, 2)).to(maxima.dtype)
    maxima.copy_(torch.fmax(maxima, largest.masked_fill(largest == -math.inf, math.nan)))
