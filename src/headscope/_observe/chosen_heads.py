"""The weights of chosen heads of an observed call, block by block, and of no other heads.

A block is the softmax of its logits where all are finite. Where a row is empty or not finite, or a sink or a specified
lse takes part, the block is normalised as in ``block_weights``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.blocks import block_sizes, slices, visible_keys
from headscope._attend.call import Call
from headscope._attend.interface import Inputs, accumulate_dtype
from headscope._observe import inputs as observe_inputs
from headscope._observe.aggregate import LayerStats, layer_stats, tiles_of
from headscope._observe.block_weights import Rows, weights
from headscope._observe.inputs import Request
from headscope._observe.placement import find_first_key
from headscope._observe.result import Observed
from headscope._observe.scene import Scene, sample
from headscope._observe.visibility import visible_block, visible_rows
from headscope._support.hashing import hash_numbers
from headscope._support.logits import cap_logits, scaled_products
from headscope.masks import Dense
from headscope.stats import HeadWeights, Observe

SAMPLE = 16  # keys of which a checksum is computed
MASKED = 2
"""How many times smaller a block is with a mask: fewer rows have fewer keys that only some of them see."""
MOST_RETAINED = 1 << 18
"""Numbers of masks that are retained for further calls of the same sizes: 1 MiB of float32."""


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


def can_choose(what: Observe, call: Call) -> bool:
    """Return whether the chosen heads exist, and their weights are within the limit of one call."""
    try:
        what.check_weights((call.batch, call.queries, call.keys), accumulate_dtype(call.dtype))
    except ValueError:
        return False
    return max(what.weights, default=0) < call.heads


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


def with_weights(layer: LayerStats, request: Request, scene: Scene) -> LayerStats:
    """Return the statistics of a call with the weights of its chosen heads, if there are any."""
    return replace(layer, weights=(_chosen_weights(request, scene),)) if request.what.weights else layer


def without_numbers(scene: Scene) -> Scene:
    """Return a scene of a call on a CPU without its queries and keys, which are not to be held."""
    nothing = torch.empty(0, device="cpu")
    return replace(scene, q=nothing, inputs=Inputs(nothing, nothing, nothing, None, None))


class RepeatedWeights:
    """The weights of chosen heads, described once for calls that differ in the numbers in q and k only.

    Attributes:
        size: of the weights of one call, in bytes.
    """

    def __init__(self, what: Observe, scene: Scene) -> None:
        call, nothing = scene.call, torch.empty(0, device="cpu")
        self._heads, self._whole = tuple(what.weights), scene.whole
        self._queries = _indices(scene.rows, nothing.device)
        self._sample = _sample(call.keys, nothing.device)
        self._place = self._ends = None  # of cross-attention: they depend on the keys
        if _places_among_keys(scene) is not None:
            self._place = _place(scene, None, self._queries)
            self._ends = _find_ends(self._place, call) if call.keys else None
        blocks = _blocks(scene, self._heads)
        few = sum(part.tile.numel() for _, hidden in blocks for part in hidden or ()) <= MOST_RETAINED
        self._blocks = blocks if few else None
        shape = (call.batch, len(self._heads), len(scene.rows), call.keys)
        self._whole_block = blocks[0] if len(blocks) == 1 and few and blocks[0][0].is_whole(shape) else None
        self._scene = without_numbers(scene)
        self.size = what.check_weights((call.batch, call.queries, call.keys), accumulate_dtype(call.dtype))

    def with_heads(self, what: Observe) -> RepeatedWeights | None:
        """Return the same for other chosen heads; None: that is an error."""
        heads = tuple(what.weights)
        if not can_choose(what, self._scene.call):
            return None
        if len(heads) != len(self._heads) or _differs_by_head(self._scene):
            return RepeatedWeights(what, self._scene)
        other = copy(self)
        other._heads = heads
        if self._blocks is not None:
            other._blocks = [(block._replace(heads=heads[block.n]), hidden) for block, hidden in self._blocks]
            other._whole_block = None if self._whole_block is None else other._blocks[0]
        return other

    def of(self, q: Tensor, k: Tensor) -> HeadWeights:
        """Return the weights of a call with these queries and keys, [B, H, Q, D] and [B, Hkv, K, D]."""
        with torch.no_grad():
            rows = q if self._whole else q.index_select(2, self._queries)
            p = self._at_once(rows, k)
            if p is None:
                scene = replace(self._scene, q=rows, inputs=Inputs(q, k, k[..., :0], None, None))
                p = _weights(scene, self._heads, self._blocks or _blocks(scene, self._heads))
            return self._placed(p, k)

    def of_finite(self, q: Tensor, k: Tensor) -> HeadWeights | None:
        """Return the same; None: a row may be empty or not finite, or the weights are several blocks."""
        with torch.no_grad():
            p = self._at_once(q if self._whole else q.index_select(2, self._queries), k)
            return None if p is None else self._placed(p, k)

    def _placed(self, p: Tensor, k: Tensor) -> HeadWeights:
        place = _nowhere(k, self._sample) if self._place is None else self._place
        ends = k.new_empty(len(k), 2, 0) if self._ends is None else k[:, 0].index_select(1, self._ends)
        return HeadWeights(self._heads, self._queries, p, self._scene.call.queries, place, ends)

    def _at_once(self, rows: Tensor, k: Tensor) -> Tensor | None:
        """Return the weights if they are one block of finite rows: each further line takes as long as their softmax."""
        block, hidden = self._whole_block or (None, None)
        if block is None or hidden is None:
            return None
        return _softmax(self._scene.call, *_cut(self._scene.call, block, rows, k), None, hidden)


def _sees(scene: Scene) -> Tensor:
    """Return which rows have a visible key, boolean [B, H, R]."""
    call, count, device = scene.call, len(scene.rows), scene.q.device
    sees = torch.full((call.batch, call.heads, count), call.keys > 0, device=device)
    plan, bias = scene.plan, scene.inputs.bias
    if (bias is None and (plan is None or not plan.may_be_empty)) or 0 in (*sees.shape, call.keys):
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
    picked = _rows_of_mask(mask, rows) if isinstance(mask, Tensor) else None
    if picked is not None and len(picked) < len(rows):  # on a device, a scene has all rows
        rows = [rows[r] for r in picked]
        index = torch.tensor(picked, dtype=torch.long, device=scene.q.device)
        lse = None if scene.lse is None else scene.lse.index_select(2, index)
        scene = replace(scene, rows=rows, q=scene.q.index_select(2, index), lse=lse)
    heads = tuple(request.what.weights)
    queries = _indices(rows, scene.q.device)
    place = _place(scene, picked, queries)
    p, ends = _weights(scene, heads, _blocks(scene, heads)), _end_keys(scene, place)
    return HeadWeights(heads, queries, p, scene.call.queries, place, ends)


def _indices(rows: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as an int64 tensor; a range without a list of them."""
    if isinstance(rows, range):
        return torch.arange(rows.start, rows.stop, rows.step, device=device)
    return torch.tensor(list(rows), dtype=torch.long, device=device)


