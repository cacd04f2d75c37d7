"""The letters of the axes of a tensor, from where its numbers belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headscope.tracing._written.arrangement import Coordinate

Letters = Mapping[Coordinate, str]
UNKNOWN = "?"
MOST_LINES = 512  # along an axis, from which its letter is read: the first, and others spread evenly
CERTAIN = 1 << 18  # up to so many numbers are compared one by one


def name_axes(coordinates: Tensor, ids: Tensor, letters: Letters, usual: Sequence[str]) -> list[tuple[str, int]]:
    """Return the letter and the size of each axis of a tensor: those of the coordinates that change along it.

    Args:
        coordinates: where each number belongs, [6, ids].
        ids: of the tensor.
        letters: of the coordinates.
        usual: the letters in the usual order. An axis of size 1 has the first that no other axis has.
    """
    names: list[str | None] = [
        _name_axis(coordinates, ids, at, letters) if ids.shape[at] > 1 else None for at in range(ids.ndim)
    ]
    used = {letter for name in names if name for letter in name.split("·")}
    spare = [letter for letter in usual if letter not in used]
    for at in range(ids.ndim):
        if names[at] is None:
            names[at] = spare.pop(0) if spare and len(spare) >= sum(name is None for name in names[at:]) else "1"
    return [(name, size) for name, size in zip(unique([str(name) for name in names]), ids.shape, strict=True)]


def unique(names: Sequence[str]) -> list[str]:
    """Return names of which none is there twice: the second has a prime."""
    result: list[str] = []
    for name in names:
        while name in result:
            name += "′"
        result.append(name)
    return result


def _name_axis(coordinates: Tensor, ids: Tensor, at: int, letters: Letters) -> str:
    changing: list[tuple[int, str]] = []
    size = ids.shape[at]
    lines = ids.movedim(at, -1).reshape(-1, size)
    if len(lines) > MOST_LINES:
        chosen = torch.linspace(0, len(lines) - 1, MOST_LINES, dtype=torch.float64).long()
        lines = torch.cat([lines[:MOST_LINES], lines[chosen]])
    for coordinate, letter in letters.items():
        values = coordinates[coordinate][lines]
        known = (values >= 0).all(-1)
        values = values[known]
        if not len(values):
            continue
        changes = values.diff(dim=-1) != 0
        if bool(changes.any()):
            changing.append((int(changes.sum(-1).max()), letter))
    if not changing:
        return UNKNOWN
    return "·".join(letter for _, letter in sorted(changing, key=lambda each: each[0]))


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, in any order."""
    if a.numel() != b.numel() or not a.numel():
        return a.numel() == b.numel()
    if torch.stack(torch.aminmax(a)).tolist() != torch.stack(torch.aminmax(b)).tolist():
        return False
    if int(a.sum()) != int(b.sum()) or int((a * a).sum()) != int((b * b).sum()):
        return False
    return a.numel() > CERTAIN or bool(torch.equal(a.flatten().sort().values, b.flatten().sort().values))
