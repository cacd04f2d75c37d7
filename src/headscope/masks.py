"""Masks as values: say what may be seen, combine with ``&`` and ``|``.

A mask answers one question, ``allows(b, h, i, j)``: may query ``i`` of head ``h`` in batch entry ``b`` see key ``j``?
True means *attend*, as in ``scaled_dot_product_attention``; the masks of ``nn.MultiheadAttention`` mean the opposite.

``plan`` brings any combination to one normal form, so that the backends never meet the classes below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from headscope._support.torch_state import has_no_values, is_traced

__all__ = ["Band", "Dense", "Documents", "KeyLengths", "Mask", "Plan", "Prefix", "causal", "window"]

Index: TypeAlias = "int | Tensor"
Sizes: TypeAlias = "tuple[int, int, int, int]"

FAR = 1 << 48  # positions; no sequence is longer
LAST_OFFSET = 1 << 61  # further ones count as this: added to a position, int64 must not overflow
PLANS = 64  # plans kept with a mask that holds tensors
SMALL = 16  # numbers that compare faster as a list than by a call of torch


class Mask(ABC):
    """What may be seen. Masks without tensors compare and hash by value, those with tensors by identity."""

    _plans: _Plans | None = None

    @abstractmethod
    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        """Whether query ``i`` may see key ``j``; the indices are tensors (or numbers) that broadcast."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors this mask reads, in a fixed order."""
        return ()

    def at(self, queries: int, keys: int) -> Mask:
        """The same mask with every position that depends on the sizes made explicit."""
        return self

    def leaves(self) -> Iterator[Mask]:
        """The primitives this mask is made of."""
        yield self

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        """Return this mask over copies of the tensors whose values a plan depends on.

        A plan never reads the values of ``Dense``, nor those of a caller's own mask: these keep their tensors.
        """
        return self

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        """``allows`` over a block of the matrix, broadcastable to [b, h, i, j]."""
        return self.allows(
            torch.arange(b.start, b.stop, device=device)[:, None, None, None],
            torch.arange(h.start, h.stop, device=device)[:, None, None],
            torch.arange(i.start, i.stop, device=device)[:, None],
            torch.arange(j.start, j.stop, device=device),
        )

    def dense(self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """The whole matrix, boolean, [B, H, Q, K] (a view where it repeats)."""
        seen = self.at(queries, keys).tile(
            slice(0, batch), slice(0, heads), slice(0, queries), slice(0, keys), torch.device(device)
        )
        return seen.expand(batch, heads, queries, keys)

    def plan(self, batch: int, heads: int, queries: int, keys: int) -> Plan:
        """Return the normal form of this mask for these sizes.

        The plan is cached with the mask, together with copies of the tensors that it was made from. A later call
        compares the tensors with the copies. It therefore notices every write: those of ``torch.distributed``, numpy,
        DLPack and ``.data`` raise no version. Comparing would wait for another device, so there each call plans anew.
        """
        sizes = (batch, heads, queries, keys)
        if torch.compiler.is_compiling() or is_traced():  # a plan made from traced tensors is useless to other calls
            return _plan(self, sizes)
        plans = self._plans  # not by __dict__: once it exists, every attribute of the mask is slower
        if plans is None or not plans.is_current():
            if not self.tensors():
                return _plan_by_value(self, sizes)
            read = _read_by_plans(self)
            if not all(map(_is_comparable, read.values())):
                return _plan(self, sizes)
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
        raise TypeError("a mask has no complement; a boolean tensor has one: masks.Dense(~tensor)")

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & and |, not with `and` and `or`")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_plans"}


