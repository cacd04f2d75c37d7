"""Whether a product of weights with values completes an attention, and which: right, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headscope._dataflow.attention import Roles, WrittenAttention, arrange, assign_roles, sizes
from headscope._dataflow.axes import Axis, Fixed, Piece, Source, is_of_tokens, size_of, sources
from headscope._dataflow.order import are_in_order, count_beside
from headscope._dataflow.roles import Product, Softmax, Tokens, Weights


class Refusal:
    """An attention that cannot be recorded."""


REFUSAL = Refusal()


def complete(
    role: Weights, p: Tensor, p_axes: Sequence[Axis], v: Tensor, value_keys: Axis, out: Tensor, is_left: bool,
    scope: tuple[Any, ...],
) -> WrittenAttention | Refusal | None:  # fmt: skip
    """Return the attention that a product completes; None if it is something else.

    Args:
        role, p, p_axes: the weights and their axes.
        v, out: the values, and the product.
        value_keys: the axis of the values that is summed over.
        is_left: whether the weights are the left operand.
        scope: where it is computed.
    """
    product = role.product
    contracted, rows = p_axes[-1 if is_left else -2], p_axes[-2 if is_left else -1]
    softmax = _unchanged_softmax(role)
    axes, key_axis = (p_axes, p.ndim - (1 if is_left else 2)) if softmax is None else (softmax.axes, softmax.axis)
    keys = axes[key_axis]
    rows_are_keys = _rows_are_keys(role, keys, contracted, p)
    if rows_are_keys is None:
        return None
    queries = product.columns if rows_are_keys else product.rows
    if p.ndim == 3 and not product.is_folded and _shares(p_axes[0], queries):
        return None  # values that depend on the query
    if (keys and not is_of_tokens(keys)) or product.is_other or v.is_complex():
        return REFUSAL
    roles = assign_roles(axes, key_axis, queries, product.is_folded, product.outside)
    if roles is None:
        return REFUSAL
    if not _are_rows(rows, roles, p.ndim):
        return None  # values that depend on the query, or that all sequences share
    groups = (roles.batch, roles.heads, roles.queries, roles.keys)
    scores = _log_weights(role, p, p_axes, groups, key_axis) if softmax is None else softmax.scores
    logits = scores if softmax is None or scores is None else arrange(scores, axes, groups)
    if logits is None:
        return REFUSAL
    sinks, has_logits = None, softmax is not None
    if softmax is not None and logits.shape[-1] == size_of(contracted) + 1 and p.storage_offset() == softmax.offset:
        logits, sinks, has_logits = _without_sinks(logits)
    is_whole = p.numel() == logits.numel()
    if not is_whole and (softmax is None or not _is_part(role, p, roles)):
        return REFUSAL
    shared = (roles.batch, roles.heads if is_whole else _own_heads(p_axes, roles))
    v, out = (v, out) if is_left else (v.transpose(-2, -1), out.transpose(-2, -1))
    query_tokens, key_tokens = _tokens(product, rows_are_keys)
    q, k = _factors(product, rows_are_keys, roles, logits.shape[-1])
    within = enclosing([product.scope, scope] if softmax is None else [product.scope, softmax.scope, scope])
    return WrittenAttention(
        scores=logits,
        q=q,
        k=k,
        v=_values(v, p_axes, shared, sizes(shared)),
        sinks=sinks,
        out=None if role.dropped else _output(out, p_axes, is_left, shared, roles.queries),
        has_logits=has_logits,
        from_weights=softmax is None,
        before=_before(role, groups, logits.shape),
        has_maximum=bool(product.reduced & {"amax", "max"}),
        from_exponentials=role.over is None,
        query_tokens=query_tokens,
        key_tokens=key_tokens,
        scope=within,
        needed_scope=enclosing([within, *product.scopes, *(each.scope for each in sources(roles.heads) if each.scope)]),
        heads=roles.heads,
        is_whole=is_whole,
        is_in_order=_are_in_order(roles, value_keys, query_tokens, key_tokens),
        beside=count_beside(key_tokens) if query_tokens != key_tokens else 0,
        may_be_heads=product.outside > 1 and not roles.heads and _has_axes_before(len(axes), roles, query_tokens),
    )


def _rows_are_keys(role: Weights, keys: Axis, contracted: Axis, p: Tensor) -> bool | None:
    """Return whether the keys are the rows of the product; None if a product does not sum over the keys of weights."""
    own, product = frozenset(sources(keys)), role.product
    if not contracted and size_of(keys) == 2 and own == role.over and not (product.rows and product.columns):
        shared = _shares(keys, product.rows) or _shares(keys, product.columns)
        return None if shared else bool(product.columns)  # one key and a sink
    if own != frozenset(sources(contracted)) or (role.over is not None and own != role.over):
        return None
    if not own:  # perhaps one key
        is_single = (role.over is not None or bool((p == 1).all())) and not (product.rows and product.columns)
        return bool(product.columns) if is_single else None
    if _shares(keys, product.rows):
        return True
    return False if _shares(keys, product.columns) else None


def _log_weights(
    role: Weights, p: Tensor, axes: Sequence[Axis], groups: Sequence[Sequence[Piece]], key_axis: int
) -> Tensor | None:
    """Return the logarithms of weights if they are distributions over the keys, else None.

    A row of zeros is one whose keys are all masked.
    """
    if role.dropped or size_of(axes[key_axis]) != p.shape[key_axis]:
        return None
    p = p.detach()
    sums = p.sum(key_axis, dtype=torch.promote_types(p.dtype, torch.float32))
    most = max(1e-5, 2 * torch.finfo(p.dtype).eps)
    if not bool((((sums - 1).abs() <= most) | (sums == 0)).all()) or bool((p < 0).any()):
        return None
    weights = arrange(p, axes, groups)
    return None if weights is None else weights.log()


def _before(role: Weights, groups: Sequence[Sequence[Piece]], shape: torch.Size) -> Tensor | None:
    """Return the input of the softmax that weights were before they were changed, in the order of the weights."""
    softmax = role.softmax
    if not role.changed or softmax is None or softmax.scores is None:
        return None
    scores = arrange(softmax.scores.detach(), softmax.axes, groups)
    return scores if scores is not None and scores.shape == shape else None


def _are_rows(rows: Axis, roles: Roles, ndim: int) -> bool:
    """Return whether the rows of weights of 2 or 3 axes are queries, perhaps of several heads."""
    inner = {*roles.queries, *roles.heads}
    return set(roles.queries) <= set(rows) and (set(rows) <= inner or (ndim == 2 and not roles.outer))


def _unchanged_softmax(role: Weights) -> Softmax | None:
    """Return the softmax of which weights are the result, while its input is known."""
    softmax = role.softmax
    return None if role.changed or softmax is None or softmax.scores is None else softmax


def _own_heads(axes: Sequence[Axis], roles: Roles) -> list[Piece]:
    return [piece for axis in axes[:-2] for piece in axis if piece.source in sources(roles.heads)]


def _is_part(role: Weights, p: Tensor, roles: Roles) -> bool:
    """Return whether weights are those of some heads, with all sequences, queries and keys."""
    if role.dropped or role.softmax is None or role.softmax.address != p.untyped_storage()._cdata:
        return False
    batch, queries, keys = sizes((roles.batch, roles.queries, roles.keys))
    matrices = p.shape[-2:] in ((queries, keys), (keys, queries))
    return bool(roles.heads) and matrices and p.numel() % (batch * queries * keys) == 0


def _tokens(product: Product, rows_are_keys: bool) -> tuple[Tokens, Tokens]:
    if rows_are_keys:
        return product.column_tokens, product.row_tokens
    return product.row_tokens, product.column_tokens


def _factors(product: Product, rows_are_keys: bool, roles: Roles, count: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the factors of a product as queries [B, H, Q, D] and keys [B, H, K, D]; None if they do not fit.

    Args:
        product: that of the scores.
        rows_are_keys: whether its rows are the keys.
        roles: what the pieces of the scores are.
        count: K.
    """
    factors = product.factors
    if factors is None:
        return None, None
    sides = [(factors.left, product.rows), (factors.right, product.columns)]
    (q, query_axis), (k, key_axis) = reversed(sides) if rows_are_keys else sides
    width: Axis = (Piece(None, 1, q.shape[-1]),)
    keys = roles.keys if set(roles.keys) == set(key_axis) else key_axis  # a sink is one key more
    queries = arrange(q, [*factors.outer, query_axis, width], (roles.batch, roles.heads, roles.queries, width))
    if size_of(keys) != count or queries is None:
        return None, None
    groups = (roles.batch, roles.heads, keys, width)
    return queries, arrange(k, [*factors.outer, key_axis, width], groups, roles.outer)


