"""The base of the modes that see every operation of torch while a module runs."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """A dispatch mode that does not load torch's compiler.

    torch wraps the method of each mode, to keep its compiler from tracing it. The wrapper loads the compiler, which
    takes a second, and then costs 2 µs an operation. Where the compiler is not loaded, it has nothing to keep off.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        mode: Any = cls if "torch._dynamo" in sys.modules else _unwrapped(cls)
        return super().__new__(mode)


@cache
def _unwrapped(mode: type[Any]) -> type[Any]:
    """Return a subclass whose method is not wrapped; the class itself if torch has not wrapped it."""
    method = getattr(mode.__torch_dispatch__, "__wrapped__", None)
    if method is None:
        return mode
    own = {"__torch_dispatch__": method, "_should_skip_dynamo": classmethod(lambda cls: False)}
    return type(mode.__name__, (mode,), own)