def _operand(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    hint = "; a boolean tensor is one as masks.Dense(tensor)" if isinstance(other, Tensor) else ""
    raise TypeError(f"a mask combines with masks by & and |, got {type(other).__name__}{hint}")


@dataclass(frozen=True)
class Band(Mask):
    """Keys within reach of the query's position, both ends included.

    Query i stands at position ``i + offset`` and may see keys from ``position - left`` to ``position + right``.

    Args:
        left: how many positions back, ``None`` = all.
        right: how many positions ahead, ``None`` = all.
        offset: the position of query 0: one number, or one for each batch entry (a sequence or a tensor [B]). By
            default K - Q: the queries are the last Q positions (bottom-right). torch's ``is_causal`` is top-left:
            ``offset=0``.
    """

    left: int | None = None
    right: int | None = None
    offset: int | tuple[int, ...] | Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right", "offset"):
            object.__setattr__(self, name, _as_int(getattr(self, name)))
        if isinstance(self.offset, Sequence):
            object.__setattr__(self, "offset", tuple(map(_as_int, self.offset)))

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        offset = self.offset
        if isinstance(offset, tuple):
            offset = torch.tensor(offset, device=b.device if isinstance(b, Tensor) else None)
        if isinstance(offset, Tensor):
            offset = _within_reach(offset)
            offset = offset[b] if offset.ndim else offset
        # without an offset and without sizes (see `at`) the queries start where the keys do
        gap = j - (i + (0 if offset is None else offset))
        seen = torch.ones_like(gap, dtype=torch.bool) if isinstance(gap, Tensor) else torch.tensor(True)
        if self.left is not None:
            seen = seen & (gap >= -_reach(self.left))
        if self.right is not None:
            seen = seen & (gap <= _reach(self.right))
        return seen

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.offset,) if self.offset is not None and isinstance(self.offset, Tensor) else ()

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        return Band(self.left, self.right, copy(self.offset)) if isinstance(self.offset, Tensor) else self

    def at(self, queries: int, keys: int) -> Mask:
        return Band(self.left, self.right, keys - queries) if self.offset is None else self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Band) or isinstance(self.offset, Tensor):
            return self is other
        return not isinstance(other.offset, Tensor) and self._value() == other._value()

    def __hash__(self) -> int:
        return id(self) if self.tensors() else hash((self.left, self.right, self.offset))

    def _value(self) -> tuple[object, ...]:
        said = (self.left, self.right, *(self.offset if isinstance(self.offset, tuple) else (self.offset,)))
        return type(self.offset), said, tuple(map(type, said))  # 1.0 is 1, but no number of positions


