"""The segments of the keys and rows of an observation."""

from __future__ import annotations

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
