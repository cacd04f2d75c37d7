"""The weights of chosen heads: one entry for each run, and the sequences to which successive runs are joined."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from headscope._support.arguments import kind, number, whole
from headscope._support.hashing import hash_numbers

__all__ = ["CALL_GIB", "HeadWeights"]

CALL_GIB = 2.0
"""The largest size, in GiB, of the weights of chosen heads of one call, by default."""
GIB = 2**30
_ROUNDING = 1e-3  # the largest excess of a weight over 1


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The weights of chosen heads in one run, batch entry by batch entry.

    Attributes:
        heads: the chosen heads, ascending.
        queries: which queries the rows are, int64 [R].
        p: the weights, [B, heads, R, K]; 0 for masked keys and in rows without visible keys, NaN for the visible keys
            of a row with NaN or infinity in its logits.
        length: the number of queries of the run, Q.
        place: int64 [4]: the least and the largest place of query 0 among the keys according to its rows, the position
            of key 0, and in cross-attention a checksum of the keys.
        ends: of each batch entry the key before the first query and that of the last query, of one key/value head,
            [B, 2, D]; in a file a hash of each, int64 [B, 2, 1]. Empty if unknown, as in files of earlier versions.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> (run,) = observe(q, q, what=Observe(weights=[1], rows=2)).weights_runs
        >>> run.queries.tolist(), run.of(1)[0, 0].tolist()
        ([1, 3], [0.25, 0.25, 0.25, 0.25])
    """

    heads: tuple[int, ...]
    queries: Tensor
    p: Tensor
    length: int
    place: Tensor
    ends: Tensor = field(default_factory=partial(torch.empty, 0, 2, 0, device="cpu"))

    NOWHERE: ClassVar[int] = -(2**62)
    """In place of the place of query 0, if the queries are not at places among the keys."""

    def of(self, head: int) -> Tensor:
        """Return the weights of one head, [B, R, K], without a copy.

        Raises:
            ValueError: its weights were not observed.
        """
        if head not in self.heads:
            heads = ", ".join(map(str, self.heads))
            raise ValueError(f"head: got {head}, whose weights were not observed; expected one of the heads {heads}")
        return self.p[:, self.heads.index(head)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with tensors of their own: a view would include its whole storage."""
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in self.__dict__.items()}


HeadWeights.__module__ = "headscope.stats"  # its public path


@dataclass(frozen=True)
class _Run:
    """The place of a run.

    Attributes:
        start: the position of its first query; None in cross-attention, or if unknown.
        first_key: the position of its first key.
        source: a checksum of its keys, in cross-attention.
        sizes: B and K.
        length: the number of its queries.
        before, last: hashes of the keys before the first query, and of the last one, in all batch entries; empty if
            unknown.
    """

    start: int | None
    first_key: int
    source: int
    sizes: tuple[int, int]
    length: int
    before: frozenset[int]
    last: frozenset[int]

    @staticmethod
    def of(run: HeadWeights) -> _Run:
        least, most, first_key, source = run.place.tolist()
        start = least + first_key if least == most != HeadWeights.NOWHERE else None
        batch, keys = run.p.shape[0], run.p.shape[3]
        both = [frozenset(each) for each in hash_ends(run.ends)[..., 0].mT.tolist()] if run.ends.numel() else []
        places = (least - 1, least + run.length - 1)
        ends = [both[n] if both and 0 <= at < keys else frozenset[int]() for n, at in enumerate(places)]
        return _Run(start, first_key, source, (batch, keys), run.length, *ends)

    def continues(self, before: _Run) -> bool:
        """Return whether the queries of this run continue those of the run before it."""
        if self.sizes[0] != before.sizes[0]:
            return False
        if self.start is not None and before.start is not None:
            follows = self.start == before.start + before.length
            # a beam search moves the batch entries, so each continues some entry of the run before
            return follows and (not self.before or not before.last or self.before <= before.last)
        if self.start is not None or before.start is not None or not self.source:
            return False
        return self.length == 1 and (self.source, self.sizes) == (before.source, before.sizes)


def sequences(runs: Sequence[HeadWeights], head: int) -> list[tuple[Tensor, Tensor]]:
    """Return the weights [B, R, K] of one head, and the query of each row [R], of each sequence.

    Successive runs are joined if the queries of a run continue those of the one before: in self-attention if they begin
    at the position after its last query, and the key there is the same, as with a key/value cache; in cross-attention
    if the run has one query and the same keys. The weights are 0 for keys that a run did not have.
    """
    groups: list[list[tuple[HeadWeights, _Run]]] = []
    for run in runs:
        at = _Run.of(run)
        if groups and at.continues(groups[-1][-1][1]):
            groups[-1].append((run, at))
        else:
            groups.append([(run, at)])
    return [_join(group, head) for group in groups]


def _join(group: Sequence[tuple[HeadWeights, _Run]], head: int) -> tuple[Tensor, Tensor]:
    """Return the weights of one head, and the query of each row, of the runs of one sequence."""
    if len(group) == 1 and not group[0][1].first_key:
        return group[0][0].of(head), group[0][0].queries
    pieces = [run.of(head) for run, _ in group]
    width = max(at.first_key + at.sizes[1] for _, at in group)
    p = pieces[0].new_zeros(pieces[0].shape[0], sum(piece.shape[1] for piece in pieces), width)
    queries: list[Tensor] = []
    row = before = 0
    for piece, (run, at) in zip(pieces, group, strict=True):
        rows = slice(row, row + piece.shape[1])
        p[:, rows, at.first_key : at.first_key + at.sizes[1]] = piece
        queries.append(run.queries + before)
        row, before = rows.stop, before + at.length
    return p, torch.cat(queries)


def merge_weights(several: Iterable[tuple[HeadWeights, ...]]) -> tuple[HeadWeights, ...]:
    """Return the runs of all, in order.

    Raises:
        ValueError: they are of different heads.
    """
    runs = [run for each in several for run in each]
    if other := next((run.heads for run in runs if run.heads != runs[0].heads), None):
        raise ValueError(f"weights: cannot merge those of heads {listed(runs[0].heads)} with those of {listed(other)}")
    return tuple(runs)


def count_rows(rows: int | Tensor | None, queries: int) -> int:
    """Return the number of queries that ``Observe(rows=...)`` selects in some head of some batch entry."""
    if rows is None:
        return queries
    if isinstance(rows, int):
        return min(rows, queries)
    some = rows.flatten(0, -2).any(0) if rows.ndim > 1 else rows.reshape(-1)
    return int(some.sum()) if len(some) != 1 else queries * int(some)


def head_numbers(heads: object) -> tuple[int, ...]:
    """Return the numbers of chosen heads, ascending.

    Raises:
        TypeError: it is not a collection of whole numbers.
        ValueError: a number is below 0, or there twice.
    """
    if not isinstance(heads, Collection) or isinstance(heads, (str, bytes, Tensor)):
        raise TypeError(f"weights: got {kind(heads)}, expected a tuple of heads, such as (0, 5)")
    numbers = sorted(whole("weights", head, 0) for head in heads)
    if len({*numbers}) < len(numbers):
        raise ValueError(f"weights: got {listed(numbers)}, expected each head once")
    return tuple(numbers)


def check_limit(limit: object) -> float:
    """Return a limit in GiB.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0.
    """
    if not 0 < (gib := number("weights_gib", limit)) < math.inf:
        raise ValueError(f"weights_gib: got {gib:g}, expected a finite number above 0")
    return gib


def listed(heads: Sequence[int]) -> str:
    """Return the first heads as text."""
    shown = ", ".join(map(str, heads[:8]))
    return shown if len(heads) <= 8 else f"{shown} and {len(heads) - 8} more"


def check_weights(under: str, run: HeadWeights, heads: int) -> HeadWeights:
    """Return a run of a file, after checks.

    Raises:
        ValueError: impossible heads, queries or weights.
    """
    if list(run.heads) != sorted({*run.heads}) or not run.heads or not all(0 <= h < heads for h in run.heads):
        raise ValueError(f"{under}/heads: got {list(run.heads)}, expected different ones of {heads}, ascending")
    if run.queries.tolist() != sorted({*run.queries.tolist()}):
        raise ValueError(f"{under}/queries: expected different queries, ascending")
    if bool(((run.p < 0) | (run.p > 1 + _ROUNDING)).any()):
        raise ValueError(f"{under}/p: holds {float(run.p.min()):g} to {float(run.p.max()):g}, expected weights")
    if not 0 <= int(run.place[2]) < 2**40:
        raise ValueError(f"{under}/place: got {int(run.place[2])} for the position of key 0, expected one from 0")
    return run


def hash_ends(ends: Tensor) -> Tensor:
    """Return a hash of each key of ``HeadWeights.ends``, int64 [B, 2, 1]; they are stored so."""
    return ends if ends.dtype == torch.int64 else hash_numbers(ends)[..., None]


def store_weights(runs: Iterable[HeadWeights], under: str, tensors: dict[str, Tensor]) -> None:
    """Store the tensors of all runs."""
    for n, run in enumerate(runs):
        tensors |= {f"{under}/weights/{n}/{what}": getattr(run, what) for what in ("queries", "p", "place")}
        if run.ends.numel():
            tensors[f"{under}/weights/{n}/ends"] = hash_ends(run.ends)