@dataclass(frozen=True)
class Prefix(Mask):
    """The first ``n`` keys: ``j < n``."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _as_int(self.n))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and type(self.n) is type(other.n) and self.n == other.n

    def __hash__(self) -> int:
        return hash((Prefix, self.n))

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return torch.as_tensor(j < self.n)


@dataclass(frozen=True)
class Turned(Mask):
    """A band with an offset, whose queries come last first: what ``turned`` makes of it."""

    band: Band
    queries: int

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.band.allows(b, h, self.queries - 1 - i, j)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.band.tensors()

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        band = self.band.copied(copy)
        return Turned(band, self.queries) if isinstance(band, Band) else self


@dataclass(frozen=True, eq=False)
class KeyLengths(Mask):
    """Keys before each batch entry's length, ``j < lengths[b]``; it does not move the diagonal.

    Args:
        lengths: integers [B]; keys from there on are padding, which no query sees.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _as_tensor("lengths", self.lengths))

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return j < self.lengths[b]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.lengths,)

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        return KeyLengths(copy(self.lengths))


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Keys of the query's own document: ``q_ids[b, i] == k_ids[b, j]``.

    Args:
        q_ids: integers [B, Q], the document of each query.
        k_ids: integers [B, K], the document of each key; by default those of the queries.
    """

    q_ids: Tensor
    k_ids: Tensor = field(default=None)  # pyright: ignore[reportAssignmentType]  # filled in __post_init__

    def __post_init__(self) -> None:
        q_ids = _as_tensor("q_ids", self.q_ids)
        k_ids = _as_tensor("k_ids", self.k_ids) if self.k_ids is not None else q_ids  # pyright: ignore[reportUnnecessaryComparison]
        object.__setattr__(self, "q_ids", q_ids)
        object.__setattr__(self, "k_ids", k_ids)

    @classmethod
    def from_cu_seqlens(cls, q: Tensor, k: Tensor | None = None) -> Documents:
        """Of packed sequences [1, total, ...], by where each begins: 0, 3, 5 are tokens 0 to 2, and 3 and 4.

        Args:
            q: cumulative lengths of the queries' sequences, integers [n + 1] from 0, as flash-attention takes them.
            k: of the keys' sequences, as many; by default those of the queries.

        Raises:
            TypeError, ValueError: they are not that.
        """
        q_ids = _ids_of("q", q)
        if k is None:
            return cls(q_ids, q_ids)
        k_ids = _ids_of("k", k)
        if len(k) != len(q):
            raise ValueError(
                f"k: has {len(k)} numbers, wanted {len(q)}, as q: one sequence of keys for each of queries"
            )
        return cls(q_ids, k_ids)

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        b_q, b_k = (0 if len(ids) == 1 else b for ids in (self.q_ids, self.k_ids))  # one row serves every batch entry
        return self.q_ids[b_q, i] == self.k_ids[b_k, j]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_ids, self.k_ids)

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        return Documents(copy(self.q_ids), copy(self.k_ids))


def _as_int(given: object) -> object:
    """A whole number of another library as an int; anything else as it is, for ``Call`` to judge."""
    if given is None or type(given) in (int, bool, tuple, Tensor) or not isinstance(given, Integral):
        return given
    return int(given)


def _as_tensor(name: str, given: object) -> Tensor:
    """A tensor stays where it is, whatever the default device."""
    if isinstance(given, Tensor):
        return given
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: got {type(given).__name__}, wanted a tensor, or what torch makes one of") from error


def is_integral(x: Tensor) -> bool:
    """Whether it holds whole numbers."""
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def _ids_of(name: str, cu_seqlens: Tensor) -> Tensor:
    """[n + 1] cumulative lengths -> [1, total], the number of each token's sequence."""
    if not isinstance(cu_seqlens, Tensor) or not is_integral(cu_seqlens):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{name}: got {getattr(cu_seqlens, 'dtype', type(cu_seqlens).__name__)}, wanted integers [n + 1]"
        )
    if cu_seqlens.ndim != 1:
        raise ValueError(f"{name}: is {list(cu_seqlens.shape)}, wanted [n + 1]: cumulative lengths from 0")
    lengths = cu_seqlens.diff()
    if len(cu_seqlens) == 0 or int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name}: got {cu_seqlens.tolist()}, wanted cumulative lengths: 0, and then never less")
    return torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)[None]  # [1, total]


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean tensor that broadcasts to [B, H, Q, K], True = may be seen.

    ``nn.MultiheadAttention`` writes True for what may *not* be seen: pass ``Dense(~attn_mask)``.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", _as_tensor("tensor", self.tensor))

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        full = self._four_axes()
        return full[tuple(0 if size == 1 else index for size, index in zip(full.shape, (b, h, i, j), strict=True))]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        full = self._four_axes()
        return full[tuple(slice(None) if n == 1 else at for n, at in zip(full.shape, (b, h, i, j), strict=True))]

    def _four_axes(self) -> Tensor:
        return self.tensor[(None,) * (4 - self.tensor.ndim)]


@dataclass(frozen=True)
class _Pair(Mask):
    """Two masks, combined."""

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


@dataclass(frozen=True)
class And(_Pair):
    """What both masks allow; written ``first & second``."""

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.first.allows(b, h, i, j) & self.second.allows(b, h, i, j)

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        return self.first.tile(b, h, i, j, device) & self.second.tile(b, h, i, j, device)


@dataclass(frozen=True)
class Or(_Pair):
    """What either mask allows; written ``first | second``."""

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.first.allows(b, h, i, j) | self.second.allows(b, h, i, j)

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        return self.first.tile(b, h, i, j, device) | self.second.tile(b, h, i, j, device)


def causal() -> Band:
    """Each query sees its own position and everything before it. Bottom-right: the queries are the last Q positions."""
    return Band(None, 0)


