"""The base of the parts of the statistics of a layer, and the dtype of their sums."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, or float32 on a device without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Part:
    """A part that is copied and pickled with its own numbers only: a tensor view would include its whole storage."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _alone(value) for name, value in self.__dict__.items()}


def _alone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(cast(object, value), "_fields"):  # a named tuple of tensors
        return type(value)(*map(_alone, value))
    return {name: _alone(each) for name, each in value.items()} if isinstance(value, dict) else value
