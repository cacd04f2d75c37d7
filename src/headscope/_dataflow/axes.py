"""The axes of tensors: which original axis each runs along, whatever views, copies and foldings lie between.

An axis of a tensor is a list of pieces of original axes, the slowest first: the axis of [B, T, E] that a projection
makes is one piece; after ``view(B, T, H, D)`` its last two axes are two pieces of it. Pieces follow from strides, so
views need no rule of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

Kind = Literal["row", "feature"]


@dataclass(frozen=True, eq=False)
class Source:
    """An original axis.

    Attributes:
        kind: "row": of the batch or of tokens; "feature": of numbers that a projection makes, or of parameters.
        scope: where it was made, as the follower's ``scope`` returns it.
    """

    kind: Kind
    scope: tuple[Any, ...] = ()


class Piece(NamedTuple):
    """A part of an original axis: ``size`` numbers of it, ``step`` apart; no source: one number, repeated."""

    source: Source | None
    step: int
    size: int


Axis = tuple[Piece, ...]


class Extent(NamedTuple):
    """A piece in a storage, with the distance of its numbers in bytes."""

    stride: int
    piece: Piece


Layout = tuple[Extent, ...]
"""The pieces of a storage, the fastest first."""


def size_of(axis: Axis) -> int:
    """Return the number of elements along an axis."""
    return math.prod(piece.size for piece in axis)


def sources(axis: Axis) -> list[Source]:
    """Return the sources of an axis, without repetitions of one number."""
    return [piece.source for piece in axis if piece.source is not None]


def is_of(axis: Axis, kind: Kind) -> bool:
    """Return whether an axis has sources, all of this kind."""
    own_sources = sources(axis)
    return bool(own_sources) and all(source.kind == kind for source in own_sources)


def fresh_axes(x: Tensor, scope: tuple[Any, ...], features: Iterable[int] = (-1,)) -> list[Axis]:
    """Return new axes for a tensor of which nothing is known: the last one has features, the others rows."""
    last = {axis % x.ndim for axis in features} if x.ndim else set()
    return [fresh_axis(n, "feature" if at in last else "row", scope) for at, n in enumerate(x.shape)]


def fresh_axis(size: int, kind: Kind, scope: tuple[Any, ...]) -> Axis:
    """Return an axis along a new source."""
    return () if size == 1 else (Piece(Source(kind, scope), 1, size),)


def renewed(axis: Axis, scope: tuple[Any, ...]) -> Axis:
    """Return an axis of the same pieces, each along a new source: the rows of a product are not those of its factor."""
    return tuple(
        Piece(Source("row" if piece.source is None else piece.source.kind, scope), 1, piece.size) for piece in axis
    )


def layout_of(x: Tensor, axes: Sequence[Axis]) -> Layout:
    """Return the layout of the storage of a tensor that has these axes."""
    extents: list[Extent] = []
    for axis, stride in zip(axes, x.stride(), strict=True):
        step = stride * x.element_size()
        if step == 0:
            continue
        for piece in reversed(axis):
            extents.append(Extent(step, piece))
            step *= piece.size
    return tuple(sorted(extents, key=lambda extent: extent.stride))


def resolve(x: Tensor, layout: Layout, scope: tuple[Any, ...]) -> list[Axis]:
    """Return the axes of a tensor in a storage of this layout. An axis that does not fit has a new source."""
    axes: list[Axis] = []
    for at, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        axis = _axis(size, stride * x.element_size(), layout)
        axes.append(fresh_axis(size, "feature" if at == x.ndim - 1 else "row", scope) if axis is None else axis)
    return axes


def _axis(size: int, stride: int, layout: Layout) -> Axis | None:
    """Return the pieces of ``size`` numbers, ``stride`` bytes apart; None if they do not fit the layout."""
    if size == 1:
        return ()
    if stride == 0:
        return (Piece(None, 0, size),)
    pieces: list[Piece] = []
    for extent in layout:
        whole = extent.stride * extent.piece.size
        if stride >= whole:
            continue
        if stride % extent.stride:
            return None
        by = stride // extent.stride
        most = -(-extent.piece.size // by)
        taken = min(size, most)
        if taken > 1:
            pieces.append(Piece(extent.piece.source, by * extent.piece.step, taken))
        if size <= most:
            return tuple(reversed(pieces))
        if size % taken or by * taken != extent.piece.size:
            return None
        size //= taken
        stride = whole
    return None
