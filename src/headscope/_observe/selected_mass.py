"""The recall of selected keys: how much of each row's weight they have.

The recall is a share of the visible keys, so a sink and a specified lse do not change it: weights are taken relative to
the largest one. The divergence is -ln recall = ln(1 + rest / selected), which is exact near 0, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headscope._attend.blocks import block_sizes, slices, visible_keys
from headscope._attend.interface import accumulate_dtype
from headscope._observe import inputs as observe_inputs
from headscope._observe.block_weights import FLOOR, Block, Tile, cut, query_index, rows_of, weights
from headscope._observe.result import Moments, Observed
from headscope._observe.scene import Scene
from headscope._observe.visibility import visible_block, visible_rows
from headscope._support.logits import cap_logits, scaled_products

NAMES = ("recall", "recall_kl", "largest_selected")
SMALL = 1e-30  # below it float32 loses digits
NO_MASS = -700.0  # logits so far below the sink have no weight, in float64 either


def with_selection(observed: Observed, scene: Scene, keep_rows: bool) -> Observed:
    """Return a native result with the recall of the selected keys, if there are any.

    The kernels do not have it, so a second pass computes it in blocks.
    """
    if scene.selection is None:
        return observed
    rows = selection_rows(scene)
    moments: Mapping[str, Moments] = {name: Moments.of(name, values) for name, values in rows.items()}
    return observed._replace(
        rows={**observed.rows, **rows} if keep_rows else observed.rows,
        moments={**(observed.moments or {}), **moments},
    )


def selection_rows(scene: Scene) -> dict[str, Tensor]:
    """Return the values of ``NAMES`` for all rows of a scene, [B, H, R], NaN in rows that do not count."""
    call, count, device = scene.call, len(scene.rows), scene.q.device
    shape = (call.batch, call.heads, count)
    rows = {name: torch.full(shape, math.nan, dtype=accumulate_dtype(call.dtype), device=device) for name in NAMES}
    sizes = block_sizes(call, count, observe_inputs.BLOCK)
    simple = scene.clean and scene.lse is None and scene.inputs.sinks is None and scene.inputs.bias is None
    for b in slices(call.batch, sizes.batch):
        for r in slices(count, sizes.rows):
            j = visible_keys(call, scene.plan, query_index(scene, r))
            known = _Known(scene)
            for h in slices(call.kv_heads, sizes.kv_heads) if j.start < j.stop else ():
                block = Block(b, h, r, j)
                values = _simple_values(scene, block, known) if simple else None
                if values is None:
                    tile = weights(scene, rows_of(scene, block), j)
                    values = selection_values(scene, block, tile)
                    values = {name: x.masked_fill(~tile.counted, math.nan) for name, x in values.items()}
                for name, x in values.items():
                    rows[name][b, _heads(scene, h), r] = x
    return rows


def selection_values(scene: Scene, block: Block, tile: Tile) -> dict[str, Tensor]:
    """Return the values of ``NAMES`` for the rows of a block, [b, h, i]; any number in rows that do not count."""
    selected = _selected(scene, block).to(tile.p.device)
    below = tile.max_logit - tile.top  # 0 without a sink
    shares, scale = tile.p, tile.scale  # relative to the scale, the largest share is 1
    if scene.inputs.sinks is not None or scene.lse is not None:
        shares, scale = (tile.depth - below[..., None]).exp(), torch.ones_like(tile.scale)
    values, total, small = _values(shares, selected, selected.to(shares.dtype))
    if bool(small.any()):
        logits = tile.depth.masked_fill(~selected | (tile.depth <= FLOOR), -math.inf)
        exact = (total / scale).log() + below - logits.logsumexp(-1)
        values["recall_kl"] = torch.where(small, exact, values["recall_kl"])
    return {name: value.masked_fill(below < NO_MASS, math.nan) for name, value in values.items()}


def _values(shares: Tensor, selected: Tensor, ones: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the values of rows, the sums of their shares, and which recalls are too small to take the logarithm.

    Args:
        shares: in proportion to the weights, 0 for masked keys, [b, h, i, j].
        selected, ones: which keys are selected, boolean, and as 0 and 1; both broadcast to ``shares``.
    """
    within = torch.linalg.vecdot(shares, ones)  # products with 1 and 0 are several times faster than masking
    rest = torch.linalg.vecdot(shares, 1 - ones)
    total = within + rest
    largest_key = shares.argmax(-1, keepdim=True)
    values = {
        "recall": within / total,
        "recall_kl": torch.where(within < rest, total.log() - within.log(), (rest / within).log1p()),
        "largest_selected": selected.expand(shares.shape).gather(-1, largest_key)[..., 0].to(shares.dtype),
    }
    return values, total, within < SMALL * total


