"""What chance gives: the nulls of row quantities, if the keys of each row were exchanged at random.

A quantity with a null is linear in the weights of a row: x = Σ_j p_j a_j over its n visible keys. The factor a_j
depends on positions or tokens only. Exchanging the keys gives x the mean Σp · ā and the variance
(Σp² - (Σp)² / n) · Σ(a - ā)² / (n - 1). The factors of a are the ``Exchange`` of a scene; those of p row quantities.

Where the mask consists of spans, and keys are at 0, 1, 2, …, the factors of a have closed forms. Otherwise they are
those of an even row: ā is the quantity of the row that spreads its weight evenly. The native kernels measure such rows
in one pass, with one head of width 1 in float64; else blocks of torch do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.blocks import logits_of_block, slices
from headscope._attend.interface import Inputs
from headscope._observe import inputs
from headscope._observe.block_weights import Block, Tile, cut, wide
from headscope._observe.inputs import Reductions
from headscope._observe.place_quantities import gather_mass, place_values, places_of
from headscope._observe.scene import Scene
from headscope._observe.segment_nulls import counts_of_segments
from headscope._observe.visibility import visible_block, visible_rows
from headscope._support.bounded import BoundedTable
from headscope._support.device_constants import integers
from headscope.stats import quantity_of

SINGLE = ("self", "previous", "next")
"""On a line these concern one key: ā = 1 / n and Σ(a - ā)² / (n - 1) = 1 / n, which is the quantity ``chance``."""

EVEN = 1e-6
"""A row with n Σp² - (Σp)² below this share of n Σp² is even up to rounding: exchanging its keys changes nothing."""


_STEPS = 256  # whose factors are computed together
_steps: BoundedTable[Hashable, tuple[Tensor, Tensor]] = BoundedTable(64)

MOST_WHOLE = 1 << 20
"""The sums of squared distances over fewer keys than this fit into 64 bits."""


class Exchange(NamedTuple):
    """The factors of nulls that depend on positions, tokens and the mask, for each row of a scene.

    Attributes:
        names: of the quantities with factors.
        mean: ā, [N, B or 1, H or 1, R]; any number in a row that does not have the quantity.
        spread: Σ(a - ā)² / (n - 1), of the same shape; 0 where n is 1.
        single: the quantities that need no factors, because they concern one key.
        segments: the number of visible keys of each segment, int32 [B or 1, H or 1, R or 1, S]; None = not requested.
    """

    names: tuple[str, ...]
    mean: Tensor
    spread: Tensor
    single: tuple[str, ...]
    segments: Tensor | None = None


EvenRows = Callable[[Scene], tuple[Mapping[str, Tensor], Tensor] | None]
"""Measures the rows of a scene from ``even_scene``: their quantities, and the output [B, H, Q, 2]."""


def to_exchange(
    reductions: Reductions, scene: Scene, names: tuple[str, ...], measure: EvenRows | None = None
) -> Exchange:
    """Return the factors of those of these row quantities that have a null; ``measure``: a fast way, for any mask."""
    names = tuple(name for name in names if (of := quantity_of(name)) is not None and of.has_null)
    single = tuple(name for name in names if name in SINGLE) if scene.line is not None else ()
    names = tuple(name for name in names if name not in single)
    call = scene.call
    if 0 in (call.batch, call.heads, call.keys, len(scene.rows)):  # no row has a visible key
        nothing = torch.zeros(len(names), 1, 1, len(scene.rows), dtype=wide(scene.q.device), device=scene.q.device)
        return Exchange(names, nothing, nothing, single, counts_of_segments(scene, None, reductions.segments))
    spans = _spans(scene)
    segments = counts_of_segments(scene, spans, reductions.segments)
    if _is_step(scene):
        mean, spread = _of_step(reductions, scene, names)
    elif spans is not None and (scene.line is not None or scene.own is None):
        mean, spread = _of_spans(reductions, scene, names, spans)
    else:
        moments = None if measure is None or not scene.whole else _of_even_rows(scene, names, measure)
        mean, spread = _of_blocks(reductions, scene, names) if moments is None else moments
    spread = spread.clamp_max(torch.finfo(spread.dtype).max)  # infinity times 0 is NaN
    return Exchange(names, mean, spread, single, segments)


def sum_nulls(exchange: Exchange, rows: Mapping[str, Tensor]) -> tuple[tuple[str, ...], Tensor]:
    """Return the names and sums of ``Nulls``, from the row quantities [B, H, R]; NaN where a row does not have one."""
    accumulate = wide(rows["mass"].device)
    mass, even = rows["mass"].to(accumulate), rows["chance"].to(accumulate)
    squares = (1 / rows["effective_keys"].to(accumulate)).nan_to_num(0.0)  # below the smallest float: 0
    uneven = squares - mass.square() * even  # Σ(p - Σp / n)²
    uneven = torch.where(uneven > EVEN * squares, uneven, 0.0)
    names = (*exchange.single, *exchange.names)
    sums: list[Tensor] = []
    for n, name in enumerate(names, -len(exchange.single)):
        mean, spread = (even, even) if n < 0 else (exchange.mean[n], exchange.spread[n])
        there = ~rows[name].isnan()
        variance = torch.where(there, uneven * spread, 0.0)
        sums.append(torch.stack([torch.where(there, mass * mean, 0.0).sum((0, 2)), variance.sum((0, 2))]))
    empty = torch.zeros(2, 0, mass.shape[1], dtype=accumulate, device=mass.device)
    return names, torch.stack(sums, 1) if sums else empty


# ---------------------------------------------------------------- spans of keys on a line


def _spans(scene: Scene) -> Tensor | None:
    """Return the visible spans of the rows, int64 [B or 1, R or 1, n, 2]; None if there is more to the mask."""
    plan, bias = scene.plan, scene.inputs.bias
    if (plan is not None and plan.rest is not None) or (bias is not None and _may_mask(bias)):
        return None
    device = scene.q.device
    if plan is None:
        return integers((0, scene.call.keys), device)[None, None, None]
    spans = plan.spans.to(device)
    if spans.shape[1] == 1 or scene.whole:
        return spans
    return spans[:, scene.index]


def _is_step(scene: Scene) -> bool:
    """Return whether the scene is the next row of a text, which sees all of its keys."""
    call, line = scene.call, scene.line
    if not (call.queries == 1 and scene.plan is None and scene.inputs.bias is None and scene.ids is None):
        return False
    if not (scene.q.is_cpu and line is not None and len(line) == len(scene.first) == 1):
        return False
    return int(line) == call.keys - 1 and scene.first[0].tolist() == [*range(scene.first.shape[1])]


def _of_step(reductions: Reductions, scene: Scene, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return the mean and the spread of each name, [N, 1, 1, 1]: those of one of many steps, computed together."""
    block, place = divmod(scene.call.keys - 1, _STEPS)
    key = names, reductions.windows, scene.first.shape[1], block
    found = _steps.get(key)
    if found is None:
        line = torch.arange(block * _STEPS, (block + 1) * _STEPS, device="cpu")[None]
        whole = replace(scene.call, queries=_STEPS, keys=(block + 1) * _STEPS)
        steps = replace(scene, call=whole, rows=range(_STEPS), line=line)
        spans = torch.stack([torch.zeros_like(line), line + 1], -1)[:, :, None]
        found = _steps.add(key, _of_spans(reductions, steps, names, spans))
    mean, spread = found
    return mean[..., place : place + 1], spread[..., place : place + 1]


