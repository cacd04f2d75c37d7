"""The viewer's page around the picture: the bar, its menus, the axes of all heads, colours, and a phone."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import expect

from headscope import Observe, masks, observe
from headscope.report.colours import BLUES, colour_at
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import (
    Page,
    chromium,
    in_a_browser,
    long,
    look,
    numbers,
    open_menu,
    recorded,
    short,
    thumbs,
    wait_until_drawn,
)

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def heads() -> Any:
    """A recording of so many layers and heads."""

    def of(layers: int, heads: int, length: int = 7) -> Recording:
        q = torch.randn(1, heads, length, 8, generator=torch.Generator().manual_seed(5))
        what = Observe(map=length, keep_rows=True, tokens=torch.arange(length) % 3)
        part = observe(q, q, mask=masks.causal(), what=what).parts["0"]
        parts = {f"layers.{n}.attention": part for n in range(layers)}
        kinds: Any = dict.fromkeys(parts, "self")
        return Recording(HeadStats(parts), About("m", {}, {}, kinds, tuple("abcabca")[:length], 1, 1))

    return of


def box(page: Page, selector: str) -> dict[str, float]:
    """The place of an element in the window."""
    return page.evaluate("(s) => document.querySelector(s).getBoundingClientRect().toJSON()", selector)


def pixels(page: Page, selector: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(page.locator(selector).first.screenshot())).convert("RGB"))


# ---------------------------------------------------------------- the bar


def test_one_bar_stands_above_the_picture(look: Any, short: Recording, heads: Any) -> None:
    page = look(short)
    thumbs(page)
    assert page.locator("header").count() == 1
    assert box(page, "header")["height"] == 44
    assert box(page, ".thumb canvas")["top"] <= 220, "under the cards"
    assert "Numbering starts at 0" not in page.locator("main").inner_text(), "the lead is in the help"
    assert "Numbering starts at 0" in open_menu(page, "Help").locator(".panel:visible").inner_text()
    page = look(heads(12, 3))
    thumbs(page)
    page.mouse.wheel(0, 600)
    page.wait_for_function("() => scrollY > 300")
    assert box(page, "header")["top"] == 0


@pytest.mark.parametrize(
    "size", [(1280, 900), *(pytest.param(each, marks=pytest.mark.long) for each in ((1100, 640), (1920, 1080)))]
)
def test_the_whole_map_fits_the_window(look: Any, short: Recording, long: Recording, size: tuple[int, int]) -> None:
    for found in (short, long):
        page = look(found, "view=head&layer=1&head=2")
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.locator(".map canvas").wait_for()
        page.wait_for_function("() => document.querySelector('.tools').getBoundingClientRect().bottom <= innerHeight")
        used = "() => document.querySelector('.tools').getBoundingClientRect().bottom > 0.85 * innerHeight"
        wide = (
            "() => document.querySelector('.map canvas').clientWidth > document.querySelector('.map').clientWidth - 9"
        )
        assert page.evaluate(used) or page.evaluate(wide), "it is as large as fits"
        assert page.locator("header").get_by_role("heading", name="Layer 1, head 2").is_visible()


def test_the_panel_beside_the_map_scrolls_by_itself(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    page.set_viewport_size({"width": 1280, "height": 600})
    page.locator(".map canvas").wait_for()
    panel = page.locator(".beside")
    assert panel.evaluate("(e) => e.scrollHeight > e.clientHeight + 100")
    panel.evaluate("(e) => e.scrollTo(0, 200)")
    assert panel.evaluate("(e) => e.scrollTop") == 200
    assert page.evaluate("scrollY") == 0


def test_a_menu_opens_and_closes(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=1")
    page.locator(".map canvas").wait_for()
    panel = page.locator("#menu-view")
    assert not panel.is_visible()
    open_menu(page)
    assert panel.is_visible()
    inside = box(page, "#menu-view")
    assert inside["right"] <= 1280
    assert page.get_by_label("Scale").is_visible()
    page.get_by_label("Scale").press("Escape")
    assert not panel.is_visible()
    assert page.evaluate("document.activeElement.innerText").startswith("View")
    assert page.locator(".map canvas").is_visible(), "Escape closed the menu alone"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#menu-view') !== null")
    page.mouse.click(30, 400)
    panel.wait_for(state="hidden")
    open_menu(page, "Help")
    open_menu(page)
    assert page.locator(".panel:visible").count() == 1


def test_another_view_begins_at_its_top(look: Any, heads: Any) -> None:
    page = look(heads(12, 3))
    thumbs(page)
    page.locator(".thumb").last.scroll_into_view_if_needed()
    assert page.evaluate("scrollY") > 300
    page.locator(".thumb").last.click()
    page.locator(".map canvas").wait_for()
    assert page.evaluate("scrollY") == 0
    page.locator("body").press("Escape")
    page.locator(".thumb.opened").wait_for()
    assert box(page, ".thumb.opened")["bottom"] <= 900, "the head that was open is in sight"


def test_filters_in_a_closed_menu_are_stated(look: Any, short: Recording) -> None:
    page = look(short, "by=entropy&least=0")
    assert "match the filters" not in page.locator("#heads-title + .hint").inner_text(), "they leave all heads"
    page = look(short, "by=entropy&least=1000")
    assert "0 of 6 heads match the filters." in page.locator("#heads-title + .hint").inner_text()


# ---------------------------------------------------------------- axes


def test_numbers_of_layers_and_heads_mark_rows_and_columns(look: Any, heads: Any) -> None:
    page = look(heads(5, 7))
    thumbs(page)
    assert page.locator(".top .axis").all_inner_texts() == [*"0123456"]
    assert page.locator(".layer h3").all_text_contents() == [f"layer {n}" for n in range(5)]
    lefts = page.evaluate("[...document.querySelectorAll('.thumb')].map((e) => e.getBoundingClientRect().left)")
    assert lefts[:7] * 5 == lefts, "heads stand in columns"
    assert sorted(lefts[:7]) == lefts[:7]
    lit = "[...document.querySelectorAll('[data-lit]')].map((e) => `${e.tagName} ${e.dataset.layer} ${e.dataset.head}`)"
    page.locator(".top .axis").nth(3).hover()
    assert page.evaluate(lit) == ["SPAN undefined 3", *(f"BUTTON {layer} 3" for layer in range(5))]
    page.locator(".layer h3").nth(2).hover()
    assert page.evaluate(lit) == ["H3 2 undefined", *(f"BUTTON 2 {head}" for head in range(7))]
    page.locator(".thumb").nth(9).hover()
    assert page.evaluate(lit) == ["SPAN undefined 2", "H3 1 undefined"]
    page.mouse.move(640, 20)
    assert page.evaluate(lit) == []
    page.locator(".thumb[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    assert len(page.evaluate(lit)) == 2, "what has the focus is marked, too"


def test_filtered_heads_stay_in_their_columns(look: Any, heads: Any) -> None:
    found = heads(2, 7)
    entropy = [found.stats[0, head, "entropy"].mean for head in range(7)]
    least = sorted(entropy)[4]
    page = look(found, f"by=entropy&least={least - 1e-6}")
    assert len(thumbs(page)) == 6
    columns = page.evaluate("[...document.querySelectorAll('.thumb')].map((e) => e.getBoundingClientRect().left)")
    axis = page.evaluate("[...document.querySelectorAll('.top .axis')].map((e) => e.getBoundingClientRect().left)")
    expected = [head for head in range(7) if entropy[head] >= least - 1e-6]
    assert columns == [axis[head] for head in expected] * 2


@pytest.mark.parametrize("many", [3, 64])
def test_the_axes_stay_in_sight(look: Any, heads: Any, many: int) -> None:
    page = look(heads(14, many))
    page.locator(".thumb [data-drawn]").first.wait_for()
    assert page.locator(".thumb img").count() == (14 * 64 if many == 64 else 0), "thousands of canvases are slow"
    if many == 64:
        assert page.evaluate("document.documentElement.scrollWidth") == 1280
        page.evaluate("document.querySelector('.axes').scrollTo(500, 300)")
    else:
        page.evaluate("scrollTo(0, 600)")
    page.wait_for_timeout(100)
    covers = """(selector) => [...document.querySelectorAll(selector)].some((e) => {
      const { left, top, width, height } = e.getBoundingClientRect();
      return document.elementFromPoint(left + width / 2, top + height / 2) === e;
    })"""
    assert page.evaluate(covers, ".top .axis"), "numbers of heads"
    assert page.evaluate(covers, ".layer h3"), "numbers of layers"
    moved = box(page, ".thumb")
    assert moved["left" if many == 64 else "top"] < 0


# ---------------------------------------------------------------- colours


def test_no_weight_has_the_colour_of_the_page(look: Any, heads: Any) -> None:
    first = torch.zeros(1, 1, 7, 8)
    first[..., 0] = 30
    k = torch.zeros(1, 1, 7, 8)
    k[..., 0, 0] = 30  # every query attends to the first key alone
    part = observe(first, k, what=Observe(map=7)).parts["0"]
    found = Recording(HeadStats({"0": part}), About("m", {}, {}, {"0": "self"}, None, 1, 1))
    corners = {}
    for scheme in ("light", "dark"):
        page = look(found, scheme=scheme)
        page.locator(".thumb canvas[data-drawn]").wait_for()
        drawn = pixels(page, ".thumb canvas")
        corners[scheme] = drawn[70, -9].tolist(), drawn[70, 9].tolist()
    ends = [[*colour_at(0.0)], [*colour_at(1.0)]]
    assert corners == {"light": tuple(ends), "dark": tuple(ends[::-1])}


def test_a_theme_and_a_palette_redraw_the_maps(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=2")
    page.locator(".map canvas").wait_for()
    light = pixels(page, ".map canvas").mean()
    open_menu(page).get_by_label("Theme").select_option("dark")
    page.mouse.click(30, 890)
    for _ in range(100):  # it is drawn again, soon
        if pixels(page, ".map canvas").mean() < light - 80:
            break
        page.wait_for_timeout(25)
    assert pixels(page, ".map canvas").mean() < light - 80
    assert "colours=" not in page.url, "the palette is the same"
    open_menu(page).get_by_label("Colours").select_option("viridis")
    page.wait_for_url(re.compile("colours=viridis"))
    again = look(short, page.url.partition("#")[2])
    assert again.get_by_label("Colours").input_value() == "viridis"
    assert look(short, "colours=blues-dark").get_by_label("Colours").input_value() == "blues", "not a choice"


def test_the_page_has_the_palette_of_plots() -> None:
    script = Path(__file__).parents[2] / "src" / "headscope" / "report" / "viewer.js"
    assert BLUES in script.read_text(encoding="utf-8")


# ---------------------------------------------------------------- a phone


def test_a_phone_has_four_thumbnails_a_row_with_names(look: Any, heads: Any) -> None:
    page = look(heads(3, 12), width=360)
    thumbs(page)
    tops = page.evaluate("[...document.querySelectorAll('.thumb')].map((e) => e.getBoundingClientRect().top)")
    assert all(len({*tops[n : n + 4]}) == 1 for n in range(0, 36, 4))
    assert len({*tops}) == 9
    names = page.locator(".thumb small")
    assert names.count() == 36
    assert names.first.is_visible()
    assert names.first.evaluate("(e) => e.scrollWidth <= e.clientWidth"), "the name is whole"
    assert "layer 1" in page.locator(".layer h3").nth(1).inner_text()


SMALL = """() => [...document.querySelectorAll("button, select, summary, input")]
  .filter((e) => e.checkVisibility() && !e.closest("[hidden]") && !e.matches("p .term")) // a word of a sentence
  .map((e) => [e.closest("label") ?? e, e])
  .filter(([area]) => area.getBoundingClientRect().height < 40)
  .map(([, e]) => e.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("view", ["heads", "head", "compare", "table"])
def test_targets_on_a_phone_are_large(look: Any, heads: Any, view: str) -> None:
    page = look(heads(2, 3), f"view={view}&row=3&column=2", width=360)
    page.locator("section").first.wait_for()
    wait_until_drawn(page)
    assert page.evaluate(SMALL) == []
    open_menu(page)
    assert page.evaluate(SMALL) == []
    panel = box(page, "#menu-view")
    assert 0 <= panel["left"] < panel["right"] <= 360
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_phone_steps_to_the_next_head_at_the_bottom(look: Any, heads: Any) -> None:
    page = look(heads(2, 3), "view=head&layer=0&head=1", width=360)
    page.locator(".map canvas").wait_for()
    bar = box(page, ".inview")
    assert (bar["left"], bar["right"], bar["bottom"]) == (0, 360, 900)
    page.get_by_role("button", name="next head").click()
    title = page.get_by_role("heading", name="Layer 0, head 2")
    title.wait_for()
    assert title.evaluate("(e) => e.scrollWidth <= e.clientWidth"), "the name is whole"
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    last = page.locator("footer").bounding_box()
    assert last is not None
    assert last["y"] + last["height"] <= bar["top"], "it covers nothing at the end of the page"


def test_the_link_to_what_is_shown_is_copied(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_menu(page, "View").get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.partition("#")[0] == page.url.partition("#")[0]
    again = look(short, link.partition("#")[2])
    expect(again.locator("#head-title")).to_have_text("Layer 1, head 2")
    again.locator(".map canvas").first.wait_for()
    assert "row=9&column=5" in link
