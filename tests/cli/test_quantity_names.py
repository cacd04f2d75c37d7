"""Each quantity has one name, that of ``HeadStats``, in JSON, tables, pages, trackers, data frames and comparisons."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope import Recording, load_example, watch
from headscope.cli import main
from headscope.decisions import patterns
from headscope.report.fixed_keys import FIXED_KEY
from headscope.report.words import PATTERNS as PATTERN_WORDS
from headscope.report.words import STATISTICS
from headscope.stats import PATTERNS, quantity_of
from support.commands import Run, answer
from support.html_pages import Page

TEXT = "def parse(line): return line. def parse(line): return line."
OF_PATTERNS = ["previous", "next", "self", "duplicate", "induction", "first", "local", "uniform"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recording and the page that ``watch`` writes, and with its JSON."""
    folder = tmp_path_factory.mktemp("watched")
    to = "--out", str(folder / "a.safetensors"), "--page", str(folder / "a.html")
    with (folder / "a.json").open("w", encoding="utf-8") as printed, contextlib.redirect_stdout(printed):
        assert main(["watch", "text", "--text", TEXT, "--json", *to]) == 0
    return folder


@pytest.fixture
def recorded(files: Path, run: Run) -> dict[str, Any]:
    """The JSON of ``watch``, with its recording in ``a.safetensors`` and its page in ``a.html``."""
    shutil.copytree(files, ".", dirs_exist_ok=True)
    return json.loads(Path("a.json").read_text(encoding="utf-8"))


def of_watch(run: Run) -> list[str]:
    return list(answer(run("watch", "text", "--text", TEXT, "--json"))["layers"]["layers.0.attention"]["heads"][0])


def of_text(run: Run) -> list[str]:
    return list(answer(run("text", TEXT, "--json"))["heads"][0]["statistics"])


def of_image(run: Run) -> list[str]:
    return list(answer(run("image", "--json"))["heads"][0]["statistics"])


def of_page(run: Run) -> list[str]:
    return [each["name"] for each in Page(Path("a.html").read_text(encoding="utf-8")).data["names"]]


def of_headings(run: Run) -> list[str]:
    return [
        each["heading"].replace(" ", "_") for each in Page(Path("a.html").read_text(encoding="utf-8")).data["names"]
    ]


def of_text_page(run: Run) -> list[str]:
    assert run("text", TEXT).code == 0
    names = Page(Path("headscope-text.html").read_text(encoding="utf-8")).data["names"]
    assert [each["heading"].replace(" ", "_") for each in names] == [each["name"] for each in names]
    return [each["name"] for each in names]


def of_flat(run: Run) -> list[str]:
    return list(dict.fromkeys(name.split("/")[3] for name in Recording.load("a.safetensors").flat()))


def of_frame(run: Run) -> list[str]:
    """The column ``name`` of ``to_pandas``; a stub, because pandas is not a dependency."""
    lines: list[tuple[Any, ...]] = []
    stub = types.ModuleType("pandas")
    stub.DataFrame = lambda rows, columns: lines.extend(row[columns.index("name")] for row in rows)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pandas", stub)
        Recording.load("a.safetensors").to_pandas()
    return list(dict.fromkeys(map(str, lines)))


def of_tracker(run: Run) -> list[str]:
    names: dict[str, None] = {}
    example = load_example("text")

    def write(values: dict[str, float], step: int) -> None:
        names.update(dict.fromkeys(name.split("/")[3] for name in values))

    with torch.no_grad(), watch(example.model, log=write, tokens="inputs"):
        example.model(torch.tensor([example.tokenizer.encode(TEXT)]))
    return [name for name in names if name != "max_logit_max"]  # the column ``max`` of max_logit; all others are means


def of_comparison(run: Run) -> list[str]:
    recording = Recording.load("a.safetensors")
    return [change.name for change in recording.compare(recording).heads[0].changes]


