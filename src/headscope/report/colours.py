"""The colours of maps: one palette for plots, the terminal, traces and the page (there in ``viewer/src/field.ts``).

White, blue, ink: even steps of lightness in OKLab, readable with colour blindness. No weight has the colour of the
paper; on a dark ground the palette is reversed.
"""

from __future__ import annotations

__all__ = ["BLUES", "Colour", "colour_at", "ink_on"]

Colour = tuple[int, int, int]
"""Red, green, blue, each 0 to 255."""

BLUES = "ffffffe0f1ffc0e2ffa2d3fe84c3fd63b3fe47a1f93390ee237fe0196ecf165ebb164fa517418c163472152857121d3c0e1321"
"""17 colours at even steps, six hexadecimal digits each; colours between them are interpolated linearly."""

_LAST = len(BLUES) // 6 - 1


def colour_at(place: float, *, dark: bool = False) -> Colour:
    """Return the colour at a place from 0 (no weight) to 1 (the largest weight).

    Args:
        place: on the scale of colours; beyond it, the colour of its end.
        dark: for a dark ground: from ink to white instead of white to ink.

    Examples:
        >>> from headscope.report.colours import colour_at
        >>> colour_at(0.0), colour_at(0.5), colour_at(1.0)
        ((255, 255, 255), (35, 127, 224), (14, 19, 33))
        >>> colour_at(0.0, dark=True)
        (14, 19, 33)
    """
    place = min(max(place, 0.0), 1.0)
    step = (1 - place if dark else place) * _LAST
    low = min(int(step), _LAST - 1)
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
    red, green, blue = (int(BLUES[6 * at + n : 6 * at + n + 2], 16) for n in (0, 2, 4))
    return red, green, blue
