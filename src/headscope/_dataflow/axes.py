"""The axes of tensors: which original axis each runs along, whatever views, copies and foldings lie between.

An axis of a tensor is a list of pieces of original axes, the slowest first: the axis of [B, T, E] that a projection
makes is one piece; after ``view(B, T, H, D)`` its last two axes are two pieces of it. Pieces follow from strides and
offsets, so views need no rule of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from torch import Tensor

Kind = Literal["row", "feature", "joined"]
Places = tuple[int, ...] | None


@dataclass(eq=False)
class Source:
    """An original axis.

    Attributes:
        kind: "row": of the batch or of tokens; "feature": of numbers that a projection makes, or of parameters;
            "joined": of parts that code has joined, where it is not known which of the two.
        scope: where it was made, as the follower's ``scope`` returns it.
        is_outside: whether it is of a tensor that no followed operation has made.
        projected: the steps of its pieces along which a projection was applied to each number: they may be tokens.
        last: the axis of the last part, if tokens were concatenated.
        last_fixed: what was selected along other axes for the last part.
        end: where its tokens end: what follows are parameters, or zeros; 0: it is tokens to the end.
        places: where its tokens were before code reversed, rolled, sorted or selected them; None: they are in order.
    """

    kind: Kind
    scope: tuple[Any, ...] = ()
    is_outside: bool = False
    projected: set[int] = field(default_factory=set[int])
    last: Axis = ()
    last_fixed: Fixed = frozenset()
    end: int = 0
    places: Places = None


class Piece(NamedTuple):
    """A part of an original axis: ``size`` numbers of it from ``start`` on, ``step`` apart.

    Without a source it is one number, repeated.
    """

    source: Source | None
    step: int
    size: int
    start: int = 0


Axis = tuple[Piece, ...]
Fixed = frozenset[tuple[Source, int]]
"""The numbers that code has selected along axes which a tensor no longer has."""


class Place(NamedTuple):
    """Where a tensor's numbers come from: its axes, and what was selected along others."""

    axes: list[Axis]
    fixed: Fixed


class Extent(NamedTuple):
    """A piece in a storage, with the distance of its numbers in bytes."""

    stride: int
    piece: Piece


_STRIDE = itemgetter(0)  # of an extent
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


def is_of_tokens(axis: Axis) -> bool:
    """Return whether an axis may run along tokens: all of its pieces are rows, or each number was projected."""
    pieces = [(piece.source, piece.step) for piece in axis if piece.source is not None]
    return bool(pieces) and all(source.kind != "feature" or step in source.projected for source, step in pieces)


def overlap(a: Axis, b: Axis) -> bool:
    """Return whether two axes of one tensor run along the same numbers, as the windows of ``unfold`` do."""
    return any(
        x.source is y.source and x.source is not None and x.step < y.step * y.size and y.step < x.step * x.size
        for x in a
        for y in b
    )


def fresh_axes(
    x: Tensor, scope: tuple[Any, ...], features: Iterable[int] = (-1,), *, outside: bool = False
) -> list[Axis]:
    """Return new axes for a tensor of which nothing is known: the last one has features, the others rows."""
    last = {axis % x.ndim for axis in features} if x.ndim else set()
    kinds: list[Kind] = ["feature" if at in last else "row" for at in range(x.ndim)]
    return [fresh_axis(n, kind, scope, outside) for n, kind in zip(x.shape, kinds, strict=True)]


def fresh_axis(size: int, kind: Kind, scope: tuple[Any, ...], outside: bool = False) -> Axis:
    """Return an axis along a new source."""
    return () if size == 1 else (Piece(Source(kind, scope, outside), 1, size),)


def layout_of(strides: Sequence[int], width: int, axes: Sequence[Axis]) -> Layout:
    """Return the layout of the storage of a tensor with these strides, width in bytes, and axes."""
    extents: list[Extent] = []
    for axis, stride in zip(axes, strides, strict=True):
        step = stride * width
        if step == 0:
            continue
        for piece in reversed(axis):
            extents.append(Extent(step, piece))
            step *= piece.size
    if len(extents) > 1:
        extents.sort(key=_STRIDE)
    return tuple(extents)


def resolve(x: Tensor, layout: Layout, offset: int, scope: tuple[Any, ...]) -> tuple[Place, bool]:
    """Return the axes of a tensor in a storage of this layout, and whether all fit. One that does not has a new source.

    Args:
        x: the tensor.
        layout: that of its storage.
        offset: the place of the layout's first number, in bytes.
        scope: for new axes.
    """
    width = x.element_size()
    starts = [0] * len(layout)
    rest = int(x.storage_offset()) * width - offset
    for at in reversed(range(len(layout))):
        if rest <= 0:
            break
        starts[at], rest = divmod(rest, layout[at].stride)
    axes: list[Axis] = []
    covered: set[int] = set()
    fits = True
    for size, stride in zip(x.shape, x.stride(), strict=True):
        axis = _axis(size, stride * width, layout, starts, covered)
        fits = fits and axis is not None
        axes.append(fresh_axis(size, "joined", scope) if axis is None else axis)
    if len(covered) == len(layout):
        return Place(axes, frozenset()), fits
    fixed = [
        (extent.piece.source, extent.piece.start + extent.piece.step * starts[at])
        for at, extent in enumerate(layout)
        if at not in covered and extent.piece.source is not None
    ]
    return Place(axes, frozenset(fixed)), fits


def _axis(size: int, stride: int, layout: Layout, starts: Sequence[int], covered: set[int]) -> Axis | None:
    """Return the pieces of ``size`` numbers, ``stride`` bytes apart; None if they do not fit the layout."""
    if size == 1:
        return ()
    if stride == 0:
        return (Piece(None, 0, size),)
    pieces: list[Piece] = []
    for at, extent in enumerate(layout):
        source, step, whole, first = extent.piece
        if stride >= extent.stride * whole:
            continue
        if stride % extent.stride:
            return None
        by = stride // extent.stride
        most = -((starts[at] - whole) // by)
        if most < 1:
            return None
        part = min(size, most)
        if part > 1:
            covered.add(at)
            pieces.append(Piece(source, by * step, part, first + step * starts[at]))
        if size <= most:
            return tuple(reversed(pieces))
        if size % part or by * part != whole:
            return None
        size //= part
        stride = extent.stride * whole
    return None
