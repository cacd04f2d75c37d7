"""The recall of selected keys: how much of each row's weight they have.

The recall is a share of the visible keys, so a sink and a specified lse do not change it: weights are taken relative to
the largest one. The divergence is -ln recall = ln(1 + rest / selected), which is exact near 0, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headscope._attend.interface import accumulate_dtype
from headscope._observe.block_weights import FLOOR, Block, Tile, blocks, query_index, rows_of, weights
from headscope._observe.result import Moments, Observed
from headscope._observe.scene import Scene

NAMES = ("recall", "recall_kl", "largest_selected")
SMALL = 1e-30  # below it float32 loses digits
NO_MASS = -700.0  # logits so far below the sink have no weight, in float64 either


def selection_values(scene: Scene, block: Block, tile: Tile) -> dict[str, Tensor]:
    """Return the values of ``NAMES`` for the rows of a block, [b, h, i]; any number in rows that do not count."""
    assert scene.selection is not None
    selected = scene.selection.tile(scene.call, block.b, block.h, query_index(scene, block.r), block.j)
    selected = selected.to(tile.p.device)
    below = tile.max_logit - tile.top  # 0 without a sink
    shares, scale = tile.p, tile.scale  # relative to the scale, the largest share is 1
    if scene.inputs.sinks is not None or scene.lse is not None:
        shares, scale = (tile.depth - below[..., None]).exp(), torch.ones_like(tile.scale)
    within = shares.masked_fill(~selected, 0.0).sum(-1)
    rest = shares.masked_fill(selected, 0.0).sum(-1)
    total = within + rest
    divergence = torch.where(within < rest, total.log() - within.log(), (rest / within).log1p())
    small = within < SMALL * total
    if bool(small.any()):
        logits = tile.depth.masked_fill(~selected | (tile.depth <= FLOOR), -math.inf)
        divergence = torch.where(small, (total / scale).log() + below - logits.logsumexp(-1), divergence)
    shown = shares if tile.hidden is None else shares + tile.hidden
    largest_key = shown.argmax(-1, keepdim=True)
    values = {
        "recall": within / total,
        "recall_kl": divergence,
        "largest_selected": selected.expand(shares.shape).gather(-1, largest_key)[..., 0].to(shares.dtype),
    }
    return {name: value.masked_fill(below < NO_MASS, math.nan) for name, value in values.items()}


def selection_rows(scene: Scene) -> dict[str, Tensor]:
    """Return the values of ``NAMES`` for all rows of a scene, [B, H, R], NaN in rows that do not count."""
    call, device = scene.call, scene.q.device
    shape = (call.batch, call.heads, len(scene.rows))
    rows = {name: torch.full(shape, math.nan, dtype=accumulate_dtype(call.dtype), device=device) for name in NAMES}
    for block in blocks(scene):
        tile = weights(scene, rows_of(scene, block), block.j)
        heads = slice(block.h.start * call.group, block.h.stop * call.group)
        for name, values in selection_values(scene, block, tile).items():
            rows[name][block.b, heads, block.r] = values.masked_fill(~tile.counted, math.nan)
    return rows


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
