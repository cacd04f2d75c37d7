"""Texts that the messages of several modules share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MOST_NAMES = 6  # keys in a message


def list_names(names: Iterable[Any], most: int = MOST_NAMES) -> str:
    """Return names in one line, and how many more there are."""
    every = [str(name) for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def describe_keys(missing: list[str], unexpected: list[str]) -> str:
    """Return which keys are missing and which are unexpected, in one line."""
    groups = (("missing", missing), ("unexpected", unexpected))
    return "; ".join(f"{word} {list_names(keys)}" for word, keys in groups if keys)
