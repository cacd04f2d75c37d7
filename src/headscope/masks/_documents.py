"""Documents: packed sequences, in which each query attends to the keys of its own sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from headscope._support.torch_state import has_no_values
from headscope.masks._base import Index, Mask, Sizes
from headscope.masks._codes import Code, RuleWriter
from headscope.masks._parameters import check_ids, is_integral, to_tensor
from headscope.masks._spans import clip_span


class Packing(NamedTuple):
    """The cumulative lengths of packed sequences, for kernels that read them.

    Attributes:
        q, k: int32 [n + 1], on the device of the ids.
        max_q, max_k: the length of the longest sequence, as numbers on the host.
        same: whether queries and keys are packed alike.
        version: of the ids: a write to them makes the lengths stale.
    """

    q: Tensor
    k: Tensor
    max_q: int
    max_k: int
    same: bool
    version: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Keys of the query's own document: ``q_ids[b, i] == k_ids[b, j]``.

    Args:
        q_ids: integers [B, Q], the document of each query.
        k_ids: integers [B, K], the document of each key; by default those of the queries.

    Examples:
        >>> import torch
        >>> from headscope import masks
        >>> masks.Documents(torch.tensor([[0, 0, 1]])).dense(1, 1, 3, 3)[0, 0].long()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]])
    """

    q_ids: Tensor
    k_ids: Tensor = field(default=cast("Tensor", None))  # a tensor after __post_init__

    _packing = cast("Packing | None", None)  # of a mask from cumulative lengths

    def __post_init__(self) -> None:
        q_ids, k_ids = to_tensor("q_ids", self.q_ids), cast("Tensor | None", self.k_ids)
        object.__setattr__(self, "q_ids", q_ids)
        object.__setattr__(self, "k_ids", q_ids if k_ids is None else to_tensor("k_ids", k_ids))

    @classmethod
    def from_cu_seqlens(cls, q: Tensor, k: Tensor | None = None) -> Documents:
        """Return the mask of packed sequences [1, total, ...] by their offsets: 0, 3, 5 are tokens 0 to 2, and 3 and 4.

        Args:
            q: cumulative lengths of the queries' sequences, integers [n + 1] from 0, as in flash-attention.
            k: cumulative lengths of the keys' sequences, integers [n + 1] from 0; by default those of the queries.

        Raises:
            TypeError, ValueError: they are not cumulative lengths.
        """
        q_ids = _to_ids("q", q)
        if k is None:
            return cls(q_ids, q_ids)._packed_by(q, q)
        k_ids = _to_ids("k", k)
        if len(k) != len(q):
            raise ValueError(
                f"k: has {len(k)} numbers, expected {len(q)}, as q has: one sequence of keys for each sequence of "
                "queries"
            )
        return cls(q_ids, k_ids)._packed_by(q, k)

    @property
    def packing(self) -> Packing | None:
        """The cumulative lengths, if this mask was made from them and its ids were not written since; else None.

        A compiler cannot trace the number of writes: in a compiled function the ids must not be written.
        """
        packing = self._packing
        if is_dynamo_compiling():
            return packing
        return None if packing is None or packing.version != _versions(self.q_ids, self.k_ids) else packing

    def _packed_by(self, q: Tensor, k: Tensor) -> Documents:
        """Attach cumulative lengths that were checked."""
        longest = [int(x.diff().max()) if len(x) > 1 else 0 for x in ((q,) if q is k else (q, k))]
        offsets = q.detach().int(), k.detach().int()
        packing = Packing(*offsets, longest[0], longest[-1], q is k, _versions(self.q_ids, self.k_ids))
        object.__setattr__(self, "_packing", packing)
        return self

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        b_q, b_k = (0 if len(ids) == 1 else b for ids in (self.q_ids, self.k_ids))  # one row serves every batch entry
        return self.q_ids[b_q, i] == self.k_ids[b_k, j]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_ids, self.k_ids)

    def planned_tensors(self) -> tuple[Tensor, ...]:
        return self.tensors()

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Mask:
        return Documents(copy(self.q_ids), copy(self.k_ids))

    def to_spans(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Mask | None]:
        """Return spans from the first to the last key of the query's document; other documents may lie between."""
        keys = sizes[3]
        if self.q_ids is self.k_ids and self.k_ids.device.type == "cpu" and not has_no_values() and self.k_ids.numel():
            packed = _spans_of_packed(self.k_ids)
            if packed is not None:
                return packed, None
        rows = len(self.k_ids) if len(self.q_ids) == 1 else len(self.q_ids)  # one row serves every batch entry
        q_ids, k_ids = (ids.long().expand(rows, -1).contiguous() for ids in (self.q_ids, self.k_ids))
        if keys == 0:
            return clip_span(torch.zeros_like(q_ids), torch.zeros_like(q_ids), keys), None
        ids, order = k_ids.sort(dim=-1, stable=True)
        start = torch.searchsorted(ids, q_ids)
        stop = torch.searchsorted(ids, q_ids, right=True)
        first = order.gather(-1, start.clamp(max=keys - 1))
        last = order.gather(-1, (stop - 1).clamp(min=0))
        visible = stop > start
        spans = clip_span(torch.where(visible, first, 0), torch.where(visible, last + 1, 0), keys)
        unbroken = not has_no_values() and ids.device.type == "cpu"
        unbroken = unbroken and bool(((last + 1 - first == stop - start) | ~visible).all())
        return spans, None if unbroken else self

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Mask:
        if len(entries) == whole[0]:
            return self
        rows = slice(entries.start, entries.stop)
        q_ids = self.q_ids if len(self.q_ids) == 1 else self.q_ids[rows]
        if self.k_ids is self.q_ids:
            return Documents(q_ids)
        return Documents(q_ids, self.k_ids if len(self.k_ids) == 1 else self.k_ids[rows])

    def reverse_queries(self, queries: int, keys: int) -> Mask:
        return Documents(self.q_ids.flip(-1), self.k_ids)

    def block(self, i: slice, j: slice, h: slice | None = None) -> Mask:
        return Documents(self.q_ids[:, i], self.k_ids[:, j])

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        packing = self.packing if device.type == "cuda" else None  # other devices have no kernel that reads it
        if packing is None:
            codes += [Code.DOCUMENTS]
            parts += [self.q_ids, self.k_ids]
            return
        codes += [Code.PACKED, packing.max_q, packing.max_k, int(packing.same)]
        parts += [self.q_ids, self.k_ids, packing.q, packing.k]

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        writer.add_ids(self.q_ids, self.k_ids)

    def check_sizes(self, sizes: Sizes) -> None:
        batch, _, queries, keys = sizes
        check_ids("Documents.q_ids", self.q_ids, {"B": batch, "Q": queries})
        check_ids("Documents.k_ids", self.k_ids, {"B": batch, "K": keys})


