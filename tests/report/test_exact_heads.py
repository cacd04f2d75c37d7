"""Which heads a page computes itself, in how many bits, and what it states about the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headscope import Observe, masks, observe
from headscope.report._viewer import exact_heads
from headscope.report._viewer.exact_heads import Chosen, choose_heads
from headscope.report._viewer.exact_values import Matrix, relative_bias
from headscope.report.viewer import render_recording, shown_recording
from headscope.stats import HeadStats
from headscope.stats._kept_weights import KeptWeights, weights_of
from headscope.watching import About, Recording
from support.html_pages import Page, stored_matrix
from support.recording_files import without_checksums

HEADS = 3


def recorded(length: int = 23, *, layers: int = 1, heads: int = HEADS, what: Any = None, **given: Any) -> Recording:
    parts: dict[str, Any] = {}
    for n in range(layers):
        q, k = torch.randn(2, 1, heads, length, 5)
        given = {"mask": masks.causal()} | given
        parts |= observe(q, k, what=what or Observe(map=7, keep_qk=True), **given).named(f"layers.{n}").parts
    return Recording(HeadStats(parts), About("m", {}, {}, dict.fromkeys(parts, "self"), None, 1, 1))


def heads_of(recording: Recording, **options: Any) -> list[tuple[int, int]]:
    return [(each["layer"], each["head"]) for each in shown_recording(recording, **options).exact.heads]


# ---------------------------------------------------------------- which heads


def test_without_a_request_the_best_heads_are_stored() -> None:
    scored = [[[("uniform", 0.9, 5, True)] for _ in range(HEADS)] for _ in range(5)]
    scored[3][1] = [("induction", 0.8, 5, True)]
    scored[1][2] = [("previous", 0.7, 5, True)]
    chosen = choose_heads([HEADS] * 5, scored)
    assert chosen[:2] == [(3, 1), (1, 2)]
    assert len(chosen) == 8
    assert choose_heads([HEADS] * 5, scored, (4, 0))[:3] == [(4, 0), (3, 1), (1, 2)]
    assert choose_heads([HEADS, 0, HEADS, 0, 0], scored)[0] == (0, 0)
    assert len(heads_of(recorded(layers=5))) == 8


def test_requested_heads_are_stored_in_their_order() -> None:
    recording = recorded(layers=2)
    assert heads_of(recording, exact=[("layers.1", 2), (0, 1), (1, 2)]) == [(1, 2), (0, 1)]
    assert heads_of(recording, exact=()) == []


def test_layers_without_q_and_k_or_without_a_map_are_left_out() -> None:
    for what, why in ((Observe(map=7), "q and k were not saved"), (Observe(keep_qk=True), "the layer has no map")):
        recording = recorded(what=what)
        assert heads_of(recording) == []
        assert 'id="exact"' not in render_recording(recording)
        with pytest.raises(ValueError, match=why):
            render_recording(recording, exact=[(0, 0)])


@pytest.mark.parametrize(
    ("exact", "error", "message"),
    [
        (3, TypeError, "exact: got 3, expected pairs of a layer and the number of a head"),
        ([3], ValueError, "exact: expected pairs of a layer and the number of a head, got 3"),
        ([(0, 3)], ValueError, "exact: layer 0 with head 3 does not exist; expected layers 0 to 0 or their names"),
        ([("x", 0)], ValueError, "exact: layer x with head 0 does not exist"),
        ([(0, 0)] * 9, ValueError, "exact: expected at most 8 heads, got 9"),
    ],
)
def test_a_wrong_request_is_an_error(exact: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        render_recording(recorded(), exact=exact)
    assert str(raised.value).startswith(message)


def test_weights_that_cannot_be_expressed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_heads, "MOST_REST", 100)
    monkeypatch.setattr(exact_heads, "MOST_BIAS", 100)
    dense = recorded(mask=torch.rand(23, 23) < 0.7)
    biased = recorded(bias=torch.randn(1, HEADS, 23, 23))
    for recording, why in ((dense, "its mask is not one of spans"), (biased, "its bias depends on more")):
        assert heads_of(recording) == []
        with pytest.raises(ValueError, match=f"exact: the page cannot compute .* head 1: {why}"):
            render_recording(recording, exact=[(0, 1)])
    distances = torch.arange(23) - torch.arange(23)[:, None]
    assert len(heads_of(recorded(bias=torch.randn(45)[distances + 22]))) == HEADS


def test_a_mask_that_was_overwritten_leaves_the_layer_out() -> None:
    bias = torch.randn(1, HEADS, 23, 23)
    recording = recorded(bias=bias)
    bias += 1
    assert heads_of(recording) == []
    with pytest.raises(ValueError, match="modified after the call"):
        render_recording(recording, exact=[(0, 1)])


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("heads", "length", "most"), [(8, 32_768, exact_heads.MOST_BYTES), (1, 131_072, exact_heads.MOST_BYTES_OF_HEAD)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_texts_fit_in_16_bits(heads: int, length: int, most: int, dtype: torch.dtype) -> None:
    like = torch.empty(1, 1, 1, 1, dtype=dtype)
    sizes = {"q": (1, heads, length, 64), "k": (1, heads, length, 64)}
    weights = KeptWeights({"q": like, "k": like}, sizes, (1,), 1.0, None, False)
    assert heads * Chosen((0, 0), weights).size(16) <= most


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_no_head_is_larger_than_expected(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded(1009, heads=1)
    weights = weights_of(recording.stats.parts["layers.0"].last_tiles)
    size = Chosen((0, 0), weights).size(bits)
    monkeypatch.setattr(exact_heads, "MOST_BYTES", size)
    found = shown_recording(recording, exact=[(0, 0)]).exact
    assert len(found.heads) == 1
    assert found.heads[0]["bits"] <= bits
    assert 0.5 * size < len(found.content) <= size


def test_heads_beyond_the_room_are_left_out_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded(layers=2)
    weights = weights_of(recording.stats.parts["layers.0"].last_tiles)
    monkeypatch.setattr(exact_heads, "MOST_BYTES", 2 * Chosen((0, 0), weights).size(8))
    shown = shown_recording(recording, exact=[(0, 0), (1, 1), (1, 2)])
    assert [each["head"] for each in shown.exact.heads] == [0, 1]
    assert [each["bits"] for each in shown.exact.heads] == [8, 8]
    assert shown.notes == ["Exact at every zoom: 2 of 3 heads; the others would make the page too large."]
    monkeypatch.setattr(exact_heads, "MOST_BYTES_BY_DEFAULT", 0)
    shown = shown_recording(recording)
    assert not shown.exact.heads
    assert "0 of 6 heads" in shown.notes[0]
    assert "save_html(path, exact=[(layer, head)])" in shown.notes[0]


def test_logits_that_are_too_large_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = 60 * torch.randn(2, 1, HEADS, 23, 5)
    found = observe(q, k, what=Observe(map=7, keep_qk=True)).named("layers.0")
    recording = Recording(found, About("m", {}, {}, {"layers.0": "self"}, None, 1, 1))
    exact = shown_recording(recording, exact=[(0, 0)]).exact
    assert exact.heads[0]["q"]["kind"] == "float32"
    assert exact.heads[0]["error"] < 1e-3
    size = Chosen((0, 0), weights_of(found.parts["layers.0"].last_tiles)).size(8)
    monkeypatch.setattr(exact_heads, "MOST_BYTES", size)
    exact = shown_recording(recording, exact=[(0, 0)]).exact
    assert not exact.heads
    assert exact.notes == ["Exact at every zoom: without 1 head, whose logits are too large to be stored precisely."]


def test_keys_of_a_group_and_the_mask_are_stored_once() -> None:
    q, k = torch.randn(1, 4, 23, 5), torch.randn(1, 2, 23, 5)
    found = observe(q, k, mask=masks.causal(), what=Observe(map=7, keep_qk=True)).named("a")
    recording = Recording(found, About("m", {}, {}, {"a": "self"}, None, 1, 1))
    heads = shown_recording(recording, exact=[(0, n) for n in range(4)]).exact.heads
    assert [heads[0]["k"]["at"] == each["k"]["at"] for each in heads] == [True, True, False, False]
    assert len({each["spans"]["at"] for each in heads}) == 1
    assert len({each["q"]["at"] for each in heads}) == 4


# ---------------------------------------------------------------- files


def test_a_saved_recording_has_the_same_heads(tmp_path: Path) -> None:
    recording = recorded()
    loaded = Recording.load(recording.save(tmp_path / "r.safetensors", qk=True))
    pages = [Page(render_recording(each, exact=[(0, 1)])) for each in (recording, loaded)]
    assert pages[0].script("exact") == pages[1].script("exact")
    (about,) = pages[1].data["exact"]
    q = weights_of(recording.stats.parts["layers.0"].last_tiles).parts["q"][0, 1]
    stored = stored_matrix(pages[1], about["q"], 23, 5)
    assert float((stored - q).abs().max()) < 1e-4 * float(q.abs().max())


def test_a_file_that_was_changed_is_an_error(tmp_path: Path) -> None:
    path = recorded().save(tmp_path / "r.safetensors", qk=True)
    loaded = Recording.load(path)
    content = bytearray(path.read_bytes())
    content[-4000:] = b"\x55" * 4000
    path.write_bytes(content)
    with pytest.raises(ValueError, match="the file has changed since it was loaded"):
        heads_of(loaded, strips=())


def test_damage_to_a_file_without_checksums_is_an_error(tmp_path: Path) -> None:
    path = recorded().save(tmp_path / "r.safetensors", qk=True)
    damaged = tmp_path / "damaged.safetensors"
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        metadata = file.metadata()
    (lse,) = [name for name in tensors if name.endswith("lse") and tensors[name].ndim == 3]
    save_file({**tensors, lse: tensors[lse] - 20}, damaged, metadata=without_checksums(metadata))
    with pytest.raises(ValueError, match="expected weights of at most 1"):
        heads_of(Recording.load(damaged), strips=())


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("kind", ["float32", "int16", "int8"])
def test_the_stated_difference_of_rows_is_theirs(kind: str) -> None:
    x = torch.randn(7, 13) * torch.logspace(-3, 3, 7)[:, None]
    x[2], x[3, 4] = 0, torch.inf
    matrix = Matrix.of(x, kind)
    clean = x.nan_to_num(posinf=0.0).double().numpy()
    np.testing.assert_allclose(matrix.wrong, np.linalg.norm(matrix.values - clean, axis=1), rtol=1e-9)
    assert (matrix.wrong <= {"float32": 0, "int16": 1e-4, "int8": 3e-2}[kind] * np.linalg.norm(clean, axis=1)).all()


def test_a_bias_by_distance_is_recognised() -> None:
    by_distance = torch.randn(40)
    bias = by_distance[torch.arange(23) - torch.arange(17)[:, None] + 16]
    found = relative_bias(bias)
    assert found is not None
    torch.testing.assert_close(found, by_distance[:39])
    bias[11, 3] += 1
    assert relative_bias(bias) is None
