"""Sums of the weights by key and by segment, batch entry by batch entry, and their gradients: the portable form.

With p = exp(s - lse), a loss that depends on the weights by g = dloss/dp has the gradient

    ds_ij = p_ij (g_ij - Σ_j p_ij g_ij),        of a sink: -p_sink Σ_j p_ij g_ij,

    g_ij = -(ln p_ij + 1) · that of entropy_i + that of received_j + that of the sum of the segments of i and j.

Each tile of weights is recomputed from q and k, so memory is linear in the length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import accumulate_dtype
from headscope._observe.block_weights import Block, Tile, blocks, cut, query_index, rows_of, weights
from headscope._observe.scene import Scene
from headscope._support.logits import scaled_products


class Sums(NamedTuple):
    """Sums over counted rows, or their gradients, in the dtype of the arithmetic; None = not requested.

    Attributes:
        entropy: of each row, [B, H, R]; only as a gradient.
        received: [B, H, K].
        segments: by the segments of query and key, [B, H, S, S].
    """

    entropy: Tensor | None
    received: Tensor | None
    segments: Tensor | None


@dataclass(frozen=True, eq=False)
class Request:
    """What is summed.

    Attributes:
        received: whether the weight on each key is.
        segments: the number of segments; 0 = none.
    """

    received: bool
    segments: int


def sum_weights(scene: Scene, request: Request) -> Sums:
    """Return the sums of the weights of a scene."""
    call, device, dtype = scene.call, scene.q.device, accumulate_dtype(scene.call.dtype)
    rows, size = (call.batch, call.heads), request.segments
    received = torch.zeros(*rows, call.keys, dtype=dtype, device=device) if request.received else None
    segments = torch.zeros(*rows, size, size, dtype=dtype, device=device) if size else None
    for block in blocks(scene):
        p = weights(scene, rows_of(scene, block), block.j).p
        heads = heads_of(call, block)
        if received is not None:
            received[block.b, heads, block.j] += p.sum(2)
        if segments is not None:
            of_rows, of_keys = memberships(scene, block, size, dtype)
            segments[block.b, heads] += of_rows.mT @ (p @ of_keys)
    return Sums(None, received, segments)


def heads_of(call: Call, block: Block) -> slice:
    """Return the query heads of a block."""
    return slice(block.h.start * call.group, block.h.stop * call.group)


def memberships(scene: Scene, block: Block, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return 1 where a row and a key belongs to a segment, else 0: [b or 1, 1, i, S] and [b or 1, 1, j, S]."""
    assert scene.row_segments is not None
    assert scene.key_segments is not None
    names = torch.arange(size, device=scene.q.device)
    ids = (cut(scene.row_segments, block.b)[:, block.r], cut(scene.key_segments, block.b)[:, block.j])
    of_rows, of_keys = ((each[:, None, :, None] == names).to(dtype) for each in ids)
    return of_rows, of_keys


def gradients_of_weights(scene: Scene, grads: Sums, needed: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, and of bias and sinks if needed, in the dtype of the arithmetic.

    Args:
        scene: the call; its lse is not read.
        grads: the gradients of the sums and entropies.
        needed: whether those of bias and sinks are needed: a bias may be as large as the matrix.
    """
    inputs, dtype = scene.inputs, accumulate_dtype(scene.call.dtype)

    def zeros(x: Tensor | None, need: bool = True) -> Tensor | None:
        return torch.zeros(x.shape, dtype=dtype, device=x.device) if x is not None and need else None

    totals = (zeros(inputs.q), zeros(inputs.k), zeros(inputs.bias, needed[0]), zeros(inputs.sinks, needed[1]))
    scene = replace(scene, lse=None)
    for block in blocks(scene):
        _add_block(scene, block, grads, totals)
    return totals


def _add_block(scene: Scene, block: Block, grads: Sums, totals: tuple[Tensor | None, ...]) -> None:
    """Add the gradients of one block to the totals of q, k, bias and sinks."""
    call, inputs, heads = scene.call, scene.inputs, heads_of(scene.call, block)
    dtype = accumulate_dtype(call.dtype)
    tile = weights(scene, rows_of(scene, block), block.j)
    g = _gradient_of_weights(scene, block, tile, grads)
    delta = (tile.p * g).sum(-1)  # [b, h, i]
    ds = g.sub_(delta[..., None]).mul_(tile.p)  # [b, h, i, j]
    dq, dk, dbias, dsinks = totals
    assert dq is not None
    assert dk is not None
    if dsinks is not None and inputs.sinks is not None:
        sink = inputs.sinks[heads].to(dtype)[:, None]  # [h, 1]
        weight = torch.where(tile.counted, (sink - tile.top).exp() * tile.scale, 0.0)
        dsinks[heads] -= (weight * delta).sum((0, 2))
    queries = query_index(scene, block.r)
    at = queries if isinstance(queries, slice) else torch.tensor(queries, device=scene.q.device)
    if dbias is not None:
        _add_to_bias(dbias, ds, (block.b, heads, at, block.j))
    q, k = scene.q[block.b, heads, block.r].to(dtype), inputs.k[block.b, block.h, block.j].to(dtype)
    if not scene.clean:  # NaN and infinity reach no row that counts, and 0 times them is NaN
        q, k = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k))
    q, ds = (x.reshape(len(x), -1, call.group * x.shape[2], x.shape[3]) for x in (q, ds))  # [b, hkv, g * i, ..]
    if call.softcap is not None:
        slope = scaled_products(q, k, call.scale, call.softcap).cosh().square()  # not 1 - tanh², which loses digits
        ds = ds / slope
    dk[block.b, block.h, block.j] += (ds.mT @ q).mul_(call.scale)
    of_q = (ds @ k).mul_(call.scale).view(len(q), heads.stop - heads.start, -1, call.head_dim)  # [b, h, i, D]
    if isinstance(at, slice):
        dq[block.b, heads, at] += of_q
    else:
        dq[block.b, heads].index_add_(2, at, of_q)


def _gradient_of_weights(scene: Scene, block: Block, tile: Tile, grads: Sums) -> Tensor:
    """Return dloss/dp of a block, [b, h, i, j]; 0 in rows that do not count."""
    heads, dtype = heads_of(scene.call, block), tile.p.dtype
    g = torch.zeros_like(tile.p)
    if grads.entropy is not None:
        of_rows = grads.entropy[block.b, heads, block.r, None].to(dtype)
        g -= (tile.depth - tile.norm[..., None] + 1) * of_rows  # where p is 0, depth is finite: p g is 0, too
    if grads.received is not None:
        g += grads.received[block.b, heads, None, block.j].to(dtype)
    if grads.segments is not None:
        of_rows, of_keys = memberships(scene, block, grads.segments.shape[-1], dtype)
        g += (of_rows @ grads.segments[block.b, heads].to(dtype)) @ of_keys.mT
    return torch.where(tile.counted[..., None], g, 0.0)


def _add_to_bias(total: Tensor, ds: Tensor, at: tuple[slice, slice, slice | Tensor, slice]) -> None:
    """Sum a block's gradient over the axes along which the bias repeats; the third index may be rows by number."""
    axes = [axis for axis in range(4) if total.shape[axis] == 1]
    ds = ds.sum(axes, keepdim=True) if axes else ds
    b, h, i, j = (slice(None) if n == 1 else here for n, here in zip(total.shape, at, strict=True))
    part = total[b, h][..., j]  # a view: b, h and j are slices
    if isinstance(i, slice):
        part[:, :, i] += ds
    else:
        part.index_add_(2, i, ds)
