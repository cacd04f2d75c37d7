"""ASCII replacements for printed characters, for terminals that cannot show them."""

from __future__ import annotations

import re

LIKE = {
    "␣": "_", "⏎": "\\n", "⇥": "\\t", "␍": "\\r", "∅": "(empty)", "◌": "o", "·": ".", "×": "x", "•": "*", "✓": "+",
    "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'", "←": "<-", "→": "->", "≤": "<=", "≥": ">=",
    "√": "sqrt ", "∞": "inf", "Σ": "sum ", "✗": "x", "…": "...", "±": "+-", "⌊": "floor(", "⌋": ")",
    "░": ".", "▒": ":", "▓": "*", "█": "#", "▀": "'", "▄": ",", "■": "#", "─": "-", "━": "-", "│": "|", "┃": "|",
}  # fmt: skip
"""For sentences; equations, marks of checks and token labels have their own replacements for some."""

_PLAIN_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_ASCII = {
    "Σⱼ": "sum_j", **LIKE, "ᵀ": "^T", "·": "*", "✓": "ok", "✗": "NOT HELD", "○": "-",
    "θ": "theta", "σ": "sigmoid", "ε": "eps", "ₙ": "_n",
    **dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)),
}  # fmt: skip


def to_ascii(text: str) -> str:
    """Return a text, or an equation, in ASCII, for terminals that support nothing else."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{match[0].translate(_PLAIN_POWERS)}", text)
    for fancy, simple in _ASCII.items():
        text = text.replace(fancy, simple)
    return text.encode("ascii", "replace").decode()
