"""The token ids of the keys of an attention call: those of the caller, or those that the modules were called with."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._intercept import Frame, Ids, InterceptedCall
from headscope._support.tensor_classes import ORDINARY
from headscope.stats._layer import LayerStats
from headscope.watching._ids_of_calls import find_cache, find_source

TEXTS = 16  # that a step can continue; each holds two whole numbers for each token
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, eq=False)
class Text:
    """Texts whose keys were observed.

    Attributes:
        layer: the module that attended, and the number of its call.
        cache: of the layer's call; None = without one, or it no longer exists.
        ids: from position 0 on, [B, N].
        marks: of the keys from position ``first`` to the last one, see ``marks_of``.
    """

    layer: tuple[int, int]
    cache: Callable[[], object]
    ids: Tensor
    first: int
    marks: Tensor


class Streams:
    """The ids that modules were called with, step by step, as a cache stores their keys.

    Only the keys show which text a step continues: caches are copied, cropped, reordered, and several are used in
    turns. So the ids before a step are those of the text that had the same keys in the same layer, to the bit. A cache
    that has dropped the first keys shows only the others, so it must also be the same object.

    Attributes:
        unknown: whether there was a step with unknown ids of earlier keys.
    """

    def __init__(self) -> None:
        self.unknown = False
        self._texts: deque[Text] = deque(maxlen=TEXTS)
        self._steps: WeakKeyDictionary[Frame, Tensor | None] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, call: InterceptedCall, frames: Sequence[Frame]) -> Ids | None:
        """Return ids of the keys, from the innermost module that was called with ids; None if unknown."""
        source = find_source(call, frames)
        if source is None:
            return None
        with self._lock:
            if source.frame not in self._steps:
                self._steps[source.frame] = self._join(source.ids, call, frames)
            ids = self._steps[source.frame]
        if ids is None or ids.shape[-1] != _total(call):
            self.unknown = True
            return None
        return cut(ids, call)

    def _join(self, ids: Tensor, call: InterceptedCall, frames: Sequence[Frame]) -> Tensor | None:
        """Return all ids up to this step; None if those of earlier steps are unknown."""
        total, new = _total(call), ids.shape[-1]
        first = max(0, total - call.k.shape[-2])
        known_keys = call.known_keys
        marks = None if known_keys is None else marks_of(known_keys, ids)
        layer = id(frames[0].module), frames[0].calls
        cache = reference_to(find_cache(frames))
        if total == new:
            text = ids.clone()  # a later step may write its ids into the same tensor
        elif total < new or marks is None:
            return None
        else:
            before = self._before(Text(layer, cache, ids, first, marks), total - new)
            if before is None:
                return None
            text = torch.cat([before, ids], -1)
        if marks is not None:
            self._texts.append(Text(layer, cache, text, first, marks[:, : total - first]))
        return text

    def _before(self, step: Text, count: int) -> Tensor | None:
        """Return the ids of ``count`` positions before a step; None = unknown, or different texts have its keys."""
        if count <= step.first:  # none of their keys is left
            return None
        before: list[Tensor | None] = [None] * len(step.ids)
        shorter: Text | None = None
        own = step.marks[:, : count - step.first]
        for text in self._texts:
            if not _may_go_on(text, step, count):
                continue
            ids, marks = text.ids[:, :count], text.marks[:, step.first - text.first : count - text.first]
            if torch.equal(marks, own):
                rows: list[Tensor | None] = list(ids)
                shorter = text if text.ids.shape[-1] == count else shorter
            else:
                rows = [_row(ids[(marks == row).all(-1)]) for row in own]
            for b, row in enumerate(rows):
                earlier = before[b]
                if row is not None and earlier is not None and not torch.equal(earlier, row):
                    return None
                before[b] = earlier if row is None else row
        if shorter is not None:  # from now on part of the longer text
            self._texts.remove(shorter)
        whole = [row for row in before if row is not None]
        return torch.stack(whole) if len(whole) == len(before) else None


def _may_go_on(text: Text, step: Text, count: int) -> bool:
    """Return whether a step may continue a text after ``count`` positions."""
    if text.layer != step.layer or text.marks.device != step.marks.device:
        return False
    if text.first > step.first or text.ids.shape[-1] < count:
        return False
    return not step.first or (step.cache() is not None and text.cache() is step.cache())


def _row(rows: Tensor) -> Tensor | None:
    """Return the row that all of these equal; None = they differ, or there is none."""
    return rows[0] if len(rows) and bool((rows == rows[0]).all()) else None


def marks_of(keys: Tensor, ids: Tensor) -> Tensor | None:
    """Return a number for each key and batch entry, int64 [B, K]: a hash of the key's bits.

    None if they cannot be read: keys of another batch than the ids, or of a class with its own rules.
    """
    whole = _WHOLE.get(keys.element_size())
    if math.prod(keys.shape[:-3]) != len(ids) or 0 in keys.shape or type(keys) not in ORDINARY or whole is None:
        return None
    bits = keys.detach().reshape(len(ids), *keys.shape[-3:]).contiguous().view(whole)  # [B, H, K, D]
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(1 << 62), 1 << 62, (bits.shape[1], bits.shape[3]), generator=generator, device="cpu")
    marks = torch.zeros(len(ids), bits.shape[2], dtype=torch.long, device=bits.device)
    for h, each in enumerate(factors.to(bits.device)):
        marks += (bits[:, h].long() * (2 * each + 1)).sum(-1)
    return marks.to(ids.device)


def reference_to(cache: object) -> Callable[[], object]:
    """Return a weak reference, or one to nothing if the cache does not support it."""
    try:
        return weakref.ref(cache)
    except TypeError:
        return lambda: None


def ids_of_keys(ids: Tensor, call: InterceptedCall) -> Ids:
    """Return the ids of the keys in a call, from the ids of all keys.

    Raises:
        ValueError: there are more keys than ids, so some are unknown.
    """
    count, total = ids.shape[-1] if ids.ndim else 0, _total(call)
    if count < total:
        raise ValueError(
            f'tokens: got {count:,}, this layer has {total:,} keys; pass a token for each key, or "inputs"'
        )
    return cut(ids.to(call.k.device), call)


def check_texts(count: int, parts: Iterable[LayerStats]) -> None:
    """Raise unless texts of so many tokens match the queries or the keys of some layer.

    Raises:
        ValueError: they match none; if calls differ in length, they are more than the longest has.
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
        else:  # the lengths of the calls are unknown
            fits = True
        if fits:
            return
    lengths = " or ".join(sizes[length] for length in sorted(sizes))
    tokens = "token" if count == 1 else "tokens"
    raise ValueError(f"texts: got {count:,} {tokens}, expected one for each query or key of a layer: {lengths}")


def cut(ids: Tensor, call: InterceptedCall) -> Ids:
    """Return the ids of the present keys, from ids from position 0 on; -1 for slots without a key yet."""
    keys = call.k.shape[-2]
    total = _total(call)
    first = max(0, total - keys)
    there = F.pad(ids[..., first : first + keys], (0, max(0, keys - ids.shape[-1])), value=-1)
    return Ids(there, ids[..., first - 1] if first else None)


def _total(call: InterceptedCall) -> int:
    return call.k.shape[-2] if call.total is None else int(call.total)
