"""Hashes and bytes of tensors, which tell whether numbers are the same to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
_FACTOR = 0x1E3779B97F4A7C15  # near the golden ratio, as in Fibonacci hashing (Knuth 1998, section 6.4)


def hash_numbers(x: Tensor) -> Tensor:
    """Return a hash of the numbers along the last axis, int64 [...]: their bits, each times an odd number of its place.

    Examples:
        >>> import torch
        >>> from headscope._support.hashing import hash_numbers
        >>> a, b, c = hash_numbers(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).tolist()
        >>> a == b, a == c
        (False, True)
    """
    words = x.detach().contiguous().view(_WORDS[x.element_size()]).long()
    return (words * (torch.arange(1, 2 * words.shape[-1], 2, device=x.device) * _FACTOR)).sum(-1)


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; without a copy, if it is contiguous.

    A tensor of one number counts as contiguous whatever its strides are, and then has no view as bytes.

    Examples:
        >>> import torch
        >>> from headscope._support.hashing import bytes_of
        >>> bytes_of(torch.tensor([[1, 2, 3]], dtype=torch.uint8)[:, ::3]).tobytes()
        b'\\x01'
    """
    numbers = x.detach().contiguous()
    return numbers.as_strided((numbers.numel(),), (1,)).view(torch.uint8).numpy().data
