"""Elementwise operations: the axes and the role of their result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headscope._dataflow.axes import Axis, fresh_axis, sources
from headscope._dataflow.roles import NOISE, PARAMETER, Exponentials, HeadOutput, Role, RowValue, Scores, Sums, Weights
from headscope._dataflow.table import Table


def combined_axes(table: Table, out: Tensor, tensors: Sequence[Tensor], scope: tuple[Any, ...]) -> list[Axis]:
    """Return the axes of a result: each is that of the argument that says most of it.

    Arguments that are not repeated come first: a mask [B, T] says less of tokens than the tokens do. Of these,
    arguments on the way of an attention come first, then those that are followed, then parameters.
    """
    ordered = sorted((x for x in tensors if x.ndim), key=lambda x: (x.numel() < out.numel(), _rank(table, x)))
    known = [(x, table.axes(x, scope)) for x in ordered]
    axes: list[Axis] = []
    for at in range(-out.ndim, 0):
        fitting = [axes[at] for x, axes in known if x.ndim >= -at and x.shape[at] == out.shape[at]]
        best = next((axis for axis in fitting if sources(axis)), fitting[0] if fitting else None)
        axes.append(fresh_axis(out.shape[at], "feature" if at == -1 else "row", scope) if best is None else best)
    return axes


def _rank(table: Table, x: Tensor) -> int:
    entry = table.find(x)
    if entry is None:
        return 3
    if entry.role == PARAMETER:
        return 2
    return 1 if entry.role is None else 0


def combined_role(
    name: str, out: Tensor, tensors: Sequence[Tensor], roles: Sequence[Role | None], has_number: bool
) -> Role | tuple[Exponentials, int] | None:
    """Return the role of the result of an elementwise operation; exponentials and an axis if they now sum to one there.

    Args:
        name: of the operation.
        out: its result.
        tensors, roles: its arguments.
        has_number: whether a number is an argument, too.
    """
    if not out.is_floating_point():
        return None
    if roles and all(role == PARAMETER for role in roles):
        return PARAMETER
    for x, role in zip(tensors, roles, strict=True):
        others = [other for other in roles if other is not role]
        if isinstance(role, Weights) and x.numel() == out.numel():
            dropped = NOISE in others
            changed = not dropped and (len(tensors) > 1 or has_number)
            return replace(role, changed=role.changed or changed, dropped=role.dropped or dropped)
        if isinstance(role, Exponentials) and x.numel() == out.numel():
            return _of_exponentials(name, role, others, len(tensors) > 1 or has_number)
        if isinstance(role, Scores) and x.numel() == out.numel():
            return _of_scores(name, role, x, others)
        if isinstance(role, Sums) and len(tensors) == 1:
            return replace(role, inverted=not role.inverted) if name in ("reciprocal", "pow") else role
        if isinstance(role, HeadOutput) and len(tensors) == 1:
            return role
    return NOISE if len(tensors) == 1 and roles[0] == NOISE else None


def _of_exponentials(
    name: str, role: Exponentials, others: Sequence[Role | None], changed: bool
) -> Role | tuple[Exponentials, int]:
    sums = next((other for other in others if isinstance(other, Sums)), None)
    if sums is not None and sums.product is role.product and name == ("mul" if sums.inverted else "div"):
        return role, sums.axis
    return replace(role, changed=role.changed or changed)


def _of_scores(
    name: str, role: Scores, x: Tensor, others: Sequence[Role | None]
) -> Role | tuple[Exponentials, int] | None:
    if name == "exp":
        scores = x if role.unshifted is None else role.unshifted
        exponentials = Exponentials(role.product, scores)
        return exponentials if role.normalized is None else (exponentials, role.normalized)
    of_rows = next((other for other in others if isinstance(other, RowValue)), None)
    if name == "sub" and of_rows is not None:
        return Scores(role.product, of_rows.scores, of_rows.lse_axis)
    return Scores(role.product)
