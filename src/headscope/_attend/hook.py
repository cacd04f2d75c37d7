"""The one place where another part of headscope steps into attention calls: ``with intercepting(interceptor): ...``.

``headscope.attention`` and ``attend`` call the interceptor in place of ``_attend.attention.run_attention``, with the
same arguments. The interceptor calls ``run_attention`` itself, once or not at all, and returns what the caller gets.
``watch``, ``heads`` and ``check`` use this hook.

The interceptor is an attribute of this module, which each call reads through the module. It is not a ``ContextVar``:
torch's compiler cannot trace ``ContextVar.get``. A module's attribute is a guard of the graph, so a function that was
compiled before is traced anew while an interceptor is installed. An interceptor holds for all threads. One that serves
some threads only decides for itself, as that of ``watch`` does by its stack of running modules, one for each thread.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from headscope.masks import Mask


class Interceptor(Protocol):
    """What attends in place of ``_attend.attention.run_attention``."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None, /,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return out, and the log-sum-exp of each row where ``lse`` is True."""
        ...


interceptor: Interceptor | None = None
"""The interceptor of all attention calls; None = there is none. Only this module assigns it."""


def install(replacement: Interceptor | None) -> Interceptor | None:
    """Replace the interceptor and return the one before; None removes it."""
    global interceptor
    before, interceptor = interceptor, replacement
    return before


@contextmanager
def intercepting(replacement: Interceptor) -> Generator[None]:
    """Let an interceptor attend within the block; then the one before does again."""
    before = install(replacement)
    try:
        yield
    finally:
        install(before)
