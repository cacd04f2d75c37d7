"""The largest weights of a row, and of a head: exact; ties go to the first.

The k largest weights of a head lie in the k rows with the largest maxima: if one of them were in another row, the
maxima of these k rows would all precede it. So with the maxima of all rows, it is enough to recompute k rows of each
head and batch entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.blocks import block_sizes, logits_of_block, slices
from headscope._observe import inputs
from headscope._observe.block_weights import Rows, weights
from headscope._observe.scene import Scene
from headscope.stats._layer import largest_first

_LOW = 0xFFFFFFFF


class Candidates(NamedTuple):
    """Weights, largest first, and their places.

    Attributes:
        p: [..., k], NaN if there are fewer.
        at: keys [..., k], or batch entry, query and key [..., k, 3]; int64, -1 if there are fewer.
    """

    p: Tensor
    at: Tensor

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Candidates:
        """Return no candidates."""
        return Candidates(torch.full(shape, math.nan, dtype=dtype, device=device), torch.full(shape, -1, device=device))


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of the last axis and their places; ties go to the first. x has no NaN.

    torch.topk does not define which of equal values it returns. 32-bit numbers are therefore combined with the place
    into one integer, so no two are equal.
    """
    if x.dtype != torch.float32:
        values, index = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k], index[..., :k]
    place = torch.arange(x.shape[-1], device=x.device)
    # the bits of non-negative numbers have the order of the numbers; negative ones come after, in any order
    joined = (x.contiguous().view(torch.int32).long() << 32) | (_LOW - place)
    index = _LOW - (joined.topk(k, dim=-1).values & _LOW)
    return x.gather(-1, index), index


def largest_edges(k: int, scene: Scene, maxima: Tensor) -> Candidates:
    """Return the k largest weights of each head over batch entries, queries and keys.

    Args:
        k: the number of weights, from 1.
        scene: the observed call.
        maxima: the largest weight of each row [B, H, R]; NaN where a row does not count.
    """
    call = scene.call
    edges = Candidates(
        torch.full((call.heads, k), math.nan, dtype=maxima.dtype, device=maxima.device),
        torch.full((call.heads, k, 3), -1, device=maxima.device),
    )
    if 0 in (call.heads, call.keys):
        return edges
    for b, h, rows in _chunks(k, scene, maxima):
        heads = slice(h.start * call.group, h.stop * call.group)
        assert isinstance(rows.i, Tensor)
        tile = weights(scene, rows, slice(0, call.keys))
        shown = tile.p if tile.visible is None else torch.where(tile.visible, tile.p, -1.0)
        p, key = largest(shown, min(k, call.keys))  # [1, h, r, k]
        p = torch.where((p >= 0) & tile.counted[..., None], p, math.nan)
        at = torch.stack([torch.full_like(key, b), rows.i[..., None].expand_as(key), key], -1)  # [1, h, r, k, 3]
        p = torch.cat([edges.p[heads], p[0].flatten(1)], 1)
        at = torch.cat([edges.at[heads], at[0].flatten(1, 2)], 1)
        _retain_largest(edges, heads, p, at, call.queries, call.keys)
    return edges


def _chunks(k: int, scene: Scene, maxima: Tensor) -> Iterator[tuple[int, slice, Rows]]:
    """Yield the rows with the k largest maxima of each batch entry and head, in pieces of at most ``BLOCK`` logits."""
    call = scene.call
    count = min(k, maxima.shape[-1])
    chosen = largest_first(maxima)[..., :count].sort(-1).values  # [B, H, k], ascending
    queries = chosen if scene.whole else scene.index[chosen]
    sizes = block_sizes(call, count, logits_of_block(call.device, inputs.BLOCK))
    places = product(slices(call.batch, 1), slices(call.kv_heads, sizes.kv_heads), slices(count, sizes.rows))
    for b, h, r in places:
        heads = slice(h.start * call.group, h.stop * call.group)
        pick = chosen[b, heads, r]
        q = scene.q[b, heads].gather(2, pick[..., None].expand(-1, -1, -1, call.head_dim))
        lse = None if scene.lse is None else scene.lse[b, heads].gather(2, pick)
        counts = ~maxima[b, heads].gather(2, pick).isnan()
        yield b.start, h, Rows(q, b, h, queries[b, heads, r], lse, counts)


def _retain_largest(edges: Candidates, heads: slice, p: Tensor, at: Tensor, queries: int, keys: int) -> None:
    """Retain the largest weights of some heads; ties go to the first by batch entry, query, key."""
    k = edges.p.shape[1]
    place = (at[..., 0] * queries + at[..., 1]) * keys + at[..., 2]
    order = place.argsort(dim=1)
    order = order.gather(1, largest_first(p.gather(1, order))[:, :k])
    edges.p[heads] = p.gather(1, order)
    places = at.gather(1, order[..., None].expand(-1, -1, 3))
    edges.at[heads] = torch.where(edges.p[heads].isnan()[..., None], -1, places)