class _Known:
    """What some rows have in common in all heads, computed once; ``None`` = not yet.

    Attributes:
        hidden: 0 for visible and -inf for masked keys.
        selected: which keys are selected, boolean and as 0 and 1.
    """

    def __init__(self, scene: Scene) -> None:
        self.hidden: Tensor | None = None
        self.selected: tuple[Tensor, Tensor] | None = None
        self.share_hidden = scene.plan is not None and scene.plan.rest is None
        self.share_selected = scene.selection is not None and scene.selection.is_of_all_heads


def _simple_values(scene: Scene, block: Block, known: _Known) -> dict[str, Tensor] | None:
    """Return the same as ``selection_values`` by fewer operations; None = a row is empty, or has a small recall."""
    call, dtype = scene.call, accumulate_dtype(scene.call.dtype)
    heads = _heads(scene, block.h)
    q, k = scene.q[block.b, heads, block.r].to(dtype), scene.inputs.k[block.b, block.h, block.j].to(dtype)
    grouped = q.reshape(len(q), -1, call.group * q.shape[2], call.head_dim)  # [b, hkv, g * i, D]
    s = cap_logits(scaled_products(grouped, k, call.scale, call.softcap), call.softcap)
    s = s.view(*q.shape[:3], k.shape[2])  # [b, h, i, j]
    if scene.plan is not None and not scene.plan.everything:
        if known.hidden is None or not known.share_hidden:
            known.hidden = _hidden(scene, block, dtype)
        s += known.hidden
    if not bool(s.amax(-1).isfinite().all()):
        return None
    if known.selected is None or not known.share_selected:
        selected = _selected(scene, block)
        known.selected = selected, selected.to(dtype)
    values, _, small = _values(torch.softmax(s, -1), *known.selected)
    if bool(small.any()):
        return None
    if scene.may_count is None:
        return values
    counted = cut(scene.may_count, block.b, heads, block.r)
    return {name: value.masked_fill(~counted, math.nan) for name, value in values.items()}


def _hidden(scene: Scene, block: Block, dtype: torch.dtype) -> Tensor:
    """Return 0 for visible and -inf for masked keys, broadcastable to [b, h, i, j]."""
    heads, index, device = _heads(scene, block.h), query_index(scene, block.r), scene.q.device
    if isinstance(index, slice):
        visible = visible_block(scene.plan, None, (block.b, heads, index, block.j), device)
    else:
        at = torch.tensor(index, device=device)[None, None]
        visible = visible_rows(scene.plan, None, block.b, heads, at, block.j)
    assert visible is not None  # the plan hides something
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -math.inf)


def _selected(scene: Scene, block: Block) -> Tensor:
    """Return which keys of a block are selected, boolean, broadcastable to [b, h, i, j]."""
    assert scene.selection is not None
    return scene.selection.tile(scene.call, block.b, block.h, query_index(scene, block.r), block.j)


def _heads(scene: Scene, h: slice) -> slice:
    """Return the query heads of key/value heads."""
    return slice(h.start * scene.call.group, h.stop * scene.call.group)
