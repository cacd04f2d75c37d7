"""What stands around the maps on the page of a recording: what is wrong with it, how it is read, and of what it is."""

from __future__ import annotations

import io
import math
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope import Observe, masks, observe, trace, watch
from headscope.report import render, text_sheet
from headscope.report._viewer.from_sheet import shown as shown_sheet
from headscope.report.viewer import render_recording, shown_recording
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.html_pages import Page
from support.seed_modules import SixSteps
from support.sheets import picture, softmax, words


def recorded(layers: int, broken: int = 0, **about: Any) -> Recording:
    """Layers of three heads over 7 tokens; in the first so many, one row of each head is broken."""
    parts = {}
    for layer in range(layers):
        q, k = torch.randn(2, 1, 3, 7, 5)
        if layer < broken:
            q[:, :, 4] = torch.nan
        found = observe(q, k, mask=masks.causal(), what=Observe(map=7))
        parts |= found.named(f"layers.{layer}.attn").parts
    kinds: Any = dict.fromkeys(parts, "self")
    said = {"model": "m", "options": {}, "versions": {}, "kinds": kinds, "texts": None, "forwards": 1, "ran": 1}
    return Recording(HeadStats(parts), About(**{**said, **about}))


def notes(html: str) -> list[str]:
    return [p.text for p in Page(html).all("p") if p.attributes.get("class") == "note"]


def footer(html: str) -> dict[str, str]:
    page = Page(html)
    return {name.text: value.text for name, value in zip(page.all("dt"), page.all("dd"), strict=True)}


# ---------------------------------------------------------------- what is wrong with it


@pytest.mark.parametrize(
    ("layers", "broken", "said"),
    [
        (2, 0, []),
        (1, 1, ["3 rows of heads hold NaN or infinity and are in no figure: in layer layers.0.attn."]),
        (3, 1, ["3 rows of heads hold NaN or infinity and are in no figure: in layer 0."]),
        (3, 2, ["6 rows of heads hold NaN or infinity and are in no figure: in layers 0, 1."]),
        (
            20,
            17,
            [
                "51 rows of heads hold NaN or infinity and are in no figure: in 17 layers: "
                "0, 1, 2, 3, 4, 5, 6, 7 and 9 more."
            ],
        ),
    ],
)
def test_all_broken_rows_are_told_in_one_line(layers: int, broken: int, said: list[str]) -> None:
    assert notes(render_recording(recorded(layers, broken))) == said


def test_a_sheet_tells_all_broken_rows_in_one_line() -> None:
    weights = [softmax(4, 7) for _ in range(3)]
    for layer in weights:
        layer[:, 5, 2] = torch.nan
    sheet = text_sheet("x", words(7), weights)
    assert notes(render(sheet)) == [
        "12 rows of 12 heads contain NaN or infinity and are in no statistic: layer 0 head 0, layer 0 head 1, "
        "layer 0 head 2, layer 0 head 3, layer 1 head 0, layer 1 head 1, layer 1 head 2, layer 1 head 3 and 4 more."
    ]


# ---------------------------------------------------------------- how it is read, and of what it is


def test_the_page_says_how_a_map_is_read() -> None:
    page = Page(render_recording(recorded(2)))
    (lead,) = [p.text for p in page.all("p") if p.attributes.get("class") == "lead"]
    assert lead == (
        "2 layers, 6 heads. Each row of a map is a query, each column a key; the colour shows how much attention. "
        "Numbering starts at 0."
    )
    plain = observe(*torch.randn(2, 1, 1, 7, 5)).named("a")
    page = Page(render_recording(Recording(plain, About("m", {}, {}, {"a": "self"}, None, 1, 1))))
    (lead,) = [p.text for p in page.all("p") if p.attributes.get("class") == "lead"]
    assert lead == "1 layer, 1 head. Queries attend to keys. Numbering starts at 0."


