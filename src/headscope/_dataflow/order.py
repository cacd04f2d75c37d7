"""Whether tokens are in their order on the way to a product, or were reversed, rolled, sorted or selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headscope._dataflow.axes import Axis, Piece, Places, Source
from headscope._dataflow.roles import Tokens
from headscope._dataflow.table import is_followed

REORDERED = {"flip", "roll", "index", "index_select", "gather"}
UNKNOWN: Places = ()
"""Another order for each sequence, or one that is not known."""


def reordered(
    name: str, args: Sequence[Any], old: Sequence[Axis], axes: Sequence[Axis], scope: tuple[Any, ...]
) -> list[Axis]:
    """Return axes after their numbers were moved along some of them: these have new sources, with their places.

    Args:
        name: of the operation, one of ``REORDERED``.
        args: its arguments.
        old, axes: the axes of its first one, and these with the sizes of the result.
        scope: for new sources.
    """
    along = _axes_moved(name, args)
    moved = list(axes)
    for at in along:
        places = _places(name, args, at, old[at])
        moved[at] = tuple(_relocated(piece, places, scope) for piece in axes[at])
    return moved


def _relocated(piece: Piece, places: Places, scope: tuple[Any, ...]) -> Piece:
    if piece.source is None or piece.source.kind == "feature":
        return piece
    return Piece(Source(piece.source.kind, scope, places=places), 1, piece.size)


def _axes_moved(name: str, args: Sequence[Any]) -> list[int]:
    """Return the axes along which numbers are moved."""
    ndim = args[0].ndim
    if name == "index":
        return [at for at, each in enumerate(args[1]) if each is not None]
    dims = args[1] if name != "roll" else args[2] if len(args) > 2 and args[2] else range(ndim)
    return [at % ndim for at in ([dims] if isinstance(dims, int) else dims)]


def _places(name: str, args: Sequence[Any], at: int, axis: Axis) -> Places:
    """Return where the numbers along an axis come from; None: they are in order."""
    size = args[0].shape[at]
    before: list[Places] = [piece.source.places for piece in axis if piece.source is not None]
    known = before[0] if len(axis) == 1 and before else None
    if known is None and any(each is not None for each in before):
        return UNKNOWN
    if known is not None and len(known) != size:
        return UNKNOWN
    base = torch.arange(size) if known is None else torch.tensor(known)
    if name == "flip":
        base = base.flip(0)
    elif name == "roll":
        if len(args) < 3 or not args[2]:
            return UNKNOWN
        shifts = [args[1]] if isinstance(args[1], int) else list(args[1])
        base = base.roll(next(n for n, each in zip(shifts, _axes_moved(name, args), strict=True) if each == at))
    else:
        index = args[1][at] if name == "index" else args[2]
        if not is_followed(index):
            return UNKNOWN
        base = base.to(index.device)[index] if index.ndim == 1 or known is not None else index
    along = at if base.ndim == args[0].ndim else -1
    if base.shape[along] < 2 or bool((base.diff(dim=along) >= 0).all()):
        return None
    return tuple(base.tolist()) if base.ndim == 1 else UNKNOWN


def are_in_order(queries: Sequence[Piece], keys: Sequence[Piece], value_keys: Sequence[Piece], same: bool) -> bool:
    """Return whether queries and keys are tokens in their order.

    Args:
        queries, keys: the pieces of their axes.
        value_keys: the pieces of the keys' axis of the values: where only these, and the weights, are in another order,
            so are the keys.
        same: whether they are the same tokens: then they may both have been rolled, as in a shifted window.
    """
    places = [piece.source.places for piece in (*queries, *keys) if piece.source is not None]
    of_keys = [piece.source.places for piece in keys if piece.source is not None]
    if any(piece.source.places not in (None, *of_keys) for piece in value_keys if piece.source is not None):
        return False
    return all(each is None or (same and _is_rolled(each)) for each in places)


def _is_rolled(places: Sequence[int]) -> bool:
    """Return whether these are all places from 0 on, from another one on."""
    size = len(places)
    return size > 0 and all(place == (places[0] + at) % size for at, place in enumerate(places))


def count_beside(keys: Tokens) -> int:
    """Return how many of the last keys are not tokens, but parameters or zeros."""
    ends = [
        piece.start + piece.size - piece.source.end
        for piece in keys
        if isinstance(piece, Piece) and piece.source is not None and piece.source.end and piece.step == 1
    ]
    return max(0, ends[0]) if len(ends) == 1 else 0
