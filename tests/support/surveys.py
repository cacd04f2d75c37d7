"""A small corpus for surveys, whose options are in ``survey_ranks``."""

from __future__ import annotations

import json
from pathlib import Path

LINES = "".join(f"def f{n}(x):\n    return x * {n} + y{n % 3}\n" for n in range(40))


def write_corpus(folder: Path) -> Path:
    """Write a corpus of about 1,500 tokens: texts, JSON lines and documents that cannot be read."""
    (folder / "more").mkdir(parents=True)
    (folder / "a.py").write_text(LINES)
    (folder / "b.txt").write_text("Attention is a weighted mean of values.\n" * 9)
    (folder / "more" / "c.py").write_text(LINES[:300])
    (folder / "more" / "short.txt").write_text("x")
    (folder / "broken.txt").write_bytes(b"import \xff")
    (folder / "empty.txt").write_bytes(b"")
    documents = [{"text": f"{n}: import torch, numpy as np\n" * 6} for n in range(4)]
    lines = [json.dumps(each) for each in documents]
    lines[2:2] = ["{", json.dumps({"body": "x"}), "", json.dumps({"text": 3}), json.dumps([5, 7, 9] * 7), "[5, 99999]"]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    return folder
