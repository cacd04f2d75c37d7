"""Hold how hard the prose is: README, docs and docstrings against the ceilings in scripts/prose.json.

python scripts/prose.py            # compare; exit 1 where a count is above its ceiling
python scripts/prose.py --show     # list every place that is counted
python scripts/prose.py --update   # lower the ceilings to the counts; no ceiling rises

Three things are counted: sentences of more than 25 words, lines wider than 120 columns, and words that the glossary in
docs/development/writing.md replaces.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CEILINGS = ROOT / "scripts" / "prose.json"
MOST_WORDS, MOST_COLUMNS = 25, 120
GLOSSARY = {  # a pattern -> what to write
    r"sooner": "faster, earlier",
    r"apart from|but for": "except, separately",
    r"comes? to": "equals, evaluates to",
    r"(?:is|are) no|takes? no": "negate the verb: is not, does not support",
    r"(?:is|are) to be": "the verb with its actor",
    r"is (?:said|told)|are (?:said|told)|says? so|tells? (?:that|how|which|what)": "specify, given as",
    r"may see|may be seen": "visible",
    r"wants?|wanted": "requires, expected",
    r"knows?|looks? on": "a verb that code can do",
    r"who only|whoever": "the noun",
    r"rooms?|houses?|walls?": "module, package, layer",
    r"had better|for nothing|what it is of|of its own": "plain English",
}
WORDS = re.compile(r"\b(?:" + "|".join(GLOSSARY) + r")\b", re.IGNORECASE)


class Text(NamedTuple):
    """Prose of one file, from one of its lines on."""

    kind: str
    path: Path
    line: int
    text: str


class Place(NamedTuple):
    """One thing that is counted."""

    count: str
    path: Path
    line: int
    words: str


def pages() -> list[Path]:
    """Return the pages of the repository that people read."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def without_code(markdown: str) -> str:
    """Blank what is not prose: code, tables, headings, addresses. Lines keep their numbers."""
    text = re.sub(r"^```.*?^```", lambda match: "\n" * match[0].count("\n"), markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}|\t|\s*\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def texts() -> Iterator[Text]:
    """Yield the prose of pages and docstrings."""
    for path in pages():
        yield Text("pages", path, 1, without_code(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield Text(
                    "docstrings", path, node.body[0].lineno, without_code(re.split(r"\n(?:Args|Raises):", text)[0])
                )


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence of more than 25 words, with its line counted from 0."""
    for block in re.finditer(r"(?:[^\n]+\n?)+", re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(block[0].split())):
            if len(sentence.split()) > MOST_WORDS:
                yield text.count("\n", 0, max(0, text.find(sentence[:20]))), sentence


def places() -> Iterator[Place]:
    """Yield everything that is counted."""
    for kind, path, first, text in texts():
        for line, sentence in long_sentences(text):
            yield Place(f"{kind}: long sentences", path, first + line, sentence)
        for match in WORDS.finditer(text):
            yield Place(f"{kind}: words of the glossary", path, first + text.count("\n", 0, match.start()), match[0])
    for path in pages():
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(text) > MOST_COLUMNS and "|" not in text and "](" not in text:
                yield Place("pages: wide lines", path, line, text[:60])


def main() -> None:
    """Compare the counts with the ceilings, list the places, or lower the ceilings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true")
    action.add_argument("--update", action="store_true")
    options = parser.parse_args()
    everything = list(places())
    counts = Counter(place.count for place in everything)
    ceilings: dict[str, int] = json.loads(CEILINGS.read_text(encoding="utf-8"))
    if options.show:
        for place in everything:
            print(f"{place.path.relative_to(ROOT)}:{place.line}: {place.count}: {place.words}")
    if options.update:
        ceilings = {name: min(ceiling, counts[name]) for name, ceiling in ceilings.items()}
        CEILINGS.write_text(json.dumps(ceilings, indent=2) + "\n", encoding="utf-8")
    for name, ceiling in ceilings.items():
        print(f"{name}: {counts[name]} of at most {ceiling}")
    if any(counts[name] > ceiling for name, ceiling in ceilings.items()):
        raise SystemExit("The prose became harder to read: `python scripts/prose.py --show` lists the places.")


if __name__ == "__main__":
    main()
