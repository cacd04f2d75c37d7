"""The weights of one block of rows during an observation: its rows, keys and values.

The tiles that a recording can compute later are in ``stats._kept_weights``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.blocks import block_sizes, logits_of_block, slices, visible_keys
from headscope._attend.interface import accumulate_dtype
from headscope._observe import inputs as observe_inputs
from headscope._observe.scene import Scene
from headscope._observe.visibility import bias_rows, visible_block, visible_rows
from headscope._support.logits import cap_logits, half_products, has_half_products, scaled_products
from headscope.stats._layer import wide

FLOOR = -1000.0  # exp of it is 0 in every dtype, and 0 times it is 0
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The largest relative difference between a specified lse and the row's own at which they count as equal."""

BELOW = 0.01
"""The largest distance of a specified lse below the row's largest logit that counts as rounding of another kernel."""


class Block(NamedTuple):
    """A block of rows: batch entries, key/value heads, rows of the scene, keys."""

    b: slice
    h: slice
    r: slice
    j: slice


class Tile(NamedTuple):
    """The weights of a block.

    Attributes:
        p: [b, h, i, j]; 0 for masked keys and in rows that do not count.
        depth: the logits minus the row's largest, clamped at ``FLOOR``, [b, h, i, j].
        visible: which keys are visible, broadcastable to p; None = all.
        hidden: 0 for visible and -inf for masked keys, to add to p.
        counted, broken: [b, h, i].
        top, norm: the row's largest logit (or sink), and lse - top, [b, h, i].
        scale: the factor of exp(s - top), [b, h, i].
        max_logit: [b, h, i].
        choices: the number of visible keys of a row, broadcastable to [b, h, i].
    """

    p: Tensor
    depth: Tensor
    visible: Tensor | None
    hidden: Tensor | None
    counted: Tensor
    broken: Tensor
    top: Tensor
    norm: Tensor
    scale: Tensor
    max_logit: Tensor
    choices: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows whose weights are computed.

    Attributes:
        q: [b, H, i, D]; b and h (key/value heads) are their origin.
        i: their query indices: a slice, or int64 [1, 1, i] or [b, H, i].
        lse, may_count: of these rows, or None.
    """

    q: Tensor
    b: slice
    h: slice
    i: slice | Tensor
    lse: Tensor | None
    may_count: Tensor | None


def blocks(scene: Scene) -> Iterator[Block]:
    """Yield blocks of at most ``BLOCK`` logits (at least one row), by shapes only, batch entries in order."""
    call, count = scene.call, len(scene.rows)
    if call.heads == 0:  # of q only: k may have more heads
        return
    sizes = block_sizes(call, count, logits_of_block(call.device, observe_inputs.BLOCK))
    places = product(slices(call.batch, sizes.batch), slices(call.kv_heads, sizes.kv_heads), slices(count, sizes.rows))
    for b, h, r in places:
        j = visible_keys(call, scene.plan, query_index(scene, r))
        if j.start < j.stop:
            yield Block(b, h, r, j)


def query_index(scene: Scene, r: slice) -> slice | list[int]:
    """Return which queries these rows are."""
    return r if scene.whole else list(scene.rows[r])


def rows_of(scene: Scene, block: Block) -> Rows:
    """Return the rows of a block."""
    heads = slice(block.h.start * scene.call.group, block.h.stop * scene.call.group)
    index = query_index(scene, block.r)
    return Rows(
        q=scene.q[block.b, heads, block.r],
        b=block.b,
        h=block.h,
        i=index if isinstance(index, slice) else scene.index[block.r][None, None],
        lse=None if scene.lse is None else scene.lse[block.b, heads, block.r],
        may_count=None if scene.may_count is None else cut(scene.may_count, block.b, heads, block.r),
    )


def cut(tensor: Tensor, *at: slice) -> Tensor:
    """Return a part of a tensor along its first axes; an axis of size 1 is not sliced."""
    whole = slice(None)
    return tensor[tuple(whole if n == 1 else here for n, here in zip(tensor.shape, at, strict=False))]


def weights(scene: Scene, rows: Rows, j: slice) -> Tile:
    """Return the weights of some rows over keys that include all visible ones."""
    dtype = accumulate_dtype(scene.call.dtype)
    heads = slice(rows.h.start * scene.call.group, rows.h.stop * scene.call.group)
    s, visible = _logits(scene, rows, heads, j)
    hidden = None
    if visible is not None:
        visible = visible.expand(-1, -1, -1, j.stop - j.start)
        hidden = torch.zeros(visible.shape, dtype=dtype, device=s.device).masked_fill_(~visible, -torch.inf)
        # adding is many times faster than filling, but NaN and infinity would survive it
        s = s.add_(hidden) if scene.clean else s.masked_fill_(~visible, -torch.inf)
    choices = torch.full((), j.stop - j.start, device=s.device) if visible is None else visible.sum(-1)
    max_logit = s.amax(-1)
    top, sink = max_logit, None
    if scene.inputs.sinks is not None:
        sink = scene.inputs.sinks[heads].to(dtype)[:, None]  # [h, 1]
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0)
    depth = s.sub_(top[..., None]).clamp_(min=FLOOR)
    e = depth.exp()
    ones = depth.clone().eq_(0)  # where e is 1, in its dtype
    beside = (e - ones).sum(-1) + (ones.sum(-1) - 1)  # Σ e - 1: in a peaked row, 1 + the rest would round to 1
    if sink is not None:
        beside = beside + (sink - top).exp()
    norm, scale = _normal(rows, top, beside, choices > 0)
    finite = scale.isfinite() & norm.isfinite() & (max_logit != -torch.inf)
    counted = (choices > 0) & finite
    broken = (choices > 0) & ~finite
    if rows.may_count is not None:
        counted, broken = counted & rows.may_count, broken & rows.may_count
    p = e.mul_(torch.where(counted, scale, 0.0)[..., None])
    if not scene.clean:
        p = p.masked_fill_(~counted[..., None], 0.0)
    return Tile(p, depth, visible, hidden, counted, broken, top, norm, scale, max_logit, choices)


def _logits(scene: Scene, rows: Rows, heads: slice, j: slice) -> tuple[Tensor, Tensor | None]:
    """Return the final logits [b, h, i, j] before masking, and which keys are visible."""
    call, inputs = scene.call, scene.inputs
    dtype = accumulate_dtype(call.dtype)
    q, k = rows.q, inputs.k[rows.b, rows.h, j]
    batch, _, count, _ = q.shape
    grouped = q.reshape(batch, -1, call.group * count, call.head_dim)  # [b, hkv, g * i, D]
    if has_half_products(grouped):
        s = half_products(grouped, k, call.scale, call.softcap)  # [b, hkv, g * i, j]
    else:
        s = scaled_products(grouped.to(dtype), k.to(dtype), call.scale, call.softcap)
    s = cap_logits(s, call.softcap)
    s = s.view(batch, -1, count, j.stop - j.start)  # [b, h, i, j]
    if isinstance(rows.i, slice):
        place = (rows.b, heads, rows.i, j)
        visible = visible_block(scene.plan, inputs.bias, place, s.device)
        bias = None if inputs.bias is None else cut(inputs.bias, *place)
    else:
        visible = visible_rows(scene.plan, inputs.bias, rows.b, heads, rows.i, j)
        at_b, at_h = (torch.arange(x.start, x.stop, device=s.device) for x in (rows.b, heads))
        bias = None
        if inputs.bias is not None:
            bias = bias_rows(inputs.bias, at_b[:, None, None], at_h[:, None], rows.i, j)
    return (s if bias is None else s.add_(bias.to(dtype))), visible


def _normal(rows: Rows, top: Tensor, beside: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Return lse - top, and the factor of exp(s - top) that gives p; ``beside`` is Σ exp(s - top) - 1.

    Raises:
        ValueError: on a CPU, the lse of a row with visible keys is below its largest logit. On other devices the factor
            of such a row is NaN.
    """
    norm, scale = beside.log1p(), 1 / (1 + beside)
    if rows.lse is None:
        return norm, scale
    offset = rows.lse.to(wide(top.device)) - top
    near = (offset - norm).abs() <= ROUNDING[rows.lse.dtype] * (norm + top).abs().clamp_min(1.0)
    wrong = (offset < -BELOW) & ~near & sees & offset.isfinite()
    if not top.is_cpu:  # a check would wait for the device: such rows count as broken
        scale = scale.masked_fill(wrong, math.nan)
        near = near | wrong
    elif bool(wrong.any()):
        b, h, i = wrong.nonzero()[0].tolist()
        got, largest = float(rows.lse[b, h, i]), float(top[b, h, i])
        raise ValueError(
            f"lse: got {got:g} for a row whose largest logit is {largest:g}, which gives a weight of "
            f"{math.exp(min(largest - got, 700)):.3g}; expected the natural logarithm of Σ exp over all its logits"
        )
    offset = torch.where(offset.isfinite(), offset.clamp_min(0.0), offset).to(top.dtype)
    return torch.where(near, norm, offset), torch.where(near, scale, (-offset).exp())