def _of_rows(fixed: Fixed) -> Fixed:
    return frozenset(each for each in fixed if each[0].kind != "feature")


def _has_axes_before(axes: int, roles: Roles, queries: Tokens) -> bool:
    """Return whether tensors have an axis, before those of scores of so many axes, that is a batch or heads."""
    is_of_entry = any(not isinstance(each, Piece) and each[0].is_outside for each in queries)
    return is_of_entry if axes == 2 else axes == 3 and [piece.size > 1 for piece in roles.batch] == [True]


def _are_in_order(roles: Roles, value_keys: Axis, queries: Tokens, keys: Tokens) -> bool:
    """Return whether queries and keys are tokens in their order, and in the same block."""
    are_sorted = are_in_order(roles.queries, roles.keys, value_keys, queries == keys)
    return are_sorted and not _are_elsewhere(queries, keys)


def _are_elsewhere(queries: Tokens, keys: Tokens) -> bool:
    """Return whether the last of joined keys are at another place than the queries, such as the next block."""
    places = [_of_rows(each.source.last_fixed) for each in keys if isinstance(each, Piece) and each.source is not None]
    return any(not place <= queries for place in places)


def _last_part(tokens: Piece | tuple[Source, int]) -> tuple[Axis, Tokens]:
    """Return the axis of the part that was concatenated last, and the rows that were selected for it.

    Both are empty unless the tokens reach the end of a concatenation.
    """
    if not isinstance(tokens, Piece) or tokens.source is None or not tokens.source.last:
        return (), frozenset()
    reach_end = tokens.start + tokens.step * tokens.size >= tokens.source.end
    return (tokens.source.last, frozenset(_of_rows(tokens.source.last_fixed))) if reach_end else ((), frozenset())


