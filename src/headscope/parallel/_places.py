"""``Places``: which positions of a sequence each rank of a group holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headscope._support.arguments import check_type, kind, whole
from headscope.parallel._exchange import group_rank, group_size, join_parts

Run = slice
"""Consecutive positions, from start to stop - 1."""


@dataclass(frozen=True)
class Places:
    """The positions of a sequence that each rank of a group holds.

    Args:
        parts: for each rank of the group, its runs of consecutive positions, in the order in which it holds them.
        group: the process group; None = the default one.

    Raises:
        ValueError: a position of the sequence is on no rank, or on more than one.

    Examples:
        >>> from headscope.parallel import Places
        >>> print(Places(((slice(0, 2), slice(6, 8)), (slice(2, 6),))))
        rank 0: 0 to 1 and 6 to 7; rank 1: 2 to 5
    """

    parts: tuple[tuple[Run, ...], ...]
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        runs = sorted((run.start, run.stop) for part in self.parts for run in part)
        for (_, stop), (start, _) in pairwise([(0, 0), *runs]):
            if start != stop:
                low, high, where = (stop, start, "no rank") if start > stop else (start, stop, "more than one rank")
                what = f"position {low}" if high == low + 1 else f"positions {low} to {high - 1}"
                raise ValueError(f"places: {what} on {where}; expected each position of the sequence on exactly one")

    @classmethod
    def contiguous(cls, length: int, group: dist.ProcessGroup | None = None) -> Places:
        """Return places where rank r of n holds the r-th of n equal parts; the first ones are longer by at most 1.

        Under a causal mask the last rank has most of the work; see ``head_tail``.
        """
        return cls(tuple((run,) if run.start < run.stop else () for run in _cut(length, group_size(group))), group)

    @classmethod
    def head_tail(cls, length: int, group: dist.ProcessGroup | None = None) -> Places:
        """Return places where rank r of n holds parts r and 2n - 1 - r of 2n: equal work under a causal mask.

        Source: Llama 3 Team 2024, "The Llama 3 Herd of Models", section 3.3.2.
        """
        ranks = group_size(group)
        runs = _cut(length, 2 * ranks)
        pairs = ((runs[r], runs[2 * ranks - 1 - r]) for r in range(ranks))
        return cls(tuple(_joined(pair) for pair in pairs), group)

    @classmethod
    def of(cls, positions: Tensor, group: dist.ProcessGroup | None = None) -> Places:
        """Return places by their positions: those of every rank, integers [ranks, own]; or those of this rank, [own].

        Positions of this rank alone are exchanged: every rank of the group must call it then.

        Raises:
            TypeError: they are not integers.
            ValueError: they have other axes, or some position of the sequence is on no rank or on several.
        """
        check_type("positions", positions, Tensor, "a torch.Tensor")
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"positions: dtype is {kind(positions)}, expected integers")
        if positions.ndim not in (1, 2):
            raise ValueError(
                f"positions: is {list(positions.shape)}, expected [own], those of this rank, or [ranks, own]"
            )
        every: list[Any] = positions.tolist() if positions.ndim == 2 else [None] * group_size(group)
        if positions.ndim == 1 and len(every) > 1:
            dist.all_gather_object(every, positions.tolist(), group)
        elif positions.ndim == 1:
            every = [positions.tolist()]
        return cls(tuple(_runs(each) for each in every), group)

    def __str__(self) -> str:
        parts = (" and ".join(f"{run.start} to {run.stop - 1}" for run in part) or "none" for part in self.parts)
        return "; ".join(f"rank {rank}: {part}" for rank, part in enumerate(parts))

    @property
    def length(self) -> int:
        """The length of the sequence."""
        return sum(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions that each rank holds."""
        return tuple(sum(run.stop - run.start for run in part) for part in self.parts)

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return group_rank(self.group)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of this rank."""
        return self.parts[self.rank]

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions that this rank holds, int64 [its length]."""
        return self._positions(self.runs, device)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of a whole tensor that this rank holds, along the axis of the sequence.

        Raises:
            ValueError: the axis has another length than the sequence.
        """
        if x.shape[dim] != self.length:
            raise ValueError(
                f"x: axis {dim} is {x.shape[dim]}, expected {self.length}, the length of the sequence; got "
                f"{list(x.shape)}"
            )
        return torch.cat([x.narrow(dim, run.start, run.stop - run.start) for run in self.runs or (slice(0, 0),)], dim)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole tensor, on every rank, from the part of each; every rank of the group calls it.

        The gradient of a part is the sum of those of all ranks, as ``torch.distributed.nn.functional.all_gather``.

        Raises:
            ValueError: the axis has another length than this rank holds.
        """
        if x.shape[dim] != self.lengths[self.rank]:
            raise ValueError(
                f"x: axis {dim} is {x.shape[dim]}, expected {self.lengths[self.rank]}, the part of rank {self.rank}; "
                f"got {list(x.shape)}"
            )
        parts = join_parts(x.movedim(dim, 0), self.lengths, self.group)
        return self.in_order(parts, 0).movedim(0, dim)

    def in_order(self, parts: Tensor, dim: int) -> Tensor:
        """Return the sequence in order from the parts of all ranks, one after the other."""
        order = torch.cat([self._positions(part, "cpu") for part in self.parts])
        if torch.equal(order, torch.arange(len(order))):
            return parts
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return parts.index_select(dim, back.to(parts.device))

    def by_rank(self, whole_tensor: Tensor, dim: int) -> Tensor:
        """Invert ``in_order``: return the positions of rank 0, then those of rank 1, and so on."""
        order = torch.cat([self._positions(part, whole_tensor.device) for part in self.parts])
        return whole_tensor.index_select(dim, order)

    @staticmethod
    def _positions(runs: Sequence[Run], device: torch.device | str) -> Tensor:
        pieces = [torch.arange(run.start, run.stop, device=device) for run in runs]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.long, device=device)


Places.__module__ = "headscope.parallel"  # its public path


def _cut(length: int, parts: int) -> list[Run]:
    length = whole("length", length, 0)
    short, longer = divmod(length, parts)
    stops = list(accumulate(short + (n < longer) for n in range(parts)))
    return [slice(start, stop) for start, stop in pairwise([0, *stops])]


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the same runs without empty ones, consecutive ones as one."""
    joined: list[Run] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)


def _runs(positions: list[int]) -> tuple[Run, ...]:
    return _joined(slice(at, at + 1) for at in positions)
