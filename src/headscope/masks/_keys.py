"""Masks that every query shares: the first keys, and the keys before each batch entry's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._support.arguments import kind
from headscope.masks._base import Index, Mask, Sizes
from headscope.masks._codes import Code, RuleWriter
from headscope.masks._parameters import FAR, check_ids, is_whole, to_int, to_tensor
from headscope.masks._spans import clip_span, first_keys


@dataclass(frozen=True)
class Prefix(Mask):
    """The first ``n`` keys: ``j < n``.

    Examples:
        >>> from headscope import masks
        >>> (masks.Prefix(2) | masks.causal()).dense(1, 1, 3, 3)[0, 0].long()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [1, 1, 1]])
    """

    n: int

    _by_value = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", to_int(self.n))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and type(self.n) is type(other.n) and self.n == other.n

    def __hash__(self) -> int:
        return hash((Prefix, self.n))

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return torch.as_tensor(j < self.n)

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        return first_keys(self.n, sizes[3], device), None

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Mask:
        return self

    def reverse_queries(self, queries: int, keys: int) -> Mask:
        return self

    def block(self, i: slice, j: slice, h: slice | None = None) -> Mask:
        return Prefix(min(max(self.n - j.start, 0), j.stop - j.start))

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        codes += [Code.PREFIX, self.n]

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        writer.add_spans(self.plan(*sizes).spans)

    def check_sizes(self, sizes: Sizes) -> None:
        if not is_whole(self.n) or self.n < 0:
            got = kind(self.n) if isinstance(self.n, Tensor) else repr(self.n)
            raise ValueError(f"mask: Prefix(n): expected a whole number from 0, got {got}")
        if self.n > FAR:
            raise ValueError(f"mask: Prefix(n): expected a whole number up to {FAR}, got {self.n}")


@dataclass(frozen=True, eq=False)
class KeyLengths(Mask):
    """Keys before each batch entry's length, ``j < lengths[b]``; it does not move the diagonal.

    Args:
        lengths: integers [B]; keys from there on are padding, masked for every query.

    Examples:
        >>> import torch
        >>> from headscope import masks
        >>> masks.KeyLengths(torch.tensor([1, 3])).dense(2, 1, 1, 3)[:, 0, 0].long()
        tensor([[1, 0, 0],
                [1, 1, 1]])
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", to_tensor("lengths", self.lengths))

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return j < self.lengths[b]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.lengths,)

    def planned_tensors(self) -> tuple[Tensor, ...]:
        return (self.lengths,)

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        return KeyLengths(copy(self.lengths))

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        lengths = self.lengths[:, None]
        return clip_span(torch.zeros_like(lengths), lengths, sizes[3]), None

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Mask:
        return KeyLengths(self.lengths[entries.start : entries.stop]) if len(entries) < whole[0] else self

    def reverse_queries(self, queries: int, keys: int) -> Mask:
        return self

    def block(self, i: slice, j: slice, h: slice | None = None) -> Mask:
        return KeyLengths((self.lengths - j.start).clamp(0, j.stop - j.start))

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        codes += [Code.LENGTHS]
        parts += [self.lengths]

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        writer.add_spans(self.plan(*sizes).spans)

    def check_sizes(self, sizes: Sizes) -> None:
        check_ids("KeyLengths.lengths", self.lengths, {"B": sizes[0]})


for _class in (Prefix, KeyLengths):
    _class.__module__ = "headscope.masks"  # their public path