def end_in_others(keys: Tokens, queries: int) -> bool:
    """Return whether the part of keys that was concatenated last has not as many tokens as there are queries."""
    parts = [last for last, _ in map(_last_part, keys) if last]
    return bool(parts) and all(size_of(last) != queries for last in parts)


def same_tokens(queries: Tokens, keys: Tokens) -> bool:
    """Return whether queries and keys are the same tokens, or the queries are the last of the keys."""
    if not queries or queries == keys:
        return bool(queries)
    newest: Tokens = frozenset()
    for each in keys:
        last, rows = _last_part(each)
        newest = newest.union(rows, last or [each])
    if newest == queries:
        return True
    apart, others = queries - keys, keys - queries
    if len(apart) != 1 or len(others) != 1:
        return False
    (a,), (b,) = apart, others
    if not isinstance(a, Piece) and isinstance(b, Piece):  # one query
        return a == (b.source, b.start + b.step * (b.size - 1))
    if not isinstance(a, Piece) or not isinstance(b, Piece) or a.source is not b.source or a.step != b.step:
        return False
    return a.start > b.start and a.start + a.step * a.size == b.start + b.step * b.size


def _without_sinks(logits: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Split logits [B, H, Q, K + 1] into those of the keys and sinks [H]; also whether these are the code's own.

    Where the last one differs between rows, because the largest of each row was subtracted, all of a row are shifted.
    """
    logits, last = logits[..., :-1].detach(), logits[..., -1:].detach()
    sinks = last[:1, :, :1]
    if torch.equal(sinks.expand_as(last), last):
        return logits, sinks.flatten(), True
    return logits - last, torch.zeros_like(sinks).flatten(), False


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


def enclosing(scopes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what encloses all of these."""
    first, *others = scopes
    common = 0
    while common < len(first) and all(common < len(each) and each[common] is first[common] for each in others):
        common += 1
    return first[:common]


def matches_softmax(p: Tensor, scores: Tensor, axis: int) -> bool:
    """Return whether weights are still the softmax of scores, except in rows whose keys are all masked."""
    if p.shape != scores.shape:
        return False
    weights = scores.detach().to(torch.promote_types(p.dtype, torch.float32)).softmax(axis)
    masked = scores.detach().amax(axis, keepdim=True) <= max(-1e9 * 0.9, torch.finfo(scores.dtype).min / 2)
    near = (p.detach() - weights).abs() <= max(1e-5, 2 * torch.finfo(p.dtype).eps)
    return bool((near | masked).all())
