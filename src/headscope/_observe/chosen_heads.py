"""The weights of chosen heads of an observed call, block by block, and of no other heads.

A block is the softmax of its logits where all are finite. Where a row is empty or not finite, or a sink or a specified
lse takes part, the block is normalised as in ``block_weights``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.blocks import block_sizes, slices, visible_keys
from headscope._attend.interface import Inputs, accumulate_dtype
from headscope._observe import inputs as observe_inputs
from headscope._observe.aggregate import LayerStats, layer_stats, tiles_of
from headscope._observe.block_weights import Rows, weights
from headscope._observe.inputs import Request
from headscope._observe.native_observer import Ready
from headscope._observe.placement import find_first_key
from headscope._observe.result import Observed
from headscope._observe.scene import Scene, sample
from headscope._observe.visibility import visible_block, visible_rows
from headscope._support.fingerprint import Fingerprint
from headscope._support.logits import cap_logits, scaled_products
from headscope.masks import Dense
from headscope.stats import HeadWeights, Observe

SAMPLE = 16  # keys of which a checksum is computed


def check_chosen(request: Request) -> None:
    """Check the chosen heads of a request, and the size of their weights, before anything is computed.

    Raises:
        ValueError: a head does not exist, or the weights are larger than the limit.
    """
    call, what = request.call, request.what
    if not what.weights:
        return
    if max(what.weights) >= call.heads:
        raise ValueError(f"weights: head {max(what.weights)} does not exist; expected heads 0 to {call.heads - 1}")
    what.check_weights((call.batch, call.queries, call.keys), accumulate_dtype(call.dtype))


def measures_only_weights(what: Observe) -> bool:
    """Return whether the weights of chosen heads are all that is measured, so no pass over other heads is necessary."""
    others = (what.row_stats, what.received, what.map, what.edges, what.top)
    return bool(what.weights) and not any(others)


def observe_chosen(request: Request, scene: Scene) -> LayerStats:
    """Return the statistics of a call of which only the weights of chosen heads are measured.

    ``broken`` counts rows of the chosen heads only.
    """
    call, rows = scene.call, len(scene.rows)
    weights_of_heads = _chosen_weights(request, scene)
    counted = _sees(scene)
    if scene.may_count is not None:
        counted = counted & scene.may_count
    broken = torch.zeros(call.batch, call.heads, rows, dtype=torch.bool, device=counted.device)
    if weights_of_heads.p.shape[2] == rows and weights_of_heads.p.numel():
        broken[:, list(weights_of_heads.heads)] = weights_of_heads.p.sum(-1).isnan()
    observed = Observed({}, counted & ~broken, (counted & broken).sum((0, 2)), None, None, None, None, None)
    layer = layer_stats(call, request.what, scene, observed, tiles_of(request, scene))
    return replace(layer, weights=(weights_of_heads,))


def with_weights(layer: LayerStats, request: Request, known: Scene | Ready) -> LayerStats:
    """Return the statistics of a call with the weights of its chosen heads, if there are any."""
    if not request.what.weights:
        return layer
    assert isinstance(known, Scene)  # a description is reused only if no weights are requested
    return replace(layer, weights=(_chosen_weights(request, known),))


def _sees(scene: Scene) -> Tensor:
    """Return which rows have a visible key, boolean [B, H, R]."""
    call, count, device = scene.call, len(scene.rows), scene.q.device
    sees = torch.full((call.batch, call.heads, count), call.keys > 0, device=device)
    plan, bias = scene.plan, scene.inputs.bias
    if (bias is None and (plan is None or plan.everything)) or 0 in (*sees.shape, call.keys):
        return sees
    whole, j = slice(0, call.batch), slice(0, call.keys)
    at_h = slice(0, call.heads if bias is not None or _differs_by_head(scene) else 1)
    for r in slices(count, observe_inputs.BLOCK // (call.batch * at_h.stop * call.keys)):
        if scene.whole:
            visible = visible_block(plan, bias, (whole, at_h, r, j), device)
        else:
            index = torch.tensor(list(scene.rows[r]), device=device)[None, None]
            visible = visible_rows(plan, bias, whole, at_h, index, j)
        if visible is not None:
            sees[:, :, r] = visible.any(-1)
    return sees


def _chosen_weights(request: Request, scene: Scene) -> HeadWeights:
    """Return the weights of the chosen heads of a call."""
    rows, mask = scene.rows, request.what.rows
    picked = list(range(len(rows))) if not isinstance(mask, Tensor) else _rows_of_mask(mask, rows)
    if len(picked) < len(rows):  # on a device, a scene has all rows
        rows = [rows[r] for r in picked]
        index = torch.tensor(picked, dtype=torch.long, device=scene.q.device)
        lse = None if scene.lse is None else scene.lse.index_select(2, index)
        scene = replace(scene, rows=rows, q=scene.q.index_select(2, index), lse=lse)
    heads = request.what.weights
    queries = torch.tensor(list(rows), dtype=torch.long, device=scene.q.device)
    return HeadWeights(tuple(heads), queries, _weights(scene, tuple(heads)), scene.call.queries, _place(scene, picked))


def _rows_of_mask(mask: Tensor, rows: Sequence[int]) -> list[int]:
    """Return the places among ``rows`` of those that a mask selects in some head of some batch entry."""
    some = mask.flatten(0, -2).any(0) if mask.ndim > 1 else mask.reshape(-1)
    if len(some) == 1:
        return list(range(len(rows))) if bool(some) else []
    chosen = some.tolist()
    return [place for place, row in enumerate(rows) if chosen[row]]


def _place(scene: Scene, picked: Sequence[int]) -> Tensor:
    """Return ``HeadWeights.place``."""
    at, device = scene.own if scene.line is None else scene.line, scene.q.device
    place = torch.tensor([HeadWeights.NOWHERE, HeadWeights.NOWHERE, 0, 0], device=device)
    if at is None:
        keys = scene.inputs.k
        if keys.numel():
            some = torch.tensor(sample(SAMPLE, keys.shape[2]), device=device)
            place[3] = Fingerprint(keys.index_select(2, some)).sums.sum()
        return place
    at = at[:1, picked]  # of the first batch entry
    if at.numel() and scene.call.keys:
        starts = at - torch.tensor(list(scene.rows), dtype=torch.long, device=device)
        if scene.line is None:
            starts = starts.masked_fill(at < 0, HeadWeights.NOWHERE)
        place[0], place[1] = starts.min(), starts.max()
        place[2] = find_first_key(scene.k_at)
    return place


def _weights(scene: Scene, heads: Sequence[int]) -> Tensor:
    """Return the weights of some heads, [B, heads, R, K]."""
    call, dtype = scene.call, accumulate_dtype(scene.call.dtype)
    count, device = len(scene.rows), scene.q.device
    shape = (call.batch, len(heads), count, call.keys)
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    p = torch.empty(shape, dtype=dtype, device=device)
    alone = replace(call, heads=len(heads), kv_heads=len(heads))
    sizes = block_sizes(alone, count, observe_inputs.BLOCK)
    by_head = _differs_by_head(scene)
    for b in slices(call.batch, sizes.batch):
        for r in slices(count, sizes.rows):
            at = r if scene.whole else torch.tensor(list(scene.rows[r]), device=device)[None, None]
            j = visible_keys(call, scene.plan, r if scene.whole else list(scene.rows[r]))
            shown = None
            for n in slices(len(heads), sizes.kv_heads):
                some = heads[n]
                if n.start == 0 or by_head:
                    shown = _shown(_visible(scene, b, some if by_head else some[:1], at, j), dtype)
                out = p[b, n, r]
                if j.start > 0 or j.stop < call.keys:
                    out[..., : j.start] = 0.0
                    out[..., j.stop :] = 0.0
                if j.start < j.stop:
                    out[..., j] = _block(scene, b, some, r, at, j, shown)
    return p


def _differs_by_head(scene: Scene) -> bool:
    """Return whether the visible keys may differ between heads, the bias aside."""
    rest = None if scene.plan is None else scene.plan.rest
    if rest is None:
        return False
    alike = (isinstance(x, Dense) and (x.tensor.ndim < 3 or x.tensor.shape[-3] == 1) for x in rest.leaves())
    return not all(alike)


def _visible(scene: Scene, b: slice, heads: Sequence[int], at: slice | Tensor, j: slice) -> Tensor | None:
    """Return which keys the mask shows, boolean, broadcastable to [b, heads, i, j]; None = all."""
    parts: list[Tensor] = []
    for head in heads:
        h = slice(head, head + 1)
        if isinstance(at, slice):
            part = visible_block(scene.plan, None, (b, h, at, j), scene.q.device)
        else:
            part = visible_rows(scene.plan, None, b, h, at, j)
        if part is None:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _Shown(NamedTuple):
    """Which keys the mask shows, boolean, and 0 for these and -inf for others, to add to logits."""

    visible: Tensor
    hidden: Tensor


def _shown(visible: Tensor | None, dtype: torch.dtype) -> _Shown | None:
    if visible is None:
        return None
    hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return _Shown(visible, hidden.masked_fill_(~visible, -torch.inf))


def _bias(scene: Scene, b: slice, heads: Sequence[int], at: slice | Tensor, j: slice) -> Tensor | None:
    """Return the bias of a block, broadcastable to [b, heads, i, j]."""
    bias = scene.inputs.bias
    if bias is None:
        return None
    if bias.shape[0] > 1:
        bias = bias[b]
    if bias.shape[1] > 1:
        bias = bias[:, _as_index(heads)]
    if bias.shape[2] > 1:
        bias = bias[:, :, at] if isinstance(at, slice) else bias.index_select(2, at[0, 0])
    return bias if bias.shape[3] == 1 else bias[..., j]


def _as_index(heads: Sequence[int]) -> slice | list[int]:
    """Return an index of an axis of heads, without a copy if they are successive."""
    successive = list(heads) == list(range(heads[0], heads[0] + len(heads)))
    return slice(heads[0], heads[-1] + 1) if successive else list(heads)


def _block(
    scene: Scene, b: slice, heads: Sequence[int], r: slice, at: slice | Tensor, j: slice, shown: _Shown | None
) -> Tensor:
    """Return the weights of a block, [b, heads, r, j]; ``shown``: by the mask, None = all."""
    call, dtype = scene.call, accumulate_dtype(scene.call.dtype)
    q = scene.q[b, _as_index(heads), r].to(dtype)
    k = scene.inputs.k[b, _as_index([head // call.group for head in heads]), j].to(dtype)
    bias = _bias(scene, b, heads, at, j)
    if scene.lse is None and scene.inputs.sinks is None and q.device.type == "cpu":
        s = cap_logits(scaled_products(q, k, call.scale, call.softcap), call.softcap)
        s = s if bias is None else s.add_(bias.to(dtype))
        s = s if shown is None else s.add_(shown.hidden)  # many times faster than filling; NaN and infinity survive it
        if bool(s.amax(-1).isfinite().all()):
            return torch.softmax(s, -1)
    return _careful_block(scene, b, heads, r, (q, k, bias), None if shown is None else shown.visible)


def _careful_block(
    scene: Scene,
    b: slice,
    heads: Sequence[int],
    r: slice,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    visible: Tensor | None,
) -> Tensor:
    """Return the weights of a block with empty rows, rows that are not finite, sinks or a specified lse."""
    q, k, bias = tensors  # of the block
    if visible is not None:
        bias = torch.where(visible, q.new_zeros(()) if bias is None else bias.to(q.dtype), -torch.inf)
    whole = slice(0, len(q)), slice(0, len(heads))
    call = replace(
        scene.call, lead=(len(q),), heads=len(heads), kv_heads=len(heads), queries=q.shape[2], keys=k.shape[2]
    )
    sinks = None if scene.inputs.sinks is None else scene.inputs.sinks[list(heads)]
    inputs = Inputs(q, k, k[..., :0], bias, sinks)
    alone = replace(scene, call=call, plan=None, inputs=inputs, rows=range(call.queries), q=q, has_norms=False)
    lse = None if scene.lse is None else scene.lse[b, list(heads), r]
    tile = weights(alone, Rows(q, *whole, slice(0, call.queries), lse, None), slice(0, call.keys))
    broken = tile.broken[..., None] if tile.visible is None else tile.broken[..., None] & tile.visible
    return tile.p.masked_fill(broken, torch.nan)
