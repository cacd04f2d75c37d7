"""Tables that stand on a page beside the heads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """One table of a page.

    Attributes:
        title, says: what it is; caption: what stands below it.
        columns, cells: headings and lines, as text.
        words: the columns that hold words and not numbers.
    """

    title: str
    says: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    caption: str
    words: Collection[str] = ()
