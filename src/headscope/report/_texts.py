"""Texts of pages: tokens and names as they are shown, and sentences about rows."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from headscope._analysis.answers import plural, short_layers
from headscope.stats import LayerStats

__all__ = ["NOT_EXPLANATION", "broken_layers", "few", "short_layers", "visible"]

NOT_EXPLANATION = (
    "Attention weights show where a head reads. They do not explain the model's answer: attention is not explanation. "
    "A score measures how closely a head matches a pattern. It does not show what the head is for."
)

FEW = 8
"""How many layers or heads a line names."""


_BYTES = re.compile(r"( ?)((?:\\x[89a-f][0-9a-f])+)")
"""A token of bytes that are no whole character, as tokenizers of bytes write it."""

_SHOWN = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}


def visible(text: str, *, limit: int = 24, blanks: bool = True) -> str:
    r"""Return text on one line, every character visible: blanks as symbols, controls and direction marks as escapes.

    A letter that combines with nothing is given a dotted circle; what is longer than ``limit`` characters ends in "…".
    The empty text is shown as "∅". Without ``blanks`` a space stays a space. A token of bytes that are no whole
    character is shown by its bytes, as ⟨e1⟩.

    Examples:
        >>> from headscope.report.sheet import visible
        >>> visible("two words"), visible("a long token", limit=8), visible("")
        ('two␣words', 'a␣long␣…', '∅')
        >>> visible(r"\xe1"), visible(r" \xe1\xb5"), visible(r"a\xe1")
        ('⟨e1⟩', '␣⟨e1⟩⟨b5⟩', 'a\\xe1')
    """
    if (split := _BYTES.fullmatch(text)) is not None:
        text = split[1] + re.sub(r"\\x(..)", r"⟨\1⟩", split[2])
    shown = "".join(
        " " if character == " " and not blanks else _visible_character(character) for character in text[: limit + 1]
    )
    if text and unicodedata.combining(text[0]):
        shown = "◌" + shown
    return (shown[: limit - 1] + "…" if len(text) > limit or len(shown) > limit else shown) or "∅"


def _visible_character(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    # Cc control, Cf format (joiners, marks of direction), Cs lone surrogate, Co private, Cn unassigned, Z other blanks
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"):
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
    return character


def few(names: Sequence[str], most: int = FEW) -> str:
    """The first of these names, as they are shown, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(visible(name, limit=40, blanks=False) for name in names[:most]) + more


def broken_layers(parts: Mapping[str, LayerStats]) -> str:
    """Return how many rows hold NaN or infinity and are in no figure, and in which layers; empty where none do.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.report.sheet import broken_layers
        >>> q = torch.randn(1, 2, 4, 8)
        >>> q[0, 0, 0, 0] = torch.nan
        >>> broken_layers({"layers.0": observe(q, q, q)})
        '4 rows of heads hold NaN or infinity and are in no figure: in layer layers.0.'
    """
    counts = {layer: int(part.broken.sum()) for layer, part in parts.items() if part.broken.any()}
    if not counts:
        return ""
    short, _ = short_layers([*parts])
    total, names = sum(counts.values()), few([short[layer] for layer in counts])
    which = f"{plural('layer', len(counts))} {names}" if len(counts) <= FEW else f"{len(counts)} layers: {names}"
    hold, are = ("holds", "is") if total == 1 else ("hold", "are")
    return f"{total:,} {plural('row', total)} of heads {hold} NaN or infinity and {are} in no figure: in {which}."
