"""Hold prose to docs/development/writing.md: pages, docstrings and messages against the limits in scripts/prose.json.

python scripts/prose.py                       # exit 1 where a figure is above its limit
python scripts/prose.py --show [PATH ...]     # list every place that counts, of all files or of these
python scripts/prose.py --worst 20 [PATH ...] # the longest sentences

Of each corpus six things are measured: the mean length of its sentences, the share of long ones, words that the
glossary replaces, lines that are too wide, headings in title case, and US spelling. A word of the glossary may stand
where prose.json allows the phrase around it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMITS = ROOT / "scripts" / "prose.json"
LONG_WORDS, MOST_COLUMNS = 30, 120
GLOSSARY = {  # a pattern -> what to write
    r"look(?:s|ed|ing)? (?:at|on)": "attend to",
    r"seen|hidden by|may see|sees": "visible, masked, recorded",
    r"said|told|says? so|tells? (?:that|how|which|what)": "specify, given as, argument",
    r"wants?|wanted": "requires, expected",
    r"beside": "compared with",
    r"sooner": "faster, earlier",
    r"apart|but for": "separately, except",
    r"(?:comes?|came) to": "equals, evaluates to",
    r"kept": "cached, saved, retained",
    r"verbs?|rooms?|houses?|walls?": "command, module, package, layer",
    r"(?:is|are) no|takes? no": "negate the verb: is not, does not support",
    r"(?:is|are) to be": "the verb with its actor",
    r"who only|whoever|theirs|ours": "the noun",
    r"had better|for nothing|what it is of|nothing but": "plain English",
    r"put in place whole|fetch(?:es)? ahead": "written atomically, prefetches",
}
US = {
    r"colors?": "colour",
    r"center(?:s|ed)?": "centre",
    r"behaviors?": "behaviour",
    r"grays?": "grey",
    r"neighbors?": "neighbour",
    r"labeled|modeled|canceled": "labelled, modelled, cancelled",
    r"initializ\w+|recogniz\w+|summariz\w+|serializ\w+|organiz\w+|minimiz\w+|maximiz\w+|renormaliz\w+": "-ise",
}
WORDS = re.compile(r"(?<![-\w])(?:" + "|".join(GLOSSARY) + r")(?![-\w])", re.IGNORECASE)
SPELLING = re.compile(r"\b(?:" + "|".join(US) + r")\b", re.IGNORECASE)
LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ", re.MULTILINE)
ARGUMENT = re.compile(r"^ {4}\**[\w, *]+(?: \([^)]*\))?: ", re.MULTILINE)


class Text(NamedTuple):
    """Prose of one file, from one of its lines on."""

    corpus: str
    path: Path
    line: int
    text: str


class Place(NamedTuple):
    """One thing that counts."""

    corpus: str
    measure: str
    path: Path
    line: int
    words: str


def pages() -> list[Path]:
    """Return the pages that people read; CHANGELOG is a list of changes, and CODE_OF_CONDUCT is not our text."""
    root = [page for page in ROOT.glob("*.md") if page.name not in ("CHANGELOG.md", "CODE_OF_CONDUCT.md")]
    rendered = ROOT / "docs" / "getting_started" / "notebook.md"  # by scripts/render_notebook.py
    return sorted({*root, *(ROOT / "docs").rglob("*.md")} - {rendered})


def without_code(markdown: str) -> str:
    """Blank what is not prose: code, tables, headings, addresses. Lines keep their numbers."""
    text = re.sub(r"^```.*?^```", lambda match: "\n" * match[0].count("\n"), markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(
        r"^(?: {4,}>>>.*(?:\n {4,}\S.*)*|>>>.*(?:\n.+)*)", lambda m: "\n" * m[0].count("\n"), text, flags=re.M
    )
    text = re.sub(r"^(?:\s*\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"(`+)[^`].*?\1", "code", text)


def without_indented_code(markdown: str) -> str:
    """Blank the blocks of pages that four blanks make code: after an empty line, and not within a list."""
    lines, out, code, in_list = markdown.split("\n"), list[str](), False, False
    for n, line in enumerate(lines):
        if LIST_ITEM.match(line):
            in_list = True
        elif line.strip() and not line.startswith(" "):
            in_list = False
        starts = line.startswith("    ") and not in_list and (n == 0 or not lines[n - 1].strip() or code)
        code = starts or (code and not line.strip())
        out.append("" if starts else line)
    return "\n".join(out)


def message_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that hold a sentence: four words or more; what an f-string inserts is one word."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "code" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | parts):
            text = node.value
        else:
            continue
        if (
            len(re.findall(r"(?<![\w.<{])[A-Za-z']{2,}(?![\w=>}])", text)) >= 4
            and "{\n" not in text
            and "</" not in text
        ):
            yield node.lineno, text


def texts() -> Iterator[Text]:
    """Yield the prose of pages, docstrings and messages."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        yield Text("pages", path, 1, without_code(without_indented_code(text)))
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield Text("docstrings", path, node.body[0].lineno, ARGUMENT.sub("\n", without_code(text)))
        for line, text in message_strings(tree):
            yield Text("messages", path, line, re.sub(r"`[^`]*`", "code", text))


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences with their line, counted from 0; a semicolon or colon before a blank ends one, too."""
    for block in re.finditer(r"(?:[^\n]+\n?)+", LIST_ITEM.sub("\n", text)):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(block[0].split())):
            if len(sentence.split()) >= 2:
                yield text.count("\n", 0, max(0, text.find(sentence[:20]))), sentence


def is_title_case(heading: str) -> bool:
    """Whether words of a heading after its first begin with a capital without being names or code."""
    _, *rest = re.sub(r"`[^`]*`", "", heading).split()
    return sum(bool(re.fullmatch(r"[A-Z][a-z]{2,}[,.:]?", word)) for word in rest) >= 2


def places(allowed: list[str]) -> Iterator[Place]:
    """Yield each long sentence, wide line, heading in title case, US word and word of the glossary not allowed."""
    for corpus, path, first, text in texts():
        free = text
        for phrase in allowed:
            free = re.sub(re.escape(phrase), lambda match: "·" * len(match[0]), free, flags=re.IGNORECASE)
        for line, sentence in sentences(text):
            if len(sentence.split()) > LONG_WORDS:
                yield Place(corpus, "long sentences, %", path, first + line, sentence)
        for pattern, name in ((WORDS, "glossary, in 1,000 words"), (SPELLING, "US spelling")):
            for match in pattern.finditer(free):
                around = free[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
                yield Place(corpus, name, path, first + free.count("\n", 0, match.start()), f"{match[0]}: …{around}…")
    for path in pages():
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(text) > MOST_COLUMNS and "|" not in text and "](" not in text:
                yield Place("pages", "wide lines", path, line, text[:60])
            if (heading := re.match(r"#+ (.+)", text)) and is_title_case(heading[1]):
                yield Place("pages", "headings in title case", path, line, heading[1])


def measure(found: list[Place]) -> dict[str, dict[str, float]]:
    """Return each figure of each corpus."""
    figures: dict[str, dict[str, float]] = {}
    lengths: dict[str, list[int]] = {}
    words: dict[str, int] = {}
    for corpus, _, _, text in texts():
        lengths.setdefault(corpus, []).extend(len(sentence.split()) for _, sentence in sentences(text))
        words[corpus] = words.get(corpus, 0) + len(text.split())
    for corpus, each in lengths.items():
        count = {name: sum(place[:2] == (corpus, name) for place in found) for name in {place[1] for place in found}}
        figures[corpus] = {
            "mean sentence, words": round(sum(each) / len(each), 2),
            "long sentences, %": round(100 * count.get("long sentences, %", 0) / len(each), 2),
            "glossary, in 1,000 words": round(1000 * count.get("glossary, in 1,000 words", 0) / words[corpus], 2),
            **{name: count.get(name, 0) for name in ("wide lines", "headings in title case", "US spelling")},
        }
    return figures


def main() -> None:
    """Compare the figures with the limits, or list the places."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    options = parser.parse_args()
    settings = json.loads(LIMITS.read_text(encoding="utf-8"))
    found = list(places(settings["allowed"]))
    shown = [path.resolve() for path in options.paths]

    def is_shown(path: Path) -> bool:
        return not shown or any(path == each or each in path.parents for each in shown)

    if options.show:
        for corpus, name, path, line, words in found:
            if is_shown(path):
                print(f"{path.relative_to(ROOT)}:{line}: {corpus}: {name}: {words}")
    if options.worst:
        longest = [(len(s.split()), path, first + n, s) for _, path, first, text in texts() for n, s in sentences(text)]
        for length, path, line, sentence in sorted(longest, key=lambda each: -each[0])[: options.worst]:
            if is_shown(path):
                print(f"{path.relative_to(ROOT)}:{line}: {length} words: {sentence}")
    above = False
    for corpus, figures in measure(found).items():
        for name, figure in figures.items():
            limit = settings["limits"][corpus][name]
            above = above or figure > limit
            print(f"{'ABOVE ' if figure > limit else ''}{corpus}: {name}: {figure} of at most {limit}")
    if above:
        raise SystemExit("The prose is harder to read than scripts/prose.json allows: --show lists the places.")


if __name__ == "__main__":
    main()
