"""Run a model wholly in float64: casts to float32 inside it become casts to float64.

Norms, softmax and rotary angles of most models compute in float32, whatever the dtype of their input. Their rounding
would then hide differences below 1e-7. Lifted to float64, the same code rounds 2^29 times less.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headscope._support.operation_mode import OperationMode

FACTORIES = frozenset({"zeros", "ones", "empty", "rand", "randn", "linspace", "eye"})
"""Functions whose result has the default dtype where the call does not name one."""


class LiftMode(OperationMode):
    """Replaces float32 by float64 in each operation that names a dtype."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = {name: _lift(value) for name, value in (kwargs or {}).items()}
        name = func.overloadpacket.__name__
        if name in FACTORIES and options.get("dtype") is None:
            options["dtype"] = torch.float64
        return func(*(_lift(value) for value in args), **options)


def _lift(value: Any) -> Any:
    """Return float64 for float32, and any other value as it is."""
    return torch.float64 if value is torch.float32 else value


def lifted(lifts: bool) -> AbstractContextManager[object]:
    """Return a context in which a model in float64 computes in float64 only, or one that changes nothing."""
    return LiftMode() if lifts else nullcontext()