def packed_documents(tensors: tuple[Tensor, ...], max_q: int, max_k: int, same: bool) -> Documents:
    """Return documents from ids and cumulative lengths, as ``Documents.encode`` writes them."""
    q_ids, k_ids, q, k = tensors
    mask = Documents(q_ids, k_ids)
    object.__setattr__(mask, "_packing", Packing(q, k, max_q, max_k, same, _versions(q_ids, k_ids)))
    return mask


def _versions(q_ids: Tensor, k_ids: Tensor) -> tuple[int, int]:
    """Return the numbers of writes to the ids; those of inference tensors are not counted."""
    first, second = (0 if x.is_inference() else x._version for x in (q_ids, k_ids))
    return first, second


def _to_ids(name: str, cu_seqlens: object) -> Tensor:
    """Convert cumulative lengths [n + 1] to the number of each token's sequence, [1, total]."""
    if not isinstance(cu_seqlens, Tensor) or not is_integral(cu_seqlens):
        raise TypeError(
            f"{name}: got {getattr(cu_seqlens, 'dtype', type(cu_seqlens).__name__)}, expected integers [n + 1]"
        )
    if cu_seqlens.ndim != 1:
        raise ValueError(f"{name}: is {list(cu_seqlens.shape)}, expected [n + 1]: cumulative lengths from 0")
    lengths = cu_seqlens.diff()
    if len(cu_seqlens) == 0 or int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(
            f"{name}: got {cu_seqlens.tolist()}, expected cumulative lengths, which start at 0 and never decrease"
        )
    return torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)[None]  # [1, total]


def _spans_of_packed(ids: Tensor) -> Tensor | None:
    """Return the spans [B or 1, K, 1, 2] of ids [B or 1, K] that are contiguous and ascending; else None."""
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


Documents.__module__ = "headscope.masks"  # its public path