def _may_mask(bias: Tensor) -> bool:
    """Return whether a bias masks keys; on a GPU, where reading it would wait, assume so."""
    return not bias.is_cpu or bool((bias == -torch.inf).any())


def _of_spans(reductions: Reductions, scene: Scene, names: tuple[str, ...], spans: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the spread of each name, [N, B or 1, 1, R]."""
    low, high = spans.unbind(-1)  # [B or 1, R or 1, n]
    keys = (high - low).clamp_min(0).sum(-1)
    alike = scene.first.is_cpu and bool((scene.first == scene.first[:1]).all())  # a GPU would have to wait
    first = scene.first[:1] if alike else scene.first
    first = first[:, None, :, None]  # [B or 1, 1, f, 1]
    shown = (first >= 0) & ((first >= low[..., None, :]) & (first < high[..., None, :])).any(-1, keepdim=True)
    matches: dict[str, Tensor] = {"first": shown.sum((-1, -2))}
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    if scene.line is not None:
        line = scene.line
        moments["distance"] = _distances(line, low, high, keys, scene.call.keys)
        for w in reductions.windows:
            reach = int(min(w, 2 * (scene.call.queries + scene.call.keys)))
            begin, end = (line - reach)[..., None], (line + reach + 1)[..., None]  # [B or 1, R, 1]
            near = (torch.minimum(high, end) - torch.maximum(low, begin)).clamp_min(0).sum(-1)
            far = shown & ~((first >= begin[..., None]) & (first < end[..., None]))
            matches[f"window_{w:g}"] = near
            matches[f"streaming_{w:g}"] = near + far.sum((-1, -2))
        if scene.ids is not None:
            matches |= _by_token(scene, low, high)
    for name, count in matches.items():
        moments[name] = _indicator(count, keys)
    return _stacked([moments[name] for name in names], scene)


def _indicator(count: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and spread, if ``count`` of the visible keys count with 1 and the others with 0."""
    mean = count / keys.clamp_min(1).to(wide(keys.device))
    return mean, count * (1 - mean) / (keys - 1).clamp_min(1)


def _distances(line: Tensor, low: Tensor, high: Tensor, keys: Tensor, max_key: int) -> tuple[Tensor, Tensor]:
    """Return mean and spread of |line - j| over spans of keys j, by sums in whole numbers."""
    near = line.clamp(0, max_key)  # beyond the keys, distances grow alike, and their sums would overflow
    ends = torch.stack([low, high]) - near[..., None]  # [2, B or 1, R, n]
    if max_key >= MOST_WHOLE:
        ends = ends.to(wide(ends.device))
    once = ends * (ends - 1) // 2  # |0| + |1| + … below an end
    total = torch.where(ends >= 0, once, -once)
    squares = once * (2 * ends - 1) // 3
    (below, above), (below_squares, above_squares) = total, squares
    total, squares = (above - below).sum(-1), (above_squares - below_squares).sum(-1)
    mean = total / keys.clamp_min(1).to(wide(keys.device))
    return mean + (line - near).abs(), (squares - total * mean).clamp_min(0) / (keys - 1).clamp_min(1)


def _by_token(scene: Scene, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Return how many visible keys hold the row's token elsewhere, and how many follow one, [B, R]."""
    assert scene.own is not None
    assert scene.ids is not None
    batch, keys = scene.ids.shape
    rows = scene.own.shape[1]
    ids, before = scene.ids, torch.cat([scene.ids[:, :1], scene.ids[:, :-1]], 1)
    known = torch.arange(keys, device=ids.device) > 0
    if scene.id_before is not None:
        before, known = torch.cat([scene.id_before[:, None].to(ids.dtype), ids[:, :-1]], 1), torch.ones_like(known)
    _, number = torch.cat([ids, before]).unique(return_inverse=True)
    of_key, of_before = number.view(2, batch, keys)
    of_before = torch.where(known, of_before, number.max() + 1)  # of no token
    own = scene.own.expand(batch, -1)
    token = of_key.gather(1, own.clamp_min(0))[..., None]  # [B, R, 1]
    ends = torch.stack([low, high], -1).expand(batch, rows, -1, -1).flatten(2)  # [B, R, 2n]
    place = torch.arange(keys, device=ids.device)
    targets = (token * (keys + 1) + ends).flatten(1)
    counts: dict[str, Tensor] = {}
    for name, numbers in (("duplicate", of_key), ("induction", of_before)):
        order = (numbers * (keys + 1) + place).sort(-1).values  # by token, then by place
        rank = torch.searchsorted(order, targets).view(batch, rows, -1, 2)
        counts[name] = (rank[..., 1] - rank[..., 0]).clamp_min(0).sum(-1)
    inside = ((own[..., None] >= low) & (own[..., None] < high)).any(-1)
    counts["duplicate"] = counts["duplicate"] - inside.long()
    return {name: torch.where(own >= 0, count, 0) for name, count in counts.items()}


def _stacked(values: list[tuple[Tensor, Tensor]], scene: Scene) -> tuple[Tensor, Tensor]:
    """Return all means and all spreads, [N, B or 1, 1, R], of tensors that broadcast to [B, R]."""
    rows, dtype = len(scene.rows), wide(scene.q.device)
    batch = max([1, *(len(x) for each in values for x in each)])
    shape = (len(values), batch, 1, rows)
    mean, spread = (torch.zeros(shape, dtype=dtype, device=scene.q.device) for _ in range(2))
    for n, (of_mean, of_spread) in enumerate(values):
        mean[n, :, 0], spread[n, :, 0] = of_mean, of_spread
    return mean, spread


# ---------------------------------------------------------------- any mask and any positions


def _of_even_rows(scene: Scene, names: tuple[str, ...], measure: EvenRows) -> tuple[Tensor, Tensor] | None:
    """Return the mean and the spread of each name, [N, B, H or 1, R], by observing even rows over the same mask."""
    measured = measure(even_scene(scene))
    if measured is None:
        return None
    rows, moments = measured
    keys = 1 / rows["chance"]
    more = (keys - 1).clamp_min(1.0)
    mean: list[Tensor] = []
    spread: list[Tensor] = []
    for name in names:
        average = rows[name]
        apart = average * (1 - average) * keys
        if name == "distance":
            assert scene.line is not None
            line = (scene.line - scene.call.keys // 2)[:, None]  # where ``even_scene`` counts keys from
            squares = moments[..., 1] - 2 * line * moments[..., 0] + line.square()
            apart = (squares - average.square()) * keys
        mean.append(average)
        spread.append(apart.clamp_min(0) / more)
    return torch.stack(mean).nan_to_num(0.0), torch.stack(spread).nan_to_num(0.0)


def even_scene(scene: Scene) -> Scene:
    """Return a scene with the same visible keys, all logits 0, and with place and squared place as values."""
    call, inputs_of_scene, heads = scene.call, scene.inputs, _heads_of_mask(scene)
    bias = inputs_of_scene.bias
    if bias is not None:
        bias = torch.zeros_like(bias, dtype=torch.float64).masked_fill_(bias == -torch.inf, -torch.inf)
    place = torch.arange(call.keys, dtype=torch.float64, device=scene.q.device) - call.keys // 2
    v = torch.stack([place, place.square()], -1).expand(call.batch, heads, -1, -1)
    q, k = (torch.zeros(call.batch, heads, n, 1, dtype=v.dtype, device=v.device) for n in (call.queries, call.keys))
    even = replace(
        call, lead=(call.batch,), heads=heads, kv_heads=heads, head_dim=1, v_head_dim=2, dtype=v.dtype,
        bias=None if bias is None else tuple(bias.shape), bias_dtype=None if bias is None else bias.dtype,
        scale=1.0, softcap=None, sinks=False, lse=True, grad=False, bias_grad=False,
    )  # fmt: skip
    tensors = Inputs(q, k, v, bias, None)
    return replace(scene, call=even, inputs=tensors, q=q, lse=None, may_count=None, has_norms=False)


def _of_blocks(reductions: Reductions, scene: Scene, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return the mean and the spread of each name, [N, B, H or 1, R], as quantities of even rows."""
    call, device = scene.call, scene.q.device
    heads = _heads_of_mask(scene)
    shape = (len(names), call.batch, heads, len(scene.rows))
    mean, spread = (torch.zeros(shape, dtype=wide(device), device=device) for _ in range(2))
    size = max(1, logits_of_block(call.device, inputs.BLOCK) // max(1, heads * call.keys))
    for b, r in product(slices(call.batch, 1), slices(len(scene.rows), size)):
        block = Block(b, slice(0, call.kv_heads), r, slice(0, call.keys))
        tile = _even_tile(scene, block, heads)
        values = {"first": gather_mass(tile.p, cut(scene.first, b)[:, None, None, :], block.j).sum(-1)}
        if scene.own is not None:
            values |= place_values(reductions, scene, block, tile)
        more = (tile.choices - 1).clamp_min(1)
        for n, name in enumerate(names):
            average = values[name].nan_to_num(0.0)
            mean[n, b, :, r] = average
            if name == "distance":
                assert tile.visible is not None
                reach = places_of(scene, block, tile)[0].nan_to_num(0.0)
                apart = ((reach - average[..., None]).square() * tile.visible).sum(-1)
            else:
                apart = average * (1 - average) * tile.choices
            spread[n, b, :, r] = apart.clamp_min(0) / more
    return mean, spread


def _heads_of_mask(scene: Scene) -> int:
    """Return 1 if the mask is that of all heads, otherwise their number."""
    one = (slice(0, 1), slice(0, scene.call.heads), slice(0, 1), slice(0, 1))
    pairs = visible_block(scene.plan, scene.inputs.bias, one, scene.q.device) if scene.call.keys else None
    return 1 if pairs is None else pairs.shape[1]


def _even_tile(scene: Scene, block: Block, heads: int) -> Tile:
    """Return even rows over all keys, one for each head of the mask."""
    of_heads = slice(0, scene.call.heads)
    if scene.whole:
        pairs = visible_block(scene.plan, scene.inputs.bias, (block.b, of_heads, block.r, block.j), scene.q.device)
    else:
        index = scene.index[block.r][None, None]
        pairs = visible_rows(scene.plan, scene.inputs.bias, block.b, of_heads, index, block.j)
        pairs = None if pairs is None else pairs[:, :heads]
    shape = (1, heads, block.r.stop - block.r.start, scene.call.keys)
    visible = torch.ones(shape, dtype=torch.bool, device=scene.q.device) if pairs is None else pairs.expand(shape)
    choices = visible.sum(-1)
    p = visible / choices.clamp_min(1)[..., None].to(wide(scene.q.device))
    return Tile(p, p, visible, None, choices > 0, choices < 0, p[..., 0], p[..., 0], p[..., 0], p[..., 0], choices)