def _rows_of_mask(mask: Tensor, rows: Sequence[int]) -> list[int]:
    """Return the places among ``rows`` of those that a mask selects in some head of some batch entry."""
    some = mask.flatten(0, -2).any(0) if mask.ndim > 1 else mask.reshape(-1)
    if len(some) == 1:
        return list(range(len(rows))) if bool(some) else []
    chosen = some.tolist()
    return [place for place, row in enumerate(rows) if chosen[row]]


def _places_among_keys(scene: Scene) -> Tensor | None:
    """Return where the rows are among the keys, int64 [B or 1, R]; None: the keys are those of other tokens."""
    return scene.own if scene.line is None else scene.line


def _place(scene: Scene, picked: Sequence[int] | None, queries: Tensor) -> Tensor:
    """Return ``HeadWeights.place``; ``picked``: the places of the queries among the rows of the request, None = all."""
    at, device = _places_among_keys(scene), scene.q.device
    if at is None:
        return _nowhere(scene.inputs.k, _sample(scene.call.keys, device))
    place = torch.tensor([HeadWeights.NOWHERE, HeadWeights.NOWHERE, 0, 0], device=device)
    at = at[:1] if picked is None else at[:1, picked]  # of the first batch entry
    if at.numel() and scene.call.keys:
        starts = at - queries
        if scene.line is None:
            starts = starts.masked_fill(at < 0, HeadWeights.NOWHERE)
        place[0], place[1] = starts.min(), starts.max()
        place[2] = find_first_key(scene.k_at)
    return place


def _sample(keys: int, device: torch.device) -> Tensor:
    """Return the keys of which a checksum is computed."""
    return torch.tensor(list(sample(SAMPLE, keys)), dtype=torch.long, device=device)


