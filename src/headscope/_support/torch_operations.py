"""torch's operations beneath autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PRODUCTS: dict[str, Callable[[tuple[Any, ...]], tuple[Tensor, Tensor]]] = {
    "mm": lambda args: (args[0], args[1]),
    "bmm": lambda args: (args[0], args[1]),
    "addmm": lambda args: (args[1], args[2]),
    "baddbmm": lambda args: (args[1], args[2]),
}
"""Products of two matrices by name: from the arguments to the operands."""


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is composed of others: without autograd it arrives whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
