"""Exact heads: the page computes their weights from q, k and lse in a worker, and explains a weight."""

# ruff: noqa: F401, F811  # look is a fixture

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope import Observe, masks, observe
from headscope.report._viewer import exact_heads
from headscope.report.serving import pooled_tile
from headscope.stats._kept_weights import KeptWeights, weights_of
from headscope.watching import About, Recording
from support.browser import Page as Shown
from support.browser import in_a_browser, look, serving, thumbs
from support.html_pages import Page, stored_matrix

pytestmark = in_a_browser

SPY = """
  window.tiles = [];
  const Plain = window.Worker;
  window.Worker = class extends Plain {
    asked = {};
    constructor(url) {
      super(url);
      window.workers = (window.workers ?? 0) + 1;
      this.addEventListener("message", ({ data }) => {
        if (!data.tile) return;
        const [mean, max] = [data.tile.mean, data.tile.max].map((values) => [...values].map(String)); // JSON has no NaN
        tiles.push({ ...this.asked[data.id], mean, max });
      });
    }
    postMessage(request) {
      this.asked[request.id] = request;
      super.postMessage(request);
    }
  };
"""


@pytest.fixture(scope="module")
def chromium(chromium_process: Any) -> Iterator[Any]:
    """A context of its own, whose pages have the spy."""
    context = chromium_process.new_context()
    context.set_default_timeout(20_000)
    context.add_init_script(SPY)
    yield context
    context.close()


def recorded(
    queries: int, keys: int, *, dtype: torch.dtype = torch.float32, size: float = 1.5, bins: int = 11, **given: Any
) -> Recording:
    """One layer of four heads in two groups over two inputs."""
    q, k = (torch.randn(2, heads, n, 13) * size for heads, n in ((4, queries), (2, keys)))
    found = observe(q.to(dtype), k.to(dtype), what=Observe(map=bins, keep_qk=True), **given).named("a")
    return Recording(found, About("m", {}, {}, {"a": given.get("kind", "self")}, None, 1, 1))


def stored(page: Page, about: dict[str, Any], weights: KeptWeights) -> KeptWeights:
    """The weights from what the page holds, in float64."""
    queries, keys = about["lengths"]
    depth, head = about["depth"], about["head"]
    group = head * weights.sizes["k"][1] // weights.sizes["q"][1]
    parts = {name: x.double() if name in "qk" else x.clone() for name, x in weights.tensors().items()}
    parts["q"][0, head] = stored_matrix(page, about["q"], queries, depth)
    parts["k"][0, group] = stored_matrix(page, about["k"], keys, depth)
    parts["lse"] = parts["lse"].double()
    parts["lse"][0, head] = torch.from_numpy(np.frombuffer(page.exact(about["lse"]), "<f4").astype(float))
    return replace(weights, parts=parts, wide=True, shared={})


def originals(weights: KeptWeights) -> KeptWeights:
    parts = {name: x.double() if name in ("q", "k", "lse") else x for name, x in weights.tensors().items()}
    return replace(weights, parts=parts, wide=True, shared={})


def last_tile(page: Shown, head: int | None = None) -> dict[str, Any]:
    """What the worker answered last, of this head if one is given."""
    page.wait_for_function("(head) => tiles.length && (head === null || tiles.at(-1).head === head)", arg=head)
    found = page.evaluate("tiles.at(-1)")
    shape = [min(512, stop - start) for start, stop in (found["queries"], found["keys"])]
    return {**found, **{name: np.array(found[name], dtype=float).reshape(shape) for name in ("mean", "max")}}


ALIBI = -(torch.arange(97) - torch.arange(97)[:, None]).abs() * torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]

CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.causal()},
    "window, softcap, bf16": {"mask": masks.window(29), "softcap": 3.0, "dtype": torch.bfloat16},
    "fp16, sinks": {"mask": masks.causal(), "sinks": torch.randn(4), "dtype": torch.float16},
    "documents, key lengths": {
        "mask": masks.Documents(torch.tensor([[0] * 40 + [1] * 57] * 2)) & masks.KeyLengths(torch.tensor([91, 97]))
    },
    "prefix": {"mask": masks.causal() | masks.Prefix(31)},
    "dense": {"mask": (torch.rand(2, 1, 97, 97) < 0.5) | torch.eye(97, dtype=torch.bool)},
    "rows without keys": {"mask": masks.Band(None, -3)},
    "relative bias": {"mask": masks.causal(), "bias": ALIBI},
    "any bias": {"bias": torch.randn(1, 4, 97, 97).masked_fill(torch.rand(1, 4, 97, 97) < 0.1, -torch.inf)},
    "cross": {"queries": 53, "kind": "cross"},
    "float64": {"mask": masks.causal(), "dtype": torch.float64},
}


@pytest.mark.parametrize("case", CASES)
def test_a_tile_is_that_of_python(look: Any, case: str, tmp_path: Path) -> None:
    recording = recorded(**{"queries": 97, "keys": 97, **CASES[case]})
    path = recording.save_html(tmp_path / "page.html", exact=[("a", 3)])
    page = look(path, "view=head&layer=0&head=3&zoom=2,0.5,0.5")
    tile = last_tile(page)
    (about,) = Page(path.read_text(encoding="utf-8")).data["exact"]
    weights = weights_of(recording.stats.parts["a"].last_tiles)
    i, j = tuple(tile["queries"]), tuple(tile["keys"])
    same = stored(Page(path.read_text(encoding="utf-8")), about, weights).piece(0, 3, i, j).numpy()
    np.testing.assert_allclose(tile["mean"], same, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(tile["mean"], tile["max"])
    assert np.nanmax(same) > 0.01
    assert np.isnan(same).any() == (case not in ("cross",))
    model = originals(weights).piece(0, 3, i, j).numpy()
    off = np.abs(tile["mean"] - model)
    assert np.nanmax(off - model * (about["error"] + 1e-6)) <= 1e-7
    assert "Exact: each visible cell is one weight" in page.locator(".hint.exact").inner_text()


@pytest.mark.parametrize(
    ("kind", "size", "room"), [("int16", 0.3, 10**7), ("int16", 4.0, 17_000), ("int8", 0.7, 12_000)]
)
def test_fewer_bits_state_their_error(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: float, room: int
) -> None:
    monkeypatch.setattr(exact_heads, "MOST_BYTES", room)
    recording = recorded(97, 97, size=size, mask=masks.window(41))
    path = recording.save_html(tmp_path / "page.html", exact=[(0, 1), (0, 2)])
    page = look(path, "view=head&layer=0&head=1&zoom=2,0.5,0.5")
    tile = last_tile(page)
    source = Page(path.read_text(encoding="utf-8"))
    about = source.data["exact"][0]
    assert (about["q"]["kind"], about["k"]["kind"]) == (kind, kind)
    assert len(source.script("exact")) <= room
    weights = weights_of(recording.stats.parts["a"].last_tiles)
    i, j = tuple(tile["queries"]), tuple(tile["keys"])
    np.testing.assert_allclose(tile["mean"], stored(source, about, weights).piece(0, 1, i, j), rtol=1e-6, atol=1e-6)
    model = originals(weights).piece(0, 1, i, j).numpy()
    share = np.nanmax(np.abs(tile["mean"] / model - 1)[model > 1e-30])  # smaller ones are subnormal in float32
    assert 0.02 * about["error"] < share <= about["error"], "as stated, and not far too large"
    bits = kind.removeprefix("int")
    for shown in (page.locator(".map .stored"), page.locator(".why .stored")):
        assert f"in {bits} bits: a weight differs from the model's by at most" in shown.inner_text()


@pytest.mark.long
def test_a_wide_piece_is_pooled_as_by_the_server(look: Any, tmp_path: Path) -> None:
    recording = recorded(1201, 1201, mask=masks.causal())
    path = recording.save_html(tmp_path / "page.html", exact=[(0, 2)])
    page = look(path, "view=head&layer=0&head=2&zoom=1.5,0.5,0.6")
    tile = last_tile(page)
    weights = originals(weights_of(recording.stats.parts["a"].last_tiles))
    mean, largest = pooled_tile(weights, 2, tuple(tile["queries"]), tuple(tile["keys"]), 512)
    assert mean.shape == (512, 512)
    np.testing.assert_allclose(tile["mean"], mean, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(tile["max"], largest, rtol=2e-3, atol=1e-6)
    assert "each cell pools several weights" in page.locator(".hint.exact").inner_text()


def test_many_heads_take_turns_in_the_worker(look: Any, tmp_path: Path) -> None:
    recording = recorded(97, 97, mask=masks.causal())
    path = recording.save_html(tmp_path / "page.html", exact=[(0, n) for n in range(4)])
    weights = originals(weights_of(recording.stats.parts["a"].last_tiles))
    page = look(path, "view=head&layer=0&head=0&zoom=2,0.5,0.5")
    for head in (0, 1, 2, 3, 0, 2):
        page.evaluate(f"location.hash = '#view=head&layer=0&head={head}&zoom=2,0.5,0.5'")
        tile = last_tile(page, head)
        expected = weights.piece(0, head, tuple(tile["queries"]), tuple(tile["keys"]))
        np.testing.assert_allclose(tile["mean"], expected, rtol=2e-3, atol=1e-6)
    assert page.evaluate("workers") == 1


# ---------------------------------------------------------------- why this weight


def why(page: Shown) -> dict[str, float]:
    found = page.locator(".why [data-p]")
    found.wait_for()
    return {name: float(found.get_attribute(f"data-{name}") or "nan") for name in ("p", "logit", "dot")}


def check_rival(page: Shown, weights: Any, query: int, key: int) -> None:
    """Check the comparison with the other key of the largest weight."""
    row = [float(weights.piece(0, 2, (query, query + 1), (j, j + 1))) for j in range(query + 1)]
    other = max((j for j in range(query + 1) if j != key), key=row.__getitem__)
    rival = page.locator(".why .rival")
    assert int(rival.get_attribute("data-key") or -1) == other
    assert f"Against key {other}, the largest other key of this query ({100 * row[other]:.2g}" in rival.inner_text()
    q, k, o = (weights.parts[x][0, n, at].double() for x, n, at in (("q", 2, query), ("k", 1, key), ("k", 1, other)))
    products = (q * (k - o)).tolist()
    shown = [each.split("\n") for each in rival.locator(".dimensions li").all_inner_texts()]
    order = sorted(range(13), key=lambda d: -abs(products[d]))
    assert [name for name, *_ in shown] == [f"dim {d}" for d in order[:10]]
    values = [float(value.replace("−", "-")) for *_, value in shown]
    assert values == pytest.approx([products[d] for d in order[:10]], rel=1e-3)


def test_a_weight_is_explained(look: Any, tmp_path: Path) -> None:
    bias = torch.randn(97)
    recording = recorded(97, 97, dtype=torch.bfloat16, mask=masks.causal(), softcap=5.0, bias=bias)
    path = recording.save_html(tmp_path / "page.html", exact=[(0, 2)])
    weights = originals(weights_of(recording.stats.parts["a"].last_tiles))
    query, key = 61, 23
    page = look(path, f"view=head&layer=0&head=2&cell={query},{key}&row=7&column=2")
    shown = why(page)
    q, k = (x[0, n, at] for x, n, at in ((weights.parts["q"], 2, query), (weights.parts["k"], 1, key)))
    products = (q * k).tolist()
    scaled = sum(products) / math.sqrt(13)
    logit = 5 * math.tanh(scaled / 5) + float(bias[key])
    expected = {"dot": sum(products), "logit": logit, "p": math.exp(logit - float(weights.parts["lse"][0, 2, query]))}
    assert shown == pytest.approx(expected, rel=1e-5)
    assert shown["p"] == pytest.approx(float(weights.piece(0, 2, (query, query + 1), (key, key + 1))), rel=1e-5)
    order = sorted(range(13), key=lambda d: -abs(products[d]))
    rows = page.locator(".why li:not(.rival) > .dimensions li").all_inner_texts()
    assert [row.split("\n")[0] for row in rows] == [f"dim {d}" for d in order[:10]]
    values = [float(row.split("\n")[-1].replace("−", "-")) for row in rows]
    assert values == pytest.approx([products[d] for d in order[:10]], rel=1e-3)
    text = page.locator(".why").inner_text().replace("−", "-")
    assert f"the other 3 dimensions together: {sum(products[d] for d in order[10:]):+.4g}"[:45] in text
    assert "The mask lets this query attend to this key." in text
    check_rival(page, weights, query, key)
    assert "tanh(" in text
    assert "lse = " in text
    assert f"= {expected['p']:.4g}"[:6] in text


def test_a_masked_weight_is_explained(look: Any, tmp_path: Path) -> None:
    path = recorded(97, 97, mask=masks.causal()).save_html(tmp_path / "page.html", exact=[(0, 2)])
    page = look(path, "view=head&layer=0&head=2&cell=23,61&row=2&column=7")
    assert why(page)["p"] == 0
    text = page.locator(".why").inner_text()
    assert "Its weight is 0, whatever q · k is" in text
    assert "exp(" not in text


def test_a_click_on_one_weight_explains_it(look: Any, tmp_path: Path) -> None:
    recording = recorded(11, 11, dtype=torch.float16, mask=masks.causal())
    path = recording.save_html(tmp_path / "page.html", exact=[(0, 0)])
    page = look(path, "view=head&layer=0&head=0")
    assert "Select one cell of the map" in page.locator(".why").inner_text()
    page.locator(".map canvas").focus()
    for _ in range(5):
        page.keyboard.press("Shift+ArrowDown")
    page.keyboard.press("Shift+ArrowRight")
    weights = weights_of(recording.stats.parts["a"].last_tiles)
    assert why(page)["p"] == pytest.approx(float(weights.piece(0, 0, (5, 6), (1, 2))), rel=1e-5)
    assert "query 5 → key 1" in page.locator(".why").inner_text()


def test_other_heads_name_those_that_are_exact(look: Any, tmp_path: Path) -> None:
    path = recorded(97, 97, mask=masks.causal()).save_html(tmp_path / "page.html", exact=[(0, 2)])
    page = look(path, "view=head&layer=0&head=1&zoom=2,0.5,0.5")
    page.locator(".why button").click()
    page.locator("#head-title", has_text="head 2").wait_for()
    last_tile(page, 2)


# ---------------------------------------------------------------- pages without


def test_a_page_without_exact_heads_has_no_worker(look: Any, tmp_path: Path) -> None:
    path = recorded(97, 97, mask=masks.causal()).save_html(tmp_path / "page.html", exact=())
    page = look(path, "view=head&layer=0&head=1&zoom=2,0.5,0.5&cell=61,23")
    page.locator(".map canvas").wait_for()
    page.wait_for_timeout(600)  # a tile is requested after 150 ms
    assert page.evaluate("[window.workers, tiles.length]") == [None, 0]
    assert "--keep-qk" in page.locator(".why").inner_text(), "it states how to get a page with them"
    assert page.locator(".why ol").count() == 0
    source = path.read_text(encoding="utf-8")
    assert "worker-src" not in source.split("<title>")[0]
    assert 'id="exact"' not in source


def test_a_page_with_exact_heads_allows_only_workers_from_itself(look: Any, tmp_path: Path) -> None:
    path = recorded(97, 97, mask=masks.causal()).save_html(tmp_path / "page.html")
    policy = path.read_text(encoding="utf-8").split("<title>")[0]
    assert "worker-src blob:;" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy


def test_the_page_in_a_notebook_computes_them(chromium: Any, tmp_path: Path) -> None:
    html = recorded(97, 97, mask=masks.causal())._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html>{html}", encoding="utf-8")
    page = chromium.new_page()
    page.goto(path.as_uri())
    frame = page.frames[1]
    frame.locator(".thumb canvas[data-drawn]").first.click()
    frame.locator(".map").get_by_role("button", name="Zoom in").click()
    frame.wait_for_function("() => tiles.length > 0")
    page.close()


def test_a_served_page_asks_its_server(chromium: Any, tmp_path: Path) -> None:
    recording = recorded(97, 97, mask=masks.causal())
    with serving(recording, tmp_path / "r.safetensors") as server:
        page = chromium.new_page()
        page.goto(f"{server.url}#view=head&layer=0&head=1&zoom=2,0.5,0.5")
        page.locator(".hint.exact").wait_for()
        assert page.evaluate("window.workers ?? 0") == 0
        page.close()