def _nowhere(keys: Tensor, some: Tensor) -> Tensor:
    """Return ``HeadWeights.place`` of rows that are not among the keys, with a checksum of some of these."""
    place = torch.tensor([HeadWeights.NOWHERE, HeadWeights.NOWHERE, 0, 0], device=keys.device)
    if keys.numel():
        place[3] = hash_numbers(keys.index_select(2, some).flatten())
    return place


def _find_ends(place: Tensor, call: Call) -> Tensor:
    """Return which keys ``HeadWeights.ends`` are; the nearest ones for places without a key.

    They stay on the device, for which the call would wait.
    """
    return torch.stack([place[0] - 1, place[0] + (call.queries - 1)]).clamp(0, call.keys - 1)


def _end_keys(scene: Scene, place: Tensor) -> Tensor:
    """Return ``HeadWeights.ends`` of a call."""
    keys = scene.inputs.k
    if _places_among_keys(scene) is None or not keys.numel():
        return keys.new_empty(len(keys), 2, 0)
    return keys[:, 0].index_select(1, _find_ends(place, scene.call))


def _weights(scene: Scene, heads: Sequence[int], blocks: Sequence[tuple[_Block, list[_Hidden] | None]]) -> Tensor:
    """Return the weights of some heads, [B, heads, R, K], of which ``blocks`` has all that are visible."""
    call, dtype = scene.call, accumulate_dtype(scene.call.dtype)
    shape = (call.batch, len(heads), len(scene.rows), call.keys)
    if len(blocks) == 1 and blocks[0][0].is_whole(shape):
        return _block(scene, *blocks[0])
    p = torch.empty(shape, dtype=dtype, device=scene.q.device)
    for block, hidden in blocks:
        b, n, r, j = block.b, block.n, block.r, block.j
        out = p[b, n, r]
        if j.start > 0 or j.stop < call.keys:
            out[..., : j.start] = 0.0
            out[..., j.stop :] = 0.0
        if j.start < j.stop:
            out[..., j] = _block(scene, block, hidden)
    return p


