"""The data of a page that shows two recordings, and what every page holds so that it can be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope import Observe, masks, observe, watch
from headscope.report._viewer.compared import Numbers, distances, progressions
from headscope.report.viewer import render_recording
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.html_pages import HOSTILE, Page


def made(scale: float = 1.0, *, length: int = 11, layers: int = 2, **what: Any) -> Recording:
    parts = {}
    for layer in range(layers):
        q, k = scale * torch.randn(2, 1, 3, length, 5, generator=torch.Generator().manual_seed(layer))
        parts |= observe(q, k, mask=masks.causal(), what=Observe(**({"map": 5} | what))).named(f"h.{layer}").parts
    kinds: Any = dict.fromkeys(parts, "self")
    return Recording(HeadStats(parts), About("m", {}, {}, kinds, None, 1, 1))


def other_of(html: str) -> dict[str, Any]:
    return json.loads(next(each.text for each in Page(html).all("script") if each.attributes.get("id") == "other"))


def expanded(runs: list[int]) -> list[int]:
    return [first + n * step for first, step, length in zip(*[iter(runs)] * 3, strict=True) for n in range(length)]


def test_a_page_holds_the_second_recording_and_the_distances_of_compare() -> None:
    one, other = made(), made(2.0)
    html = render_recording(one, against=other, labels=("old", "new"))
    data, comparison = other_of(html), one.compare(other)
    assert data["labels"] == ["old", "new"]
    assert [layer["name"] for layer in data["layers"]] == ["h.0", "h.1"]
    for n, layer in enumerate(("h.0", "h.1")):
        heads = [head for head in comparison.heads if head.layer == layer]
        assert data["distances"][n]["map"] == pytest.approx([head.map for head in heads], rel=1e-6)
        assert data["distances"][n]["received"] == pytest.approx([head.received for head in heads], rel=1e-6)
        means = other.stats.parts[layer].moments["entropy"].mean.tolist()
        assert data["statistics"][n]["entropy"]["mean"] == pytest.approx(means, rel=1e-6)
    assert "other-blocks" in html
    assert 'id="other"' not in render_recording(one), "a page of one recording is as it was"


def test_what_cannot_be_measured_is_null_and_what_is_not_finite_is_marked() -> None:
    one = made()
    assert one.stats.parts["h.0"].map is not None
    other = made(2.0)
    part = other.stats.parts["h.0"]
    assert part.map is not None
    part.map.sum[1, 0, 0] = math.inf
    first = distances(one.compare(other), ["h.0"])[0]
    assert first is not None
    assert first["map"][1] == -1
    assert (first["map"][0] or 0) > 0
    data = other_of(render_recording(one, against=made(2.0, map=7)))
    assert data["distances"][0]["map"] == [None] * 3


def test_layers_of_one_side_have_no_distances() -> None:
    data = other_of(render_recording(made(), against=made(layers=3)))
    assert [each is None for each in data["distances"]] == [False, False, True]


def test_recordings_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    one = made()
    with pytest.raises(TypeError, match=r"^against: got HeadStats, expected a recording$"):
        one.save_html(tmp_path / "a.html", against=one.stats)
    renamed = Recording(one.stats.named("x.0", "x.1"), one.about)
    with pytest.raises(
        ValueError, match=r"^against: expected a recording with the same layers, got none in common \(the"
    ):
        one.save_html(tmp_path / "a.html", against=renamed)
    models = [torch.nn.TransformerEncoderLayer(8, heads, batch_first=True) for heads in (2, 4)]
    recordings: list[Recording] = []
    for model in models:
        with watch(model) as recording:
            model(torch.zeros(1, 4, 8))
        recordings.append(recording)
    with pytest.raises(
        ValueError, match=r"^against: layer self_attn has different heads from the recording; expected 2 h"
    ):
        recordings[0].save_html(tmp_path / "a.html", against=recordings[1])
    assert not (tmp_path / "a.html").exists()


def test_names_of_files_and_layers_cannot_leave_their_element() -> None:
    one = made()
    hostile = Recording(one.stats.named(*HOSTILE[:2]), one.about)
    html = render_recording(hostile, against=hostile, labels=(HOSTILE[0], HOSTILE[3]))
    data = other_of(html)
    assert data["labels"] == [HOSTILE[0], "\\u202egnp.exe"]
    assert len(Page(html).all("script")) == 5
    one = Recording(HeadStats({"a\n": one.stats.parts["h.0"]}), one.about)
    layer = Page(render_recording(one)).data["layers"][0]
    assert (layer["name"], layer["key"]) == ("a⏎", "a\n")


def test_the_counts_of_bins_and_keys_can_be_computed_from_a_page() -> None:
    one = made(length=23)
    data = Page(render_recording(one)).data
    for n, part in enumerate(one.stats.parts.values()):
        layer = data["layers"][n]
        assert part.map is not None
        assert part.eligible is not None
        assert layer["bins"] == 5
        for head in range(3):
            counts = expanded(data["numbers"][layer["counts"][head]])
            assert counts == part.map.count[head].flatten().tolist()
            assert expanded(data["numbers"][layer["eligible"][head]]) == part.eligible[head].tolist()
    assert len(data["numbers"]) == 2, "equal lists are there once"
    exact = Page(render_recording(made(map=11))).data["layers"][0]
    assert exact["counts"] is None, "each visible bin has one pair"
    assert {each["unit"] for each in data["names"]} >= {"share", "nats", "logits", "input"}


@pytest.mark.parametrize("seed", range(5))
def test_progressions_give_the_numbers_again(seed: int) -> None:
    random = np.random.default_rng(seed)
    for size in (0, 1, 2, 3, 17):
        for values in (
            random.integers(0, 3, size),
            np.arange(size)[::-1],
            np.full(size, 7),
            random.integers(0, 99, size),
        ):
            runs = progressions(values)
            assert expanded(runs) == values.tolist()
            assert len(runs) <= 3 * max(1, size)
    assert progressions(np.arange(97)[::-1]) == [96, -1, 97]


def test_a_page_has_no_more_numbers_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from headscope.report._viewer import compared

    monkeypatch.setattr(compared, "MOST_NUMBERS", 2)
    numbers = Numbers()
    assert numbers.add(np.array([[3, 2, 1]] * 3)) == [0, 0, 0]
    assert numbers.add(np.array([[3, 2, 1], [1, 1, 1]])) is None
    assert numbers.lists == [[3, -1, 3]]