def window(n: int) -> Band:
    """The last ``n`` keys, the query's own included: a sliding window (with ``causal`` already in it)."""
    n = _as_int(n)  # pyright: ignore[reportAssignmentType]  # checked in the next line
    if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"n: window wants a whole number, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"n: window({n}) would see nothing; wanted at least 1 (the query's own key)")
    return Band(n - 1, 0)


def is_constant(mask: Mask) -> bool:
    """Whether nothing can change what the mask allows: no part holds a tensor or is of a caller's own class."""
    return not mask.tensors() and all(isinstance(leaf, (Band, Prefix, Turned)) for leaf in mask.leaves())


def turned(mask: Mask, queries: int, keys: int) -> Mask | None:
    """The same of queries that come last first, and back; None where that cannot be said without filling it in."""
    # no match: the compiler of older versions of torch cannot read one with classes
    if isinstance(mask, Band):
        return Turned(mask if mask.offset is not None else Band(mask.left, mask.right, keys - queries), queries)
    if isinstance(mask, Turned):
        return mask.band
    if isinstance(mask, (Prefix, KeyLengths)):
        return mask
    if isinstance(mask, Documents):
        return Documents(mask.q_ids.flip(-1), mask.k_ids)
    if isinstance(mask, Dense):
        return Dense(mask.tensor.flip(-2)) if mask.tensor.ndim > 1 else mask
    if isinstance(mask, (And, Or)):
        first, second = (turned(part, queries, keys) for part in (mask.first, mask.second))
        return None if first is None or second is None else type(mask)(first, second)
    return None


# ---------------------------------------------------------------- the normal form


@dataclass(frozen=True, eq=False)
class Plan:
    """What a mask comes to, whatever it was made of: ``j`` in one of the spans of (b, i), and the rest allows it.

    Attributes:
        spans: integers [B or 1, Q or 1, n, 2] with n = 1 or 2: half-open key intervals, ascending and disjoint; an
            empty one is (K, K).
        rest: what the spans cannot say, or None. ``rest.allows`` is asked only inside the spans.
        bounds: for each query the first and the last key + 1 over batch and spans, as numbers on the host, [Q or 1, 2];
            None where reading them would wait for a device or has no values (meta, compilation).
        full: the spans leave out no key of any query.
        everything: every query may see every key.
        is_causal: exactly ``j <= i``, with as many queries as keys.
        may_be_empty: some row may see nothing.
        originals: the caller's own tensors, where ``rest`` holds copies; None where it holds the originals.
    """

    spans: Tensor
    rest: Mask | None
    bounds: Tensor | None
    full: bool
    everything: bool
    is_causal: bool
    may_be_empty: bool
    originals: tuple[Tensor, ...] | None = None

    def read_again(self) -> tuple[Tensor, ...]:
        """Return the caller's tensors that the backward pass saves, so that autograd refuses a write it can notice."""
        held = self.rest_tensors()  # a compiler cannot follow the question of the next line
        return held if is_dynamo_compiling() else tuple(x for x in held if not x.is_inference())

    def rest_tensors(self) -> tuple[Tensor, ...]:
        """Return the caller's own tensors that ``rest`` stands for, in the order of ``rest.tensors()``."""
        if self.rest is None:
            return ()
        return self.rest.tensors() if self.originals is None else self.originals

    def tile(self, b: slice, h: slice, i: slice, j: slice) -> Tensor:
        """What may be seen in a block, boolean, broadcastable to [b, h, i, j]."""
        spans = self.spans[_within(b, self.spans.shape[0]), _within(i, self.spans.shape[1])]  # [b, i, n, 2]
        spans = spans[:, None, :, :, :, None]  # [b, 1, i, n, 2, 1]
        keys = torch.arange(j.start, j.stop, device=spans.device)
        inside = (keys >= spans[..., 0, :]) & (keys < spans[..., 1, :])  # [b, 1, i, n, j]
        seen = inside[..., 0, :] if inside.shape[-2] == 1 else inside[..., 0, :] | inside[..., 1, :]
        return seen if self.rest is None else seen & self.rest.tile(b, h, i, j, spans.device)


def _within(block: slice, size: int) -> slice:
    return slice(None) if size == 1 else block


class _Plans(dict["Sizes", Plan]):
    """The plans of one mask by sizes, made from copies of its tensors; current while the tensors equal the copies.

    The comparison is exact. It costs 3.5 µs for 4,096 ids, where planning takes 100 µs and attending more than 1 ms;
    few numbers, such as lengths [B], are compared as lists, in 0.3 µs. The copies also keep a plan and its rest
    consistent whatever is written later: a backward pass reads the mask of its forward pass.

    Args:
        mask: what to plan.
        read: its tensors whose values a plan depends on: those of ``Dense`` do not.
    """

    def __init__(self, mask: Mask, read: dict[int, Tensor]) -> None:
        super().__init__()
        self._small = [(x, x.tolist()) for x in read.values() if x.numel() <= SMALL]
        self._large = [(x, x.detach().clone()) for x in read.values() if x.numel() > SMALL]
        self._anywhere = None if read else mask.tensors()[0]
        self._device = None if self._anywhere is None else self._anywhere.device  # where the plans lie

    def is_current(self) -> bool:
        """Whether every tensor still holds what its copy holds."""
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
            if len(self) >= PLANS:  # so many sizes come only from a length that grows with every call
                self.clear()
            plan = _plan(mask, sizes)
            if plan.rest is not None:
                plan = replace(plan, rest=plan.rest.copied(self._copy), originals=plan.rest.tensors())
            self[sizes] = plan
        return plan

    def _copy(self, x: Tensor) -> Tensor:
        for original, copy in self._large:
            if original is x:
                return copy
        for original, values in self._small:
            if original is x:
                return x.new_tensor(values)
        return x


def _read_by_plans(mask: Mask) -> dict[int, Tensor]:
    """The tensors whose values a plan depends on, each once, by id."""
    kinds = (KeyLengths, Documents, Band, Turned)
    return {id(x): x for leaf in mask.leaves() if isinstance(leaf, kinds) for x in leaf.tensors()}


def _is_comparable(x: Tensor) -> bool:
    """Whether its values can be compared without waiting for a device: those of a plain tensor on the CPU."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.layout == torch.strided and not x.is_inference()
    return plain and not (x.is_neg() or x._is_zerotensor())  # these two refuse new_tensor and tolist


@lru_cache(maxsize=16)  # functional keeps more, with a limit for their length
def _plan_by_value(mask: Mask, sizes: Sizes) -> Plan:
    return _plan(mask, sizes)


def _plan(mask: Mask, sizes: Sizes) -> Plan:
    _, _, queries, keys = sizes
    mask = mask.at(queries, keys)
    tensors = mask.tensors()
    device = tensors[0].device if tensors else torch.device("cpu")
    spans, rest = _spans(mask, sizes, device)
    readable = device.type == "cpu" and spans.numel() > 0 and not has_no_values()
    if not readable:
        square = (  # sizes last: what is asked of those that are open is a guard of a compiler's graph
            isinstance(mask, Band)
            and not isinstance(mask.offset, Tensor)  # one for each batch entry does not compare; a traced number does
            and (mask.left, mask.right) == (None, 0)
            and queries == keys
            and mask.offset == 0
        )
        full = isinstance(mask, Dense)
        return Plan(spans, rest, None, full=full, everything=False, is_causal=square, may_be_empty=True)
    # They ascend, empty ones last: the first of a row says most. Looks at one number come before those at all.
    low, high = spans[:, :, 0, 0], spans[:, :, 0, 1]
    full = int(high[0, 0]) - int(low[0, 0]) == keys and bool((high - low == keys).all())
    return Plan(
        spans,
        rest,
        _bounds(spans),
        full=full,
        everything=full and rest is None,
        is_causal=_is_causal(spans, rest, queries, keys),
        may_be_empty=rest is not None or bool((low == keys).any()),
    )


def _bounds(spans: Tensor) -> Tensor:
    """[B or 1, q, n, 2] -> the first and the last key + 1 of each query, [q, 2]; of none, (K, 0)."""
    low, high = spans[:, :, 0, 0], spans[..., 1]
    last = torch.where(high > spans[..., 0], high, 0).amax(-1)
    if len(spans) == 1:  # a minimum over an axis of one takes a hundred times as long
        return torch.stack([low[0], last[0]], -1)
    return torch.stack([low.amin(0), last.amax(0)], -1)


def _is_causal(spans: Tensor, rest: Mask | None, queries: int, keys: int) -> bool:
    if rest is not None or queries != keys or spans.shape[:3] != (1, queries, 1):
        return False
    low, high = spans[0, :, 0].unbind(-1)
    if low[-1] != 0 or high[0] != 1:
        return False
    return bool((low == 0).all()) and torch.equal(high, torch.arange(1, keys + 1, device=spans.device))


def _spans(mask: Mask, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
    """The spans of a mask and what they leave unsaid. The branch taken depends on sizes, not on a device's values."""
    keys = sizes[3]
    # no match: the compiler of older versions of torch cannot read one with classes
    if isinstance(mask, Band):
        return _band(mask, sizes, device), None
    if isinstance(mask, Turned):
        return _band(mask.band, sizes, device).flip(1), None
    if isinstance(mask, Prefix):
        return _span(torch.zeros(1, 1, device=device), torch.full((1, 1), mask.n, device=device), keys), None
    if isinstance(mask, KeyLengths):
        lengths = mask.lengths[:, None]
        return _span(torch.zeros_like(lengths), lengths, keys), None
    if isinstance(mask, Documents):
        return _documents(mask, keys)
    if isinstance(mask, And):
        return _both(mask, sizes, device)
    if isinstance(mask, Or):
        return _either(mask, sizes, device)
    return _span(torch.zeros(1, 1, device=device), torch.full((1, 1), keys, device=device), keys), mask


def _span(low: Tensor, high: Tensor, keys: int) -> Tensor:
    """[b, q] ends -> [b, q, 1, 2], cut to the keys there are, an empty one moved to (K, K)."""
    low, high = low.long().clamp(0, keys), high.long().clamp(0, keys)
    low, high = torch.broadcast_tensors(low, high)
    visible = high > low
    return torch.stack([torch.where(visible, low, keys), torch.where(visible, high, keys)], -1)[:, :, None]


def _band(mask: Band, sizes: Sizes, device: torch.device) -> Tensor:
    _, _, queries, keys = sizes
    offset = 0 if mask.offset is None else mask.offset  # a number stays one: it may be a compiler's
    if isinstance(offset, (Tensor, tuple)):
        offset = _within_reach(torch.as_tensor(offset, device=device)).reshape(-1, 1)  # [B, 1]
    position = torch.arange(queries, device=device)[None] + offset  # [B or 1, Q]
    low = position - _reach(mask.left) if mask.left is not None else torch.zeros_like(position)
    high = position + _reach(mask.right) + 1 if mask.right is not None else torch.full_like(position, keys)
    return _span(low, high, keys)


def _reach(n: int) -> int:
    """A reach as wide as anybody needs, so that ``sys.maxsize`` for "unbounded" does not overflow."""
    return max(-FAR, min(n, FAR))


def _within_reach(offset: Tensor) -> Tensor:
    """Bound offsets to what can be added to a position. No reach spans so many positions, so nothing else changes."""
    return offset.long().clamp(-LAST_OFFSET, LAST_OFFSET)


def _documents(mask: Documents, keys: int) -> tuple[Tensor, Mask | None]:
    """From the first to the last key of the query's document; other documents may lie between."""
    if mask.q_ids is mask.k_ids and mask.k_ids.device.type == "cpu" and not has_no_values() and mask.k_ids.numel():
        packed = _packed(mask.k_ids)
        if packed is not None:
            return packed, None
    rows = len(mask.k_ids) if len(mask.q_ids) == 1 else len(mask.q_ids)  # one row serves every batch entry
    q_ids, k_ids = (ids.long().expand(rows, -1).contiguous() for ids in (mask.q_ids, mask.k_ids))
    if keys == 0:
        return _span(torch.zeros_like(q_ids), torch.zeros_like(q_ids), keys), None
    ids, order = k_ids.sort(dim=-1, stable=True)
    start = torch.searchsorted(ids, q_ids)
    stop = torch.searchsorted(ids, q_ids, right=True)
    first = order.gather(-1, start.clamp(max=keys - 1))
    last = order.gather(-1, (stop - 1).clamp(min=0))
    found = stop > start
    spans = _span(torch.where(found, first, 0), torch.where(found, last + 1, 0), keys)
    unbroken = not has_no_values() and ids.device.type == "cpu"
    unbroken = unbroken and bool(((last + 1 - first == stop - start) | ~found).all())
    return spans, None if unbroken else mask


def _packed(ids: Tensor) -> Tensor | None:
    """The spans [B or 1, K, 1, 2] of documents that lie one behind the other, numbered upwards; None if they do not."""
    ids = ids.long()
    before, after = ids[:, :-1], ids[:, 1:]
    if bool((after < before).any()):
        return None
    begins = torch.cat([ids.new_ones(len(ids), 1, dtype=torch.bool), after > before], 1)
    start = begins.reshape(-1).nonzero()[:, 0]  # of each document, counted through all rows
    stop = torch.cat([start[1:], start.new_tensor([ids.numel()])])
    spans = torch.stack([start, stop], -1).repeat_interleave(stop - start, 0, output_size=ids.numel())
    spans = spans.view(*ids.shape, 1, 2)
    return spans if len(ids) == 1 else spans - ids.shape[1] * torch.arange(len(ids), device="cpu")[:, None, None, None]


def _both(mask: And, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
    (a, rest_a), (b, rest_b) = _spans(mask.first, sizes, device), _spans(mask.second, sizes, device)
    if a.shape[2] == b.shape[2] == 2:  # could come to three spans
        b, rest_b = _hull(b, sizes[3]), mask.second
    if a.shape[2] < b.shape[2]:
        a, b = b, a
    cut = [_span(torch.maximum(a[:, :, n, 0], b[:, :, 0, 0]), torch.minimum(a[:, :, n, 1], b[:, :, 0, 1]), sizes[3])
           for n in range(a.shape[2])]  # fmt: skip
    rest = rest_b if rest_a is None else rest_a if rest_b is None else And(rest_a, rest_b)
    return (cut[0] if len(cut) == 1 else _ascending(cut[0], cut[1], sizes[3])), rest


def _either(mask: Or, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
    (a, rest_a), (b, rest_b) = _spans(mask.first, sizes, device), _spans(mask.second, sizes, device)
    keys = sizes[3]
    exact = rest_a is None and rest_b is None and a.shape[2] == b.shape[2] == 1
    pair = _ascending(_hull(a, keys), _hull(b, keys), keys)
    return (pair, None) if exact else (_hull(pair, keys), mask)


def _hull(spans: Tensor, keys: int) -> Tensor:
    """The one span from the first to the last key of all."""
    if spans.shape[2] == 1:
        return spans
    low, high = spans[..., 0], spans[..., 1]
    return _span(low.amin(-1), torch.where(high > low, high, 0).amax(-1), keys)


def _ascending(a: Tensor, b: Tensor, keys: int) -> Tensor:
    """Two spans [b, q, 1, 2] as one ascending, disjoint pair [b, q, 2, 2]; where they touch, the first takes all."""
    a, b = torch.broadcast_tensors(a[:, :, 0], b[:, :, 0])
    swap = b[..., :1] < a[..., :1]
    first, second = torch.where(swap, b, a), torch.where(swap, a, b)  # empty ones, at (K, K), come last
    touch = second[..., 0] <= first[..., 1]
    end = torch.where(touch, torch.maximum(first[..., 1], second[..., 1]), first[..., 1])
    one = _span(first[..., 0], end, keys)
    two = torch.where(touch[..., None], keys, second)[:, :, None]
    return torch.cat([one, two], 2)
