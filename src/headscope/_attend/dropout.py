"""The seed of dropout. A backend draws it for a call; under a compiler, the caller of the operator does."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class DropoutPlace(NamedTuple):
    """The seed of a larger call [B, heads, queries, K], and the first head, query and key of a part of it there.

    The part drops the weights that the larger call would drop.
    """

    seed: int
    heads: int
    queries: int
    first_head: int = 0
    first_query: int = 0
    first_key: int = 0


Seed = int | DropoutPlace


def draw_seed() -> Tensor:
    """Draw a seed of dropout from torch's generator: one int64 on the CPU. A graph draws one in each run."""
    return torch.randint(2**62, (), device="cpu")


@contextmanager
def seeded(generator: torch.Generator, seed: int) -> Generator[None]:
    """Seed a generator within the block, and restore its state after it; this reads no number from a GPU."""
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def dropout_factors(
    place: DropoutPlace, dropout: float, b: slice, h: slice, i: slice, j: slice, device: torch.device
) -> Tensor:
    """Return which weights of a block to drop, 0, and by what to multiply the others, float64 [b, h, i, j].

    The numbers are those of the native kernels: a hash of the seed, the row of the larger call, and the key.
    """
    heads, queries = torch.arange(h.start, h.stop, device=device), torch.arange(i.start, i.stop, device=device)
    keys = torch.arange(j.start, j.stop, device=device) + place.first_key
    entries = torch.arange(b.start, b.stop, device=device)
    row = (entries[:, None] * place.heads + place.first_head + heads)[..., None] * place.queries  # [b, h, 1]
    row = row + place.first_query + queries  # [b, h, i]
    x = (place.seed + _signed(0x9E3779B97F4A7C15) * (row + 1))[..., None] ^ (keys * _signed(0xBF58476D1CE4E5B9))
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    retained = _shift_right(x ^ _shift_right(x, 31), 32) >= int(dropout * 2**32)
    return retained.double() / (1 - dropout)


def _signed(number: int) -> int:
    """Return 64 bits as a signed number: torch multiplies int64 modulo 2^64, as the kernels do."""
    return number - (1 << 64) if number >> 63 else number


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
