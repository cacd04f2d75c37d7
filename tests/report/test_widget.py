"""The page as a widget of a notebook: Python reads the selection, and opens heads."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope import Observe, watch
from headscope.functional import attention
from headscope.masks import causal
from headscope.report import widget
from headscope.report.widget import HeadView, show_heads
from headscope.watching import Recording
from support.browser import chromium, in_a_browser

__all__ = ["chromium"]  # a fixture

LENGTH = 23


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(x, x.flip(-1), x, mask=causal())


@pytest.fixture
def recording() -> Recording:
    model, x = Model(), torch.randn(1, 3, LENGTH, 5, generator=torch.Generator().manual_seed(1))
    with watch(model, what=Observe(map=6, keep_qk=True)) as seen:
        model(x)
    return seen


def test_a_head_is_opened_and_selected(recording: Recording) -> None:
    view = show_heads(recording, height=500, title="A model")
    assert b"A model" in view.widget.page
    assert view.widget.height == 500
    assert view.selected == {"layer": 0, "head": 0, "query": None, "key": None}
    opened: list[Any] = []
    view.widget.observe(lambda change: opened.append(change["new"]), "opened")
    for _ in range(2):  # the same head again is opened again
        view.open("Model", 2)
    assert [each for each in opened if each] == [{"layer": 0, "head": 2}] * 2
    assert view.selected["head"] == 2
    for layer, head, text in (
        (1, 0, "layer: got 1"),
        ("x", 0, "layer: got 'x'"),
        (0, 3, "head: got 3"),
        (0, -1, "head"),
    ):
        with pytest.raises(ValueError, match=text):
            view.open(layer, head)


def test_the_tile_holds_the_exact_weights_in_view(recording: Recording) -> None:
    view = show_heads(recording)
    whole = view.tile
    assert whole.shape == (LENGTH, LENGTH)
    assert torch.allclose(whole.nansum(-1), torch.ones(LENGTH), atol=1e-5)
    view.widget.state = {"layer": 0, "head": 1, "row": 2, "column": 5, "zoom": [2.0, 1.0, 0.0]}
    assert view.selected == {"layer": 0, "head": 1, "query": 2 * LENGTH // 6, "key": 5 * LENGTH // 6}
    view.open(0, 1)
    all_of_it = view.tile
    view.widget.state = {"layer": 0, "head": 1, "row": None, "column": None, "zoom": [2.0, 1.0, 0.0]}
    half = LENGTH // 2
    assert torch.equal(view.tile.nan_to_num(), all_of_it[: view.tile.shape[0], half:].nan_to_num())
    with pytest.raises(ValueError, match="tile: q and k were not kept"):
        _ = show_heads(watched_without_keys()).tile


def watched_without_keys() -> Recording:
    model = Model()
    with watch(model) as seen:
        model(torch.randn(1, 2, 5, 4))
    return seen


def test_a_watch_that_is_open_is_shown_as_it_is_now() -> None:
    model, x = Model(), torch.randn(1, 2, 7, 4)
    with watch(model, what=Observe(map=7)) as seen:
        model(x)
        view = show_heads(seen)
        before = view.widget.page
        model(x + 1)
        view.refresh()
        assert view.widget.page != before
        assert b"2 forward passes" in view.widget.page


def test_without_anywidget_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, recording: Recording) -> None:
    original = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "anywidget":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    widget._widget_class.cache_clear()
    with pytest.raises(ImportError, match="pip install anywidget"):
        show_heads(recording)


HOST = """
<!DOCTYPE html><title>host</title><div id="cell"></div>
<script type="module">
  const script = %s;
  const widget = (await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })))).default;
  const held = { page: new TextEncoder().encode(%s), height: 700, opened: {}, state: {} }, listeners = {};
  const model = {
    get: (name) => held[name],
    set: (name, value) => { held[name] = value; listeners[`change:${name}`]?.(); },
    save_changes: () => { window.saved = { ...held.state }; },
    on: (name, listener) => { listeners[name] = listener; },
  };
  widget.render({ model, el: document.getElementById("cell") });
  window.model = model;
</script>
"""


@in_a_browser
def test_the_page_in_its_frame_says_what_is_selected_and_opens_heads(
    chromium: Any, recording: Recording, tmp_path: Path
) -> None:
    view: HeadView = show_heads(recording)
    quoted = [json.dumps(text).replace("</", "<\\/") for text in (view.widget._esm, view.widget.page.decode())]
    path = tmp_path / "host.html"
    path.write_text(HOST % (quoted[0], quoted[1]), encoding="utf-8")
    page = chromium.new_page()
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe[title=headscope]")
    frame.locator(".thumb").first.wait_for()
    page.evaluate("model.set('opened', { layer: 0, head: 2 })")
    frame.locator("#head-title", has_text="head 2").wait_for()
    page.wait_for_function("window.saved?.head === 2")
    frame.locator(".map canvas").first.click(position={"x": 200, "y": 300})
    page.wait_for_function("window.saved?.row !== null")
    view.widget.state = page.evaluate("window.saved")
    assert view.selected["head"] == 2
    assert view.selected["query"] is not None
    for wrong in ("{ layer: 7, head: 0 }", "{ layer: 0, head: '1' }", "{ layer: null, head: 0 }"):
        page.evaluate(f"model.set('opened', {wrong})")
    page.evaluate("document.querySelector('iframe').contentWindow.postMessage(null, '*')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.saved.head") == 2
    page.close()
