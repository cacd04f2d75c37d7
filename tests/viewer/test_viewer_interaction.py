"""The viewer's page in use: what is typed and pressed is heard, and nothing is lost on the way to another head."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from headscope import Observe, masks, observe
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import (
    LONG,
    BrowserContext,
    Page,
    Watched,
    chromium,
    in_a_browser,
    long,
    look,
    near,
    numbers,
    open_menu,
    place,
    recorded,
    serving,
    short,
    thumbs,
    weight,
    zoom_of,
)
from support.html_pages import HOSTILE

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def unlike() -> Recording:
    """Layers with different bins and heads: 3 heads and 12 bins, then 2 heads and 5 bins."""
    parts = {}
    for name, length, heads, bins in (("0", LONG, 3, 12), ("1", 20, 2, 5)):
        q, k = torch.randn(2, 1, heads, length, 8, generator=torch.Generator().manual_seed(1))
        what = Observe(map=bins, keep_rows=True, top=3, keep_qk=True)
        parts |= observe(q, k, mask=masks.causal(), what=what).named(name).parts
    kinds: Any = dict.fromkeys(parts, "self")
    return Recording(HeadStats(parts), About("m", {}, {}, kinds, None, 1, 1))


def focused(page: Page) -> str:
    """What has the focus, by its text or the name of its element."""
    return page.evaluate("(e => e.id || e.innerText || e.tagName)(document.activeElement)")


def until(page: Page, true: str) -> None:
    """Waits until this is true; the page itself would not evaluate a text."""
    for _ in range(400):
        if page.evaluate(true):
            return
        page.wait_for_timeout(25)
    pytest.fail(f"never true: {true}")


def heading(page: Page, text: str) -> None:
    page.get_by_role("heading", name=text, exact=True).wait_for()


# ---------------------------------------------------------------- numbers


def test_numbers_are_typed_digit_by_digit(look: Any, long: Recording) -> None:
    page = look(long, "by=entropy&least=7")
    limit = open_menu(page).get_by_label("limit")
    assert limit.input_value() == "7"
    for text in ("0.05", "-1.5"):
        limit.press("ControlOrMeta+a")
        page.keyboard.type(text)
        page.wait_for_url(re.compile(re.escape(f"least={text}")))
        assert limit.input_value() == text
    limit.press("ControlOrMeta+a")
    page.keyboard.press("Delete")
    page.wait_for_url(lambda url: "least=" not in url)
    assert len(thumbs(page)) == 6, "no limit is in force"
    page = look(long, "view=head&row=10&column=2")
    query = page.get_by_label("Query", exact=True)  # of 80 to 87
    query.press("ControlOrMeta+a")
    page.keyboard.type("85")
    page.get_by_role("heading", name="Strongest keys of query").get_by_text("w85").wait_for()
    assert query.input_value() == "85"
    query.press("ControlOrMeta+a")
    page.keyboard.type("7")
    assert query.input_value() == "7", "it may become 79"
    query.press("Enter")
    until(page, "document.querySelector('[aria-label=Query]').value === '80'")


def test_an_address_says_no_more_than_it_does(look: Any, short: Recording) -> None:
    page = look(short, "view=head&row=&column=&zoom=131072,0.5,0.5")
    page.get_by_text("Click a cell or a token to select it.").wait_for()
    page.get_by_role("button", name="Zoom out").click()
    page.wait_for_url(lambda url: zoom_of(url)[0] == 4)  # half of 8, the closest
    page.evaluate("location.hash = '#view=head&zoom=5,-5,9'")
    until(page, "document.querySelectorAll('.strip')[0].children.length === 3")
    shown = [page.locator(".strip").nth(n).locator("button").first.get_attribute("title") for n in (0, 1)]
    assert [int(title.partition(":")[0]) for title in shown] == [0, len(HOSTILE) - 3], (
        "a fifth of the tokens, at the edges"
    )


def test_back_is_heard_right_after_an_address_is_written(look: Any, short: Recording) -> None:
    page = look(short, "view=table")
    page.get_by_role("button", name="CSV").wait_for()
    page.wait_for_timeout(200)
    page.evaluate(
        """async () => {
          const moved = () => new Promise((done) => addEventListener("hashchange", done, { once: true }));
          for (const go of [() => (location.hash = "#view=compare"), () => history.back()]) await (go(), moved());
        }"""
    )
    page.get_by_role("button", name="CSV").wait_for()
    assert "view=table" in page.url


# ---------------------------------------------------------------- zoom


SLOW = "window.requestAnimationFrame = () => 0"  # no frame comes


def test_a_drag_that_pauses_is_in_the_address(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=1&zoom=3,0.5,0.5")
    page.locator(".map canvas").wait_for()
    page.mouse.move(*place(page, 0.5, 0.5))
    page.mouse.down()
    page.mouse.move(*place(page, 0.6, 0.6))
    page.wait_for_url(lambda url: zoom_of(url)[1] != 0.5, timeout=5000)
    assert zoom_of(page.url)[0] == 3, "a drag does not zoom"
    page.mouse.up()


def test_the_last_zoom_that_was_asked_for_stays(look: Any, short: Recording, unlike: Recording) -> None:
    page = look(short, "view=head&layer=1&head=1")
    canvas = page.locator(".map canvas")
    canvas.wait_for()
    page.evaluate(SLOW)
    for _ in range(2):
        canvas.press("+")
    page.wait_for_url(lambda url: zoom_of(url)[0] == 4)
    canvas.press("0")
    page.wait_for_url(lambda url: "zoom=" not in url)
    page.mouse.move(*place(page, 0.5, 0.5))
    page.mouse.wheel(0, -240)
    until(page, "document.querySelector('.map canvas').style.touchAction === 'none'")
    canvas.press("0")  # before the page has heard of the wheel
    page.wait_for_timeout(400)
    assert "zoom=" not in page.url
    page = look(unlike, "view=head&layer=1&head=1&zoom=3,0.5,0.5")
    page.locator(".map canvas").wait_for()
    page.mouse.move(*place(page, 0.5, 0.5))
    page.mouse.down()
    page.mouse.move(*place(page, 0.6, 0.6))
    page.keyboard.press("ArrowUp")
    heading(page, "Layer 0, head 1")
    page.mouse.move(*place(page, 0.7, 0.7))
    page.wait_for_url(re.compile("layer=0"))
    page.wait_for_timeout(300)
    page.mouse.up()
    assert "zoom=" not in page.url, "a drag is of the map that it began on"


# ---------------------------------------------------------------- steps


def test_a_step_to_another_head_leaves_all_in_its_place(look: Any, long: Recording) -> None:
    page = look(long, "view=head&layer=0&head=0&row=10&column=2")
    page.locator(".map canvas").focus()
    page.get_by_text("Strongest connections").click()
    page.locator(".map canvas").focus()
    band = page.locator("canvas.band[data-drawn]")
    band.scroll_into_view_if_needed()
    box, scrolled = band.bounding_box(), page.evaluate("scrollY")
    assert box is not None
    page.mouse.move(box["x"] + 58 + 40.5 * (box["width"] - 58) / LONG, box["y"] + 3.5 * 11)
    readout = page.locator(".strips .readout")
    for head, key in ((0, "ArrowRight"), (1, "ArrowRight"), (2, "ArrowLeft"), (1, "")):  # the last one is still decoded
        heading(page, f"Layer 0, head {head}")
        band.wait_for()
        until(page, "document.querySelector('.strips .readout').innerText.startsWith('query 40')")
        assert numbers(readout.inner_text())[-1] == pytest.approx(weight(long, 0, head)[40, 37], abs=5e-3)
        assert page.locator(".map canvas").evaluate("(map) => map === document.activeElement")
        assert page.locator("details", has=page.locator(".largest")).get_attribute("open") is not None
        assert page.evaluate("scrollY") == scrolled
        if key:
            page.keyboard.press(key)


def test_a_token_in_focus_is_still_pointed_at_in_another_head(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=0&head=0&row=9&column=3")
    titles = page.locator(".pinned h4")
    titles.first.wait_for()
    pinned = titles.all_inner_texts()
    page.locator(".strip").first.locator("button").nth(5).focus()
    pointed = titles.all_inner_texts()
    assert pointed != pinned
    page.keyboard.press("ArrowDown")
    heading(page, "Layer 1, head 0")
    assert titles.all_inner_texts()[0] == pointed[0]
    page.locator(".map canvas").focus()
    assert titles.all_inner_texts() == pinned


def test_arrow_and_button_lead_to_the_same_head(look: Any, unlike: Recording) -> None:
    for press in (lambda page: page.keyboard.press("ArrowDown"), lambda page: page.get_by_label("next layer").click()):
        page = look(unlike, "view=head&layer=0&head=2&row=11&column=3")
        heading(page, "Layer 0, head 2")
        press(page)
        heading(page, "Layer 1, head 1")
    page = look(unlike, "view=compare&layer=1&head=1&other=0&otherhead=2")
    page.locator(".map canvas").nth(1).wait_for()
    box = page.locator(".map canvas").nth(1).bounding_box()
    page.mouse.click(box["x"] + 0.4 * box["width"], box["y"] + box["height"] - 12)
    page.wait_for_timeout(200)
    assert "row=" not in page.url, "a bin of the other is none of the one"


def test_the_focus_is_never_lost(look: Any, short: Recording) -> None:
    page = look(short, "layer=1&head=1&row=9&column=3")
    thumbs(page)
    page.locator(".thumb").nth(4).press("Enter")
    assert focused(page) == "head-title"
    page.get_by_role("button", name="Clear the selection").press("Enter")
    assert focused(page) == "CANVAS"
    page.locator(".map canvas").press("+")
    page.get_by_role("button", name="Show all").press("Enter")
    until(page, "document.querySelectorAll('.tools [aria-disabled=true]').length === 2")
    assert focused(page) == "Show all"
    page.get_by_role("button", name="next head").press("Enter")
    heading(page, "Layer 1, head 2")
    assert focused(page) == "→"
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Statistics").click()
    page.get_by_role("button", name="layer 0, head 2").press("Enter")
    assert focused(page) == "head-title"


def test_strips_are_read_with_keys(look: Any, long: Recording) -> None:
    page = look(long, "view=head&layer=0&head=2")
    band = page.locator("canvas.band[data-drawn]")
    band.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        band.press(key)
    readout = page.locator(".strips .readout").inner_text()
    assert readout.startswith("query 1 “␣w1” → key 0 “␣w0”: ")
    assert numbers(readout)[-1] == pytest.approx(weight(long, 0, 2)[1, 0], abs=5e-3)
    heading(page, "Layer 0, head 2")


def test_an_address_says_which_queries_a_strip_shows(look: Any) -> None:
    found = recorded(300, None, Observe(map=10, keep_qk=True))
    page = look(found, "view=head&layer=0&head=1&row=5&column=2")
    band = page.locator("canvas.band[data-drawn]")
    assert "queries 100 to 199." in band.get_attribute("aria-label"), "the pinned row is in the middle"
    first = page.get_by_label("Queries from")
    first.fill("7")
    page.get_by_label("Queries shown").select_option("50")
    page.wait_for_url(re.compile("from=7&many=50"))
    again = look(found, page.url.partition("#")[2])
    band = again.locator("canvas.band[data-drawn]")
    assert "queries 7 to 56." in band.get_attribute("aria-label")
    again.locator(".map canvas").press("Shift+ArrowDown")
    again.wait_for_url(re.compile("row=6"))
    assert "queries 155 to 204." in band.get_attribute("aria-label")
    again.get_by_role("button", name="Clear the selection").click()
    again.wait_for_url(lambda url: "row=" not in url)
    assert "queries 155 to 204." in band.get_attribute("aria-label"), "it stays"


# ---------------------------------------------------------------- the screen


def double_pixels(page: Page) -> Any:
    """Put the page on a screen of twice as many pixels. At times Chromium sends no event of it: then do it again."""
    page.evaluate("window.ratio = matchMedia('(resolution: 1dppx)'); ratio.onchange = () => (window.doubled = true); 0")
    session = page.context.new_cdp_session(page)
    screen = {"width": 1280, "height": 900, "deviceScaleFactor": 2, "mobile": False}
    for _ in range(20):
        session.send("Emulation.setDeviceMetricsOverride", screen)
        for _ in range(12):
            page.wait_for_timeout(25)
            if page.evaluate("window.doubled === true"):
                return session
        session.send("Emulation.clearDeviceMetricsOverride")
        page.wait_for_timeout(100)
    pytest.fail("Chromium sent no event of another screen")


def test_what_is_drawn_follows_the_screen(look: Any, short: Recording) -> None:
    sizes = "[...document.querySelectorAll('canvas')].map((e) => e.width / e.clientWidth)"
    for view in ("head", "heads"):
        page = look(short, f"view={view}", width=700)
        page.locator("canvas").first.wait_for()
        until(page, f"{sizes}.every((size) => size === 1)")
        page.set_viewport_size({"width": 1280, "height": 900})
        until(page, f"{sizes}.every((size) => size === 1)")
        session = double_pixels(page)  # the browser drops the override with the session
        until(page, f"{sizes}.every((size) => size === 2)")
        session.detach()
    page = look(short, "view=head")
    drawn = page.locator(".map canvas")
    light = np.asarray(Image.open(io.BytesIO(drawn.screenshot())).convert("L"))[0, 0]
    page.emulate_media(color_scheme="dark")
    for _ in range(100):
        dark = np.asarray(Image.open(io.BytesIO(drawn.screenshot())).convert("L"))[0, 0]
        if dark < 60:
            break
        page.wait_for_timeout(25)
    assert dark < 60 < 200 < light


def test_a_figure_of_all_heads_has_one_theme(look: Any, short: Recording) -> None:
    page = look(short, scheme="light")
    thumbs(page)
    page.get_by_role("button", name="Figure of all heads").click()
    with page.expect_download() as download:
        page.evaluate(
            """() => {
              [...document.querySelectorAll(".choices button")].find((each) => each.textContent === "SVG").click();
              document.documentElement.dataset.theme = "dark";
            }"""
        )
    svg = ElementTree.fromstring(Path(download.value.path()).read_text(encoding="utf-8"))
    rects = [element for element in svg.iter() if element.tag.endswith("rect")]
    assert rects[0].get("fill") == "#ffffff"
    maps = [element.get("fill") for element in rects if element.get("width") == element.get("height") == "96"]
    assert maps == ["#e9e6ec"] * 6, "one for every head"


def test_buttons_and_pictures_are_told_apart_by_name(look: Any, short: Recording) -> None:
    page = look(short, "view=compare&layer=0&head=1&other=1&otherhead=2")
    page.locator(".map canvas").nth(2).wait_for()
    names = [button.get_attribute("aria-label") for button in page.locator(".tools .figure-menu > button").all()]
    one, other = "layer 0, head 1", "layer 1, head 2"
    assert names == [f"Figure of the map of {name}" for name in (one, other, f"{other} − {one}")]
    page = look(recorded(7, None, Observe()))
    for thumb in page.locator(".thumb").all():
        assert thumb.get_attribute("aria-label").endswith(thumb.locator(".tile").inner_text())
    page.get_by_role("tab", name="Statistics").click()
    page.emulate_media(media="print")
    assert page.locator(".scroll").evaluate("(table) => getComputedStyle(table).maxHeight") == "none"


def test_a_server_that_stopped_is_told_of(chromium: BrowserContext, long: Recording, tmp_path: Path) -> None:
    with serving(long, tmp_path / "long.safetensors") as server:
        watched = Watched(chromium, f"{server.url}#view=head&layer=1&head=2")
        page = watched.page
        page.locator("canvas.band[data-drawn]").wait_for()
    page.locator(".map canvas").press("+")
    page.locator(".map").get_by_text("The server has stopped.").wait_for()
    page.locator("body").press("ArrowLeft")
    page.locator(".strips").get_by_text("The server has stopped.").wait_for()
    assert {said.partition(":")[0] for said in watched.said} == {"Failed to load resource"}, "the browser alone said so"
    watched.close()


# ---------------------------------------------------------------- back


def test_back_leads_to_the_view_before_as_it_was_left(look: Any, short: Recording) -> None:
    page = look(short, "scale=log")
    thumbs(page)
    began = page.evaluate("history.length")
    page.locator(".thumb").nth(4).click()
    heading(page, "Layer 1, head 1")
    page.locator(".map canvas").press("+")
    page.wait_for_url(re.compile("zoom="))
    page.get_by_role("button", name="next head").click()
    heading(page, "Layer 1, head 2")
    page.get_by_role("tab", name="Statistics").click()
    assert page.evaluate("history.length") == began + 2, "zoom and steps are no new entry"
    page.go_back()
    heading(page, "Layer 1, head 2")
    assert "zoom=" in page.url
    page.go_back()
    page.locator(".thumb.opened").wait_for()
    assert "layer=" not in page.url
    assert page.get_by_label("Scale").input_value() == "log"
    page.go_forward()
    heading(page, "Layer 1, head 2")


# What is due is run as soon as the page has heard of another entry, before `hashchange`: the timers of a slow machine.
TIMERS_AT_ONCE = """() => {
    const due = new Map(), wait = window.setTimeout, stop = window.clearTimeout;
    let id = 0;
    window.setTimeout = (run, after, ...rest) => {
        if (after !== 150) return wait(run, after, ...rest);
        due.set(--id, run);
        return id;
    };
    window.clearTimeout = (id) => { due.delete(id) || stop(id); };
    addEventListener("popstate", () => { for (const run of due.values()) run(); });
}"""


def test_back_right_after_a_change_reaches_the_view_before(look: Any, short: Recording) -> None:
    page = look(short, "scale=log")
    thumbs(page)
    page.locator(".thumb").nth(4).click()
    heading(page, "Layer 1, head 1")
    page.wait_for_timeout(300)  # the address is written
    page.evaluate(TIMERS_AT_ONCE)
    page.get_by_role("button", name="next head").click()
    heading(page, "Layer 1, head 2")
    page.evaluate("history.back()")
    page.locator(".thumb.opened").wait_for(timeout=10_000)
    assert "layer=" not in page.url
    open_menu(page).get_by_label("Scale").select_option("linear")
    page.evaluate("history.forward()")
    heading(page, "Layer 1, head 1")
    assert "view=head" in page.url


def test_escape_leads_back_to_all_heads(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=1&row=9&column=3")
    canvas = page.locator(".map canvas")
    canvas.press("Escape")
    page.get_by_text("Click a cell or a token to select it.").wait_for()
    canvas.press("Escape")
    thumbs(page)
    opened = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert opened.startswith("layer 1, head 1"), "on the head that was open"
    page.keyboard.press("Enter")
    heading(page, "Layer 1, head 1")
    page.keyboard.press("Escape")
    thumbs(page)
    page.get_by_role("tab", selected=True).press("End")
    assert focused(page) == "tab-table"
    page.keyboard.press("Home")
    assert focused(page) == "tab-heads"
