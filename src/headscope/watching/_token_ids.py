"""The token ids of the keys of an attention call: those that were given, or those that the modules were called with."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._intercept import Frame, Ids, InterceptedCall
from headscope.stats._layer import LayerStats

_NOT_IDS = ("mask", "position", "type", "label")


class Streams:
    """The ids that each module was called with, step after step, as a cache keeps their keys."""

    def __init__(self) -> None:
        # by module: the call that is going on, and the ids from position 0 on
        self._streams: dict[int, tuple[weakref.ref[Frame], Tensor | None]] = {}
        self._lock = threading.Lock()

    def of(self, call: InterceptedCall, frames: Iterable[Frame]) -> Ids | None:
        """Ids of the keys, from the innermost module that was called with ids; None where there are none."""
        queries = call.q.shape[-2]
        for frame in frames:
            ids = _ids(frame, queries)
            if ids is not None:
                with self._lock:
                    stream = self._extended(frame, ids, _total(call))
                return None if stream is None else cut(stream, call)
        return None

    def _extended(self, frame: Frame, ids: Tensor, total: int) -> Tensor | None:
        """All ids up to this step; None where earlier steps were not seen."""
        key = id(frame.module)
        last, before = self._streams.get(key, (None, None))
        if last is not None and last() is frame:  # another layer of the same step
            return before
        stream = None
        if total == ids.shape[-1]:
            stream = ids.clone()  # a later step may write its ids into the same tensor
        elif before is not None and before.shape[-1] + ids.shape[-1] == total and len(before) == len(ids):
            stream = torch.cat([before, ids], -1)
        self._streams[key] = (weakref.ref(frame), stream)
        return stream


def ids_of_keys(ids: Tensor, call: InterceptedCall) -> Ids:
    """Of ids that stand for all keys, those of the keys that are there.

    Raises:
        ValueError: there are more keys than ids, so that those of some are not known.
    """
    count, total = ids.shape[-1] if ids.ndim else 0, _total(call)
    if count < total:
        raise ValueError(f'tokens: are of {count:,} keys, this layer has {total:,}; give all of them, or "inputs"')
    return cut(ids.to(call.k.device), call)


def check_texts(count: int, parts: Iterable[LayerStats]) -> None:
    """See to it that texts of so many tokens are those of the queries or the keys of some layer.

    Raises:
        ValueError: they are of none; where calls differ in length, of more than the longest has.
    """
    sizes: dict[int, str] = {}
    for part in parts:
        if part.lengths is not None:
            fits = count in part.lengths
            sizes |= {length: f"{length:,}" for length in part.lengths}
        elif part.received is not None:
            longest = part.received.shape[-1]
            fits = count <= longest
            sizes[longest] = f"up to {longest:,}"
        else:  # how long the calls were is not known
            fits = True
        if fits:
            return
    lengths = " or ".join(sizes[length] for length in sorted(sizes))
    tokens = "token" if count == 1 else "tokens"
    raise ValueError(f"texts: are of {count:,} {tokens}, wanted those of the queries or keys of a layer: {lengths}")


def cut(ids: Tensor, call: InterceptedCall) -> Ids:
    """Of ids from position 0 on, those of the keys that are there; -1 for room that no key has taken yet."""
    keys = call.k.shape[-2]
    total = _total(call)
    first = max(0, total - keys)
    there = F.pad(ids[..., first : first + keys], (0, max(0, keys - ids.shape[-1])), value=-1)
    return Ids(there, ids[..., first - 1] if first else None)


def _total(call: InterceptedCall) -> int:
    return call.k.shape[-2] if call.total is None else int(call.total)


def _ids(frame: Frame, queries: int) -> Tensor | None:
    """The ids that a module was called with, [B, T]: its ``input_ids``, or its first whole numbers, one a query."""
    arguments: dict[str, Any] = dict(frame.arguments)
    named = arguments.get("input_ids")
    if isinstance(named, Tensor):
        return named.detach() if named.ndim == 2 and named.shape[-1] == queries else None
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or any(part in name for part in _NOT_IDS):
            continue
        whole = not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool)
        if whole and value.ndim == 2 and value.shape[-1] == queries:
            return value.detach()
    return None
