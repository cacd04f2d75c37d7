"""How a cell of a map is drawn in the terminal: what the console can show, and colours or shades of ASCII."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from headscope._support.ascii import LIKE
from headscope.report.colours import Colour, colour_at, ink_on

SHADES = " .:-=+*#%@"
"""From no weight to the largest, for consoles without colours."""

_PLAIN = str.maketrans({mark: LIKE[mark] for mark in "␣⏎⇥␍∅◌"} | {"…": "~", "²": "^2"})
"""ASCII for the marks that ``visible`` makes and for headings; letters of a token are escaped."""


class Ability(NamedTuple):
    """What a console can show."""

    colour: bool
    wide: bool
    """Characters beyond ASCII."""

    def label(self, text: str) -> str:
        """Return a token's label in characters that the console can show."""
        if self.wide:
            return text
        return text.translate(_PLAIN).encode("ascii", "backslashreplace").decode("ascii")


def ability(console: Console, options: ConsoleOptions) -> Ability:
    """Return what a console can show."""
    wide = not options.ascii_only and not console.is_dumb_terminal and not console.legacy_windows
    return Ability(colour=console.color_system is not None and not console.no_color, wide=wide)


HIDDEN = -1.0
"""The value of a masked cell."""

BROKEN = (0, 140, 255)
"""The colour of NaN and infinity."""


@dataclass(frozen=True)
class Ink:
    """How a weight is drawn: as a colour, or as a shade of ASCII.

    Attributes:
        able: what the console can show.
        most: the weight with the full colour.
        root: whether the scale is the square root of the weight.
        grey: whether the colours are greys.
    """

    able: Ability
    most: float
    root: bool = False
    grey: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value on the colour scale, 0 to 1."""
        share = min(1.0, value / self.most)
        return math.sqrt(share) if self.root else share

    def colour(self, value: float) -> Colour | None:
        """Return the colour of a cell; a masked one has the terminal's background."""
        if value == HIDDEN or not self.able.colour:
            return None
        if math.isnan(value):
            return BROKEN
        level = round(255 * self.place(value))
        return (level, level, level) if self.grey else colour_at(self.place(value), dark=True)

    def cell(self, value: float, width: int, text: str = "") -> Text:
        """Return one cell ``width`` characters wide; without colours and text, a shade."""
        colour = self.colour(value)
        if colour is not None:
            return Text(f"{text:^{width}}", Style(color=ink_on(colour), bgcolor=_hex(colour)))
        if not text and value != HIDDEN and not self.able.colour:
            text = width * ("?" if math.isnan(value) else SHADES[round(self.place(value) * (len(SHADES) - 1))])
        return Text(f"{text:^{width}}")

    def halves(self, above: float, below: float) -> Text:
        """Return two cells, one above the other, in one character."""
        upper, lower = self.colour(above), self.colour(below)
        if upper is None:
            return Text(" ") if lower is None else Text("▄", Style(color=_hex(lower)))
        return Text("▀", Style(color=_hex(upper), bgcolor=None if lower is None else _hex(lower)))


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
