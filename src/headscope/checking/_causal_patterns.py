"""Patterns of causal attention that hide some earlier keys by intention: windows, chunks, strides and blocks."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_SINKS = 4  # first keys that every query may see besides its pattern, as in StreamingLLM


def name_causal_pattern(visible: Tensor) -> str:
    """Return the causal pattern of [Q, K] in words, such as "chunks of 4 keys"; "" if it is none that is known.

    In each of them, every query attends to itself, and some to an earlier key.
    """
    size = len(visible)
    tri = torch.ones(size, size, dtype=torch.bool).tril()
    if torch.equal(visible, tri):
        return "all earlier keys"
    for sinks in range(MOST_SINKS + 1):
        first = tri & (torch.arange(size) < sinks)
        if not bool((visible | ~first).all()) or not bool(visible.diagonal().all()):
            return ""
        name = _name_pattern(visible, first, tri)
        if name:
            return f"{name} and the first {'key' if sinks == 1 else f'{sinks} keys'}" if sinks else name
    return ""


def _name_pattern(visible: Tensor, first: Tensor, tri: Tensor) -> str:
    """Return the pattern of the pairs that are not among the first keys; "" if it is not known."""
    index = torch.arange(len(tri))
    distance, free = index[:, None] - index, tri & ~first
    if not bool((visible & free & (distance > 0)).any()):
        return ""
    if _depends_on(distance, visible, free):
        seen = sorted(set(distance[visible & free].tolist()))
        return f"a window of {len(seen)} keys" if seen == list(range(len(seen))) else f"keys at distances {_list(seen)}"
    for block in range(2, len(tri) - 1):
        gap = index[:, None] // block - index // block
        if _depends_on(gap, visible, free):
            seen = sorted(set(gap[visible & free].tolist()))
            return f"chunks of {block} keys" if seen == [0] else f"blocks of {block} keys at distances {_list(seen)}"
        stride = (gap == 0) | (index % block >= block - 1)  # its own block, and the last key of each block
        if torch.equal(visible & free, stride & free):
            return f"blocks of {block} keys and the last key of each block"
    return ""


def _depends_on(key: Tensor, visible: Tensor, free: Tensor) -> bool:
    """Return whether pairs of the same number ``key`` are either all visible or all hidden, and number 0 visible."""
    return all(
        bool(visible[at].all()) or not (number == 0 or bool(visible[at].any()))
        for number in range(int(key.max()) + 1)
        for at in [free & (key == number)]
    )


def _list(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:4]))
    return f"{text}, …" if len(numbers) > 4 else text
