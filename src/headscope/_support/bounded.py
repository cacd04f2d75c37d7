"""The one kind of table for what can be computed again."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedTable(dict[K, V]):
    """A table that is emptied when it would hold more than ``most`` entries.

    So many come only from sizes that grow with every call, and then no old one is asked for again. It needs no lock: an
    entry is complete before it is added, and one that another thread drops is computed again.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def add(self, key: K, value: V) -> V:
        """Add an entry, to an empty table if there is no room; return the value."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value
