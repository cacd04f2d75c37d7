"""q and k of windows in the page of ``headscope watch``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope import Observe, Recording, watch
from headscope.cli._shared import page_weights
from headscope.cli._shared.model_loading import Loaded, load
from headscope.cli._shared.page_weights import with_page_weights
from headscope.cli._shared.segment_options import read_segment_options
from headscope.cli._shared.watch_options import WatchOptions
from headscope.cli._shared.watch_run import run_watch
from headscope.cli._shared.windows import Input, read_input, windows
from headscope.stats._kept_weights import weights_of
from support.commands import Run
from support.html_pages import Page, stored_matrix
from support.model_folders import gpt2, save

TEXT = "the quick brown fox jumps over the lazy dog, the quick brown fox jumps."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 that reads 29 tokens."""
    return save(gpt2(), tmp_path_factory.mktemp("models") / "gpt2")


def test_the_page_holds_q_and_k_of_windows_and_the_recording_does_not(run: Run, folder: Path) -> None:
    ran = run("watch", str(folder), "--text", TEXT, "--page", "page.html", "--out", "run.safetensors")
    assert ran.code == 0, ran.err
    page = Page(Path("page.html").read_text(encoding="utf-8"))
    assert not any(part.tiles for part in Recording.load("run.safetensors").stats.parts.values())
    examples = [each["run"] for each in page.data["highlights"] if each["cell"]]
    held = [each["window"] for each in page.data["exact"]]
    assert held[0] == max(range(3), key=lambda window: (examples.count(window), -window)), "that of the cards"
    assert {*held} == {0, 1, 2}
    loaded = load(str(folder))
    assert loaded.encode is not None
    parts = windows(loaded.encode(TEXT), 29, loaded.ends)
    for each in page.data["exact"]:
        with torch.inference_mode(), watch(loaded.model, what=Observe(keep_qk=True)) as recording:
            loaded.run(parts[each["window"]])
        weights = weights_of(recording.stats.parts[f"transformer.h.{each['layer']}.attn"].last_tiles)
        for name in "qk":
            stored = stored_matrix(page, each[name], *weights.sizes[name][2:])
            original = weights.parts[name][0, each["head"]].double()
            torch.testing.assert_close(stored, original, rtol=0, atol=1e-3 * float(original.abs().max()))


def watched(folder: Path) -> tuple[Loaded, Input, Any]:
    """A model, a text in windows, and the recording of it."""
    loaded = load(str(folder))
    model_input = read_input(loaded, TEXT, None, None, None, None, read_segment_options((), None, None))
    options = WatchOptions(None, (), None, None, False, "page.html", False, False, None, None, None)
    return loaded, model_input, run_watch(loaded, model_input, options)


def test_a_window_that_is_another_when_it_is_read_again_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, model_input, result = watched(folder)
    assert all(sorted(part.tiles) == [0, 1, 2] for part in result.on_page.stats.parts.values())
    assert not any(part.tiles for part in result.recording.stats.parts.values())
    other = replace(loaded, run=lambda ids: loaded.run(ids.flip(-1)))
    page = with_page_weights(result.recording, other, model_input, ())
    assert not any(part.tiles for part in page.stats.parts.values())
    monkeypatch.setattr(page_weights, "MOST_QK", 0)
    page = with_page_weights(result.recording, loaded, model_input, ())
    assert not any(part.tiles for part in page.stats.parts.values()), "q and k have no room"