def test_the_footer_of_a_recording() -> None:
    options = {
        "rows": None, "row_stats": True, "received": False, "map": 7, "edges": 0, "top": 0, "windows": [3, 16],
        "first": 1, "tokens": "Tensor", "keep_rows": True, "keep_qk": False, "every": 1, "kinds": {},
        "positions": "Tensor", "accelerate": False, "layers": ["layers.*"], "input": {"source": "a.txt", "tokens": 7},
    }  # fmt: skip
    found = footer(render_recording(recorded(2, options=options, versions={"headscope": "1", "torch": "2"})))
    assert found == {
        "Model": "m",
        "Input": "a.txt; 7 queries × 7 keys; 1 forward pass",
        "Averages": "over up to 7 queries per head",
        "Layers": "layers.*.attn",
        "Options": "received=False, map=7, windows=[3, 16], tokens=<tensor>, keep_rows=True, positions=<tensor>, "
        "layers=['layers.*']",
        "Versions": "headscope 1, torch 2",
    }
    one = observe(*torch.randn(2, 1, 1, 1, 5)).named("a")
    found = footer(render_recording(Recording(one, About("m", {}, {}, {"a": "self"}, None, 2, 2))))
    assert found["Input"] == "1 query × 1 key; 2 forward passes"
    assert found["Averages"] == "over up to 1 query per head"
    assert "Options" not in found, "all are the defaults"
    assert footer(render_recording(recorded(1, ran=9, forwards=3)))["Input"].endswith(
        "; 3 of 9 forward passes observed"
    )


def test_the_footer_of_a_sheet_says_over_how_many_tokens_it_averages() -> None:
    weights = [softmax(4, 7) for _ in range(3)]
    weights[1][2, 5, 2] = torch.nan
    found = footer(render(text_sheet("x", words(7), weights, footer={"Model": "m", "Input": "i", "Options": "none"})))
    assert list(found) == ["Model", "Input", "Averages", "Versions"]
    assert found["Averages"] == "over up to 6–7 tokens, depending on the head"
    assert footer(render(picture()))["Averages"] == "over up to 35 patches per head"
    asked = footer(render(text_sheet("x", words(7), weights, footer={"Options": "layer 1"})))
    assert asked["Options"] == "layer 1"


# ---------------------------------------------------------------- what does not fit


def patches(keys: int, **about: Any) -> Recording:
    found = observe(*torch.randn(2, 1, 1, keys, 5), what=Observe(map=keys)).named("a")
    return Recording(found, About(**{"model": "m", "kinds": {"a": "self"}, "forwards": 1, "ran": 1, **about}))


@pytest.mark.parametrize(
    ("keys", "grid", "left"),
    [(197, (13, 14), 15), (197, (14, 13), 15), (210, None, 14), (24, (4, 4), 8)],
)
def test_a_grid_leaves_no_row_of_patches_over(keys: int, grid: tuple[int, int] | None, left: int) -> None:
    seen, pixels = patches(keys), np.zeros((6, 8), np.uint8)
    rows, columns = grid or (14, 14)
    said = f"grid: {rows} x {columns} patches leave {left} of the {keys} keys over, "
    said += f"enough for a row or column of patches; pass special={left} if all of them come before the patches"
    with pytest.raises(ValueError, match=f"^{said}$"):
        render_recording(seen, image=pixels, grid=grid)
    image = Page(render_recording(seen, image=pixels, grid=(rows, columns), special=left)).data["image"]
    assert (image["grid"], image["special"]) == ([rows, columns], left)


@pytest.mark.parametrize(("keys", "grid", "special"), [(197, None, 1), (201, None, 5), (13, (1, 12), 1), (16, None, 0)])
def test_a_few_keys_before_the_patches_are_special(keys: int, grid: tuple[int, int] | None, special: int) -> None:
    page = Page(render_recording(patches(keys), image=np.zeros((6, 8), np.uint8), grid=grid))
    assert page.data["image"]["special"] == special


