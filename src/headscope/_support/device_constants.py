"""Constants on a device, copied from the host once: a copy in each call would wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from headscope._support.torch_state import is_traced


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers as int64 [n]; do not write to the result.

    On a CPU the tensor is new; on other devices equal numbers share one.

    Examples:
        >>> integers((3, 5), torch.device("cpu"))
        tensor([3, 5])
    """
    if device.type == "cpu" or is_traced():  # a tracer's tensors are useless outside it
        return torch.tensor(list(values), dtype=torch.long, device=device)
    return _integers(tuple(values), device)


def numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the same for floating numbers."""
    if device.type == "cpu" or is_traced():
        return torch.tensor(list(values), dtype=dtype, device=device)
    return _numbers(tuple(values), dtype, device)


@lru_cache(maxsize=256)
def _integers(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)


@lru_cache(maxsize=256)
def _numbers(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