def of_columns(run: Run) -> list[str]:
    """The columns of ``HeadStats.table`` with every quantity."""
    recording = Recording.load("a.safetensors")
    return [str(column.header) for column in recording.stats.table(names=recording.names).columns][3:]


SURFACES: dict[str, Callable[[Run], list[str]]] = {
    "watch --json": of_watch, "text --json": of_text, "image --json": of_image, "the page of watch": of_page,
    "the headings of a page": of_headings, "the page of text": of_text_page, "flat": of_flat, "to_pandas": of_frame,
    "a tracker": of_tracker, "a comparison": of_comparison, "a table": of_columns,
}  # fmt: skip


@pytest.mark.parametrize("surface", SURFACES)
def test_each_quantity_has_the_name_of_its_definition(surface: str, run: Run, recorded: dict[str, Any]) -> None:
    names = SURFACES[surface](run)
    assert len(names) >= 8
    assert [name for name in names if quantity_of(name) is None] == []
    assert {"entropy", "normalized_entropy", "max_weight", "effective_keys", "first", "distance", "self"} <= {*names}
    assert len({*names}) == len(names)


def test_a_heading_is_the_name_in_words() -> None:
    assert {name: word.heading for name, word in STATISTICS.items()} == {
        name: name.replace("_", " ") for name in STATISTICS
    }


def test_a_mean_is_the_same_on_each_surface(run: Run, recorded: dict[str, Any]) -> None:
    """The same name is the same number: layer 3, head 5, with seven digits on the page."""
    recording, page = Recording.load("a.safetensors"), Page(Path("a.html").read_text(encoding="utf-8")).data
    read = answer(run("text", TEXT, "--json"))["heads"][3 * 8 + 5]["statistics"]
    for name in recording.names:
        mean = recording[3, 5, name].mean
        found = [recorded["layers"]["layers.3.attention"]["heads"][5][name]["mean"]]
        found += [page["statistics"][3][name]["mean"][5]]
        found += [read[name]] if name in read else []
        found += [] if mean != mean else [recording.flat()[f"attn/L03/H05/{name}"]]
        for value in found:
            assert (value is None) == (mean != mean)
            assert value is None or value == pytest.approx(mean, rel=1e-4, abs=1e-6), name


def test_patterns_have_one_order(run: Run, recorded: dict[str, Any]) -> None:
    """previous, next, duplicate, induction, first, uniform: in JSON, legends, the page and the docs of a statistic."""
    # a fixed key is a pattern of pages and commands only
    assert list(PATTERNS) == [name for name in PATTERN_WORDS if name != FIXED_KEY] == OF_PATTERNS
    scores = patterns(Recording.load("a.safetensors").stats).of("layers.0.attention", 0)
    in_json = [each["pattern"] for each in recorded["patterns"]["scores"] if each["layer"] == "layers.0.attention"]
    for names in (list(scores), in_json[: len(scores)]):
        assert names == [name for name in OF_PATTERNS if name in names]
        assert len(names) >= 6
    quantities = [name for name in STATISTICS if name in OF_PATTERNS]
    assert quantities == [name for name in OF_PATTERNS if name in quantities]
    names = [name for name in of_page(run) if name in OF_PATTERNS]
    assert names == quantities
    out = run("watch", "text", "--text", TEXT, "--no-page").out
    legend = [name for name in re.findall(r"(\w+): +(?:all +)?weight", " ".join(out.split())) if name in OF_PATTERNS]
    assert legend == [name for name in OF_PATTERNS if name in legend]
    assert len(legend) >= 3


def test_json_says_which_patterns_are_names(recorded: dict[str, Any]) -> None:
    scores = recorded["patterns"]["scores"]
    for each in scores:
        if each["pattern"] == "uniform":
            assert each["named"] == (each["score"] >= 0.3 and each["peaks"] <= 0.1), each
        elif each["z"] is not None:
            assert each["named"] == (each["score"] >= 0.3 and each["z"] >= 3), each
            assert each["peaks"] is None
    assert {each["named"] for each in scores} == {True, False}
