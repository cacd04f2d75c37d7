"""Characters beyond ASCII that are printed, and what stands for them where they cannot be shown."""

from __future__ import annotations

import re

LIKE = {
    "␣": "_", "⏎": "\\n", "⇥": "\\t", "␍": "\\r", "∅": "(empty)", "◌": "o", "·": ".", "×": "x", "•": "*", "✓": "+",
    "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'", "←": "<-", "→": "->", "≤": "<=", "≥": ">=",
    "√": "sqrt ", "∞": "inf", "Σ": "sum ", "✗": "x", "…": "...", "±": "+-", "⌊": "floor(", "⌋": ")",
    "░": ".", "▒": ":", "▓": "*", "█": "#", "▀": "'", "▄": ",", "■": "#", "─": "-", "━": "-", "│": "|", "┃": "|",
}  # fmt: skip
"""In a sentence; an equation, a mark of a check and a token's label have words of their own for some."""

_PLAIN_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_ASCII = {
    "Σⱼ": "sum_j", **LIKE, "ᵀ": "^T", "·": "*", "✓": "ok", "✗": "NOT HELD", "○": "-",
    **dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)),
}  # fmt: skip


def to_ascii(text: str) -> str:
    """Return a text, or an equation, in ASCII, for terminals that have nothing else."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{match[0].translate(_PLAIN_POWERS)}", text)
    for fancy, simple in _ASCII.items():
        text = text.replace(fancy, simple)
    return text.encode("ascii", "replace").decode()
