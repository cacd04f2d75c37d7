"""Positions of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._support.arguments import shapes
from headscope._support.torch_state import is_traced
from headscope.positions._options import to_positions


def restarting(cu_seqlens: Tensor) -> Tensor:
    """Return positions [total] of packed sequences, from 0 in each: cumulative lengths 0, 3, 5 -> 0, 1, 2, 0, 1.

    Raises:
        TypeError: they are not a tensor of integers.
        ValueError: they do not start at 0, or decrease.

    Examples:
        >>> import torch
        >>> from headscope import positions
        >>> positions.restarting(torch.tensor([0, 3, 5]))
        tensor([0, 1, 2, 0, 1])
    """
    cu_seqlens = to_positions("cu_seqlens", cu_seqlens, "[n + 1]")
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens: {shapes(cu_seqlens=cu_seqlens)}, expected [n + 1]")
    if cu_seqlens.device.type != "meta" and not is_traced():
        offsets: list[int] = cu_seqlens.tolist()
        if offsets[0] or offsets != sorted(offsets):
            raise ValueError(f"cu_seqlens: got {offsets}, expected numbers that start at 0 and never decrease")
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())  # [total]
    return torch.arange(len(starts), device=starts.device) - starts
