"""The table for all cached values that can be recomputed."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedTable(dict[K, V]):
    """A table that is cleared when it would hold more than ``most`` entries.

    Only sizes that grow with every call lead to so many entries, and old entries are then never used again. It does not
    require a lock: an entry is complete before it is added, and one that another thread drops is recomputed.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def add(self, key: K, value: V) -> V:
        """Add an entry, to a cleared table if it is full; return the value."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value
