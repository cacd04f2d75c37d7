"""headscope's own attention by its definition, so that its steps can be followed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from headscope import functional


@contextmanager
def computed_by_reference() -> Generator[list[int]]:
    """Compute ``headscope.attention`` by the reference backend while this is open; yield an entry for each call."""
    before, calls = functional.watched, list[int]()

    def attend(q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, numbers: Any, backend: Any) -> Any:
        calls.append(1)
        return functional._run(q, k, v, mask, bias, sinks, numbers, "reference")

    functional.watched = attend
    try:
        yield calls
    finally:
        functional.watched = before
