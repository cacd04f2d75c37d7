"""Names and texts that hold controls, marks of direction and lone surrogates: printed as escapes, by every command."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headscope import Observe, load_example, observe, watch
from headscope.stats import HeadStats
from headscope.watching import Recording
from support.commands import Run

HOSTILE = "\ud800\u202e\x1b[31m\x9b\nFORGED\u2028"
SHOWN = r"\ud800\u202e\x1b[31m\x9b\nFORGED\u2028"
TEXT = "def add(a, b): return a"


@pytest.fixture(scope="module")
def recording() -> Recording:
    """The shipped model as somebody could have recorded it: with a hostile model, layer, option and version."""
    example = load_example("text")
    ids = torch.tensor([example.tokenizer.encode(TEXT)])
    with torch.no_grad(), watch(example.model, what=Observe(map=8, keep_qk=True)) as seen:
        example.model(ids)
    names = [HOSTILE + name if at % 2 == 0 else name for at, name in enumerate(seen.layers)]
    assert seen.about.origin is not None
    layers = {new: seen.about.origin.layers[old] for old, new in zip(seen.layers, names, strict=True)}
    about = replace(
        seen.about, origin=replace(seen.about.origin, layers=layers), model=HOSTILE,
        kinds=dict.fromkeys(names, "self"), versions={HOSTILE: HOSTILE},
        options={**seen.about.options, "input": {"source": HOSTILE}, HOSTILE: HOSTILE},
        texts=(HOSTILE,) * ids.shape[1],
    )  # fmt: skip
    return Recording(seen.stats.named(*names), about)


def check_printable(text: str) -> None:
    """Raises: AssertionError: a character that a terminal obeys, or a line that a name has begun."""
    text.encode("utf-8")
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    assert not any(line.startswith("FORGED") for line in text.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "hostile.safetensors", "--out", "p.html"],
        ["report", "hostile.safetensors", "--strip", "9.9"],
        ["report", "hostile.safetensors", "--title", HOSTILE[1:], "--image", HOSTILE[1:]],
        ["report", HOSTILE[1:]],
        ["watch", "text", "--text", TEXT, "--against", "hostile.safetensors", "--no-page"],
        ["watch", "text", "--text", TEXT, "--against", "hostile.safetensors", "--json"],
        ["watch", "text", "--text", TEXT, "--against", HOSTILE[1:]],
        ["watch", "text", "--text", TEXT + HOSTILE[1:], "--out", f"{HOSTILE[1:]}.st"],
        ["watch", "text", "--text", TEXT, "--page", f"{HOSTILE[1:]}.html"],
        ["watch", "text", "--text", TEXT, "--layers", HOSTILE[1:]],
        ["watch", HOSTILE[1:], "--text", TEXT],
        ["text", TEXT + HOSTILE[1:]],
        ["text", TEXT + HOSTILE[1:], "--explain"],
        ["image", HOSTILE[1:]],
        ["doctor", "--device", HOSTILE[1:]],
        ["check", f"{HOSTILE[1:]}:A"],
        ["trace", HOSTILE[1:]],
    ],
)  # fmt: skip
def test_a_command_prints_hostile_names_as_escapes(
    arguments: list[str],
    recording: Recording,
    run: Run,
) -> None:
    recording.save("hostile.safetensors", qk=True)

    ran = run(*arguments)

    assert "Traceback" not in ran.err
    check_printable(ran.out + ran.err)


def test_what_moved_names_a_hostile_layer_by_its_escapes(recording: Recording, run: Run) -> None:
    recording.save("hostile.safetensors")

    ran = run("watch", "text", "--text", TEXT, "--against", "hostile.safetensors", "--no-page")

    assert ran.code == 1
    assert SHOWN in "".join(ran.out.split())


def moved(recording: Recording) -> Recording:
    """A recording of the same layers, of other weights."""
    parts = recording.stats.parts
    stats = [
        observe(*torch.randn(2, 1, part.heads, 7, 4) * 9, what=Observe(map=8)).named(name)
        for name, part in parts.items()
    ]
    return Recording(HeadStats({name: part for each in stats for name, part in each.parts.items()}), recording.about)


@pytest.mark.parametrize(
    "answer",
    [
        lambda seen: seen,
        lambda seen: seen.table(),
        lambda seen: seen.table(sort="layer", limit=9),
        lambda seen: seen.stats.table(),
        lambda seen: seen.compare(moved(seen)),
        lambda seen: seen.compare(seen.stats.named(*(f"{name}{HOSTILE}" for name in seen.layers))),
    ],
    ids=["recording", "table", "sorted", "statistics", "moved", "others"],
)
def test_a_table_shows_hostile_names_as_escapes(answer: Callable[[Recording], Any], recording: Recording) -> None:
    out = Console(file=io.StringIO(), width=300, color_system=None)

    out.print(answer(recording))

    text = out.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert SHOWN in text
    check_printable(text)


def test_decisions_show_hostile_names_as_escapes(recording: Recording) -> None:
    from headscope import decisions

    out = Console(file=io.StringIO(), width=300, color_system=None)

    out.print(decisions.near_duplicates(recording, threshold=0.0))
    out.print(decisions.near_duplicates(recording, threshold=1.0))
    out.print(decisions.patterns(recording))
    out.print(decisions.kv_budget(recording, (2,)))

    text = out.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert text.count(SHOWN) > 3
    check_printable(text)


def test_text_of_a_recording_is_printable(recording: Recording) -> None:
    page = recording.stats._repr_html_()
    caption = recording.compare(recording.stats.named(*(f"{name}{HOSTILE}" for name in recording.layers))).caption()

    for text in (repr(recording), repr(recording.stats), caption, page):
        check_printable(text)


def test_the_page_of_a_hostile_recording_can_be_written(recording: Recording, tmp_path: Path) -> None:
    page = recording.save_html(tmp_path / "page.html").read_text(encoding="utf-8")

    assert [c for c in "\u202e\x1b\u2028\x9b" if c in page] == []
