"""Parts that code joins by stack, cat, or writes into a buffer: what the axis that runs over them is.

Parts of other tokens are a row axis: a batch, or more tokens. Parts of the same tokens, from other features, are a
feature axis, such as heads. Parts that differ in the place along one original axis are a piece of that axis again.
Everything else is "joined": neither a batch nor heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headscope._dataflow.axes import Axis, Fixed, Kind, Piece, Place, Source, fresh_axis, size_of
from headscope._dataflow.roles import Product, Tokens


def tokens_of(axes: Sequence[Axis], fixed: Fixed) -> Tokens:
    """Return which tokens a tensor's rows are: all of the place that does not come from features."""
    pieces = (piece for axis in axes for piece in axis)
    return frozenset(piece for piece in pieces if piece.source is not None and piece.source.kind != "feature") | {
        each for each in fixed if each[0].kind != "feature"
    }


def joined_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Return which tokens those of several parts are together; none: it is not known."""
    common = frozenset[Any].intersection(*parts)
    if all(part == common for part in parts):
        return common
    rest = [[piece for piece in part - common if isinstance(piece, Piece)] for part in parts]
    if any(len(pieces) != 1 or len(part - common) != 1 for pieces, part in zip(rest, parts, strict=True)):
        return frozenset()
    chain = _chain([tuple(pieces) for pieces in rest])
    return common | {chain} if chain else frozenset()


def joined_product(products: Sequence[Product]) -> Product:
    """Return the product of scores that are joined: the first, with the tokens of all."""
    first = products[0]
    if all(each is first for each in products):
        return first
    rows, columns = ([getattr(each, name) for each in products] for name in ("row_tokens", "column_tokens"))
    return replace(first, row_tokens=joined_tokens(rows), column_tokens=joined_tokens(columns), factors=None)


def kind_of_parts(parts: Sequence[Place]) -> Kind:
    """Return the kind of the axis over parts that are not at evenly spaced places of one axis."""
    tokens = [tokens_of(*part) for part in parts]
    if len(set(tokens)) == len(parts):
        return "row"
    features = {_features(part) for part in parts}
    return "feature" if len(set(tokens)) == 1 and len(features) == len(parts) else "joined"


def _features(part: Place) -> Tokens:
    pieces = (piece for axis in part.axes for piece in axis)
    return frozenset(piece for piece in pieces if piece.source is not None and piece.source.kind == "feature") | {
        each for each in part.fixed if each[0].kind == "feature"
    }


def stacked_axis(parts: Sequence[Place], scope: tuple[Any, ...]) -> Axis:
    """Return the axis over parts of the same shape."""
    if len(parts) == 1:
        return ()
    return _repeated(parts) or _spaced(parts) or fresh_axis(len(parts), kind_of_parts(parts), scope)


def _repeated(parts: Sequence[Place]) -> Axis:
    """Return the piece of parts that all come from the same numbers."""
    return (Piece(None, 0, len(parts)),) if all(part == parts[0] for part in parts) else ()


def _spaced(parts: Sequence[Place]) -> Axis:
    """Return the piece along which parts differ, if it is one and they are evenly spaced; else nothing."""
    shapes = {_shape(part) for part in parts}
    if len(shapes) != 1:
        return ()
    starts = [_starts(part) for part in parts]
    if any(len(each[source]) != len(starts[0][source]) for each in starts for source in each):
        return ()
    moving = [source for source in starts[0] if any(each[source] != starts[0][source] for each in starts)]
    if len(moving) != 1:
        return ()
    at = [each[moving[0]] for each in starts]
    steps = {tuple(y - x for x, y in zip(a, b, strict=True)) for a, b in itertools.pairwise(at)}
    step = next(iter(steps))
    if len(steps) != 1 or len(set(step)) != 1 or step[0] <= 0:
        return ()
    return (Piece(moving[0], step[0], len(parts), at[0][0]),)


def _shape(part: Place) -> tuple[object, ...]:
    """Return a place without its starts."""
    axes = tuple(tuple(piece[:3] for piece in axis) for axis in part.axes)
    return axes, frozenset(source for source, _ in part.fixed)


def _starts(part: Place) -> dict[Source, tuple[int, ...]]:
    starts: dict[Source, tuple[int, ...]] = {}
    pieces = [piece for axis in part.axes for piece in axis if piece.source is not None]
    for source, start in (*((piece.source, piece.start) for piece in pieces), *sorted(part.fixed, key=lambda x: x[1])):
        if source is not None:
            starts[source] = (*starts.get(source, ()), start)
    return starts


def concatenated_axis(parts: Sequence[Place], at: int, size: int, scope: tuple[Any, ...]) -> Axis:
    """Return the axis ``at`` of parts that were concatenated along it, to ``size`` numbers."""
    along = {piece for part in parts for piece in part.axes[at]}
    axes = [part.axes[at] or _single(part, along) for part in parts]
    if chain := _chain(axes):
        return (chain,)
    if len({size_of(axis) for axis in axes}) == 1:
        own = parts[0].axes[at]
        over = _repeated(parts) or _spaced(parts)
        if not over and not any(axis and axis[0].source is None for axis in axes):
            kind = kind_of_parts(parts)
            if kind == "feature" or not own:
                over = fresh_axis(len(parts), kind, scope)
        if over:
            return _merged(over[0], own)
    return fresh_axis(size, _kind_of_rows(parts, at), scope)


def _single(part: Place, along: set[Piece]) -> Axis:
    """Return the axis of one number, if it is selected along the source of these pieces."""
    steps = {piece.source: piece.step for piece in along if piece.source is not None}
    selected = [(source, start) for source, start in part.fixed if source in steps]
    return tuple(Piece(source, steps[source], 1, start) for source, start in selected) if len(selected) == 1 else ()


def _chain(axes: Sequence[Axis]) -> Piece | None:
    """Return the piece whose neighbouring parts these axes are, in order; None if they are not."""
    if not all(len(axis) == 1 for axis in axes):
        return None
    first = axes[0][0]
    end = first.start
    for (piece,) in axes:
        if piece.source is None or piece.source is not first.source or piece.step != first.step or piece.start != end:
            return None
        end += piece.size * piece.step
    return first._replace(size=(end - first.start) // first.step)


def _merged(over: Piece, own: Axis) -> Axis:
    """Return the axis of a piece over an axis, as one piece where they follow each other."""
    if own and own[0].source is over.source and over.source is not None and over.step == own[0].step * own[0].size:
        return (own[0]._replace(size=own[0].size * over.size, start=over.start), *own[1:])
    return (over, *own)


def _kind_of_rows(parts: Sequence[Place], at: int) -> Kind:
    """Return the kind of an axis that parts of any sizes were concatenated along."""
    kinds = {piece.source.kind for part in parts for piece in part.axes[at] if piece.source is not None}
    single = all(len(part.axes[at]) <= 1 for part in parts)
    if kinds == {"feature"}:
        return "feature"
    different = len({tokens_of([part.axes[at]], part.fixed) for part in parts}) == len(parts)
    return "row" if kinds == {"row"} and single and different else "joined"
