"""Operations that keep numbers in their places, move them, or sum them: ids follow, scales are recorded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headscope._provenance.arguments import broadcasts, list_tensors, replace_tensors, scale_of
from headscope._provenance.identities import Identities
from headscope._provenance.record import SCORES, Mixing
from headscope._provenance.shadows import MOST_IDS


def follow_elementwise(
    identities: Identities, name: str, out: Tensor, args: tuple[Any, ...], sources: list[Tensor]
) -> None:
    """Assign the ids of numbers made of those at the same place: of several, the one that was projected last.

    A number that is spread over an axis, such as a row's logsumexp, does not replace the numbers it is spread over.
    Where scaled and unscaled projections are added, as in LoRA, the sum counts as unscaled.
    """
    ids = factors = None
    rank = torch.zeros(())
    for x in sources:
        shadow = identities.shadows.find(x)
        if shadow is None or not broadcasts(x, out):
            continue
        one, scale = (part.expand(out.shape) for part in shadow)
        order = torch.where(one > 0, one + MOST_IDS * (x.numel() == out.numel()), 0)
        if ids is None or factors is None:
            ids, factors, rank = one, scale, order
        else:
            if name in ("add", "sub"):
                _record_summed_pairs(identities, one, ids)
            summed = (one > 0) & (ids > 0) & (name in ("add", "sub")) & ((scale == 1) | (factors == 1))
            factors = torch.where(summed, 1.0, torch.where(order > rank, scale, factors))
            ids, rank = torch.where(order > rank, one, ids), torch.maximum(rank, order)
    if ids is None or factors is None:
        return
    if name == "_safe_softmax":  # torch's attention runs without a fused kernel here, because there is none
        identities.record.fused_calls += 1
    by = scale_of(name, args)
    if by is not None:
        _record_scale(identities, ids, by)
        factors = factors * by
    identities.shadows.assign(out, ids, factors)
    if by is None and name in ("mul", "div"):
        _record_unit_rows(identities, out)
        _record_row_scales(identities, name, args)


def _record_summed_pairs(identities: Identities, one: Tensor, other: Tensor) -> None:
    """Record scores of different pairs of tokens that are added."""
    record = identities.record
    both = (one > 0) & (other > 0) & (one != other)
    a, b = one[both], other[both]
    if len(a) and record.holds_scores(a) and record.holds_scores(b):
        differ = (record.token[a] != record.token[b]) | (record.other_token[a] != record.other_token[b])
        record.pairs_summed = record.pairs_summed or bool(differ.any())


def follow_move(identities: Identities, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Move the ids and factors as the operation moves the numbers."""
    for which in (0, 1):
        moved = func(*replace_tensors(args, lambda x, w=which: identities.shadows.component(x, w)), **kwargs)
        shadow = identities.shadows.create(out)
        if shadow is not None:
            shadow[which].copy_(moved)


def follow_reduction(identities: Identities, out: Tensor, args: tuple[Any, ...]) -> None:
    """Record weights, or outputs of heads, that are summed over heads."""
    ids = identities.shadows.ids(args[0])
    if ids is None or not ids.numel() or len(args) < 2 or args[1] is None:
        return
    record = identities.record
    axes = [axis % ids.ndim for axis in (args[1] if isinstance(args[1], list) else [args[1]])]
    if record.holds_scores(ids):
        if out.ndim >= 2 and out.shape[-2:] == ids.shape[-2:]:
            record.averaged_weights.append(out)
    elif record.holds_heads(ids) and ids.ndim - 1 not in axes:
        token, feature = record.token[ids], record.feature[ids]
        same_token = bool((token.amax(axes) == token.amin(axes)).all())
        several_features = bool((feature.amax(axes) > feature.amin(axes)).any())
        record.heads_summed = record.heads_summed or (same_token and several_features)


def follow_in_place(identities: Identities, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
    """Update the shadow of a tensor that was written to."""
    shadows = identities.shadows
    by = scale_of(name[:-1], args)
    others = [x for x in list_tensors(args[1:], {}) if shadows.ids(x) is not None]
    shadow = shadows.find(out)
    if shadow is None:
        if not others:
            return
        shadow = shadows.create(out)
    if shadow is None:
        return
    if by is not None:
        _record_scale(identities, shadow.ids, by)
        shadow.factors.mul_(by)
    elif name in ("mul_", "div_") and not others:
        _record_unit_rows(identities, out)
        _record_row_scales(identities, name[:-1], args)
    elif name in ("zero_", "normal_", "uniform_"):
        shadow.ids.zero_()
    elif name == "copy_":
        source = shadows.find(args[1])
        shadow.ids.copy_(torch.zeros((), dtype=torch.long) if source is None else source.ids)
        shadow.factors.copy_(torch.ones((), dtype=torch.float64) if source is None else source.factors)
    elif name == "index_put_" and others:
        source = shadows.find(args[2])
        if source is not None:
            for part, new in zip(shadow, source, strict=True):
                part.index_put_(list(args[1]), new)
    elif name not in ("masked_fill_", "fill_", "index_put_"):
        for x in others:
            if broadcasts(x, out):
                new, spread = shadows.component(x, 0).expand(out.shape), x.numel() < out.numel()
                shadow.ids.copy_(torch.where((shadow.ids > 0) & spread, shadow.ids, torch.maximum(shadow.ids, new)))


def _record_scale(identities: Identities, ids: Tensor, by: float) -> None:
    """Record a number that scores are multiplied by."""
    last = int(ids.max()) if ids.numel() else 0
    if last and by != 1.0 and identities.record.kind[last] == SCORES:
        identities.record.scales.append((last, by))


def _record_unit_rows(identities: Identities, out: Tensor) -> None:
    """Record rows that were brought to length 1, or to that and what they were scaled by before."""
    shadow = identities.shadows.find(out)
    if shadow is None or not out.is_floating_point() or out.ndim < 2:
        return
    ids, factors = shadow
    length = out.detach().double().norm(dim=-1, keepdim=True)
    for scaled in (torch.ones_like(factors), factors.clone()):
        if bool(((length - scaled).abs() < 1e-5 * scaled).all()):
            identities.record.unit[ids] = True
            factors.copy_(scaled)
            return


def _record_row_scales(identities: Identities, name: str, args: tuple[Any, ...]) -> None:
    """Record outputs of heads that are multiplied by, or divided by, a number for each query."""
    for x, y in ((args[0], args[1]), (args[1], args[0])) if name == "mul" else ((args[0], args[1]),):
        ids = identities.shadows.ids(x) if isinstance(x, Tensor) and isinstance(y, Tensor) else None
        if ids is None or not ids.numel() or not broadcasts(y, x) or not identities.record.holds_heads(ids):
            continue
        by = y.detach().double().expand(x.shape).reshape(-1)
        by = 1 / by if name == "div" else by
        for mixing in identities.record.mixings:
            _record_scales_of(mixing, ids.reshape(-1), by)


def _record_scales_of(mixing: Mixing, ids: Tensor, by: Tensor) -> None:
    """Record the scale of each query of one product of weights with values, from flat ids and scales."""
    first = mixing.out.start
    own = (ids >= first) & (ids < mixing.out.stop)
    if not bool(own.any()):
        return
    rows, shape = (ids[own] - first) // mixing.values.shape[-1], mixing.p.shape[:2]
    low, high = (
        torch.full((shape.numel(),), math.nan, dtype=torch.float64).scatter_reduce(
            0, rows, by[own], way, include_self=False
        )
        for way in ("amin", "amax")
    )
    if bool((low == high).any()):
        mixing.scales.append(torch.where(low == high, low, 1.0).view(shape))
