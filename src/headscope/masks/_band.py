"""Bands: keys within reach of the query's position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from headscope._support.arguments import kind
from headscope.masks._base import Index, Mask, Sizes
from headscope.masks._codes import Code, RuleWriter
from headscope.masks._parameters import FAR, check_ids, is_whole, to_int
from headscope.masks._spans import clip_span

UNBOUNDED = (1 << 63) - 1  # the reach of an unbounded band; ``sys.maxsize``


@dataclass(frozen=True)
class Band(Mask):
    """Keys within reach of the query's position, both ends included.

    Query i stands at position ``i + offset``; keys from ``position - left`` to ``position + right`` are visible to it.

    Args:
        left: how many positions back, ``None`` = all; so are ``sys.maxsize`` and more.
        right: how many positions ahead, ``None`` = all; so are ``sys.maxsize`` and more.
        offset: the position of query 0: one number, or one for each batch entry (a sequence or a tensor [B]). By
            default K - Q: the queries are the last Q positions (bottom-right). torch's ``is_causal`` is top-left:
            ``offset=0``. Numbers are limited to ±2^48; a tensor, whose contents are not read, may hold any of 64 bits.

    Examples:
        >>> from headscope import masks
        >>> masks.Band(left=1, right=1).dense(1, 1, 3, 3)[0, 0].long()
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]])
    """

    left: int | None = None
    right: int | None = None
    offset: int | tuple[int, ...] | Tensor | None = None

    _by_value = True

    def __post_init__(self) -> None:
        for name in ("left", "right", "offset"):
            object.__setattr__(self, name, to_int(getattr(self, name)))
        if isinstance(self.offset, Sequence):
            object.__setattr__(self, "offset", tuple(map(to_int, self.offset)))

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        offset = self.offset
        if isinstance(offset, tuple):
            offset = torch.tensor(offset, device=b.device if isinstance(b, Tensor) else None)
        if isinstance(offset, Tensor):
            offset = offset[b] if offset.ndim else offset
        if offset is None:  # and without sizes (see `at`): the queries start where the keys do
            offset = 0
        left, right = reach(self.left), reach(self.right)
        gap = j - i - offset * 0  # of the shape of all three
        visible = torch.ones_like(gap, dtype=torch.bool) if isinstance(gap, Tensor) else torch.tensor(True)
        if left < UNBOUNDED:
            visible = visible & (gap >= _shifted(offset, -left))
        if right < UNBOUNDED:
            visible = visible & (gap <= _shifted(offset, right))
        return visible

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.offset,) if self.offset is not None and isinstance(self.offset, Tensor) else ()

    def planned_tensors(self) -> tuple[Tensor, ...]:
        return self.tensors()

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        return Band(self.left, self.right, copy(self.offset)) if isinstance(self.offset, Tensor) else self

    def at(self, queries: int, keys: int) -> Band:
        return Band(self.left, self.right, keys - queries) if self.offset is None else self

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        _, _, queries, keys = sizes
        offset = 0 if self.offset is None else self.offset  # an int stays as it is: it may be a compiler's SymInt
        if isinstance(offset, (Tensor, tuple)):
            offset = torch.as_tensor(offset, device=device).reshape(-1, 1)  # [B, 1]
        left, right = reach(self.left), reach(self.right)
        i = torch.arange(queries, device=device)[None]  # [1, Q]
        rows = i.expand(len(offset), queries) if isinstance(offset, Tensor) else i  # [B or 1, Q]
        low = i + _shifted(offset, -left) if left < UNBOUNDED else torch.zeros_like(rows)
        high = i + _shifted(offset, right + 1) if right < UNBOUNDED else torch.full_like(rows, keys)
        return clip_span(low, high, keys), None

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Band:
        offset = self.offset
        each = isinstance(offset, tuple) or (isinstance(offset, Tensor) and offset.ndim > 0)
        if not each or len(entries) == whole[0]:
            return self
        rows: Any = offset
        return Band(self.left, self.right, rows[entries.start : entries.stop])

    def reverse_queries(self, queries: int, keys: int) -> Mask:
        return ReversedBand(self.at(queries, keys), queries)

    def block(self, i: slice, j: slice, h: slice | None = None) -> Band:
        shift, offset = i.start - j.start, 0 if self.offset is None else self.offset
        moved = tuple(n + shift for n in offset) if isinstance(offset, tuple) else offset + shift
        return Band(self.left, self.right, moved)

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        codes += [Code.BAND, reach(self.left), reach(self.right)]
        if self.offset is None:
            codes += [Code.NO_OFFSET]
        elif isinstance(self.offset, Tensor):
            codes += [Code.OFFSET_TENSOR]
            parts += [self.offset]
        elif isinstance(self.offset, tuple):
            codes += [Code.OFFSETS, len(self.offset), *self.offset]
        else:
            codes += [Code.ONE_OFFSET, self.offset]

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        writer.add_spans(self.plan(*sizes).spans)

    def check_sizes(self, sizes: Sizes) -> None:
        for name, number in (("left", self.left), ("right", self.right)):
            if number is not None and not is_whole(number):
                raise TypeError(f"mask: Band({name}=...): expected a whole number or None, got {kind(number)}")
        batch, offset = sizes[0], self.offset
        if isinstance(offset, Tensor):
            check_ids("Band.offset", offset, {"B": batch} if offset.ndim else {})  # one number serves the whole batch
            return
        each = offset if isinstance(offset, tuple) else () if offset is None else (offset,)
        if not all(map(is_whole, each)):
            raise TypeError(
                f"mask: Band(offset=...): expected a whole number, or one for each batch entry, got {offset!r}"
            )
        if any(abs(number) > FAR for number in each):
            raise ValueError(f"mask: Band(offset=...): expected numbers from {-FAR} to {FAR}, got {offset!r}")
        if isinstance(offset, tuple) and len(offset) != batch:
            raise ValueError(
                f"mask: Band.offset has {len(offset)} numbers, expected {batch}, one for each batch entry (B)"
            )

    def is_causal(self, queries: int, keys: int) -> bool:
        return (  # sizes last: comparing symbolic ones adds a guard to a compiled graph
            not isinstance(self.offset, Tensor)  # one for each batch entry does not compare; a traced number does
            and (self.left, self.right) == (None, 0)
            and queries == keys
            and self.offset == 0
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Band) or isinstance(self.offset, Tensor):
            return self is other
        return not isinstance(other.offset, Tensor) and self._value() == other._value()

    def __hash__(self) -> int:
        return id(self) if self.tensors() else hash((self.left, self.right, self.offset))

    def _value(self) -> tuple[object, ...]:
        numbers = (self.left, self.right, *(self.offset if isinstance(self.offset, tuple) else (self.offset,)))
        return type(self.offset), numbers, tuple(map(type, numbers))  # 1.0 == 1, but is not a number of positions


@dataclass(frozen=True)
class ReversedBand(Mask):
    """A band with an offset and queries in reverse order: the result of ``Band.reverse_queries``."""

    band: Band
    queries: int

    _by_value = True

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.band.allows(b, h, self.queries - 1 - i, j)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.band.tensors()

    def planned_tensors(self) -> tuple[Tensor, ...]:
        return self.band.tensors()

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        band = self.band.copied(copy)
        return ReversedBand(band, self.queries) if isinstance(band, Band) else self

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        return self.band.to_spans(sizes, device)[0].flip(1), None

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Mask:
        return ReversedBand(self.band.part(entries, heads, whole), self.queries)

    def reverse_queries(self, queries: int, keys: int) -> Mask:
        return self.band

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        writer.add_spans(self.plan(*sizes).spans)

    def check_sizes(self, sizes: Sizes) -> None:
        self.band.check_sizes(sizes)


def reach(n: int | None) -> int:
    """Return the reach of a band, clamped to 64 bits; ``UNBOUNDED`` for None."""
    return UNBOUNDED if n is None else max(-UNBOUNDED, min(n, UNBOUNDED))


def _shifted(offset: int | Tensor, by: int) -> int | Tensor:
    """Add a number of up to 64 bits to an offset: exact within ``FAR``, and beyond it at least on the right side."""
    if isinstance(offset, Tensor):
        low, high = offset_limits(by)
        return offset.long().clamp(low, high) + by
    if isinstance(offset, torch.SymInt) or is_dynamo_compiling():  # checked; a comparison would become a guard
        return offset + max(-2 * FAR, min(by, 2 * FAR))
    return max(-FAR, min(offset + by, FAR))


def offset_limits(by: int) -> tuple[int | None, int | None]:
    """Return the range of offsets for which ``offset + by`` stays within ``FAR``; None if every 64-bit offset does."""
    low, high = -FAR - by, FAR - by
    return low if low > -UNBOUNDED else None, high if high < UNBOUNDED else None


def causal() -> Band:
    """Return the causal mask: each query attends to its own position and all before.

    The queries are the last Q positions.

    Examples:
        >>> from headscope import masks
        >>> masks.causal().dense(1, 1, 2, 3)[0, 0].long()  # two queries, the last of three positions
        tensor([[1, 1, 0],
                [1, 1, 1]])
    """
    return Band(None, 0)


def window(n: int) -> Band:
    """Return a sliding window: the last ``n`` keys, the query's own included (``causal`` is part of it).

    Examples:
        >>> from headscope import masks
        >>> masks.window(2).dense(1, 1, 3, 3)[0, 0].long()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]])
    """
    length = to_int(n)
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(f"n: window(n): expected a whole number, got {type(length).__name__}")
    if length < 1:
        raise ValueError(f"n: window({length}) would mask every key; expected at least 1 (the query's own key)")
    return Band(length - 1, 0)  # pyright: ignore[reportArgumentType]  # a SymInt counts as an int


for _class in (Band, ReversedBand):
    _class.__module__ = "headscope.masks"  # their public path
