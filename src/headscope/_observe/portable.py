"""The portable form of the pass over the weights: each tile is recomputed from q and k, reduced, and discarded.

A row is normalised by its own sum, as in softmax, so its errors are not larger: exp(s - lse) would add the rounding of
lse, 2e-6 for logits of 50, to every weight. A specified lse that equals the row's own within rounding changes nothing;
any other is used as passed, and p = exp(s - lse).

The entropy is Σ p (lse - s) = Σ p (top - s) + mass · (lse - top), where top is the row's largest logit: both terms are
sums of non-negative numbers, so nothing cancels in peaked rows, as it would in lse - Σ p s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope._attend.interface import accumulate_dtype
from headscope._observe.block_weights import Block, Tile, blocks, cut, rows_of, weights
from headscope._observe.edges import Candidates, largest, largest_edges
from headscope._observe.inputs import Reductions
from headscope._observe.map_bins import MapSums, add_to_map
from headscope._observe.place_quantities import gather_mass, place_values
from headscope._observe.result import Observed
from headscope._observe.scene import Scene
from headscope._observe.segment_sums import SegmentSums, add_to_maxima, empty_maxima
from headscope._observe.selected_mass import selection_values
from headscope.stats import quantity_names
from headscope.stats._layer import Edges, HeadMap, wide


def observe_blocks(reductions: Reductions, scene: Scene) -> Observed:
    """Return all requested results of all rows of a scene, block by block."""
    call, device = scene.call, scene.q.device
    shape = (call.batch, call.heads, len(scene.rows))
    rows: dict[str, Tensor] = {}
    counted = torch.zeros(shape, dtype=torch.bool, device=device)
    broken = torch.zeros(call.heads, dtype=torch.int64, device=device)
    dtype = accumulate_dtype(call.dtype)
    keys = (call.batch, call.heads, call.keys)
    received = torch.zeros(keys, dtype=wide(device), device=device) if reductions.received else None
    eligible = torch.zeros(keys, dtype=torch.int64, device=device) if reductions.received else None
    sums = MapSums.empty(call.heads, reductions.bins, device) if reductions.bins else None
    masses = SegmentSums.empty(call.heads, reductions.segments, device, wide(device)) if reductions.segments else None
    maxima = empty_maxima(call, device, wide(device)) if reductions.received_max else None
    top = Candidates.empty((*shape, reductions.top), dtype, device) if reductions.top else None
    names = row_names(reductions, scene)
    for name in names:
        rows[name] = torch.full(shape, math.nan, dtype=dtype, device=device)
    if reductions.argmax:
        rows["argmax"] = torch.full(shape, -1, device=device)
    for block in blocks(scene):
        tile = weights(scene, rows_of(scene, block), block.j)
        heads = slice(block.h.start * call.group, block.h.stop * call.group)
        at = (block.b, heads, block.r)
        counted[at] = tile.counted
        broken[heads] += tile.broken.sum((0, 2))
        for name, values in row_values(reductions, scene, block, tile, names).items():
            rows[name][at] = values
        if received is not None and eligible is not None:
            _add_to_keys(tile, received[block.b, heads, block.j], eligible[block.b, heads, block.j])
        if sums is not None:
            queries = range(block.r.start, block.r.stop) if scene.whole else scene.rows[block.r]
            add_to_map(
                sums,
                tile.p,
                tile.visible,
                tile.hidden,
                tile.counted,
                heads,
                block.b.start,
                queries,
                block.j,
                scene.whole_sequence,
            )
        if masses is not None:
            masses.add(scene, block, tile, heads)
        if maxima is not None:
            add_to_maxima(maxima[heads, block.j], tile)
        if top is not None:
            _store_top(tile, block.j.start, top, at)
    edges = None
    if reductions.edges:
        edges = _edges(largest_edges(reductions.edges, scene, torch.where(counted, rows["max_weight"], math.nan)))
    if not reductions.rows:
        rows.pop("max_weight", None)
    received, eligible = (None if x is None else x.sum(0) for x in (received, eligible))
    shares = None if masses is None else (masses.sum, masses.count, masses.first)
    return Observed(
        rows, counted, broken, received, eligible, sums and _map(sums), edges, top,
        segments=shares, received_max=maxima,
    )  # fmt: skip


def _first_run(at: Tensor) -> Tensor:
    """Prepend the run, 0, to batch entry, query and key: [..., 3] -> [..., 4]."""
    return torch.cat([torch.where(at[..., :1] >= 0, 0, -1), at], -1)


def _map(sums: MapSums) -> HeadMap:
    most = sums.max.masked_fill(sums.max == -math.inf, math.nan)
    return HeadMap(sums.sum, sums.count, most, sums.at)


def _edges(largest_of_head: Candidates) -> Edges:
    return Edges(largest_of_head.p.to(wide(largest_of_head.p.device)), _first_run(largest_of_head.at))


def row_names(reductions: Reductions, scene: Scene) -> list[str]:
    """Return the requested row quantities that these rows have, in the order of docs/concepts/statistics.md."""
    if not reductions.rows:
        return ["max_weight"] if reductions.edges else []  # edges require it
    having = ["weights"]
    if scene.own is not None:
        having.append("positions")
        if scene.q_at is None or scene.q_at.shape[-1] == 1:
            having.append("line")
        if scene.ids is not None:
            having.append("tokens")
    if scene.has_norms:
        having.append("values")
    if scene.selection is not None:
        having.append("selection")
    return quantity_names(having, reductions.windows, reductions.extra)


def row_values(reductions: Reductions, scene: Scene, block: Block, tile: Tile, names: list[str]) -> dict[str, Tensor]:
    """Return name -> [b, h, i], NaN where a row does not count or does not have the quantity."""
    quantities = {"max_weight": (tile.max_logit - tile.top).exp() * tile.scale}
    if reductions.rows:
        quantities |= _of_weights(tile)
        if "second_weight" in names:
            quantities["second_weight"] = _second_weight(tile)
        quantities |= _of_keys(scene, block, tile)
        if scene.own is not None:
            quantities |= place_values(reductions, scene, block, tile)
        if scene.selection is not None:
            quantities |= selection_values(scene, block, tile)
    values = {name: quantities[name].masked_fill(~tile.counted, math.nan) for name in names}
    if reductions.argmax:
        shown = tile.p if tile.hidden is None else tile.p + tile.hidden
        values["argmax"] = torch.where(tile.counted, shown.argmax(-1) + block.j.start, -1)
    return values


def _of_weights(tile: Tile) -> dict[str, Tensor]:
    """Return the quantities that depend only on the weights of a row."""
    mass = tile.p.sum(-1)
    squares = torch.linalg.vector_norm(tile.p, dim=-1).square()
    entropy = (mass * tile.norm - (tile.p * tile.depth).sum(-1)).clamp_min(0.0)
    return {
        "lse": tile.top + tile.norm,
        "max_logit": tile.max_logit,
        "entropy": entropy,
        "normalized_entropy": torch.where(tile.choices >= 2, entropy / tile.choices.to(entropy.dtype).log(), math.nan),
        "effective_keys": torch.where(squares >= torch.finfo(squares.dtype).tiny, 1 / squares, math.nan),
        "mass": mass,
        "chance": (1 / tile.choices.to(mass.dtype)).expand_as(mass),
    }


def _second_weight(tile: Tile) -> Tensor:
    if tile.p.shape[-1] < 2:
        return torch.zeros_like(tile.p[..., 0])
    return tile.p.topk(2, dim=-1).values[..., 1]  # p is 0 where a key is not visible


def _of_keys(scene: Scene, block: Block, tile: Tile) -> dict[str, Tensor]:
    """Return the quantities that depend on which keys are real, and on their values."""
    index = cut(scene.first, block.b)[:, None, None, :]  # [b or 1, 1, 1, n]
    quantities = {"first": gather_mass(tile.p, index, block.j).sum(-1)}
    if scene.norms is None:
        return quantities
    norms = scene.norms[block.b, block.h, block.j]  # [b, hkv, j]
    grouped = tile.p.unflatten(1, (norms.shape[1], -1))  # [b, hkv, g, i, j]
    bad = None if scene.clean else ~norms.isfinite()
    clean = norms if bad is None else norms.masked_fill(bad, 0.0)
    values = (grouped @ clean[:, :, None, :, None]).squeeze(-1).flatten(1, 2)  # [b, h, i]
    if bad is not None:
        not_finite = bad.repeat_interleave(grouped.shape[2], 1)[:, :, None]  # [b, h, 1, j]
        not_finite = (not_finite if tile.visible is None else not_finite & tile.visible).any(-1)
        values = values.masked_fill(not_finite, math.nan)
    return quantities | {"value_norm": values}


def _add_to_keys(tile: Tile, received: Tensor, eligible: Tensor) -> None:
    """Add a block's columns."""
    received += tile.p.sum(2)
    counted = tile.counted.to(tile.p.dtype)
    if tile.visible is None:
        eligible += tile.counted.sum(-1)[..., None]
        return
    visible = tile.visible.to(tile.p.dtype).expand(-1, -1, counted.shape[2], -1)  # [b or 1, h or 1, i, j]
    columns = (
        counted @ visible[:, 0] if visible.shape[1] == 1 else (counted[:, :, None] @ visible)[:, :, 0]
    )  # [b, h, j]
    eligible += columns.long()


def _store_top(tile: Tile, start: int, top: Candidates, at: tuple[slice, slice, slice]) -> None:
    """Store the largest weights of each row of a block."""
    shown = tile.p if tile.visible is None else torch.where(tile.visible, tile.p, -1.0)
    k = min(top.p.shape[-1], shown.shape[-1])
    values, index = largest(shown, k)
    there = (values >= 0) & tile.counted[..., None]
    top.p[at][..., :k] = torch.where(there, values, math.nan)
    top.at[at][..., :k] = torch.where(there, index + start, -1)
