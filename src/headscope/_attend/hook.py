"""The hook for other parts of headscope to intercept attention calls: ``with intercepting(interceptor): ...``.

``headscope.attention`` and ``attend`` call the interceptor instead of ``_attend.attention.run_attention``, with the
same arguments. The interceptor calls ``run_attention`` itself, once or not at all, and returns the caller's result.
``watch``, ``heads`` and ``check`` use this hook.

The interceptor is an attribute of this module, which each call reads through the module. It is not a ``ContextVar``:
torch's compiler cannot trace ``ContextVar.get``. A module's attribute is a guard of the graph, so a compiled function
is retraced while an interceptor is installed. An interceptor applies to all threads. One that serves some threads only
must check the thread itself, as that of ``watch`` does with its stack of running modules for each thread.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from headscope.masks import Mask


class Interceptor(Protocol):
    """A replacement for ``_attend.attention.run_attention``."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None, /,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return out, and the log-sum-exp of each row if ``lse`` is True."""
        ...


interceptor: Interceptor | None = None
"""The interceptor of all attention calls, or None. Only this module assigns it."""


def install(replacement: Interceptor | None) -> Interceptor | None:
    """Replace the interceptor and return the previous one; None removes it."""
    global interceptor
    before, interceptor = interceptor, replacement
    return before


@contextmanager
def intercepting(replacement: Interceptor) -> Generator[None]:
    """Install an interceptor within the block, and restore the previous one after it."""
    before = install(replacement)
    try:
        yield
    finally:
        install(before)
