"""The colours of maps in the terminal; those of the page are in ``viewer/src/field.ts``.

They are matplotlib's "magma", which is perceptually uniform and readable with colour blindness.
"""

from __future__ import annotations

__all__ = ["MAGMA", "Colour", "colour_at", "ink_on"]

Colour = tuple[int, int, int]
"""Red, green, blue, each 0 to 255."""

MAGMA = (
    "0000040303120a0822130d341d114729115a36106b440f7651127c5d177f6a1c81762181832681902a819c2e7faa337d"
    "b73779c43c75d0416fdc4869e75263ef5d5ef56b5cf9795dfc8961fd9869fea772feb67cfec488fed395fde2a3fcf0b2fcfdbf"
)
"""33 colours at even steps, six hexadecimal digits each; colours between them are interpolated linearly."""


def colour_at(place: float) -> Colour:
    """Return the colour at a place from 0 (black) to 1 (nearly white).

    Examples:
        >>> from headscope.report.colours import colour_at
        >>> colour_at(0.0), colour_at(0.5), colour_at(1.0)
        ((0, 0, 4), (183, 55, 121), (252, 253, 191))
    """
    step = min(max(place, 0.0), 1.0) * 32
    low = min(int(step), 31)
    red, green, blue = (round(a + (b - a) * (step - low)) for a, b in zip(_anchor(low), _anchor(low + 1), strict=True))
    return red, green, blue


def ink_on(colour: Colour) -> str:
    """Return black or white, whichever is more readable on a colour.

    Examples:
        >>> from headscope.report.colours import ink_on
        >>> ink_on((255, 255, 255)), ink_on((0, 0, 3))
        ('black', 'white')
    """
    red, green, blue = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "white"


def _anchor(at: int) -> Colour:
    red, green, blue = (int(MAGMA[6 * at + n : 6 * at + n + 2], 16) for n in (0, 2, 4))
    return red, green, blue
