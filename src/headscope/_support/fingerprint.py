"""Fingerprints of tensors: detect later changes of a tensor without a copy.

``Tensor._version`` counts only writes through autograd. ``torch.distributed``, numpy, DLPack and ``.data`` write to the
same memory without a new version, so only the contents show the change.
"""

from __future__ import annotations

from types import EllipsisType

import torch
from torch import Tensor

AT_ONCE = 1 << 18  # words multiplied at once: 2 MiB as int64, which stay in the L2 cache
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by the bytes of an element
_SALTS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # the first digits of π: one salt for each of the two sums

Rows = tuple[int | slice | EllipsisType, ...]
"""An index into all axes of a tensor but the last."""


class Fingerprint:
    """Two 64-bit sums for each row of a tensor (a row runs along the last axis).

    A sum adds the row's 32-bit words, each times a 64-bit number that depends on the word's index. Two rows that differ
    have equal sums with a probability of 2 ** -66 at most, whether words were changed, swapped or negated. Bits are
    compared, so NaN equals itself. Works on every device; only ``matches`` waits for it.

    Source: Lemire and Kaser 2014, "Strongly universal string hashing is fast", section 3.
    """

    def __init__(self, x: Tensor) -> None:
        self.shape = x.shape
        self.dtype = x.dtype
        self.sums = _sums(x)  # [..., 2]

    def matches(self, x: Tensor, rows: Rows = ()) -> bool:
        """Return whether these rows of a tensor, by default all, are unchanged."""
        if x.shape != self.shape or x.dtype != self.dtype:
            return False
        part, sums = (x[rows], self.sums[rows]) if rows else (x, self.sums)
        return torch.equal(_sums(part), sums.to(x.device))


def _sums(x: Tensor) -> Tensor:
    """Return the sums of rows [..., n], int64 [..., 2]; a single number counts as one row of one element."""
    x = x.detach().resolve_neg()
    x = x[None] if x.ndim == 0 else x
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]  # the others repeat it
    length = x.shape[-1]
    if 0 in x.shape:
        return torch.zeros(*x.shape[:-1], 2, dtype=torch.int64, device=x.device)
    factors: list[Tensor] = []
    parts: list[Tensor] = []
    for block in once.reshape(-1, length).split(max(1, AT_ONCE // length)):
        words = _words(block).long()  # [r, words]
        factors = factors or [_factors(words.shape[1], salt, x.device) for salt in _SALTS]
        parts.append(torch.stack([(words * each).sum(-1) for each in factors], -1))
    return torch.cat(parts).view(*once.shape[:-1], 2).expand(*x.shape[:-1], 2)


def _words(block: Tensor) -> Tensor:
    """Return the bits of a block [r, n] as 32-bit integers, or smaller ones if n requires it."""
    size = block.element_size()
    wide = torch.int32 if block.shape[1] * size % 4 == 0 else _WORDS[size]
    block = block.contiguous()
    if block.storage_offset() * size % 4 or block._is_zerotensor():  # a view with other words starts at a whole word
        block = block.clone()
    return block.view(wide)


def _factors(count: int, salt: int, device: torch.device) -> Tensor:
    """Return a pseudo-random 64-bit number for each index, int64 [count]: the outputs of SplitMix64.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17.
    """
    x = torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15) + salt
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return an unsigned shift to the right; torch's own extends the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """Return the int64 with the same bits."""
    return x - (1 << 64) if x >> 63 else x
