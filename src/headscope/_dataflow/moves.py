"""Operations that move numbers: what becomes of the axes of their argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headscope._dataflow.axes import Axis, Extent, Layout, Piece, fresh_axis


def moved_axes(
    name: str, x: Tensor, axes: Sequence[Axis], out: Tensor, args: tuple[Any, ...], scope: tuple[Any, ...]
) -> list[Axis] | None:
    """Return the axes of the result of a move; None if they cannot be known.

    Args:
        name: of the operation.
        x, axes: the argument that is moved, and its axes.
        out: the result.
        args: all arguments.
        scope: for new axes.
    """
    if name == "stack":
        at = (args[1] if len(args) > 1 else 0) % out.ndim
        # what code stacks in a forward pass are heads, which it has computed one by one
        return [*axes[:at], fresh_axis(out.shape[at], "feature", scope), *axes[at:]]
    if name == "repeat":
        more = out.ndim - x.ndim
        new: list[Axis] = [(Piece(None, 0, n),) if n > 1 else () for n in out.shape[:more]]
        for axis, size, n in zip(axes, x.shape, out.shape[more:], strict=True):
            new.append(axis if n == size else (Piece(None, 0, n // max(size, 1)), *axis))
        return new
    if out.ndim != x.ndim:
        return None
    return [
        axis if n == size else resized(axis, n, scope) for axis, size, n in zip(axes, x.shape, out.shape, strict=True)
    ]


def resized(axis: Axis, size: int, scope: tuple[Any, ...]) -> Axis:
    """Return an axis of which some numbers were taken, or others were added."""
    if size == 1:
        return ()
    if len(axis) == 1:
        return (Piece(axis[0].source, axis[0].step, size),)
    kinds = {piece.source.kind for piece in axis if piece.source is not None}
    return fresh_axis(size, "feature" if kinds == {"feature"} else "row", scope)


def written_layout(
    old: Layout, into: Tensor, into_axes: Sequence[Axis], axes: Sequence[Axis], scope: tuple[Any, ...]
) -> Layout:
    """Return the layout of a storage after a tensor with these axes was written into a part of it.

    What code writes part by part are heads, or chunks of queries: an axis of the storage that the part does not have
    runs over them.

    Args:
        old: the layout before.
        into, into_axes: the part, and its axes in that layout.
        axes: of the tensor that was written.
        scope: for new axes.
    """
    covered = {piece.source for axis in into_axes for piece in axis}
    extents: list[Extent] = []
    for axis, own, n, stride in zip(axes, into_axes, into.shape, into.stride(), strict=True):
        step = stride * into.element_size()
        whole = next((extent.piece.size for extent in old if extent.stride == step and len(own) == 1), n)
        axis = axis if whole == n else resized(axis, whole, scope)
        for piece in reversed(axis):
            extents.append(Extent(step, piece))
            step *= piece.size
    for extent in old:
        if extent.piece.source not in covered:
            extents += [Extent(extent.stride, piece) for piece in fresh_axis(extent.piece.size, "feature", scope)]
    return tuple(sorted(extents, key=lambda extent: extent.stride))
