"""Operations that move numbers: what becomes of the axes of their argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headscope._dataflow.axes import Axis, Extent, Kind, Layout, Piece, Place, Source, fresh_axis, sources
from headscope._dataflow.joining import concatenated_axis, kind_of_parts, stacked_axis
from headscope._dataflow.order import REORDERED, UNKNOWN, reordered
from headscope._dataflow.table import Entry


def moved_axes(
    name: str, args: Sequence[Any], axes: Sequence[Axis], out: Tensor, scope: tuple[Any, ...], *, ordered: bool
) -> list[Axis] | None:
    """Return the axes of the result of a move of one tensor; None if they cannot be known.

    Args:
        name: of the operation.
        args, axes: its arguments, of which the first is moved, and the axes of that.
        out: the result.
        scope: for new axes.
        ordered: whether rows in another order are still called the same.
    """
    x = args[0]
    if name == "repeat":
        more = out.ndim - x.ndim
        new: list[Axis] = [(Piece(None, 0, n),) if n > 1 else () for n in out.shape[:more]]
        for axis, size, n in zip(axes, x.shape, out.shape[more:], strict=True):
            new.append(axis if n == size else (Piece(None, 0, n // max(size, 1)), *axis))
        return new
    if out.ndim != x.ndim:
        return None
    moved = [
        axis if n == size else resized(axis, n, scope, same=ordered)
        for axis, size, n in zip(axes, x.shape, out.shape, strict=True)
    ]
    if name in REORDERED and not ordered:
        return reordered(name, args, axes, moved, scope)
    if name == "constant_pad_nd" and not ordered:
        _note_padding(args, axes, moved)
    return moved


def _note_padding(args: Sequence[Any], old: Sequence[Axis], axes: Sequence[Axis]) -> None:
    """Note where the tokens of axes end to which numbers were added behind them."""
    pads = list(args[1])
    for at, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True), 1):
        if before >= 0 and after > 0:
            _note_end(axes[-at], old[-at], before + args[0].shape[-at])


def _note_end(axis: Axis, last: Axis, end: int) -> None:
    """Note, of an axis with a source of its own, that tokens are its last ones before an end."""
    if len(axis) == 1 and axis[0].source is not None and axis[0].source not in sources(last):
        axis[0].source.last, axis[0].source.end = last, end


def joined_axes(
    name: str, known: Sequence[Place], best: Place, at: int, out: Tensor, scope: tuple[Any, ...],
    *, all_known: bool, same: bool, after: int = 0,
) -> list[Axis]:  # fmt: skip
    """Return the axes of tensors that were stacked or concatenated.

    Args:
        name: "stack" or "cat".
        known: where those come from that are followed and not parameters.
        best: the place of that of which most is known; it has the other axes.
        at: the axis.
        out: the result.
        scope: for new axes.
        all_known: whether these are all.
        same: whether an axis to which others were added retains its source.
        after: how many numbers follow the last known tensor.
    """
    axes = list(best.axes)
    if name == "stack":
        over = stacked_axis(known, scope) if all_known else fresh_axis(out.shape[at], "joined", scope)
        return [*axes[:at], over, *axes[at:]]
    if all_known:
        axes[at] = concatenated_axis(known, at, out.shape[at], scope)
    else:  # the keys of earlier steps, a token that is learned, or zeros
        axes[at] = resized(axes[at], out.shape[at], scope, same=same)
    before = {piece.source for part in known for axis in part.axes for piece in axis}
    for piece in axes[at]:
        if piece.source is not None and piece.source not in before:
            piece.source.last, piece.source.last_fixed = known[-1].axes[at], known[-1].fixed
            piece.source.end = out.shape[at] - after if after and name == "cat" else 0
            if any(each.places is not None for part in known for each in sources(part.axes[at])):
                piece.source.places = UNKNOWN
    return axes


def resized(axis: Axis, size: int, scope: tuple[Any, ...], *, same: bool = False) -> Axis:
    """Return an axis of which some numbers were taken, or others were added; ``same``: it retains its source."""
    if size == 1:
        return ()
    if same and len(axis) == 1:
        return (axis[0]._replace(size=size),)
    kinds: set[Kind] = {piece.source.kind for piece in axis if piece.source is not None}
    is_one = kinds == {"feature"} or (len(kinds) == 1 and len(axis) == 1)
    return fresh_axis(size, kinds.pop() if is_one else "joined", scope)


def note_part(entry: Entry, into: Tensor, before: Place, part: Place, scope: tuple[Any, ...]) -> None:
    """Change the layout of a storage after a tensor was written into a part of it.

    Args:
        entry: of the storage.
        into, before: the part, and its place in the layout so far.
        part: where the tensor comes from that was written.
        scope: for new axes.
    """
    if entry.parts:
        entry.parts = [*entry.parts, part]
        kind = kind_of_parts(entry.parts)
        for source in entry.joined:
            source.kind = kind
        return
    entry.parts = [part]
    entry.whole = None
    entry.views = None
    entry.known_layout, entry.joined = _written_layout(entry.layout, into, before.axes, part.axes, scope)


def _written_layout(
    old: Layout, into: Tensor, into_axes: Sequence[Axis], axes: Sequence[Axis], scope: tuple[Any, ...]
) -> tuple[Layout, list[Source]]:
    """Return the layout of a storage after its first part was written, and the axes that run over parts."""
    covered = {piece.source for axis in into_axes for piece in axis}
    joined: list[Source] = []
    extents: list[Extent] = []

    def over_parts(size: int, stride: int) -> None:
        for piece in fresh_axis(size, "joined", scope):
            extents.append(Extent(stride, piece))
            if piece.source is not None:
                joined.append(piece.source)

    for axis, own, n, stride in zip(axes, into_axes, into.shape, into.stride(), strict=True):
        step = stride * into.element_size()
        whole = next((extent.piece.size for extent in old if extent.stride == step and len(own) == 1), n)
        if whole != n:
            over_parts(whole, step)
            continue
        for piece in reversed(axis):
            extents.append(Extent(step, piece))
            step *= piece.size
    for extent in old:
        if extent.piece.source not in covered:
            over_parts(extent.piece.size, extent.stride)
    return tuple(sorted(extents, key=lambda extent: extent.stride)), joined
