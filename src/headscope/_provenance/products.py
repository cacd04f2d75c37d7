"""Products of matrices: projections of tokens, scores of queries with keys, and weights times values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope._provenance.identities import Identities, Origin
from headscope._provenance.record import HEADS, LINEAR, MIXED, NONE, SCORES, SUMMED, Mixing, Operands, Projection


@dataclass(frozen=True)
class Operand:
    """A copy of an operand with three axes, and copies of its ids and factors, None where it has no shadow."""

    values: Tensor
    ids: Tensor | None
    factors: Tensor | None


def copy_operand(identities: Identities, x: Tensor) -> Operand:
    """Copy an operand and its shadow before the product is computed."""
    shadow = identities.shadows.find(x)
    ids, factors = (None, None) if shadow is None or not shadow.ids.any() else (s.clone() for s in shadow)
    values = x.detach().clone()
    if x.ndim == 3:
        return Operand(values, ids, factors)
    return Operand(values[None], None if ids is None else ids[None], None if factors is None else factors[None])


def follow_convolution(identities: Identities, out: Tensor, args: tuple[Any, ...]) -> None:
    """Record a convolution of width 1 as the projection that it is; others mix neighbours and are not followed."""
    x, weight, stride, padding, groups = args[0], args[1], args[3], args[4], args[8]
    plain = weight.shape[2:].numel() == 1 and groups == 1 and set(stride) == {1} and set(padding) == {0}
    shadow, last = identities.shadows.find(x), out.movedim(1, -1)  # the second has its channels last
    if shadow is None or not shadow.ids.any():
        return
    if not plain or x.ndim != weight.ndim or args[6]:
        identities.record.convolved = True
        return
    if not out.is_contiguous() and not last.is_contiguous():
        return  # a copy would not share the storage
    rows = out.flatten(2).mT if out.is_contiguous() else last.flatten(1, -2)  # [B, T, features]
    left = Operand(*(each.detach().flatten(2).mT.clone() for each in (x, *shadow)))
    record_product(identities, rows, left, copy_operand(identities, weight.flatten(1).mT[None]))


def record_product(identities: Identities, out: Tensor, left: Operand, right: Operand) -> None:
    """Record the product of two operands, by what is known of each."""
    a, b = left, right
    three = out if out.ndim == 3 else out[None]
    if a.ids is None or b.ids is None or a.factors is None or b.factors is None:
        if a.ids is not None:
            _record_projection(identities, three, a.ids, b.values, a.factors)
        elif b.ids is not None:  # weights @ xᵀ
            ids, weights = b.ids.transpose(1, 2), a.values.transpose(1, 2)
            _record_projection(identities, three.transpose(1, 2), ids, weights, b.factors)
        return
    record = identities.record
    a_scores, b_scores = record.holds_scores(a.ids), record.holds_scores(b.ids)
    if a_scores and not b_scores:
        _record_mixing(identities, three, a.values, a.ids, b.ids)
    elif b_scores and not a_scores:
        transposed = (x.transpose(1, 2) for x in (three, b.values, b.ids, a.ids))
        _record_mixing(identities, *transposed)
    elif not a_scores:
        _record_scores(identities, three, left, right)


def common_value(x: Tensor, axis: int) -> Tensor:
    """Return the value that is everywhere the same along an axis; MIXED where there are several."""
    low = x.amin(axis)
    return torch.where(low == x.amax(axis), low, MIXED)


def _record_projection(
    identities: Identities, out: Tensor, ids: Tensor, weights: Tensor, factors: Tensor | None
) -> None:
    """A product with weights, [N, rows, width] @ [N, width, features]."""
    record = identities.record
    if record.holds_scores(ids):
        return
    token = common_value(record.token[ids], -1)[..., None]  # [N, rows, 1]
    one_feature = (common_value(record.feature[ids], -1) >= 0)[..., None]
    token = torch.where((token == MIXED) & one_feature, SUMMED, token)
    features = identities.number_columns(weights)  # [N, features]
    identities.assign_new(out, Origin(LINEAR, token, features[:, None]))
    factor = 1.0 if factors is None else float(factors.mean())
    record.projections.append(Projection(ids, factor, weights, features))


def _record_scores(identities: Identities, out: Tensor, left: Operand, right: Operand) -> None:
    """A product of two operands that were made of tokens, [N, rows, D] @ [N, D, columns]."""
    record, a_ids, b_ids, a_factors, b_factors = identities.record, left.ids, right.ids, left.factors, right.factors
    assert a_ids is not None
    assert b_ids is not None
    assert a_factors is not None
    assert b_factors is not None
    rows, columns = common_value(record.token[a_ids], -1), common_value(record.token[b_ids], 1)
    if bool((rows == MIXED).all()) and bool((columns == MIXED).all()):
        record.tokens_summed = True  # summed over tokens, not over features: linear attention, say
        return
    origin = Origin(
        SCORES,
        token=rows[..., None],
        feature=record.feature[a_ids].amin(-1)[..., None],
        other_token=columns[:, None],
        other_feature=record.feature[b_ids].amin(1)[:, None],
        value=left.values.double() @ right.values.double(),
        factor=a_factors.amax(-1)[..., None] * b_factors.amax(1)[:, None],
    )
    identities.assign_new(out, origin)
    unit = bool(record.unit[a_ids].all()) and bool(record.unit[b_ids].all())
    record.operands.append(Operands(a_ids, b_ids, (float(a_factors.amax()), float(b_factors.amax())), unit))


def _record_mixing(identities: Identities, out: Tensor, p: Tensor, p_ids: Tensor, v_ids: Tensor) -> None:
    """A product of weights with values, [N, Q, K] @ [N, K, Dv]."""
    record, first = identities.record, identities.count
    record.mixings.append(Mixing(p, p_ids, v_ids, range(first, first + out.numel())))
    token = common_value(record.token[p_ids], -1)
    if bool((token == MIXED).any()):  # the second operand of the scores was the queries'
        token = common_value(record.other_token[p_ids], -1)
    feature = _common_feature(record.feature[v_ids], v_ids > 0)
    identities.assign_new(out, Origin(HEADS, token[..., None], feature[:, None]))


def _common_feature(feature: Tensor, known: Tensor) -> Tensor:
    """Return the feature of each column of values [N, K, Dv]; rows of padding, of which nothing is known, have none."""
    low = torch.where(known, feature, torch.iinfo(feature.dtype).max).amin(1)
    high = torch.where(known, feature, NONE).amax(1)
    return torch.where(low >= high, high, MIXED)
