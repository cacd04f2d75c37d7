"""Context parallelism: while it is active, q, k and v of a call are this rank's part of a sequence.

``headscope.parallel.context`` installs an implementation here. ``run_attention`` and ``observe_call`` then pass it
their arguments, and ``MultiHeadAttention`` asks it for positions. Like the interceptor of ``hook``, it is an attribute
of this module, because torch's compiler cannot trace ``ContextVar.get``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from headscope._attend.interface import Result
from headscope.masks import Mask


class Context(Protocol):
    """Attention over a sequence of which this process holds a part."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        scale: float | None, softcap: float | None, dropout: float, backend: str | None, /,
    ) -> Result:  # fmt: skip
        """Return out and lse of this rank's queries over all keys; mask is that of the whole sequence."""
        ...

    def measure(
        self, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask | Tensor | None, bias: Tensor | None,
        sinks: Tensor | None, scale: float | None, softcap: float | None, lse: Tensor | None, what: Any,
        positions: Any, /,
    ) -> Any:  # fmt: skip
        """Return the statistics of this rank's queries over all keys."""
        ...

    entered: bool
    """Whether a module is running within ``share``."""

    def share(self, run: Callable[[], Any]) -> Any:
        """Run a module. An error of its arguments reaches every rank, so that none waits for this one."""
        ...

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's part in the sequence, int64 [own]."""
        ...

    def positions_of_keys(self, positions: Tensor) -> Tensor:
        """Return the positions of all keys, in the order of the sequence, from those of each rank's part."""
        ...


active: Context | None = None
"""The implementation while context parallelism is active, or None. Only this module assigns it."""


@contextmanager
def within(context: Context) -> Generator[None]:
    """Install an implementation within the block, and restore the previous one after it."""
    global active
    before, active = active, context
    try:
        yield
    finally:
        active = before
