"""How many levels the weights of a head have on a page that holds every weight.

Weights that do not repeat, such as those of a model with random weights, compress badly. Where the page would be too
large, such heads have fewer levels, and each weight is a share of the largest of its row: an error of at most
1 / levels of it. Heads that compress well stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EVERY_WEIGHT_BYTES", "FULL", "ROW_LEVELS", "joined", "levels_of", "row_codes"]

Array = NDArray[Any]

EVERY_WEIGHT_BYTES = 7_100_000
"""The most bytes of all blocks with every weight, before base64: a page of 10 MB has room for them."""

FULL = 255
"""The levels of 8 bits."""

STEPS = (191, 127, 101, 85, 64, 51, 42, 36, 32, 28, 24, 21, 18, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3)
"""The numbers of levels to choose from."""

ROW_LEVELS = 65_535

FINE = 1024  # parts of a histogram


def row_codes(mean: Array, visible: Array, levels: int) -> tuple[Array, Array]:
    """Return the codes c of the visible weights, and those of the largest of each row, rounded up.

    A weight is the largest of its row * (c / levels)², and that is the largest of the head * (c / ROW_LEVELS)².

    Args:
        mean, visible: [rows, columns].
        levels: the largest code.
    """
    largest = np.where(visible, mean, 0).max(-1, initial=0.0)
    most = float(np.float32(largest.max(initial=0.0)))
    codes = np.ceil(np.sqrt((largest / (most or 1.0)).clip(0, 1)) * ROW_LEVELS)
    return np.rint(_shares(mean, visible, most * (codes / ROW_LEVELS) ** 2) * levels), codes


def joined(codes: Array, levels: int) -> bytes:
    """Return codes as bytes, several in each where they fit: a symbol of deflate has one bit or more.

    A byte of n codes is c0 + c1 * b + c2 * b² ..., with b = levels + 1 and the largest n with b^n <= 256.
    """
    base = levels + 1
    many = int(math.log(256.5, base))
    padded = np.zeros(-(-len(codes) // many) * many, np.int64)
    padded[: len(codes)] = codes
    return (padded.reshape(-1, many) * base ** np.arange(many)).sum(1).astype(np.uint8).tobytes()


def levels_of(
    sizes: Sequence[Sequence[int]], others: Sequence[int], maps: Sequence[tuple[Array, Array] | None], bits: int
) -> list[list[int] | None]:
    """Return for each layer the levels of its heads; None for a layer whose heads have all.

    Args:
        sizes: of each block with all levels, in bytes.
        others: of each layer, what a block holds besides its weights, in bytes.
        maps: of each layer with single weights, these and whether they are visible, each [H, rows, columns].
        bits: of a code.
    """
    everything = sum(map(sum, sizes))
    if bits != 8 or everything <= EVERY_WEIGHT_BYTES:
        return [None] * len(maps)
    places = [(n, head) for n, each in enumerate(maps) if each is not None for head in range(len(each[0]))]
    counts = {(n, head): _histogram(maps[n], head) for n, head in places}
    rest = everything - sum(sizes[n][head] for n, head in places)
    rows = [0 if each is None else 2 * each[0].shape[1] for each in maps]  # bytes of the largest of each row
    levels = [[FULL] * len(each) for each in sizes]
    for step in STEPS:
        costs = {(n, head): others[n] + rows[n] + _bytes(found, step) for (n, head), found in counts.items()}
        everything = rest + sum(min(sizes[n][head], cost) for (n, head), cost in costs.items())
        if everything > EVERY_WEIGHT_BYTES and step != STEPS[-1]:
            continue
        for (n, head), cost in costs.items():
            levels[n][head] = step if cost < sizes[n][head] else FULL
        break
    return [each if min(each, default=FULL) < FULL else None for each in levels]


def _shares(mean: Array, visible: Array, largest: Array) -> Array:
    """Return the square root of the share of each visible weight of the largest of its row."""
    rows = np.broadcast_to(largest[:, None], mean.shape)[visible].astype(np.float64)
    shares = np.divide(mean[visible], rows, out=np.zeros(len(rows)), where=rows > 0)
    return np.sqrt(shares.clip(0, 1))


def _histogram(layer: tuple[Array, Array] | None, head: int) -> Array:
    assert layer is not None
    mean, visible = layer[0][head], layer[1][head]
    shares = _shares(mean, visible, np.where(visible, mean, 0).max(-1, initial=0.0))
    return np.bincount(np.rint(shares * (FINE - 1)).astype(np.int64), minlength=FINE)


def _bytes(histogram: Array, levels: int) -> float:
    """Return about how many bytes codes of so many levels take, from their entropy."""
    codes = np.rint(np.arange(FINE) / (FINE - 1) * levels).astype(np.int64)
    counts = np.bincount(codes, weights=histogram)
    share = counts[counts > 0] / max(1, histogram.sum())
    entropy = float(-(share * np.log2(share)).sum()) if len(share) else 0.0
    return math.ceil((1.03 * entropy + 0.03) * float(histogram.sum()) / 8)