def test_an_image_of_tokens_is_refused() -> None:
    seen = patches(16, texts=tuple("abcdefghijklmnop"))
    with pytest.raises(
        ValueError, match=r"image: expected a recording of patches, got one with the texts of 16 tokens"
    ):
        render_recording(seen, image=np.zeros((6, 8), np.uint8), grid=(2, 2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"title": 3}, "title: got 3, expected a str"),
        ({"special": ["a"]}, "special: got list, expected a whole number from 0"),
        ({"special": 1.0}, "special: got float, expected a whole number from 0"),
        ({"special": True}, "special: got bool, expected a whole number from 0"),
        ({"grid": "4x4"}, "grid: expected rows and columns of patches, each at least 1, got '4x4'"),
        ({"grid": 4}, "grid: expected rows and columns of patches, each at least 1, got 4"),
        ({"grid": (4.0, 4)}, "grid: expected rows and columns of patches, each at least 1, got (4.0, 4)"),
        ({"trace": [{"step": "scores"}]}, "trace: got list, expected what headscope.trace returns"),
        ({"strips": 5}, "strips: got 5, expected pairs of a layer and the number of a head"),
    ],
)
def test_options_of_another_kind_are_named(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    pixels = {"image": np.zeros((6, 8), np.uint8)} if {"special", "grid"} & set(options) else {}
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        patches(16).save_html(tmp_path / "a.html", **{**pixels, **options})


def test_a_trace_of_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^trace: MultiHeadAttention\(4, 2\) .* has sizes only, expected values"):
        render_recording(patches(16), trace=trace(seq=3, dim=4, heads=2))


def test_a_page_shows_the_steps_of_a_class_with_its_lines() -> None:
    module, x = SixSteps(20, 4), torch.randn(2, 7, 20)
    with watch(module) as recording:
        module(x)
    steps = trace(module, x)
    shown = Page(render_recording(recording, trace=steps)).data["trace"]
    assert shown["title"] == "SixSteps on x [2, 7, 20]"
    written = [step for stage in shown["stages"] for step in stage["steps"]]
    assert [step["step"] for step in written] == [row.step for row in steps.rows]
    assert all(step["held"] for step in written)
    weights = next(step for step in written if step["step"] == "weights")
    assert weights["code"] == steps.row("weights").code != ""
    assert Page(render_recording(recording)).data["trace"] is None


def test_numbers_of_numpy_are_numbers() -> None:
    grid: Any = np.array([4, 4])
    special: Any = np.int64(1)
    html = render_recording(patches(17), image=np.zeros((6, 8), np.uint8), grid=grid, special=special)
    image = Page(html).data["image"]
    assert (image["grid"], image["special"]) == ([4, 4], 1)


# ---------------------------------------------------------------- a page that takes long


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "after", "told"), [(Terminal, 0.01, True), (Terminal, 60.0, False), (io.StringIO, 0.01, False)]
)
def test_of_a_page_that_takes_long_a_terminal_is_told(
    stream: type[io.StringIO], after: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: Any, **__: Any) -> list[str]:
        deadline = time.monotonic() + (10 if told else 0.2)
        while time.monotonic() < deadline and "writing the page" not in stderr.getvalue():
            time.sleep(0.01)
        return []

    stderr = stream()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr("headscope.report.viewer.PROGRESS_DELAY", after)
    monkeypatch.setattr("headscope.report._viewer.from_recording._notes", slow)
    before = {*threading.enumerate()}
    recorded(1).save_html(tmp_path / "a.html")
    assert ("writing the page" in stderr.getvalue()) == told
    deadline = time.monotonic() + 10
    while (left := {*threading.enumerate()} - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    monkeypatch.setenv("TERM", "dumb")
    written = stderr.getvalue()
    recorded(1).save_html(tmp_path / "a.html")
    assert stderr.getvalue() == written


def test_an_error_of_a_page_ends_what_a_terminal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    threads = threading.active_count()
    with pytest.raises(TypeError, match="title: got 3, expected a str"):
        recorded(1).save_html(tmp_path / "a.html", title=3)
    assert threading.active_count() == threads


def test_a_page_states_which_patterns_too_few_rows_show_and_which_heads_follow_them_all_the_same() -> None:
    q, k = torch.zeros(2, 1, 2, 8, 8)
    k[0, 0] = 30 * torch.eye(8)
    q[0, 0] = torch.eye(8)[[0, 1, 2, 3, 1, 2, 3, 4]]  # the token after the earlier copy; head 1 is even
    what = Observe(keep_rows=True, tokens=torch.arange(4).repeat(2))
    found = observe(q, k, mask=masks.causal(), what=what)
    about = About("m", {}, {"headscope": "0"}, dict.fromkeys(found.parts, "self"), tuple("abcdabcd"), 1, 1)
    layer = shown_recording(Recording(found, about)).layers[0]
    assert {name: (few.rows, few.heads) for name, few in layer.few.items()} == {
        "duplicate": (4, []),
        "induction": (4, [0]),
    }
    means = {name: columns["mean"] for name, columns in layer.statistics.items()}
    p = torch.softmax((q @ k.mT / 8**0.5)[0].masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf), -1)
    sheet = shown_sheet(text_sheet("", [*"abcdabcd"], [p], ids=[*range(4)] * 2)).layers[0]
    assert sheet.few == layer.few
    assert sheet.statistics["induction"]["mean"] == pytest.approx(means["induction"], abs=1e-5)
