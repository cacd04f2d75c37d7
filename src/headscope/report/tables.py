"""The tables of a page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Section", "grid", "number"]


@dataclass(frozen=True)
class Section:
    """One table of a page.

    Attributes:
        title, says: what the table shows.
        caption: the text below the table.
        columns, cells: headings and lines, as text.
        words: the columns that hold words instead of numbers.

    Examples:
        >>> from headscope.report.tables import Section
        >>> section = Section("Heads", "One line a head.", ["head", "entropy"], [["0.0", "1.25"]], caption="")
        >>> section.columns, section.cells[0]
        (['head', 'entropy'], ['0.0', '1.25'])
    """

    title: str
    says: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    caption: str
    words: Collection[str] = ()


def number(value: float, digits: int) -> str:
    """Return a value as text with ``digits`` decimals; a negative number of digits means scientific notation.

    Examples:
        >>> from headscope.report.tables import number
        >>> number(0.12345, 3), number(12345.0, -1), number(float("inf"), 3)
        ('0.123', '1.2e+04', '∞')
    """
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}f}" if digits >= 0 else f"{value:.1e}"


def grid(corner: Sequence[Sequence[float]]) -> list[list[str]]:
    """Return a corner of values as text, with as many decimals as its largest value allows.

    Examples:
        >>> from headscope.report.tables import grid
        >>> grid([[0.5, -1.0], [123.0, 0.25]])
        [['0.5', '-1.0'], ['123.0', '0.2']]
    """
    largest = max((abs(v) for row in corner for v in row if abs(v) < float("inf")), default=0.0)
    digits = 3 if 1e-2 <= largest < 100 or largest == 0 else 1 if 100 <= largest < 1e5 else -1
    return [[number(value, digits) for value in row] for row in corner]
