"""Strips: where a query stands, which keys are near it, and which layers have any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headscope import Observe, masks, observe
from headscope.report._viewer.packing import Strips
from headscope.report.serving import RefusedError, Server
from headscope.report.viewer import render_recording, shown_recording
from headscope.stats import HeadStats
from headscope.stats._kept_weights import weights_of
from headscope.watching import About, Recording
from support.html_pages import Page
from support.recording_files import without_checksums

HEADS = 3


def recorded(
    queries: int, keys: int, *, batch: int = 2, kind: Any = "self", mask: Any = None, what: Any = None, **given: Any
) -> Recording:
    q, k = torch.randn(batch, HEADS, queries, 8), torch.randn(batch, HEADS, keys, 8)
    found = observe(q, k, mask=mask, kind=kind, what=what or Observe(keep_qk=True), **given).named("a")
    return Recording(found, About("m", {}, {}, {"a": kind}, None, 1, 1))


def strips(recording: Recording) -> Strips:
    found = shown_recording(recording).layers[0].source.strips
    assert found is not None
    return found


def near(recording: Recording, head: int, offset: int, low: int, high: int) -> np.ndarray[Any, Any]:
    """Codes of the weights at these distances from i + offset, from all weights."""
    kept = weights_of(recording.stats.parts["a"].last_tiles)
    p = kept.piece(0, head, (0, kept.queries), (0, kept.keys)).numpy()
    codes = np.full((kept.queries, high - low + 1), 255)
    for i, j in np.argwhere(~np.isnan(p)):
        if low <= j - i - offset <= high:
            codes[i, j - i - offset - low] = round(float(np.sqrt(p[i, j])) * 254)
    return codes


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("offset", [5, 35])
@pytest.mark.parametrize("dense", [False, True])
def test_a_query_of_a_static_cache_stands_at_the_offset_of_the_mask(queries: int, offset: int, dense: bool) -> None:
    if dense:  # a watch gives the positions that such a mask stands for
        mask = torch.ones(queries, 41, dtype=torch.bool).tril(offset)
        recording = recorded(queries, 41, mask=mask, q_pos=torch.arange(queries) + offset)
    else:
        recording = recorded(queries, 41, mask=masks.Band(None, 0, offset=offset))
    found = strips(recording)
    assert (found.offset, found.low, found.high) == (offset, -31, 0)
    for head, codes in found.codes.items():
        np.testing.assert_array_equal(codes[:, :32], near(recording, head, offset, -31, 0))
    with Server(recording) as server:
        served = server.strip({"layer": 0, "head": 1, "i0": 0, "i1": queries})
    assert served == found.codes[1].tobytes()


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "offset"),
    [
        (masks.Band(None, -1), 12, 12, 0),
        (masks.Band(7, -2), 50, 50, 0),
        (masks.Dense(torch.ones(5, 5, dtype=torch.bool).tril(-1)), 5, 5, 0),
        (masks.Band(2, 2, offset=3), 4, 20, 3),
        (masks.Band(None, 2, offset=3), 4, 20, 3),
        (masks.Band(None, 0, offset=(6, 2)), 4, 20, 6),
        (masks.Band(None, 0, offset=-3), 9, 5, -3),
        (masks.KeyLengths(torch.tensor([5, 9])), 1, 9, 8),
        (masks.Band(None, 0, offset=2) | masks.Band(2, 2, offset=3), 4, 20, 16),
    ],
)
def test_how_far_a_mask_reaches_moves_no_query(
    mask: masks.Mask, queries: int, keys: int, offset: int, tmp_path: Path
) -> None:
    recording = recorded(queries, keys, mask=mask)
    for seen in (recording, Recording.load(recording.save(tmp_path / "r.safetensors", qk=True))):
        found = strips(seen)
        assert found.offset == offset
        for head, codes in found.codes.items():
            wanted = near(seen, head, offset, found.low, found.high)
            np.testing.assert_array_equal(codes[:, : wanted.shape[1]], wanted)


@pytest.mark.parametrize(
    ("given", "offset"),
    [
        ({"q_pos": torch.tensor([7, 8, 9])}, 7),
        ({"q_pos": torch.tensor([[7, 8, 9], [1, 2, 3]])[..., None]}, 7),
        ({"k_pos": torch.arange(11) + 30}, 8),
        ({"q_pos": torch.tensor([35, 36, 37]), "k_pos": torch.arange(11) + 30}, 5),
        ({"q_pos": torch.tensor([9, 90, 91])}, 9),
        ({"q_pos": torch.tensor([8, 4, 6])}, 8),
        ({"q_pos": torch.tensor([90, 91, 92])}, 8),
        ({"q_pos": torch.tensor([5, 6, 7]), "what": Observe(keep_qk=True, rows=1)}, 5),
    ],
)
def test_queries_stand_at_the_keys_of_their_positions(given: dict[str, Any], offset: int) -> None:
    assert strips(recorded(3, 11, **given)).offset == offset


def test_a_file_that_says_no_offset_has_the_queries_last(tmp_path: Path) -> None:
    path = recorded(3, 11, mask=masks.Band(None, 0, offset=2)).save(tmp_path / "r.safetensors", qk=True)
    with safe_open(path, framework="pt") as file:
        said, tensors = without_checksums(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stats = json.loads(said["headscope.stats"])
    assert stats["layers"][0]["qk"][0].pop("offset") == 2
    save_file(tensors, path, {**said, "headscope.stats": json.dumps(stats)})
    assert strips(Recording.load(path)).offset == 8


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (None, {}),
        (masks.window(3), {}),
        (masks.Band(None, 2), {}),
        (masks.KeyLengths(torch.tensor([11, 5])), {}),
        (masks.causal() & masks.KeyLengths(torch.tensor([11, 5])), {}),
        (masks.Dense(torch.zeros(13, 29, dtype=torch.bool)), {}),
        (None, {"bias": torch.randn(HEADS, 13, 29)}),
    ],
)
def test_elsewhere_queries_are_the_last_ones(mask: Any, given: dict[str, Any]) -> None:
    recording = recorded(13, 29, mask=mask, **given)
    found = strips(recording)
    assert found.offset == 29 - 13
    for head, codes in found.codes.items():
        wanted = near(recording, head, 29 - 13, found.low, found.high)
        np.testing.assert_array_equal(codes[:, : found.high - found.low + 1], wanted)


@pytest.mark.parametrize("what", [Observe(keep_qk=True), Observe(keep_qk=True, map=9)], ids=["no map", "a map"])
@pytest.mark.parametrize(
    ("mask", "queries", "near"),
    [
        (None, 60, (-16, 16)),
        (masks.Band(2, 2), 60, (-16, 16)),
        (masks.causal() | masks.Prefix(3), 60, (-16, 16)),
        (masks.causal(), 60, (-31, 0)),
        (masks.causal(), 4, (-31, 0)),
    ],
)
def test_keys_after_a_query_are_near_it_where_they_may_be_seen(
    mask: Any, queries: int, near: tuple[int, int], what: Observe
) -> None:
    recording = recorded(queries, 60, mask=mask, what=what)
    found = strips(recording)
    assert (found.low, found.high) == near
    with Server(recording) as server:
        served = server.strips[0]
        assert served is not None
        assert (served.offset, served.low, served.high) == (60 - queries, *near)


def test_one_head_that_sees_ahead_is_enough() -> None:
    seen = torch.ones(1, HEADS, 11, 11, dtype=torch.bool).tril()
    seen[:, 2, 4, 6] = True
    assert strips(recorded(11, 11, mask=masks.Dense(seen))).high == 16


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 7), (2, 0, 7), (2, 3, 0)])
def test_without_weights_there_are_no_strips(batch: int, queries: int, keys: int) -> None:
    recording = recorded(queries, keys, batch=batch)
    assert shown_recording(recording).layers[0].source.strips is None
    with pytest.raises(
        ValueError, match=r"strips: expected layers whose last call has inputs, queries and keys, got layer 0"
    ):
        render_recording(recording, strips=[(0, 2)])
    with Server(recording) as server:
        assert server.strips == [None]


def test_of_calls_of_different_lengths_strips_and_tiles_are_those_of_the_last() -> None:
    first, last = (recorded(length, length, mask=masks.causal()) for length in (11, 7))
    both = Recording(first.stats.merge(last.stats), first.about)
    found, wanted = strips(both), strips(last)
    assert (found.lengths, list(found.codes)) == ((7, 7), [0, 1, 2])
    for head, codes in found.codes.items():
        np.testing.assert_array_equal(codes, wanted.codes[head])
    (said,) = [layer["strips"] for layer in Page(render_recording(both, strips=[(0, 1)])).data["layers"]]
    assert (said["lengths"], list(said["heads"])) == ([7, 7], ["1"])
    with Server(both) as server:
        data = Page(server.page.decode()).data
        assert (data["served"], data["layers"][0]["strips"]["lengths"]) == ([[7, 7]], [7, 7])
        assert server.strip({"layer": 0, "head": 1, "i0": 0, "i1": 7}) == wanted.codes[1].tobytes()


@pytest.mark.parametrize("lengths", [(11,), (7, 11)])
def test_weights_that_are_gone_hinder_no_page(lengths: tuple[int, ...]) -> None:
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    calls = [recorded(n, n, mask=mask if n == 11 else None) for n in lengths]
    stats = calls[0].stats.merge(*(each.stats for each in calls[1:]))
    mask[3] = False
    recording = Recording(stats, calls[0].about)
    assert shown_recording(recording).layers[0].source.strips is None
    with pytest.raises(ValueError, match=r"mask \[11, 11\] was overwritten after it was observed"):
        render_recording(recording, strips=[(0, 0)])


def test_weights_that_are_gone_hinder_no_server() -> None:
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    gone, there = recorded(11, 11, mask=mask), recorded(11, 11)
    mask[3] = False
    parts = {"a": gone.stats.parts["a"], "b": there.stats.parts["a"]}
    with Server(Recording(HeadStats(parts), there.about)) as server:
        assert Page(server.page.decode()).data["served"] == [None, [11, 11]]
        assert [each is None for each in server.strips] == [True, False]
        with pytest.raises(RefusedError, match=r"layer: expected a layer with q and k"):
            server.strip({"layer": 0, "head": 0, "i0": 0, "i1": 11})
        served = server.strip({"layer": 1, "head": 2, "i0": 0, "i1": 11})
    assert served == strips(there).codes[2].tobytes()
    with pytest.raises(ValueError, match=r"mask \[11, 11\] was overwritten after it was observed"):
        Server(gone)


def test_where_every_weight_is_in_the_map_there_are_no_strips() -> None:
    whole, pooled = (
        recorded(11, 11, batch=1, mask=masks.causal(), what=Observe(map=n, keep_qk=True)) for n in (11, 10)
    )
    parts = {"a": whole.stats.parts["a"], "b": pooled.stats.parts["a"]}
    recording = Recording(HeadStats(parts), whole.about)
    for asked, heads in ((None, ["0", "1", "2"]), ([(0, 1)], []), ([("a", 0), ("b", 2)], ["2"])):
        first, second = Page(render_recording(recording, strips=asked)).data["layers"]
        assert first["map"]["exact"]
        assert first["strips"]["heads"] == {}
        assert [*(second["strips"] or {"heads": {}})["heads"]] == heads


def test_where_the_map_is_exact_the_page_still_says_where_the_queries_stand() -> None:
    recording = recorded(3, 41, batch=1, mask=masks.Band(None, 0, offset=5), what=Observe(map=41, keep_qk=True))
    assert (strips(recording).codes, strips(recording).offset) == ({}, 5)


def test_an_error_in_a_strip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("strip_of is wrong")

    monkeypatch.setattr("headscope.report._viewer.strips.strip_of", fail)
    with pytest.raises(ValueError, match=r"strip_of is wrong"):
        shown_recording(recorded(11, 11))


def test_cross_attention_has_no_strips() -> None:
    recording = recorded(3, 7, kind="cross")
    assert shown_recording(recording).layers[0].source.strips is None
    with pytest.raises(
        ValueError,
        match=r"strips: expected layers of self-attention, got layer 0: in cross-attention no key is near a query",
    ):
        render_recording(recording, strips=[(0, 0)])
    with Server(recording) as server:
        assert b'"strips":null' in server.page
        assert len(server.tile({"layer": 0, "head": 0, "i0": 0, "i1": 3, "j0": 0, "j1": 7, "size": 8})) == 2 * 3 * 7 * 4
        with pytest.raises(RefusedError, match=r"layer: expected a layer with strips"):
            server.strip({"layer": 0, "head": 0, "i0": 0, "i1": 3})
