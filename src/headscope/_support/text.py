"""Untrusted text, such as names in a recording, in a form that is safe to print."""

from __future__ import annotations

import re


def visible(text: str) -> str:
    """Return the text with each character that controls a terminal, or is invisible, as an escape such as ``\\x1b``.

    These are control characters including line ends, direction marks, lone surrogates, and blanks other than the space.
    All code that prints names, tokens or text of a file or a recording calls this function.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def count_places(piece: str, text: str) -> int:
    """Return how often a text has a piece, also where the places overlap.

    Examples:
        >>> from headscope._support.text import count_places
        >>> count_places("aa", "aaa"), count_places("", "aaa")
        (2, 0)
    """
    return sum(1 for _ in re.finditer(f"(?={re.escape(piece)})", text)) if piece else 0
