"""Caches of keys and values, so that decoding projects each token once: growing, preallocated, rolling.

One cache serves one layer: ``MultiHeadAttention.forward(x, cache=cache)`` appends the keys and values of x and attends
to all cached tokens; until a call has its output the cache is unchanged. The kernels read a view of the buffer; steps
do not copy it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling

from headscope._support.arguments import counts, kind, shapes, whole
from headscope.masks import Band, Documents, Mask, as_mask, causal

__all__ = ["Cache", "GrowingCache", "Held", "RollingCache", "StaticCache"]

LEAST = 64  # tokens for which a growing cache makes room at first
SHARED = "cache: another call added tokens while this one ran; use a cache in one call at a time"


class Held(NamedTuple):
    """The keys and values that the queries of a call attend to.

    Attributes:
        k: the keys, [B, Hkv, K, D]; the last ones are those of the call's own tokens.
        v: the values, [B, Hkv, K, Dv], in the same order.
        first: how many tokens came before key 0.
        mask: which keys are visible, or None for all.

    Examples:
        >>> import torch
        >>> from headscope.cache import GrowingCache
        >>> k = v = torch.zeros(1, 2, 3, 4)
        >>> held = GrowingCache().append(k, v)
        >>> held.k.shape, held.first, held.mask
        (torch.Size([1, 2, 3, 4]), 0, Band(left=None, right=0, offset=None))
    """

    k: Tensor
    v: Tensor
    first: int
    mask: Mask | None


class Staged(NamedTuple):
    """The state of a cache once a call has its output, and the number of tokens before that call."""

    before: int
    k: Tensor
    v: Tensor
    first: int
    length: int


class Placed(NamedTuple):
    """Keys and values to attend to, the token that the first of them belongs to, and the next state of the cache."""

    keys: Tensor
    values: Tensor
    first: int
    staged: Staged


class Cache(ABC):
    """Cached keys and values of one layer.

    Key j belongs to the j-th token, padding included, so positions and masks mean the same as without a cache. The
    first call determines sizes, dtype and device. For inference only: a call whose keys require gradients is an error.

    Args:
        padding: how many of the first tokens of each row are padding, [B]: they are masked as keys, and as queries they
            attend to nothing. By default none.

    Examples:
        >>> import torch
        >>> from headscope.cache import Cache, GrowingCache
        >>> cache: Cache = GrowingCache(padding=[2, 0])
        >>> held = cache.append(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
        >>> cache.length, cache.padding, cache.keys.shape
        (3, (2, 0), torch.Size([2, 1, 3, 4]))
    """

    forgets = False
    """Whether it drops keys, so that key j no longer belongs to token j."""

    def __init__(self, *, padding: Tensor | Sequence[int] | None = None) -> None:
        self._padding = counts("padding", padding)
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._first = 0  # the token in slot 0
        self._length = 0
        self._staged: Staged | None = None  # of the call that wrote last, until it commits
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    # ------------------------------------------------------------ reading

    @property
    def length(self) -> int:
        """The number of tokens so far, padding and dropped ones included: the position of the next one."""
        return self._length

    @property
    def padding(self) -> tuple[int, ...]:
        """The number of padding tokens at the start of each row; empty = none."""
        return self._padding

    @property
    def capacity(self) -> int:
        """The number of tokens that fit into the present buffers."""
        return 0 if self._k is None else self._k.shape[-2]

    @property
    def keys(self) -> Tensor:
        """The cached keys, [B, Hkv, tokens, D]; a view."""
        return self._filled(self._k)[:, :, : self._length - self._first]

    @property
    def values(self) -> Tensor:
        """The cached values, [B, Hkv, tokens, Dv]; a view."""
        return self._filled(self._v)[:, :, : self._length - self._first]

    def __repr__(self) -> str:
        padded = f", padding={list(self._padding)}" if self._padding else ""
        return f"{type(self).__name__}({self.length} tokens, room for {self.capacity}{padded})"

    # ------------------------------------------------------------ writing

    def append(self, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None) -> Held:
        """Append keys and values, already rotated to their positions, and return the keys that their queries attend to.

        Args:
            k: keys of the T new tokens, [B, Hkv, T, D].
            v: values of the same tokens, [B, Hkv, T, Dv].
            mask: which keys are visible, in addition to the order of tokens; see ``MultiHeadAttention.forward``.

        Raises:
            TypeError, ValueError: they do not fit the cached ones, require gradients, or exceed the capacity.
            RuntimeError: another thread uses the cache in the meantime.
        """
        held, staged = self._stage(k, v, mask)
        self._commit(staged)
        return held

    def _stage(self, k: Tensor, v: Tensor, mask: Mask | Tensor | None, start: int | None = None) -> tuple[Held, Staged]:
        """Check, mask and write k and v, rotated to position ``start`` if it is known, after the cached tokens.

        Only ``_commit`` makes them count: a call may fail.
        """
        known = as_mask(mask)
        if self.forgets and known is not None:
            _check_reach(known)
        with self._exclusive():  # two threads would write their keys to the same slots
            self._check(k, v)
            if start is not None and start != self._length:
                raise RuntimeError(SHARED)
            keys, values, first, staged = self._place(k, v)
            if not is_dynamo_compiling():
                self._staged = staged
        return Held(keys, values, first, self._sees(known, k.shape[-2], keys.shape[-2], first, k.device)), staged

    def _commit(self, staged: Staged) -> None:
        with self._exclusive():
            if self._length != staged.before or (not is_dynamo_compiling() and self._staged is not staged):
                raise RuntimeError(SHARED)
            _, self._k, self._v, self._first, self._length = staged

    def _exclusive(self) -> AbstractContextManager[object]:
        """Keep other threads out; a compiled graph can hold no lock."""
        return nullcontext() if is_dynamo_compiling() else self._lock

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Replace row b by row ``rows[b]``, as beam search requires; there may be more or fewer rows than before.

        Raises:
            TypeError: rows are not whole numbers.
            ValueError: such a row does not exist; the cache is empty.
        """
        k, v = self._filled(self._k), self._filled(self._v)
        rows = torch.as_tensor(rows, device=k.device)
        if rows.numel() == 0:
            raise ValueError(f"rows: got none, expected at least one number from 0 to {len(k) - 1}")
        if rows.dtype.is_floating_point or rows.dtype == torch.bool or rows.ndim != 1:
            raise TypeError(f"rows: got {kind(rows)} {list(rows.shape)}, expected integers [B]")
        rows = rows.long()  # small ones index differently, or not at all
        if any(not 0 <= row < len(k) for row in rows.tolist()):
            raise ValueError(f"rows: got {rows.tolist()}, expected numbers from 0 to {len(k) - 1}")
        held = self._length - self._first
        self._k, self._v = (_reordered(each, rows, held) for each in (k, v))
        self._staged = None  # a call that runs meanwhile has the old rows
        if self._padding:
            self._padding = tuple(self._padding[row] for row in rows.tolist())

    def reset(self, *, padding: Tensor | Sequence[int] | None = None) -> None:
        """Remove all tokens. Tokens of the same sizes reuse the buffers; other sizes get new buffers.

        Args:
            padding: how many of the first of the next tokens of each row are padding, [B]. Required if the cache has
                padding, because the old padding rarely fits the next tokens. ``[0] * B`` means none.

        Raises:
            TypeError: padding is not integers.
            ValueError: the cache has padding and the argument is missing; the cache is then unchanged.
        """
        if padding is None and self._padding:
            raise ValueError(
                "padding: expected the padding of the next tokens, because the cache has padding "
                f"{list(self._padding)}; pass reset(padding=[…]), or padding=[0, …] for none"
            )
        self._padding = counts("padding", padding)
        self._first = self._length = 0
        self._staged = None

    @abstractmethod
    def _place(self, k: Tensor, v: Tensor) -> Placed:
        """Write k and v to free slots of this class of cache; return the visible ones, and what ``_commit`` sets.

        Cached tokens are not overwritten: k and v go after them, or into other buffers.
        """

    def _write(self, into: tuple[Tensor, Tensor], first: int, k: Tensor, v: Tensor) -> Placed:
        """Write k and v into buffers that begin with token ``first``, after the cached tokens; return all of them."""
        into_k, into_v = into
        start = self._length - first
        stop = start + k.shape[-2]
        into_k[:, :, start:stop] = k
        into_v[:, :, start:stop] = v
        staged = Staged(self._length, into_k, into_v, first, first + stop)
        return Placed(into_k[:, :, :stop], into_v[:, :, :stop], first, staged)

    def _allocate(self, k: Tensor, v: Tensor, tokens: int, retained: int) -> tuple[Tensor, Tensor]:
        """Return new buffers for ``tokens`` tokens, which begin with the last ``retained`` cached ones."""
        held = self._length - self._first
        buffers: list[Tensor] = []
        with torch.inference_mode(False):  # later calls, outside of it, write here too
            for before, new in ((self._k, k), (self._v, v)):
                room = new.new_empty((*new.shape[:2], tokens, new.shape[3]))  # [B, Hkv, tokens, D]
                if before is not None:
                    room[:, :, :retained] = before[:, :, held - retained : held]
                buffers.append(room)
        return buffers[0], buffers[1]

    def _filled(self, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise ValueError("cache: is empty; the first call determines its sizes")
        return tensor

    # ------------------------------------------------------------ masks

    def _sees(self, mask: Mask | None, queries: int, keys: int, first: int, device: torch.device) -> Mask | None:
        """Return which keys the last T = ``queries`` of ``keys`` tokens attend to: neither later tokens nor padding."""
        if queries > 1:  # every key is visible to the last one anyway
            early = isinstance(mask, Band) and mask.offset is None and mask.right is not None and mask.right <= 0
            mask = causal() if mask is None else mask if early else causal() & mask
        if not self._padding or max(self._padding) <= first:
            return mask
        starts = tuple(max(0, count - first) for count in self._padding)
        if queries == 1:
            # from starts[b] on; this offset does not hold the query's position, which is the end
            real: Mask = causal() & Band(0, None, offset=starts)
        else:
            at = torch.arange(keys, device=device)
            padded = at < torch.tensor(starts, device=device)[:, None]  # [B, K]
            real = Documents(torch.where(padded[:, keys - queries :], -2, 0), torch.where(padded, -1, 0))
        return real if mask is None else mask & real

    # ------------------------------------------------------------ checks

    def _check(self, k: Tensor, v: Tensor) -> None:
        if torch.compiler.is_exporting() or (isinstance(k, FakeTensor) and not is_dynamo_compiling()):
            raise ValueError(
                "cache: torch.export does not support a cache; pass k and v in and out, and call attention"
            )
        if k.ndim != 4:
            raise ValueError(f"cache: expected x with three axes, [B, T, E], and k with four; {shapes(k=k, v=v)}")
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "cache: k and v require gradients, which a cache does not store; decode under torch.no_grad() or "
                "torch.inference_mode()"
            )
        if self._padding and len(self._padding) != len(k):
            raise ValueError(f"cache: padding has {len(self._padding)} rows, expected {len(k)} (B); {shapes(k=k)}")
        error = self._mismatch(k, v)
        if error is None:
            return
        if self._length:
            raise error
        self._k = self._v = None  # after a reset the buffers are empty: allocate others

    def _mismatch(self, k: Tensor, v: Tensor) -> TypeError | ValueError | None:
        for name, new, held in (("k", k, self._k), ("v", v, self._v)):
            if held is None:
                continue
            if new.dtype != held.dtype or new.device != held.device:
                got, expected = (f"{kind(x)} on {x.device}" for x in (new, held))
                return TypeError(f"cache: {name} is {got}, the cached one is {expected}")
            if (*new.shape[:2], new.shape[3]) != (*held.shape[:2], held.shape[3]):
                sizes = f"[{held.shape[0]}, {held.shape[1]}, T, {held.shape[3]}]"
                return ValueError(f"cache: {name} is {list(new.shape)}, expected {sizes} as the cached one")
        return None


class GrowingCache(Cache):
    """A cache without a limit: its capacity doubles when it is full, so tokens are copied less than twice in all.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention
        >>> from headscope.cache import GrowingCache
        >>> module, cache = MultiHeadAttention(8, 2).requires_grad_(False), GrowingCache()
        >>> outs = [module(x, cache=cache) for x in torch.randn(3, 1, 1, 8)]  # one token in each call
        >>> cache
        GrowingCache(3 tokens, room for 64)
    """

    def _place(self, k: Tensor, v: Tensor) -> Placed:
        needed = self._length + k.shape[-2]
        if self._k is None or self._v is None or needed > self.capacity:
            into = self._allocate(k, v, max(needed, 2 * self.capacity, LEAST), self._length)
        else:
            into = self._k, self._v
        return self._write(into, 0, k, v)


class StaticCache(Cache):
    """A cache of fixed size, allocated once, in the first call; it never moves, and raises when it is full.

    Args:
        capacity: the largest number of tokens, padding included, from 1.
        padding: see ``Cache``.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention
        >>> from headscope.cache import StaticCache
        >>> module, cache = MultiHeadAttention(8, 2).requires_grad_(False), StaticCache(16)
        >>> out = module(torch.randn(1, 3, 8), cache=cache)
        >>> cache
        StaticCache(3 tokens, room for 16)
    """

    def __init__(self, capacity: int, *, padding: Tensor | Sequence[int] | None = None) -> None:
        super().__init__(padding=padding)
        self._capacity = whole("capacity", capacity)

    @property
    def capacity(self) -> int:
        """The largest number of tokens."""
        return self._capacity

    def _place(self, k: Tensor, v: Tensor) -> Placed:
        needed = self._length + k.shape[-2]
        if needed > self._capacity:
            raise ValueError(
                f"cache: is full; it holds {self._length} of {self._capacity} tokens, got {k.shape[-2]} more; "
                f"expected a capacity of at least {needed}"
            )
        into = (
            (self._k, self._v)
            if self._k is not None and self._v is not None
            else self._allocate(k, v, self._capacity, 0)
        )
        return self._write(into, 0, k, v)


class RollingCache(Cache):
    """A cache for a sliding window: each query attends to the last ``window`` tokens, its own included.

    Tokens outside the window of all later tokens are dropped. The buffer holds twice the window; when it is full, the
    last tokens move to the front of another buffer, so each token is copied about once.

    Args:
        window: number of visible tokens, from 1. The layer attends within it, whatever its mask is.
        padding: see ``Cache``.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention
        >>> from headscope.cache import RollingCache
        >>> module, cache = MultiHeadAttention(8, 2).requires_grad_(False), RollingCache(2)
        >>> outs = [module(x, cache=cache) for x in torch.randn(9, 1, 1, 8)]  # one token in each call
        >>> cache
        RollingCache(9 tokens, room for 4)
    """

    forgets = True

    def __init__(self, window: int, *, padding: Tensor | Sequence[int] | None = None) -> None:
        super().__init__(padding=padding)
        self.window = whole("window", window)

    def _place(self, k: Tensor, v: Tensor) -> Placed:
        new, held, room = k.shape[-2], self._length - self._first, 2 * self.window
        retained = min(self.window - 1, held)  # the keys that are visible to the first new token
        if retained + new > room:
            return self._pass_through(k, v, retained)
        if self._k is None or self._v is None or held + new > room:
            into, first = self._allocate(k, v, room, retained), self._length - retained
        else:
            into, first = (self._k, self._v), self._first
        keys, values, first, staged = self._write(into, first, k, v)
        unseen = keys.shape[-2] - new - retained
        return Placed(keys[:, :, unseen:], values[:, :, unseen:], first + unseen, staged)

    def _pass_through(self, k: Tensor, v: Tensor, retained: int) -> Placed:
        """Attend to a copy of the visible tokens, which exceed the capacity, and retain the end of the copy."""
        length = self._length + k.shape[-2]
        all_k, all_v = self._allocate(k, v, retained + k.shape[-2], retained)
        all_k[:, :, retained:], all_v[:, :, retained:] = k, v
        into_k, into_v = self._allocate(k, v, 2 * self.window, 0)
        end = self.window
        into_k[:, :, :end], into_v[:, :, :end] = all_k[:, :, -end:], all_v[:, :, -end:]
        staged = Staged(self._length, into_k, into_v, length - end, length)
        return Placed(all_k, all_v, self._length - retained, staged)

    def _sees(self, mask: Mask | None, queries: int, keys: int, first: int, device: torch.device) -> Mask | None:
        reach = Band(self.window - 1, 0)
        mask = mask if keys <= self.window else reach if mask is None else reach & mask
        return super()._sees(mask, queries, keys, first, device)


def _check_reach(mask: Mask) -> None:
    if not all(isinstance(leaf, Band) and leaf.offset is None for leaf in mask.leaves()):
        raise ValueError(
            f"mask: got {type(mask).__name__}, expected causal(), window(n) or another Band without offset, because "
            "a RollingCache drops keys, so key numbers change"
        )


def _reordered(buffer: Tensor, rows: Tensor, held: int) -> Tensor:
    chosen = buffer[:, :, :held].index_select(0, rows)
    if len(rows) != len(buffer):
        with torch.inference_mode(False):
            buffer = buffer.new_empty((len(rows), *buffer.shape[1:]))
    buffer[:, :, :held] = chosen
    return buffer
