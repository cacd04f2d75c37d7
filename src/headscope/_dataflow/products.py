"""Products of two tensors: projections, scores, and weights with values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope._dataflow.attention import Roles, WrittenAttention, arrange, assign_roles, sizes
from headscope._dataflow.axes import Axis, Piece, fresh_axis, is_of, renewed, size_of, sources
from headscope._dataflow.roles import PARAMETER, Product, Role, Scores, Softmax, Weights
from headscope._dataflow.table import Table


@dataclass(frozen=True)
class Completion:
    """An attention, and its softmax."""

    attention: WrittenAttention
    softmax: Softmax


@dataclass(frozen=True)
class Result:
    """The axes and the role of the result of a product, and the attention that it completes."""

    axes: list[Axis]
    role: Role | None = None
    completion: Completion | None = None
    attends: bool = False


def multiply(table: Table, left: Tensor, right: Tensor, out: Tensor, scope: tuple[Any, ...]) -> Result:
    """Return what a product of left, [N, R, D] or [R, D], and right, [N, D, C] or [D, C], computes."""
    left_role, right_role = table.role(left), table.role(right)
    a, b = table.axes(left, scope), table.axes(right, scope)
    outer = [_merged(a[0], b[0])] if left.ndim == 3 else []
    columns = fresh_axis(out.shape[-1], "feature", scope)
    if right_role == PARAMETER and left_role != PARAMETER:
        return Result([*outer, a[-2], columns], left_role if isinstance(left_role, Scores) else None)
    if left_role == PARAMETER and right_role != PARAMETER:
        rows = fresh_axis(out.shape[-2], "feature", scope)
        return Result([*outer, rows, b[-1]], right_role if isinstance(right_role, Scores) else None)
    if left_role == PARAMETER:  # queries that are learned
        return Result([*outer, fresh_axis(out.shape[-2], "row", scope), columns])
    for role, p_axes, p, v, is_left in ((left_role, a, left, right, True), (right_role, b, right, left, False)):
        if isinstance(role, Weights):
            axes = [*outer, a[-2], b[-1]]
            if role.softmax.scores is None:
                return Result(axes, attends=True)
            completion = _attention(role, p, p_axes, v, out, is_left, scope)
            return Result(axes, completion=completion, attends=completion is not None)
    product = Product(
        renewed(a[-2], scope), renewed(b[-1], scope), tuple(sources(a[-2])), tuple(sources(b[-1])),
        not outer, scope,
    )  # fmt: skip
    return Result([*outer, product.rows, product.columns], Scores(product))


def _merged(a: Axis, b: Axis) -> Axis:
    """Return the axis that two operands share: that of the first, but of the second where the first repeats numbers."""
    if len(sources(a)) == len(a):
        return a
    if [piece.size for piece in a] == [piece.size for piece in b]:
        return tuple(x if x.source is not None else y for x, y in zip(a, b, strict=True))
    return b if len(sources(b)) == len(b) else a


def _attention(
    role: Weights, p: Tensor, p_axes: Sequence[Axis], v: Tensor, out: Tensor, is_left: bool, scope: tuple[Any, ...],
) -> Completion | None:  # fmt: skip
    """Return the attention that a product of weights with values completes; None if it is something else."""
    softmax, product = role.softmax, role.softmax.product
    scores = softmax.scores
    if scores is None:
        return None
    axes = softmax.axes
    keys = axes[softmax.axis]
    rows_are_keys = _shares(keys, product.rows)
    if not is_of(keys, "row") or not (rows_are_keys or _shares(keys, product.columns)):
        return None
    contracted, rows = p_axes[-1 if is_left else -2], p_axes[-2 if is_left else -1]
    if set(sources(contracted)) != set(sources(keys)):
        return None
    queries = product.columns if rows_are_keys else product.rows
    roles = assign_roles(axes, softmax.axis, sources(queries), product.is_folded)
    inner = {*roles.queries, *roles.heads}
    if not set(roles.queries) <= set(rows) or not (set(rows) <= inner or (p.ndim == 2 and not roles.outer)):
        return None  # values that depend on the query, or that all sequences share
    groups = (roles.batch, roles.heads, roles.queries, roles.keys)
    logits = arrange(scores, axes, groups)
    if logits is None:
        return None
    shared = (roles.batch, roles.heads)
    values = result = sinks = None
    if logits.shape[-1] == size_of(contracted) + 1 and p.storage_offset() == softmax.offset:
        sinks = _sinks(logits[..., -1])
        if sinks is None:
            return None
        logits = logits[..., :-1]
    if p.numel() != logits.numel() and not _lacks_heads_only(p, roles):
        return None
    if p.numel() == logits.numel():
        if not is_left:
            v, out = v.transpose(-2, -1), out.transpose(-2, -1)
        values = _values(v, p_axes, shared, sizes(shared))
        if not role.dropped:
            result = _output(out, p_axes, is_left, shared, roles.queries)
    tokens = (
        (product.column_tokens, product.row_tokens) if rows_are_keys else (product.row_tokens, product.column_tokens)
    )
    same = True if tokens[0] and tokens[0] == tokens[1] else None
    within = _enclosing([product.scope, softmax.scope, scope])
    scopes = [source.scope for source in sources(roles.heads) if source.scope]
    attention = WrittenAttention(
        logits, values, sinks, result, same, within, _enclosing([within, *scopes]), bool(roles.heads)
    )
    return Completion(attention, softmax)


def _sinks(logits: Tensor) -> Tensor | None:
    """Return the sinks [H] that an additional logit of each row, [B, H, Q], is; None if it differs between rows."""
    sinks = logits[:1, :, :1].detach()
    return sinks.flatten() if torch.equal(sinks.expand_as(logits), logits) else None


def _lacks_heads_only(p: Tensor, roles: Roles) -> bool:
    """Return whether weights are those of some heads, with all sequences, queries and keys."""
    batch, queries, keys = sizes((roles.batch, roles.queries, roles.keys))
    matrices = p.shape[-2:] in ((queries, keys), (keys, queries))
    return bool(roles.heads) and matrices and p.numel() % (batch * queries * keys) == 0


def _shares(axis: Axis, other: Axis) -> bool:
    """Return whether an axis runs along sources of another."""
    others = sources(other)
    return bool(axis) and any(piece.source in others for piece in axis)


def _values(
    v: Tensor, p_axes: Sequence[Axis], shared: tuple[Sequence[Piece], Sequence[Piece]], outer: Sequence[int]
) -> Tensor | None:
    """Return values [N, K, Dv], or [K, Dv], as [B, H, K, Dv]."""
    keys, width = v.shape[-2:]
    if v.ndim == 2:
        return v.expand(*outer, keys, width)
    inner: tuple[Axis, Axis] = ((Piece(None, 1, keys),), (Piece(None, 2, width),))
    return arrange(v, [p_axes[0], *inner], (*shared, *inner), shared[1])


def _output(
    out: Tensor, p_axes: Sequence[Axis], is_left: bool, shared: tuple[Sequence[Piece], Sequence[Piece]],
    queries: Sequence[Piece],
) -> Tensor | None:  # fmt: skip
    """Return the output [N, Q, Dv], or [Q, Dv], as [B, H, Q, Dv]."""
    width: Axis = (Piece(None, 1, out.shape[-1]),)
    rows = p_axes[-2 if is_left else -1]
    outer = [p_axes[0]] if out.ndim == 3 else []
    return arrange(out, [*outer, rows, width], (*shared, queries, width))


def _enclosing(scopes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what encloses all of these."""
    first, *others = scopes
    common = 0
    while common < len(first) and all(common < len(each) and each[common] is first[common] for each in others):
        common += 1
    return first[:common]
