"""The segments of a watched call: those of the options, where they fit its queries and keys."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from headscope._intercept import InterceptedCall, WatchWarning
from headscope._support.user_line import user_stacklevel
from headscope.stats import Segments

MOST_NAMED = 8


def fit_segments(segments: Segments, call: InterceptedCall, kind: str) -> Segments | str:
    """Return the segments of a call, or why it has none.

    In self-attention the ids are those of the positions from 0 on. With a cache, a step has those of its keys so far.
    """
    ids, query_ids = segments._ids, segments._query_ids
    batch, queries = math.prod(call.q.shape[:-3]), call.q.shape[-2]
    keys = call.k.shape[-2] - (_beside(call, ids.shape[-1]) if kind == "self" else 0)
    for name, each in (("ids", ids), ("query_ids", query_ids)):
        if each is not None and each.ndim == 2 and len(each) not in (1, batch):
            return f"has a batch of {batch}, {name} one of {len(each)}"
    if kind == "cross":
        if query_ids is None:
            return "is cross-attention, which requires query_ids"
        if (query_ids.shape[-1], ids.shape[-1]) != (queries, keys):
            return f"has {queries:,} queries and {keys:,} keys, got {query_ids.shape[-1]:,} and {ids.shape[-1]:,} ids"
        return segments
    if query_ids is not None:
        return "is self-attention, got query_ids"
    total = keys if call.total is None else int(call.total)
    if total > ids.shape[-1] or (call.total is None and keys == queries and keys != ids.shape[-1]):
        return f"has {total:,} tokens, got {ids.shape[-1]:,} ids"
    first = max(0, total - keys)
    if not first and call.k.shape[-2] == ids.shape[-1]:
        return segments
    return Segments(segments.names, _padded(ids[..., first : first + keys], call.k.shape[-2]))


def _beside(call: InterceptedCall, count: int) -> int:
    """Return the number of keys, at the end, that do not belong to tokens; ``count``: the number of ids."""
    more = call.k.shape[-2] - count
    if call.beside or more <= 0 or call.k_pos is None or call.k_pos.ndim > 2:
        return call.beside
    return more if bool(call.k_pos[-more:].isnan().all()) else 0  # as bias_k of nn.MultiheadAttention


def _padded(ids: Tensor, length: int) -> Tensor:
    return F.pad(ids, (0, length - ids.shape[-1]), value=-1)


def warn_of_unsegmented(reasons: Mapping[str, str]) -> None:
    """Warn of the layers with calls that do not fit the segments."""
    texts = [f"{layer} {reason}" for layer, reason in reasons.items()]
    more = f"; and {len(texts) - MOST_NAMED:,} more" if len(texts) > MOST_NAMED else ""
    warnings.warn(
        f"watch: segments: these calls have none, because the ids do not fit: {'; '.join(texts[:MOST_NAMED])}{more}. "
        "Pass an id for each token, generated ones included, or select the layers that fit with layers=",
        WatchWarning,
        stacklevel=user_stacklevel(),
    )
