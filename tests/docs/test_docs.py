"""README and docs: their Python runs as it stands there, and their links lead to something."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest

from support.paths import ROOT

RENDERED = ROOT / "docs" / "getting_started" / "notebook.md"  # by scripts/render_notebook.py, where the site was built
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "training").glob("*.md")} - {RENDERED})
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


class Block(NamedTuple):
    """Python between ``` fences, the line of the file on which it begins, counted from 1, and what it prints."""

    line: int
    code: str
    output: str | None = None


def blocks(text: str) -> list[Block]:
    """A ```text block that follows Python with at most an empty line between is what the Python prints."""
    pattern = r"^```python\n(.*?)^```$(?:\n\n?```text\n(.*?)^```$)?"
    return [
        Block(text[: found.start(1)].count("\n") + 1, found[1], found[2])
        for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE)
    ]


WITH_CODE = [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_pages_that_hold_code_are_found() -> None:
    assert {"README.md", "docs/concepts/masks.md", "docs/guides/sheets_and_plots.md", "docs/guides/trace.md"} <= {
        named(page) for page in WITH_CODE
    }
    assert blocks("a\n```python\nb = 1\nc\n```\n```\nd\n```\n```python\ne\n```\n") == [
        (3, "b = 1\nc\n", None),
        (10, "e\n", None),
    ]
    assert blocks("```python\na\n```\n\n```text\n1\n```\n") == [(2, "a\n", "1\n")]


def test_lists_of_members_in_the_reference_are_complete() -> None:
    """A page that puts names in an order of its own must not lose one."""
    listed: dict[str, list[str]] = {}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        blocks = re.finditer(
            r"^::: (\S+)\n(?:    .*\n)*?      members:\n((?:        - \w+\n)+)", page.read_text(), re.MULTILINE
        )
        listed |= {block[1]: re.findall(r"- (\w+)", block[2]) for block in blocks}
    assert len(listed) >= 4
    for room, names in listed.items():
        assert sorted(names) == sorted(importlib.import_module(room).__all__), room


def test_every_room_is_in_the_reference() -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    package = ROOT / "src" / "headscope"
    rooms = [f"headscope.{room.stem}" for room in package.glob("[!_]*.py") if room.stem != "cli"]  # command_line.md
    rooms += [f"headscope.report.{room.stem}" for room in (package / "report").glob("[!_]*.py")]
    assert [room for room in rooms if f"::: {room}\n" not in reference] == []


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # Whisper's np.repeat of a tensor
@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, in order, in one namespace and an empty folder; what they print is what the page shows."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = blocks(page.read_text(encoding="utf-8"))
    for line, code, output in found:
        printed = io.StringIO()
        # empty lines before it: an error then names the line of the page
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        if output is not None:
            same = doctest.OutputChecker().check_output(
                output, printed.getvalue(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            )
            assert same, f"{named(page)}:{line}: prints\n{printed.getvalue()}"
    pyplot.close("all")
    assert len(namespace) > 2, f"{named(page)}: its {len(found)} blocks made nothing"


def targets(markdown: str) -> list[str]:
    """Where links and images of Markdown lead, outside of code."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    found = re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", prose)
    return found + re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)


def anchors(markdown: str) -> set[str]:
    """The fragments by which headings are reached, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_are_found() -> None:
    page = '# A `b` c\n[x](y.md) ![z](a/b.png "t") `[no](no.md)` <img src="c.svg">\n```\n[no](no.md)\n```\n[u](#a-b-c)'
    assert targets(page) == ["y.md", "a/b.png", "#a-b-c", "c.svg"]
    assert anchors(page) == {"a-b-c"}


def markdown(page: Path) -> str:
    """A page, or what a notebook says between its cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    notebook: Any = nbformat.reads(text, as_version=4)
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def headings(page: Path) -> set[str]:
    """The fragments of a page; in a notebook they are the headings as they stand, with hyphens for blanks."""
    if page.suffix == ".ipynb":
        return {found.replace(" ", "-") for found in re.findall(r"^#+ (.+)$", markdown(page), re.MULTILINE)}
    return anchors(markdown(page))


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, fragment = target.partition("#")
    there = page.parent / path if path else page
    if not there.exists():
        return False
    return not fragment or there.suffix not in (".md", ".ipynb") or fragment in headings(there)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=named)
def test_relative_links_lead_to_files(page: Path) -> None:
    relative = [target for target in targets(markdown(page)) if not re.match(r"[a-z]+:", target)]  # nothing is fetched
    broken = [target for target in relative if not leads_somewhere(page, target)]
    assert not broken, f"{named(page)} links to what is not there: {', '.join(broken)}"