def _blocks(scene: Scene, heads: Sequence[int]) -> list[tuple[_Block, list[_Hidden] | None]]:
    """Return all blocks of the weights of some heads, each with its masked columns; None = by the careful path."""
    call, count, device = scene.call, len(scene.rows), scene.q.device
    if 0 in (call.batch, len(heads), count, call.keys):
        return []
    blocks: list[tuple[_Block, list[_Hidden] | None]] = []
    alone = replace(call, heads=len(heads), kv_heads=len(heads))
    masked = scene.plan is not None and not scene.plan.everything
    sizes = block_sizes(alone, count, observe_inputs.BLOCK // (MASKED if masked else 1))
    by_head = _differs_by_head(scene)
    simple = scene.lse is None and scene.inputs.sinks is None and device.type == "cpu"
    for b in slices(call.batch, sizes.batch):
        for r in slices(count, sizes.rows):
            at = r if scene.whole else torch.tensor(list(scene.rows[r]), device=device)[None, None]
            j = visible_keys(call, scene.plan, r if scene.whole else list(scene.rows[r]))
            hidden: list[_Hidden] = []
            for n in slices(len(heads), sizes.kv_heads):
                some = heads[n]
                if simple and (n.start == 0 or by_head):
                    hidden = _hidden(scene, b, some if by_head else some[:1], at, j)
                blocks.append((_Block(b, n, tuple(some), r, at, j), hidden if simple else None))
    return blocks


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


class _Hidden(NamedTuple):
    """Columns of a block in which some keys are masked: 0 for visible and -inf for masked keys, to add to logits."""

    columns: slice
    tile: Tensor


def _hidden(scene: Scene, b: slice, heads: Sequence[int], at: slice | Tensor, j: slice) -> list[_Hidden]:
    """Return the columns of a block, counted from its first key, that are not visible to every row."""
    plan, parts = scene.plan, [j]
    if plan is None or plan.everything or j.start == j.stop:
        return []
    if plan.rest is None and plan.spans.shape[2] == 1:  # of a causal block only the last keys are masked for some row
        spans = plan.spans if plan.spans.shape[0] == 1 else plan.spans[b]
        if spans.shape[1] > 1:
            spans = spans[:, at] if isinstance(at, slice) else spans.index_select(1, at[0, 0])
        first = min(max(int(spans[..., 0].max()), j.start), j.stop)
        end = max(min(int(spans[..., 1].min()), j.stop), first)
        parts = [part for part in (slice(j.start, first), slice(end, j.stop)) if part.start < part.stop]
    hidden: list[_Hidden] = []
    for part in parts:
        visible = _visible(scene, b, heads, at, part)
        assert visible is not None  # only a plan with everything gives None
        tile = torch.zeros(visible.shape, dtype=accumulate_dtype(scene.call.dtype), device=visible.device)
        tile.masked_fill_(~visible, -torch.inf)
        hidden.append(_Hidden(slice(part.start - j.start, part.stop - j.start), tile))
    return hidden


class _Block(NamedTuple):
    """A block: batch entries, places among the chosen heads, these heads, rows of the scene, their queries, keys."""

    b: slice
    n: slice
    heads: tuple[int, ...]
    r: slice
    at: slice | Tensor
    j: slice

    def is_whole(self, shape: tuple[int, int, int, int]) -> bool:
        """Return whether these are all of [B, heads, R, K] weights."""
        parts = (self.b, self.n, self.r, self.j)
        return all(part.stop - part.start == size for part, size in zip(parts, shape, strict=True))


def _bias(bias: Tensor | None, block: _Block) -> Tensor | None:
    """Return the bias of a block, broadcastable to [b, heads, i, j]."""
    if bias is None:
        return None
    if bias.shape[0] > 1:
        bias = bias[block.b]
    if bias.shape[1] > 1:
        bias = bias[:, _as_index(block.heads)]
    if bias.shape[2] > 1:
        bias = bias[:, :, block.at] if isinstance(block.at, slice) else bias.index_select(2, block.at[0, 0])
    return bias if bias.shape[3] == 1 else bias[..., block.j]


def _as_index(heads: Sequence[int]) -> slice | list[int]:
    """Return an index of an axis of heads, without a copy if they are successive."""
    successive = list(heads) == list(range(heads[0], heads[0] + len(heads)))
    return slice(heads[0], heads[-1] + 1) if successive else list(heads)


def _block(scene: Scene, block: _Block, hidden: list[_Hidden] | None) -> Tensor:
    """Return the weights of a block, [b, heads, i, j]; ``hidden``: None = by the careful path."""
    q, k = _cut(scene.call, block, scene.q, scene.inputs.k)
    bias = _bias(scene.inputs.bias, block)
    p = None if hidden is None else _softmax(scene.call, q, k, bias, hidden)
    return _careful_block(scene, block, q, k, bias) if p is None else p


def _cut(call: Call, block: _Block, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries and keys of a block, of q [B, H, R, D] and k [B, Hkv, K, D]."""
    dtype, key_heads = accumulate_dtype(call.dtype), [head // call.group for head in block.heads]
    return q[block.b, _as_index(block.heads), block.r].to(dtype), k[block.b, _as_index(key_heads), block.j].to(dtype)


def _softmax(call: Call, q: Tensor, k: Tensor, bias: Tensor | None, hidden: list[_Hidden]) -> Tensor | None:
    """Return the weights of a block; None: a row is empty or not finite."""
    s = cap_logits(scaled_products(q, k, call.scale, call.softcap), call.softcap)
    if bias is not None:
        s += bias.to(s.dtype)
    for columns, tile in hidden:  # adding is many times faster than filling, but NaN and infinity survive it
        s[..., columns] += tile
    p = torch.softmax(s, -1, out=s)  # in place: another tensor of this size costs its pages
    return None if math.isnan(p[..., 0].amax()) else p  # such a row is NaN in every column


def _careful_block(scene: Scene, block: _Block, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the weights of a block with empty rows, rows that are not finite, sinks or a specified lse."""
    visible = _visible(scene, block.b, block.heads, block.at, block.j)
    if visible is not None:
        bias = torch.where(visible, q.new_zeros(()) if bias is None else bias.to(q.dtype), -torch.inf)
    heads, queries, keys = len(block.heads), q.shape[2], k.shape[2]
    call = replace(scene.call, lead=(len(q),), heads=heads, kv_heads=heads, queries=queries, keys=keys)
    sinks = None if scene.inputs.sinks is None else scene.inputs.sinks[list(block.heads)]
    inputs = Inputs(q, k, k[..., :0], bias, sinks)
    alone = replace(scene, call=call, plan=None, inputs=inputs, rows=range(queries), q=q, has_norms=False)
    lse = None if scene.lse is None else scene.lse[block.b, list(block.heads), block.r]
    whole = Rows(q, slice(0, len(q)), slice(0, heads), slice(0, queries), lse, None)
    tile = weights(alone, whole, slice(0, keys))
    broken = tile.broken[..., None] if tile.visible is None else tile.broken[..., None] & tile.visible
    return tile.p.masked_fill(broken, torch.nan)
