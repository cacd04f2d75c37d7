"""The files, folders and names that the pages for contributors mention exist."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from headscope._layouts.table import Layout
from support.paths import DOCS, ROOT

if not (ROOT / "csrc").exists() or not DOCS.exists():
    pytest.skip("not in a checkout", allow_module_level=True)

PAGES = [ROOT / "CONTRIBUTING.md", *sorted((DOCS / "development").rglob("*.md"))]
FOLDERS = ("src", "csrc", "tests", "scripts", "benchmarks", "docs", ".github", "viewer/src")
SOURCES = {".py", ".h", ".cpp", ".js", ".jsx", ".ts", ".tsx", ".toml", ".json", ".yml", ""}
CREATED = {"yours.py"}
"""Files that a step of a page creates."""

SUFFIXES = "py|h|cpp|md|json|safetensors|toml|yml"
PATH = re.compile(rf"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:{SUFFIXES})(?![\w.])|(?<![\w./-])(?:[\w-]+/)+(?![\w./-])")
FOLDER = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})(?:/[\w-]+)+(?![\w./-])")
CODE = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?")
PLACED = re.compile(r"`([A-Za-z_]\w*)`\s+(?:in|of|to)\s+`([\w/-]+\.(?:py|h|cpp))`")


@cache
def files() -> dict[str, Path]:
    """Return all files and folders of the checkout by their paths, which begin and end with a slash."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    every = [*found, *(ROOT / folder for folder in FOLDERS), *ROOT.glob("*.*")]
    return {f"/{path.relative_to(ROOT).as_posix()}/": path for path in every}


@cache
def words() -> frozenset[str]:
    """Return the words of all sources except this file."""
    paths = [path for path in files().values() if path.suffix in SOURCES and path.is_file() and path != Path(__file__)]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths if DOCS not in path.parents]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def at(path: str) -> list[Path]:
    """Return the files whose paths end in these folders and this name."""
    return [each for name, each in files().items() if name.endswith(f"/{path.strip('/')}/")]


def missing(text: str) -> list[str]:
    """Return the paths and names of a page that are nowhere in the checkout."""
    paths = {*PATH.findall(text), *FOLDER.findall(text)}
    codes = set(CODE.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))
    names = {match[1] for code in codes - paths if (match := NAME.fullmatch(code))}
    lost = {path for path in paths if Path(path).name not in CREATED and not at(path)}
    lost |= {name for name in names if not set(name.split(".")) <= words() and not at(name)}
    for name, path in PLACED.findall(text):
        if not any(re.search(rf"\b{name}\b", each.read_text(encoding="utf-8")) for each in at(path)):
            lost.add(f"{name} in {path}")
    return sorted(lost)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_a_path_or_name_that_does_not_exist_is_reported() -> None:
    text = (
        "Add it to `ORDER` in `_attend/call.py` and to `select`\nin `src/headscope/_attend/select.py`; run "
        "`tests/gone/`, `_attend/gone.py`, `gone_by`, `Gone.name(x)`, `attend(call)`.\n"
        "```sh\npytest tests/gone_too\n```"
    )
    expected = [
        "Gone.name",
        "ORDER in _attend/call.py",
        "_attend/gone.py",
        "gone_by",
        "tests/gone/",
        "tests/gone_too",
    ]
    assert missing(text) == expected


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("adding_a_check", {path.stem for path in (ROOT / "src/headscope/checking/_probes").glob("[a-z]*.py")}),
        ("adding_a_layout", {each.name for each in fields(Layout)} - {"name", "of", "parts"}),
    ],
    ids=["probes", "fields of a layout"],
)
def test_a_table_of_a_page_is_complete(page: str, names: set[str]) -> None:
    text = (DOCS / "development" / f"{page}.md").read_text(encoding="utf-8")
    listed = {match[1] for code in CODE.findall(text) if (match := re.match(r"(\w+)", code))}
    assert names - listed == set()
