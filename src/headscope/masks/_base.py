"""The base of all masks, their combinations, and the plan, the normal form of every mask.

``Mask``, its combinations and ``Plan`` refer to each other, so they share a module. Each other class of mask has its
own module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from headscope._support.bounded import BoundedTable
from headscope._support.torch_state import has_no_values, is_traced
from headscope.masks._codes import Code, RuleKind, RuleWriter
from headscope.masks._parameters import is_comparable
from headscope.masks._spans import are_causal, ascending_pair, bound_keys, first_keys, hull, intersect, within

Index: TypeAlias = "int | Tensor"
Sizes: TypeAlias = "tuple[int, int, int, int]"

PLANS = 64  # plans cached with a mask that holds tensors
SMALL = 16  # numbers that compare faster as a list than by a call of torch


class Mask(ABC):
    """The visible keys of each query. Masks without tensors compare and hash by value, those with tensors by identity.

    A subclass requires ``allows``, and ``tensors`` if it reads any. The other methods work for every mask; a subclass
    overrides those that it can compute faster.

    Examples:
        >>> from headscope import masks
        >>> class EvenDistance(masks.Mask):
        ...     def allows(self, b, h, i, j):
        ...         return (i - j) % 2 == 0
        >>> (EvenDistance() & masks.causal()).dense(1, 1, 4, 4)[0, 0, 3].long()
        tensor([0, 1, 0, 1])
    """

    _plans: _Plans | None = None
    _by_value = False  # nothing can change what it allows: it holds numbers only
    _spans_all_keys = False  # its plan always leaves every key to the rest

    @abstractmethod
    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        """Return whether key ``j`` is visible to query ``i``; the indices are tensors (or numbers) that broadcast."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors this mask reads, in a fixed order."""
        return ()

    def at(self, queries: int, keys: int) -> Mask:
        """Return the same mask with every position that depends on the sizes made explicit."""
        return self

    def leaves(self) -> Iterator[Mask]:
        """Yield the primitives this mask is made of."""
        yield self

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        """Return this mask over copies of the tensors whose values a plan depends on.

        A plan never reads the values of ``Dense``, nor those of a caller's own mask: these keep their tensors.
        """
        return self

    def planned_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors whose values ``to_spans`` reads."""
        return ()

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        """Return spans as ``Plan`` has them, and what they cannot express: by default all keys, and the mask itself.

        The branch taken may depend on sizes, but not on values on a device.
        """
        return first_keys(sizes[3], sizes[3], device), self

    def reverse_queries(self, queries: int, keys: int) -> Mask | None:
        """Return the same mask for queries in reverse order; None if only a filled Q x K matrix could express it."""
        return None

    def block(self, i: slice, j: slice, h: slice | None = None) -> Mask:
        """Return the mask of some queries, keys and heads, numbered from 0. Positions must be explicit: see ``at``."""
        return Moved(self, head=0 if h is None else h.start, query=i.start, key=j.start)

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Mask:
        """Return the mask of some batch entries and heads of [B, H]; the result numbers them from 0."""
        return self if entries.start == heads.start == 0 else Moved(self, entries.start, heads.start)

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        """Append this mask as codes and tensors, which ``mask_from_codes`` reads: by default Q x K booleans."""
        codes += [Code.DENSE]
        parts += [self.dense(*sizes, device)]

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        """Write this mask as rules of the native kernels: by default filled in, as Q x K booleans."""
        writer.add_table(self.dense(*sizes))

    def check_sizes(self, sizes: Sizes) -> None:
        """Raise unless this mask fits [B, H, Q, K]; its tensors are ordinary and on q's device.

        Raises:
            TypeError, ValueError: a parameter of the wrong kind or size.
        """
        if type(self).__hash__ is None and not self.tensors():
            hint = "masks without tensors compare and hash by value if the class is a @dataclass(frozen=True)"
            raise TypeError(f"mask: {type(self).__name__} cannot be hashed; {hint}")

    def is_constant(self) -> bool:
        """Return whether what the mask allows cannot change: no part holds a tensor or is of a caller's own class."""
        return not self.tensors() and all(leaf._by_value for leaf in self.leaves())

    def is_causal(self, queries: int, keys: int) -> bool:
        """Return whether it is known without a plan to allow exactly ``j <= i``, with as many queries as keys."""
        return False

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        """Return ``allows`` over a block of the matrix, broadcastable to [b, h, i, j]."""
        return self.allows(
            torch.arange(b.start, b.stop, device=device)[:, None, None, None],
            torch.arange(h.start, h.stop, device=device)[:, None, None],
            torch.arange(i.start, i.stop, device=device)[:, None],
            torch.arange(j.start, j.stop, device=device),
        )

    def dense(self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the whole matrix, boolean, [B, H, Q, K] (a view where it repeats)."""
        visible = self.at(queries, keys).tile(
            slice(0, batch), slice(0, heads), slice(0, queries), slice(0, keys), torch.device(device)
        )
        return visible.expand(batch, heads, queries, keys)

    def plan(self, batch: int, heads: int, queries: int, keys: int) -> Plan:
        """Return the normal form of this mask for these sizes.

        The plan is cached with the mask, together with copies of the tensors that it was made from. A later call
        compares the tensors with the copies. It therefore detects every write, including those that do not raise the
        version: ``torch.distributed``, numpy, DLPack and ``.data``. Comparing would wait for another device, so
        there each call makes a new plan.
        """
        sizes = (batch, heads, queries, keys)
        if torch.compiler.is_compiling() or is_traced():  # a plan made from traced tensors is useless to other calls
            return make_plan(self, sizes)
        plans = self._plans  # not by __dict__: once it exists, every attribute of the mask is slower
        if plans is None or not plans.is_current():
            if not self.tensors():
                return plan_by_value(self, sizes)
            read = {id(x): x for leaf in self.leaves() for x in leaf.planned_tensors()}
            if not all(map(is_comparable, read.values())):
                return make_plan(self, sizes)
            plans = _Plans(self, read)
            object.__setattr__(self, "_plans", plans)  # a mask is frozen
        return plans.of(self, sizes)

    def __and__(self, other: Mask) -> Mask:
        return And(self, _operand(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _operand(other))

    def __rand__(self, other: object) -> Mask:
        return And(_operand(other), self)

    def __ror__(self, other: object) -> Mask:
        return Or(_operand(other), self)

    def __invert__(self) -> Mask:
        raise TypeError("mask: ~ is not supported; invert a boolean tensor instead: masks.Dense(~tensor)")

    def __bool__(self) -> bool:
        raise TypeError("mask: has no truth value; combine masks with & and |, not with `and` and `or`")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_plans"}


def _operand(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    hint = "; for a boolean tensor, use masks.Dense(tensor)" if isinstance(other, Tensor) else ""
    raise TypeError(f"mask: & and | combine two masks, got {type(other).__name__}{hint}")


@dataclass(frozen=True)
class Moved(Mask):
    """A caller's own mask from a batch entry, head, query and key on: the result of ``Mask.part`` and ``block``."""

    mask: Mask
    entry: int = 0
    head: int = 0
    query: int = 0
    key: int = 0

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.mask.allows(b + self.entry, h + self.head, i + self.query, j + self.key)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.mask.tensors()

    def at(self, queries: int, keys: int) -> Mask:
        return replace(self, mask=self.mask.at(queries, keys))


@dataclass(frozen=True)
class _Pair(Mask):
    """A combination of two masks."""

    first: Mask
    second: Mask

    def tensors(self) -> tuple[Tensor, ...]:
        return self.first.tensors() + self.second.tensors()

    def leaves(self) -> Iterator[Mask]:
        yield from self.first.leaves()
        yield from self.second.leaves()

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        return type(self)(self.first.copied(copy), self.second.copied(copy))

    def at(self, queries: int, keys: int) -> Mask:
        return type(self)(self.first.at(queries, keys), self.second.at(queries, keys))

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Mask:
        return type(self)(self.first.part(entries, heads, whole), self.second.part(entries, heads, whole))

    def reverse_queries(self, queries: int, keys: int) -> Mask | None:
        first, second = (part.reverse_queries(queries, keys) for part in (self.first, self.second))
        return None if first is None or second is None else type(self)(first, second)

    def block(self, i: slice, j: slice, h: slice | None = None) -> Mask:
        return type(self)(self.first.block(i, j, h), self.second.block(i, j, h))

    def _encode(self, code: int, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        self.first.encode(sizes, device, codes, parts)
        self.second.encode(sizes, device, codes, parts)
        codes += [code]

    def _write_rules(self, kind: RuleKind, writer: RuleWriter, sizes: Sizes) -> None:
        self.first.write_rules(writer, sizes)
        self.second.write_rules(writer, sizes)
        writer.join(kind)


@dataclass(frozen=True)
class And(_Pair):
    """The keys that both masks allow; written ``first & second``."""

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.first.allows(b, h, i, j) & self.second.allows(b, h, i, j)

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        return self.first.tile(b, h, i, j, device) & self.second.tile(b, h, i, j, device)

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        (a, rest_a), (b, rest_b) = self.first.to_spans(sizes, device), self.second.to_spans(sizes, device)
        if a.shape[2] == b.shape[2] == 2:  # could result in three spans
            b, rest_b = hull(b, sizes[3]), self.second
        rest = rest_b if rest_a is None else rest_a if rest_b is None else And(rest_a, rest_b)
        return intersect(a, b, sizes[3]), rest

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        self._encode(Code.BOTH, sizes, device, codes, parts)

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        self._write_rules(RuleKind.BOTH, writer, sizes)


@dataclass(frozen=True)
class Or(_Pair):
    """The keys that either mask allows; written ``first | second``."""

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.first.allows(b, h, i, j) | self.second.allows(b, h, i, j)

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        return self.first.tile(b, h, i, j, device) | self.second.tile(b, h, i, j, device)

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        (a, rest_a), (b, rest_b) = self.first.to_spans(sizes, device), self.second.to_spans(sizes, device)
        keys = sizes[3]
        exact = rest_a is None and rest_b is None and a.shape[2] == b.shape[2] == 1
        pair = ascending_pair(hull(a, keys), hull(b, keys), keys)
        return (pair, None) if exact else (hull(pair, keys), self)

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        self._encode(Code.EITHER, sizes, device, codes, parts)

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        self._write_rules(RuleKind.EITHER, writer, sizes)


@dataclass(frozen=True, eq=False)
class Plan:
    """The normal form of every mask: ``j`` is in one of the spans of (b, i), and the rest allows it.

    Attributes:
        spans: integers [B or 1, Q or 1, n, 2] with n = 1 or 2: half-open key intervals, ascending and disjoint; an
            empty one is (K, K).
        rest: the part that spans cannot express, or None. ``rest.allows`` is evaluated only inside the spans.
        bounds: for each query the first and the last key + 1 over batch and spans, as numbers on the host, [Q or 1, 2];
            None where reading them would wait for a device or has no values (meta, compilation).
        full: the spans include every key of every query.
        everything: every key is visible to every query.
        is_causal: exactly ``j <= i``, with as many queries as keys.
        may_be_empty: some row may be without visible keys.
        originals: the caller's own tensors, where ``rest`` holds copies; None where it holds the originals.
        source: the planned mask, with explicit positions; fused kernels read its parts.

    Examples:
        >>> from headscope import masks
        >>> plan = masks.window(2).plan(1, 1, 3, 3)
        >>> plan.spans[0, :, 0].tolist()  # of each query: the first key, and the last key + 1
        [[0, 1], [0, 2], [1, 3]]
        >>> plan.rest is None
        True
    """

    spans: Tensor
    rest: Mask | None
    bounds: Tensor | None
    full: bool
    everything: bool
    is_causal: bool
    may_be_empty: bool
    originals: tuple[Tensor, ...] | None = None
    source: Mask | None = None
    _moved = cast("Plan | None", None)  # the last copy on another device; not a field

    def on(self, device: torch.device) -> Plan:
        """Return this plan with spans on a device, copied there once."""
        moved = self if self.spans.device == device else self._moved
        if moved is None or moved.spans.device != device:
            moved = replace(self, spans=self.spans.to(device))
            if not is_traced():  # else the copy is a tracer's
                object.__setattr__(self, "_moved", moved)
        return moved

    def read_again(self) -> tuple[Tensor, ...]:
        """Return the caller's tensors that the backward pass saves, so autograd raises after a write to them."""
        tensors = self.rest_tensors()  # a compiler cannot trace the condition of the next line
        return tensors if is_dynamo_compiling() else tuple(x for x in tensors if not x.is_inference())

    def rest_tensors(self) -> tuple[Tensor, ...]:
        """Return the caller's own tensors that ``rest`` stands for, in the order of ``rest.tensors()``."""
        if self.rest is None:
            return ()
        return self.rest.tensors() if self.originals is None else self.originals

    def tile(self, b: slice, h: slice, i: slice, j: slice) -> Tensor:
        """Return which keys of a block are visible, boolean, broadcastable to [b, h, i, j]."""
        spans = self.spans[within(b, self.spans.shape[0]), within(i, self.spans.shape[1])]  # [b, i, n, 2]
        spans = spans[:, None, :, :, :, None]  # [b, 1, i, n, 2, 1]
        keys = torch.arange(j.start, j.stop, device=spans.device)
        inside = (keys >= spans[..., 0, :]) & (keys < spans[..., 1, :])  # [b, 1, i, n, j]
        visible = inside[..., 0, :] if inside.shape[-2] == 1 else inside[..., 0, :] | inside[..., 1, :]
        return visible if self.rest is None else visible & self.rest.tile(b, h, i, j, spans.device)


class _Plans(BoundedTable["Sizes", Plan]):
    """The plans of one mask by sizes, made from copies of its tensors; current while the tensors equal the copies.

    The comparison is exact. It costs 3.5 µs for 4,096 ids, where planning takes 100 µs and attending more than 1 ms;
    few numbers, such as lengths [B], are compared as lists, in 0.3 µs. The copies also keep a plan and its rest
    consistent whatever is written later: a backward pass reads the mask of its forward pass.

    Args:
        mask: what to plan.
        read: its tensors whose values a plan depends on: those of ``Dense`` do not.
    """

    def __init__(self, mask: Mask, read: dict[int, Tensor]) -> None:
        super().__init__(PLANS)
        self._small = [(x, x.tolist()) for x in read.values() if x.numel() <= SMALL]
        self._large = [(x, x.detach().clone()) for x in read.values() if x.numel() > SMALL]
        self._anywhere = None if read else mask.tensors()[0]
        self._device = None if self._anywhere is None else self._anywhere.device  # where the plans lie

    def is_current(self) -> bool:
        """Return whether every tensor still equals its copy."""
        for x, values in self._small:
            if not x.is_cpu or x.tolist() != values:
                return False
        for x, copy in self._large:
            if not x.is_cpu or x.dtype != copy.dtype or not x.equal(copy):
                return False
        return self._anywhere is None or self._anywhere.device == self._device

    def of(self, mask: Mask, sizes: Sizes) -> Plan:
        """Return the mask's plan for these sizes."""
        plan = self.get(sizes)
        if plan is None:
            plan = make_plan(mask, sizes)
            if plan.rest is not None:
                plan = replace(plan, rest=plan.rest.copied(self._copy), originals=plan.rest.tensors())
            self.add(sizes, plan)
        return plan

    def _copy(self, x: Tensor) -> Tensor:
        for original, copy in self._large:
            if original is x:
                return copy
        for original, values in self._small:
            if original is x:
                return x.new_tensor(values).view(x.shape)  # an empty list has lost the axes
        return x


@lru_cache(maxsize=16)  # prepared calls hold more plans, with a limit for their length
def plan_by_value(mask: Mask, sizes: Sizes) -> Plan:
    """Return ``make_plan`` of a mask without tensors."""
    return make_plan(mask, sizes)


def make_plan(mask: Mask, sizes: Sizes) -> Plan:
    """Return the normal form of a mask."""
    _, _, queries, keys = sizes
    mask = mask.at(queries, keys)
    tensors = mask.tensors()
    device = tensors[0].device if tensors else torch.device("cpu")
    spans, rest = mask.to_spans(sizes, device)
    readable = device.type == "cpu" and spans.numel() > 0 and not has_no_values()
    if not readable:
        causal, full = mask.is_causal(queries, keys), mask._spans_all_keys
        return Plan(spans, rest, None, full=full, everything=False, is_causal=causal, may_be_empty=True, source=mask)
    # Spans ascend, empty ones last: the first of a row decides most. One number is compared before all of them.
    low, high = spans[:, :, 0, 0], spans[:, :, 0, 1]
    full = int(high[0, 0]) - int(low[0, 0]) == keys and bool((high - low == keys).all())
    return Plan(
        spans,
        rest,
        bound_keys(spans),
        full=full,
        everything=full and rest is None,
        is_causal=rest is None and are_causal(spans, queries, keys),
        may_be_empty=rest is not None or bool((low == keys).any()),
        source=mask,
    )


for _class in (Mask, And, Or, Moved, Plan):
    _class.__module__ = "headscope.masks"  # their public path
