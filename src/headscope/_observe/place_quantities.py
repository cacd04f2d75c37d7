"""Row quantities of self-attention: distance, and the weight on keys at certain positions or with the row's token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope._observe.block_weights import Block, Tile, cut
from headscope._observe.inputs import Reductions
from headscope._observe.scene import Scene

NEAR = {"self": 0, "previous": -1, "next": 1}
"""The key's position minus the query's."""


def place_values(reductions: Reductions, scene: Scene, block: Block, tile: Tile) -> dict[str, Tensor]:
    """Return name -> [b, h, i]; NaN where a row does not have the quantity."""
    reach, placed, values = places_of(scene, block, tile)
    distance = (tile.p * (reach if scene.line is not None else reach.nan_to_num(0.0))).sum(-1)
    values["distance"] = torch.where(placed, distance, math.nan)
    for w in reductions.windows:
        near = reach <= w
        values[f"window_{w:g}"] = torch.where(placed, (tile.p * near).sum(-1), math.nan)
        retained = near | _first_keys(scene, block)
        values[f"streaming_{w:g}"] = torch.where(placed, (tile.p * retained).sum(-1), math.nan)
    if scene.ids is not None:
        values |= _by_token(scene, block, tile)
    return values


Places = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Distances, broadcastable to [b, h, i, j]; which rows have a position, to [b, h, i]; self, previous and next."""


def places_of(scene: Scene, block: Block, tile: Tile) -> Places:
    """Return distances, rows with a position, and the mass on single keys."""
    return _on_a_line(scene, block, tile) if scene.line is not None else _by_position(scene, block, tile)


def _on_a_line(scene: Scene, block: Block, tile: Tile) -> Places:
    """Handle keys at 0, 1, 2, …: the masses on single keys can be gathered."""
    assert scene.line is not None
    line = cut(scene.line, block.b, block.r)[:, None]  # [b or 1, 1, i]
    keys = torch.arange(block.j.start, block.j.stop, device=line.device)
    reach = (
        (keys - line[..., None]).abs_().to(tile.p.dtype)
    )  # [b or 1, 1, i, j]; float32 has no odd numbers from 2^24 on
    values: dict[str, Tensor] = {}
    for name, step in NEAR.items():
        index = (line + step)[..., None]  # [b or 1, 1, i, 1]
        mass = gather_mass(tile.p, index, block.j)[..., 0]
        values[name] = mass.masked_fill(~_visible_at(tile, index, block.j), math.nan)
    return reach, torch.ones_like(line, dtype=torch.bool), values


def _by_position(scene: Scene, block: Block, tile: Tile) -> Places:
    """Handle keys and queries at specified positions, in one or two dimensions; NaN = has none."""
    assert scene.q_at is not None
    assert scene.k_at is not None
    q_at = cut(scene.q_at, block.b, block.r)  # [b or 1, i, axes]
    k_at = cut(scene.k_at, block.b)
    placed = ~q_at.isnan().any(-1) & ~k_at.isnan().any(-1).all(-1, keepdim=True)
    gap = k_at[:, None, block.j] - q_at[:, :, None]  # [b or 1, i, j, axes]
    reach = (gap[..., 0].abs() if gap.shape[-1] == 1 else torch.linalg.vector_norm(gap, dim=-1)).to(tile.p.dtype)
    values: dict[str, Tensor] = {}
    for name, step in NEAR.items():
        if name == "self" or gap.shape[-1] == 1:
            values[name] = _mass_on(tile, (gap == step).all(-1)[:, None])
    return reach[:, None], placed[:, None], values


def _by_token(scene: Scene, block: Block, tile: Tile) -> dict[str, Tensor]:
    """Return the mass on other keys with the query's own token, and on those right after one."""
    assert scene.own is not None
    assert scene.ids is not None
    ids = scene.ids[block.b]  # [b, K]
    own = cut(scene.own, block.b, block.r).expand(len(ids), -1)  # [b, i]
    token = ids.gather(1, own.clamp_min(0))[..., None]
    own = own[..., None]
    keys = torch.arange(block.j.start, block.j.stop, device=ids.device)
    before = ids[:, (keys - 1).clamp_min(0)]  # [b, j]: of the key before
    known = (keys > 0).expand(before.shape)
    if scene.id_before is not None:
        before = torch.where(known, before, scene.id_before[block.b, None])
        known = torch.ones_like(known)
    duplicate = (ids[:, None, block.j] == token) & (keys != own) & (own >= 0)
    induction = (before[:, None] == token) & (own >= 0) & known[:, None]
    return {"duplicate": _mass_on(tile, duplicate[:, None]), "induction": _mass_on(tile, induction[:, None])}


def _first_keys(scene: Scene, block: Block) -> Tensor:
    """Return which keys are among the first n real ones, [b or 1, 1, 1, j]."""
    keys = torch.arange(block.j.start, block.j.stop, device=scene.first.device)
    return (keys[:, None] == cut(scene.first, block.b)[:, None, None, None, :]).any(-1)


def _mass_on(tile: Tile, target: Tensor) -> Tensor:
    """Return the mass on these keys, [b, h, i]; NaN if none of them is visible."""
    there = target if tile.visible is None else target & tile.visible
    return (tile.p * target).sum(-1).masked_fill(~there.any(-1), math.nan)


def gather_mass(p: Tensor, index: Tensor, j: slice) -> Tensor:
    """Return p at these keys [b or 1, 1, i or 1, n] (-1, or outside the block: 0), [b, h, i, n]."""
    inside = (index >= j.start) & (index < j.stop)
    at = torch.where(inside, index - j.start, 0).expand(*p.shape[:3], -1)
    return p.gather(-1, at).masked_fill(~inside, 0.0)


def _visible_at(tile: Tile, index: Tensor, j: slice) -> Tensor:
    """Return whether the key at this place [b or 1, 1, i, 1] is visible to a row, broadcastable to [b, h, i]."""
    inside = (index >= j.start) & (index < j.stop)
    if tile.visible is None:
        return inside[..., 0]
    batch = max(len(tile.visible), len(index))
    visible = tile.visible.expand(batch, -1, index.shape[2], -1)
    at = torch.where(inside, index - j.start, 0).expand(batch, visible.shape[1], -1, -1)
    return (visible.gather(-1, at) & inside)[..., 0]
