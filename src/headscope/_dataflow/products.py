"""Products of two tensors: projections, scores, and weights with values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from headscope._dataflow.attention import WrittenAttention, joined_heads
from headscope._dataflow.axes import Axis, Fixed, Piece, Place, Source, fresh_axis, overlap, size_of, sources
from headscope._dataflow.completion import Refusal, complete
from headscope._dataflow.joining import tokens_of
from headscope._dataflow.roles import PARAMETER, Factors, Lost, Part, Product, Role, Scores, Softmax, Weights
from headscope._dataflow.table import Table


@dataclass(frozen=True)
class Result:
    """The axes and the role of the result of a product, and the attention that it completes.

    Attributes:
        place, role: of the result.
        attention: the attention; None: the product does not complete one.
        softmax: that of the weights, if it has been used completely.
        refused: the product of scores of an attention that cannot be recorded.
        attends: whether the product belongs to an attention that is recorded.
    """

    place: Place
    role: Role | None = None
    attention: WrittenAttention | None = None
    softmax: Softmax | None = None
    refused: Product | None = None
    attends: bool = False


def multiply(table: Table, left: Tensor, right: Tensor, out: Tensor, scope: tuple[Any, ...]) -> Result:
    """Return what a product of left, [N, R, D] or [R, D], and right, [N, D, C] or [D, C], computes."""
    left_role, right_role = table.role(left), table.role(right)
    a, b = table.place(left, scope), table.place(right, scope)
    outer = [_merged(a.axes[0], b.axes[0])] if left.ndim == 3 else []
    if right_role == PARAMETER and left_role != PARAMETER:
        columns = _projected(table, a.axes[-2:], b.axes[-1], out.shape[-1], scope)
        return Result(
            Place([*outer, _unrepeated(a.axes[-2], scope), columns], a.fixed),
            _role_of_projection(left_role, a.axes[-1]),
        )
    if left_role == PARAMETER and right_role != PARAMETER:
        rows = _projected(table, b.axes[:-3:-1], a.axes[-2], out.shape[-2], scope)
        return Result(Place([*outer, rows, b.axes[-1]], b.fixed), _role_of_projection(right_role, b.axes[-2]))
    if left_role == PARAMETER:  # queries that are learned
        axes = [fresh_axis(out.shape[-2], "row", scope), fresh_axis(out.shape[-1], "feature", scope)]
        return Result(Place([*outer, *axes], frozenset()))
    fixed = a.fixed | b.fixed
    values = Place([*outer, a.axes[-2], b.axes[-1]], frozenset(each for each in fixed if each[0].kind != "feature"))
    for role, other in ((left_role, right_role), (right_role, left_role)):
        if isinstance(role, (Weights, Lost)) and isinstance(other, (Scores, Weights, Lost)):
            return Result(values, Lost(role.product))
    for role, p, v, is_left in ((left_role, left, right, True), (right_role, right, left, False)):
        place, other = (a, b) if is_left else (b, a)
        if isinstance(role, Weights):
            own_outer = outer and [_merged(place.axes[0], other.axes[0])]  # the heads of the weights, not of the values
            own = Place([*own_outer, *place.axes[-2:]], place.fixed)
            value_keys = other.axes[-2 if is_left else -1]
            return _completed(role, p, own, v, value_keys, out, is_left, scope, values)
        if isinstance(role, Lost):
            return Result(values, refused=role.product if _may_attend(role.product, p, is_left) else None)
    factors = Factors(left.detach(), right.detach().mT, outer)
    product = _product(table, a, b, factors, scope)
    fixed |= _contracted(a.axes[-1]) | _contracted(b.axes[-2])
    return Result(Place([*outer, product.rows, product.columns], fixed), Scores(product))


def _projected(table: Table, factor: Sequence[Axis], axis: Axis, size: int, scope: tuple[Any, ...]) -> Axis:
    """Return the axis of features that a projection makes: those of its parameter, for all that it projects.

    Args:
        table: where new sources are noted.
        factor: the rows of what is projected, and the axis that is summed over.
        axis, size: the other axis of the parameter, and its size.
        scope: where it is computed.
    """
    rows, summed = factor
    own = sources(summed)
    for piece in rows:
        if piece.source is not None and piece.source not in own:  # else they are heads, and these their features
            piece.source.projected.add(piece.step)
    if any(piece.source is None for piece in axis):
        return fresh_axis(size, "feature", scope)
    return table.derive(axis, scope[-2:-1], scope)


def _unrepeated(rows: Axis, scope: tuple[Any, ...]) -> Axis:
    """Return rows that a projection makes: those of what was repeated, such as a batch, are rows of their own."""
    return tuple(Piece(Source("row", scope), 1, each.size) if each.source is None else each for each in rows)


def _role_of_projection(role: Role | None, contracted: Axis) -> Role | None:
    """Return the role of a projection of scores or weights, unless it sums over the keys of weights."""
    if isinstance(role, Weights):
        is_codebook = role.over is None or frozenset(sources(contracted)) == role.over
        return None if is_codebook else role.altered()
    return role if isinstance(role, (Scores, Lost)) else None


def _product(table: Table, a: Place, b: Place, factors: Factors, scope: tuple[Any, ...]) -> Product:
    rows, columns = a.axes[-2], b.axes[-1]
    is_folded = not factors.outer
    outer = [] if is_folded else [a.axes[0]]
    summed = [piece.source for axis in (a.axes[-1], b.axes[-2]) for piece in axis if piece.source is not None]
    outside = {source for source in summed if source.is_outside}
    return Product(
        table.derive(rows, "rows", scope),
        table.derive(columns, "columns", scope),
        tokens_of([*outer, rows], a.fixed),
        tokens_of([*(outer and [b.axes[0]]), columns], b.fixed),
        is_folded,
        any(source.kind == "row" for source in summed)
        or any(overlap(b.axes[0], columns) for _ in outer)
        or any(overlap(a.axes[0], rows) for _ in outer),
        len(outside) if len(outside) == len(set(summed)) else 0,
        scope,
        tuple(source.scope for source in summed if source.scope),
        factors,
    )


def _contracted(axis: Axis) -> Fixed:
    """Return over which features a product sums: heads that are computed one by one differ in them."""
    return frozenset(
        (piece.source, piece.start) for piece in axis if piece.source is not None and piece.source.kind == "feature"
    )


def _merged(a: Axis, b: Axis) -> Axis:
    """Return the axis that two operands share: that of the first, but of the second where the first repeats numbers."""
    if len(sources(a)) == len(a):
        return a
    if [piece.size for piece in a] == [piece.size for piece in b]:
        return tuple(x if x.source is not None else y for x, y in zip(a, b, strict=True))
    return b if len(sources(b)) == len(b) else a


def _may_attend(product: Product, p: Tensor, is_left: bool) -> bool:
    """Return whether numbers that are not followed may be the weights of keys."""
    size = p.shape[-1 if is_left else -2]
    return any(size_of(axis) == size for axis in (product.rows, product.columns)) and not product.is_other


def attend_one_key(
    table: Table, tensors: Sequence[Tensor], roles: Sequence[Role | None], out: Tensor, scope: tuple[Any, ...]
) -> Result | None:
    """Return what a product of the weights of one query and one key with its values computes; None if it is another.

    ``einsum`` multiplies them number by number.
    """
    for at in range(2 if len(tensors) == 2 else 0):
        role, p, v = roles[at], tensors[at], tensors[1 - at]
        if not isinstance(role, Weights) or role.product.rows or role.product.columns or p.ndim != v.ndim:
            continue
        if roles[1 - at] == PARAMETER or isinstance(roles[1 - at], (Scores, Weights, Lost)):
            continue
        wide = [n for n, (a, b) in enumerate(zip(p.shape, v.shape, strict=True)) if a != b]
        if len(wide) != 1 or p.shape[wide[0]] != 1:
            continue
        weights, values = table.place(p, scope), table.place(v, scope)
        axes = [weights.axes[n] if n not in wide else values.axes[n] for n in range(p.ndim)]
        outer = tuple(piece for axis in weights.axes for piece in axis)
        p, values_of_key, result = (
            each.movedim(wide[0], -1).reshape(-1, 1, each.shape[wide[0]]) for each in (p, v, out)
        )
        own, whole = Place([outer, (), ()], weights.fixed), Place(axes, weights.fixed | values.fixed)
        done = _completed(role, p, own, values_of_key, (), result, True, scope, whole)
        if done.attends:
            return done
    return None


def _completed(
    role: Weights, p: Tensor, place: Place, v: Tensor, value_keys: Axis, out: Tensor, is_left: bool,
    scope: tuple[Any, ...], result: Place,
) -> Result:  # fmt: skip
    """Return what a product of weights with values computes."""
    softmax = role.softmax
    if role.use.is_done:
        return Result(result, attends=True)
    completion = complete(role, p, place.axes, v, value_keys, out, is_left, scope)
    if isinstance(completion, Refusal):
        return Result(result, refused=role.product)
    if completion is None:
        contracted = frozenset(sources(place.axes[-1 if is_left else -2]))
        keys = role.over or frozenset((*sources(role.product.rows), *sources(role.product.columns)))
        return Result(result, None if contracted & keys else Lost(role.product))
    if softmax is None or completion.is_whole:
        role.use.is_done = True
        return Result(result, None, completion, softmax, attends=True)
    softmax.parts[int(p.storage_offset())] = Part(p.numel(), completion.v, completion.out)
    if sum(part.size for part in softmax.parts.values()) == completion.scores.numel():
        role.use.is_done = True
        parts = [softmax.parts[at] for at in sorted(softmax.parts)]  # the order of its heads
        is_known = len(completion.heads) == 1
        tensors = {
            "v": joined_heads([part.v for part in parts]) if is_known else None,
            "out": joined_heads([part.out for part in parts]) if is_known else None,
        }
        return Result(result, None, replace(completion, **tensors), softmax, attends=True)
    return Result(result, attends=True)
