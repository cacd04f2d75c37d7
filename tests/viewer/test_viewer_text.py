"""What the viewer's page says of what it shows: scales, bits and numbers are those of what is beside them."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headscope import Observe
from headscope.report.serving import Server
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import (
    LONG,
    BrowserContext,
    Page,
    Watched,
    chromium,
    figure,
    in_a_browser,
    long,
    look,
    near,
    numbers,
    open_menu,
    place,
    recorded,
    save_figure,
    short,
    texts_of,
    thumbs,
    weight,
)
from support.paths import ROOT

pytestmark = in_a_browser


# ---------------------------------------------------------------- scales and bits


def test_the_scale_says_that_there_is_more_than_its_largest(look: Any, short: Recording) -> None:
    tops = {head: float(weight(short, 0, head)[1:].max()) for head in range(3)}  # the first row sees one key
    assert min(tops.values()) < 0.99 < max(tops.values())
    for head, top in tops.items():
        legend = look(short, f"view=head&layer=0&head={head}").locator(".legend").first
        legend.wait_for()
        more = " or more" if top < 0.99 else ""
        assert legend.inner_text().split("\n")[:3] == ["weight, linear", "0", f"{figure(top)}{more}"]


def test_values_in_8_bits_say_so(look: Any, short: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    assert "8 bits" not in page.locator(".legend").first.inner_text()
    monkeypatch.setattr("headscope.report._viewer.packing.FINE_BYTES", 0)
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    p = weight(short, 1, 2)
    assert "8 bits" in page.locator(".legend").first.inner_text()
    shown = page.locator(".pinned .cell b").inner_text()
    assert shown.startswith("≈ ")
    assert len(shown.removeprefix("≈ 0.").lstrip("0")) == 2
    assert numbers(shown)[0] == pytest.approx(p[9, 5], abs=8e-3)
    title = page.locator(".strip").first.locator("button").nth(3).get_attribute("title")
    assert ", ≈ 0." in title


@pytest.fixture
def served(chromium: BrowserContext, long: Recording, tmp_path: Path) -> Iterator[Any]:
    with Server(Recording.load(long.save(tmp_path / "long.safetensors", qk=True))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        pages: list[Watched] = []

        def opened(at: str) -> Page:
            pages.append(Watched(chromium, f"{server.url}#{at}"))
            return pages[-1].page

        yield opened
        for each in pages:
            assert each.said == []
            each.close()
        server.shutdown()
        thread.join()


def test_exact_weights_stand_under_a_scale_of_their_own(served: Any, long: Recording) -> None:
    page = served("view=head&layer=1&head=2&zoom=8,0.4,0.6")
    page.get_by_text("Exact: each visible cell is one weight").wait_for()
    i0, i1, j0, j1 = map(int, numbers(page.locator(".exact").inner_text().replace("–", " ")))
    p = weight(long, 1, 2)[i0 : i1 + 1, j0 : j1 + 1]
    legend = page.locator(".legend").first
    what, _, high, said = legend.inner_text().split("\n")
    assert (what, high) == ("weight, log", figure(float(np.float32(p.max()))))
    assert said == "The colour scale is that of the visible part."
    page.get_by_role("button", name="Show all").click()
    legend.get_by_text("Each cell averages 8–9 × 8–9 pairs of query and key").wait_for()
    assert "mean weight of a cell, log" in legend.inner_text()


def test_a_click_pins_the_exact_weight(served: Any, long: Recording) -> None:
    page = served("view=head&layer=1&head=2&zoom=8,0.4,0.6")
    page.get_by_text("Exact: each visible cell is one weight").wait_for()
    page.mouse.click(*place(page, 0.5, 0.5))
    query, key = int(0.6 * LONG), int(0.4 * LONG)
    p = figure(float(weight(long, 1, 2)[query, key]))
    wanted = f"query {query} “␣w{query}” → key {key} “␣w{key}”\nweight {p}, exact"
    pinned = page.locator(".pinned .cell")
    pinned.nth(1).wait_for()
    assert pinned.first.inner_text() == wanted
    assert pinned.nth(1).inner_text().startswith("queries 56–63 → keys 32–39")
    page.wait_for_url(f"**cell={query}%2C{key}**")
    again = served(page.url.partition("#")[2])
    again.locator(".pinned .cell").nth(1).wait_for()
    assert again.locator(".pinned .cell").first.inner_text() == wanted, "the address leads back"
    again.locator(".map canvas").press("Shift+ArrowDown")
    again.get_by_text("queries 64–71").first.wait_for()
    assert pinned.count() == 2
    assert again.locator(".pinned .cell").count() == 1, "another bin is pinned"


# ---------------------------------------------------------------- words


def test_all_texts_of_the_script_are_in_one_file() -> None:
    """A translation is that file: components hold no words between tags, and none in the attributes that are read."""
    components = sorted((ROOT / "viewer" / "src").glob("*.tsx"))
    if not components:
        pytest.skip("this is no checkout: there is no source of the script")
    attributes = "aria-label|title|label|caption|alt|placeholder"
    between = r">[^<>{}]*[A-Za-z]{2}[^<>{}]*</"
    within = rf"""\b(?:{attributes})=(?:"[^"]*[A-Za-z]{{2}}|\{{[`"'][^`"']*[A-Za-z]{{2}})"""
    words = f"{between}|{within}"
    found = {path.name: re.findall(words, path.read_text(encoding="utf-8")) for path in components}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_one_is_no_plural(look: Any) -> None:
    page = look(recorded(1, None, Observe(map=1, edges=1, top=1)), "view=head&row=0&column=0")
    page.get_by_text("Strongest connection, exact").wait_for()
    said = page.locator("body").inner_text()
    assert "1 query × 1 key;" in said
    assert "over up to 1 query per head" in said
    assert "Strongest key of query 0" in said


@pytest.mark.parametrize("lengths", [(7, 7), (7, 6)])
def test_the_strongest_weights_of_several_windows_have_words(lengths: tuple[int, int], look: Any) -> None:
    first, second = (recorded(n, None, Observe(map=3, edges=4)) for n in lengths)
    texts = tuple(tuple(f"{letter}{n}" for n in range(length)) for letter, length in zip("ab", lengths, strict=True))
    stats = first.stats.merge(second.stats)
    page = look(Recording(stats, replace(first.about, forwards=2, ran=2, run_texts=texts)), "view=head&layer=1&head=2")
    edges = [edge for edge in stats[1].edges.of(2) if (edge.i, edge.j) != (0, 0)]  # those are 1 in every window
    page.get_by_text(re.compile(f"Strongest connections?:? ?{len(edges) if len(edges) > 1 else ''}.*exact")).click()
    lines = page.locator(".largest button bdi").all_inner_texts()
    assert lines == [
        f"query {edge.i} “{texts[edge.run][edge.i]}” → key {edge.j} “{texts[edge.run][edge.j]}” (window {edge.run})"
        for edge in edges
    ]


def test_only_figures_that_are_there_can_be_chosen(look: Any, short: Recording) -> None:
    page = look(short)
    offered = page.get_by_label("Sort by").locator("option").all_inner_texts()
    assert "entropy" in offered
    assert "next" in short.stats.names, "all heads are causal"
    assert "next" not in offered


def test_every_figure_has_a_meaning_that_needs_no_pointer(look: Any) -> None:
    page = look(recorded(7, None, Observe(windows=(2,))), "view=table")
    headings = page.locator("thead button").all_inner_texts()[1:]
    assert {"lse", "max logit", "chance", "window 2", "streaming 2"} <= {*headings}
    page.get_by_text("What each statistic means").press("Enter")
    said = dict(zip(*(page.locator(f".meanings {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert [*said] == headings
    assert said["window 2"] == "Weight on the keys within 2 of the query."


def test_the_frame_is_explained(look: Any, short: Recording) -> None:
    page = look(short, "layer=1&head=1")
    thumbs(page)
    assert page.locator("[aria-current]").get_attribute("class") == "thumb opened"
    help = open_menu(page, "Help").locator(".help .panel")
    assert help.is_visible()
    assert "The framed head is the one that the tab One head shows." in help.inner_text()


# ---------------------------------------------------------------- files


@pytest.mark.long
def test_the_picture_of_all_heads_tells_how_far_it_is(look: Any, short: Recording) -> None:
    page = look(short)
    thumbs(page)
    page.evaluate(
        """() => {
          window.told = [];
          const shown = document.querySelector("#heads-title + .hint");
          const tell = () => told.push(shown.querySelector("[role=status]").textContent);
          new MutationObserver(tell).observe(shown, { subtree: true, childList: true, characterData: true });
        }"""
    )
    save_figure(page, "all heads", "PNG 2×")
    told = page.evaluate("told")
    assert any(re.fullmatch(r"Drawing head \d of 6", text) for text in told), told


def test_figures_have_a_ground_and_labels_that_fit(look: Any, long: Recording) -> None:
    page = look(long, "view=head&layer=0&head=2")
    page.locator("canvas.band[data-drawn]").wait_for()
    with Image.open(save_figure(page, "the nearby tokens", "PNG 2×")) as image:
        assert image.convert("RGBA").getpixel((1, 1)) == (255, 255, 255, 255)
    part = recorded(7, None, Observe(map=7)).stats.parts["layers.0.attention"]
    names = ["encoder.layers.0.self_attention_of_a_long_name", "decoder.layers.1.cross_attention_of_a_long_name"]
    parts = dict.fromkeys(names, part)
    page = look(Recording(HeadStats(parts), About("m", {}, {}, dict.fromkeys(parts, "self"), None, 1, 1)))
    thumbs(page)
    labels = [text for text in texts_of(save_figure(page, "all heads")) if "coder" in text]
    wide = """(texts) => {
      const ruler = document.createElement("canvas").getContext("2d");
      ruler.font = "10px sans-serif";
      return texts.map((text) => ruler.measureText(text).width);
    }"""
    assert len(labels) == 2
    assert max(page.evaluate(wide, labels)) <= 91
