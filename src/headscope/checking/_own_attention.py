"""headscope's own attention by the reference backend, so that its steps can be followed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from headscope._attend import hook
from headscope._attend.attention import run_attention


@contextmanager
def computed_by_reference() -> Generator[list[int]]:
    """Compute ``headscope.attention`` with the reference backend in this context; yield a list, one entry per call."""
    calls = list[int]()

    def attend(
        q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any,
        scale: Any, softcap: Any, dropout: Any, lse: Any, backend: Any, /,
    ) -> Any:  # fmt: skip
        calls.append(1)
        return run_attention(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, "reference")

    with hook.intercepting(attend):
        yield calls
