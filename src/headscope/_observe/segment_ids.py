"""The segments of the keys and rows of an observation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headscope._observe.inputs import Request
from headscope._support.arguments import shapes


def segments_of(request: Request, own: Tensor | None, index: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the segment of each key, int64 [B or 1, K], and of each row, [B or 1, R]; None = not requested.

    Args:
        request: the observation.
        own: the query's own key, [B or 1, Q], -1 = none; None in cross-attention.
        index: which queries the rows are; None = all.

    Raises:
        ValueError: the ids do not fit the call; in cross-attention there are none of the queries.
    """
    segments, call = request.what.segments, request.call
    if segments is None:
        return None
    device = request.inputs.q.device
    keys = _placed("ids", segments._ids, "K", call.keys, request).to(device)
    if segments._query_ids is not None:
        queries = _placed("query_ids", segments._query_ids, "Q", call.queries, request).to(device)
    elif own is None:
        raise ValueError(
            "segments: query_ids is missing; expected the segment of each query, [Q] or [B, Q], because queries and "
            "keys of cross-attention share no positions: Segments(names, ids, query_ids)"
        )
    else:
        batch = max(len(own), len(keys)) if len(own) and len(keys) else 0
        there = own.expand(batch, -1)
        queries = torch.full_like(there, -1)
        if call.keys:
            queries = keys.expand(batch, -1).gather(1, there.clamp_min(0)).masked_fill(there < 0, -1)
    return keys, queries if index is None else queries.index_select(1, index)


def _placed(argument: str, ids: Tensor, letter: str, length: int, request: Request) -> Tensor:
    """Return ids as [B or 1, length].

    Raises:
        ValueError: they are of another length or batch.
    """
    batch, inputs = request.call.batch, request.inputs
    if tuple(ids.shape) not in ((length,), (1, length), (batch, length)):
        tensor = {"k": inputs.k} if letter == "K" else {"q": inputs.q}
        raise ValueError(
            f"segments: {argument} are {list(ids.shape)}, expected [{letter}] or [B, {letter}], here [{length}] or "
            f"[{batch}, {length}]; {shapes(**tensor)}"
        )
    return ids.reshape(-1, length) if length else ids.new_zeros(1, 0)


class NativeSegments(NamedTuple):
    """The segments as the native kernels read them.

    The first keys have ids of their own, so the kernels sum the weight on them separately: S + n for those of segment
    ``holders[n]``.

    Attributes:
        keys, rows: int8 [B or 1, K] and [B or 1, R].
        ends: for each key the end of the run of keys with its segment, int32 [B or 1, K].
        names: the number of named segments, S.
        holders: the segments of the first keys, ascending.
    """

    keys: Tensor
    ends: Tensor
    rows: Tensor
    names: int
    holders: tuple[int, ...]

    @staticmethod
    def of(keys: Tensor | None, rows: Tensor | None, first: Tensor, names: int) -> NativeSegments | None:
        """Return those of keys [B or 1, K], rows [B or 1, R] and first keys [B or 1, n]; None = not requested."""
        if keys is None or rows is None:
            return None
        keys, holders = _apart(keys, first, names)
        count = keys.shape[-1]
        ends = torch.full_like(keys, count)
        changes = keys[:, 1:] != keys[:, :-1]
        ends[:, :-1] = torch.where(changes, torch.arange(1, count, device=keys.device), count)
        ends = ends.flip(-1).cummin(-1).values.flip(-1)
        return NativeSegments(
            keys.to(torch.int8).contiguous(),
            ends.to(torch.int32).contiguous(),
            rows.to(torch.int8).contiguous(),
            names,
            holders,
        )

    @property
    def size(self) -> int:
        """The number of segments that the kernels distinguish."""
        return self.names + len(self.holders)

    def arguments(self) -> tuple[int, ...]:
        """Return their number, addresses and batch strides, as ``Observation`` of the extension takes them."""
        key_stride, row_stride = (0 if len(x) == 1 else x.shape[1] for x in (self.keys, self.rows))
        return self.size, self.keys.data_ptr(), self.ends.data_ptr(), key_stride, self.rows.data_ptr(), row_stride

    def exchange_arguments(self, counts: Tensor) -> tuple[list[int], Tensor]:
        """Return what the extension reads to sum nulls, and the tensor that must stay alive for it.

        The numbers: the number of segments; the address of ``counts`` [B or 1, H or 1, R or 1, S] and its strides, 0
        along an axis of 1; the address and batch stride of the segments of rows.
        """
        counts = counts.contiguous()
        strides = [0 if n == 1 else s for n, s in zip(counts.shape[:3], counts.stride(), strict=False)]
        row_stride = 0 if len(self.rows) == 1 else self.rows.shape[1]
        return [self.names, counts.data_ptr(), *strides, self.rows.data_ptr(), row_stride], counts

    def joined(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums [H, S, S] and counts [H, S] of the named segments, and the part of the sums on first keys."""
        total, apart = total[:, : self.names].split([self.names, len(self.holders)], -1)
        first = torch.zeros_like(total)
        first[..., list(self.holders)] = apart
        return total + first, count[:, : self.names].contiguous(), first


def _apart(keys: Tensor, first: Tensor, names: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the ids of keys, with ids from ``names`` on for the first keys, and the segments of these."""
    batch = max(len(keys), len(first)) if len(keys) and len(first) else 0
    if not batch or not keys.shape[1]:
        return keys, ()
    at = first.expand(batch, -1)
    own = keys.expand(batch, -1).gather(1, at.clamp_min(0)).masked_fill(at < 0, -1)
    holders = own[own >= 0].unique()  # ascending
    if holders.numel() == 0:
        return keys, ()
    keys = keys.expand(batch, -1).clone()
    entry, place = (own >= 0).nonzero(as_tuple=True)
    keys[entry, at[entry, place]] = names + torch.searchsorted(holders, own[entry, place])
    return keys, tuple(holders.tolist())
