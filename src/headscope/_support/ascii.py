"""Characters beyond ASCII that are printed, and what stands for them where they cannot be shown."""

from __future__ import annotations

LIKE = {
    "␣": "_", "⏎": "\\n", "⇥": "\\t", "␍": "\\r", "∅": "(empty)", "◌": "o", "·": ".", "×": "x", "•": "*", "✓": "+",
    "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'", "←": "<-", "→": "->", "≤": "<=", "≥": ">=",
    "√": "sqrt ", "∞": "inf", "Σ": "sum ", "✗": "x", "…": "...", "±": "+-", "⌊": "floor(", "⌋": ")",
    "░": ".", "▒": ":", "▓": "*", "█": "#", "▀": "'", "▄": ",", "■": "#", "─": "-", "━": "-", "│": "|", "┃": "|",
}  # fmt: skip
"""In a sentence; an equation, a mark of a check and a token's label have words of their own for some."""
