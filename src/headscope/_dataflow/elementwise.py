"""Elementwise operations: the axes and the role of their result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headscope._dataflow.axes import Axis, Fixed, Place, fresh_axis, sources
from headscope._dataflow.roles import NOISE, PARAMETER, HeadOutput, Lost, Role, Scores, Use, Weights
from headscope._dataflow.table import Entry, Table

_INERT: set[Role | None] = {None, PARAMETER}
"""The roles of arguments that do not give their result one."""


def combined_place(
    table: Table, out: Tensor, tensors: Sequence[Tensor], entries: Sequence[Entry | None], scope: tuple[Any, ...]
) -> Place:
    """Return the axes of a result: each is that of the argument that says most of it.

    Arguments that are not repeated come first: a mask [B, T] says less of tokens than the tokens do. Of these,
    arguments on the way of an attention come first, then those that are followed, then parameters.
    """
    if len(tensors) == 1 and entries[0] is not None and tensors[0].shape == out.shape:
        return table.place_in(entries[0], tensors[0], scope)
    size, shape = out.numel(), out.shape
    ordered = sorted((tensors[at].numel() < size, _rank(entry), at) for at, entry in enumerate(entries))
    known: list[tuple[Tensor, Place]] = []
    fixed: Fixed = frozenset()
    for _, rank, at in ordered:
        x, entry = tensors[at], entries[at]
        if not x.ndim:
            continue
        place = table.place(x, scope) if entry is None else table.place_in(entry, x, scope)
        if place.fixed and (not known or rank != _OF_PARAMETER):
            fixed |= place.fixed
        known.append((x, place))
    if known and known[0][0].shape == shape:
        axes = known[0][1].axes
        if all(n == 1 or sources(axis) for axis, n in zip(axes, shape, strict=True)):
            return Place(axes, fixed)
    return Place(_axes_of_all(known, out, scope), fixed)


def _axes_of_all(known: Sequence[tuple[Tensor, Place]], out: Tensor, scope: tuple[Any, ...]) -> list[Axis]:
    """Return the axes of a result, each that of the first argument that says something of it."""
    axes: list[Axis] = []
    for at in range(-out.ndim, 0):
        fitting = [place.axes[at] for x, place in known if x.ndim >= -at and x.shape[at] == out.shape[at]]
        best = next((axis for axis in fitting if sources(axis)), fitting[0] if fitting else None)
        axes.append(fresh_axis(out.shape[at], "feature" if at == -1 else "row", scope) if best is None else best)
    return axes


_OF_PARAMETER = 2


def _rank(entry: Entry | None) -> int:
    if entry is None:
        return 3
    if entry.role == PARAMETER:
        return _OF_PARAMETER
    return 1 if entry.role is None else 0


def combined_role(
    name: str, out: Tensor, tensors: Sequence[Tensor], roles: Sequence[Role | None], has_number: bool
) -> Role | None:
    """Return the role of the result of an elementwise operation.

    Args:
        name: of the operation.
        out: its result.
        tensors, roles: its arguments.
        has_number: whether a number is an argument, too.
    """
    unequal = {*roles}
    if unequal == {PARAMETER}:
        return PARAMETER if out.is_floating_point() else None
    if unequal <= _INERT or not out.is_floating_point():
        return None
    if lost := next((role for role in roles if isinstance(role, Lost)), None):
        return lost
    by_size = sorted(zip(tensors, roles, strict=True), key=lambda each: each[0].numel() < out.numel())
    for kind in (Weights, Scores):
        x, role = next(((x, role) for x, role in by_size if isinstance(role, kind)), (None, None))
        if isinstance(role, Weights) and x is not None:
            return _of_weights(name, role, roles, has_number, x.numel() == out.numel())
        if isinstance(role, Scores):
            return Weights(role.product, None, None, changed=True) if name in ("exp", "exp2") else role
    if len(tensors) == 1 and (roles[0] == NOISE or isinstance(roles[0], HeadOutput)):
        return roles[0]
    return None


def _of_weights(name: str, role: Weights, roles: Sequence[Role | None], has_number: bool, same_size: bool) -> Role:
    """Return the role of weights after an operation; those that are as they were keep their softmax."""
    if NOISE in roles and len(roles) == 2 and name == "mul":
        return replace(role, dropped=True)
    if role.dropped and name in ("mul", "div") and len(roles) == 1 and has_number:
        return role  # 1 / (1 - p), after the mask of a dropout
    return replace(role, softmax=role.softmax if same_size else None, changed=True, use=Use())
