"""Labels, lists and keys of one head, and the pages of several windows."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from headscope import Observe, masks, observe
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import (
    LONG,
    chromium,
    in_a_browser,
    long,
    look,
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


def windows(lengths: tuple[int, int] = (23, 19)) -> Recording:
    """A text in two windows; in head 1 each token attends to one key, which changes from window to window."""
    parts: list[HeadStats] = []
    for run, length in enumerate(lengths):
        k = torch.eye(length)[None, None].repeat(1, 2, 1, 1)
        q = torch.zeros(1, 2, length, length)
        for n in range(length):
            q[0, 1, n, (n * (5 + 2 * run) + 1) % (n + 1)] = 400
        parts.append(observe(q, k, mask=masks.causal(), what=Observe(map=7, edges=1)).named("0"))
    texts = tuple(tuple(f"␣{letter}{n}" for n in range(length)) for letter, length in zip("ab", lengths, strict=True))
    return Recording(parts[0].merge(parts[1]), About("m", {}, {}, {"0": "self"}, None, 2, 2, run_texts=texts))


# ---------------------------------------------------------------- one head


@pytest.mark.parametrize("axis", ["query", "key"])
def test_a_click_on_the_label_of_a_token_selects_it(axis: str, look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=0&head=1")
    page.locator(".map canvas").wait_for()
    length, p = len(HOSTILE), weight(short, 0, 1)
    x, y = place(page, 6.5 / length, 6.5 / length)
    corner = place(page, 0, 0)
    page.mouse.click(*((corner[0] - 12, y) if axis == "query" else (x, corner[1] - 12)))
    row, column = (6, int(np.nanargmax(p[6]))) if axis == "query" else (int(np.nanargmax(p[:, 6])), 6)
    page.wait_for_url(f"**row={row}&column={column}*")


def test_the_number_of_a_layer_or_head_opens_it(look: Any, short: Recording) -> None:
    page = look(short, "layer=1&head=2")
    thumbs(page)
    page.locator("h3.axis").first.click()
    expect(page.locator("#head-title")).to_have_text("Layer 0, head 2")
    page.get_by_role("tab", name="All heads").click()
    page.locator(".top .axis").nth(1).click()
    expect(page.locator("#head-title")).to_have_text("Layer 0, head 1")


def test_the_ten_largest_keys_are_listed_with_the_tokens_around_them(look: Any, short: Recording) -> None:
    row = int((np.nan_to_num(weight(short, 1, 0)) >= 0.002).sum(1).argmax())
    page = look(short, f"view=head&layer=1&head=0&row={row}&column=0")
    p = weight(short, 1, 0)[row, : row + 1]
    lines = page.locator(".beside ol.context li")
    lines.first.wait_for()
    order = np.argsort(-p)[:10]
    assert [int(text.split()[0]) for text in lines.all_inner_texts()] == [n for n in order.tolist() if p[n] >= 0.001]
    best = int(order[0])
    share = float(lines.first.locator("span").last.inner_text().split()[0]) / 100
    assert share == pytest.approx(p[best], abs=6e-3)
    lines.nth(1).get_by_role("button").click()
    page.wait_for_url(f"**row={row}&column={order[1]}*")


def test_plus_leads_to_the_selection(look: Any, long: Recording) -> None:
    page = look(long, "view=head&row=9&column=3")
    page.locator(".map canvas").press("+")
    page.wait_for_url("**zoom=*")
    assert zoom_of(page.url) == pytest.approx([2, 3.5 / 12, 9.5 / 12], abs=1e-3)


def test_the_head_of_the_first_card_is_opened_first(look: Any) -> None:
    length = 31
    k = torch.eye(length)[None, None].repeat(1, 3, 1, 1)
    q = torch.zeros(1, 3, length, length)
    q[0, 1] = 400 * torch.eye(length)  # itself, exactly
    q[0, 2, 1:, :-1] = 50 * torch.eye(length - 1)  # the previous token, nearly: more telling
    stats = observe(q, k, mask=masks.causal(), what=Observe(map=length, edges=2)).named("0")
    page = look(Recording(HeadStats(stats.parts), About("m", {}, {}, {"0": "self"}, None, 1, 1)), "view=head")
    expect(page.locator("#head-title")).to_have_text("Layer 0, head 2")
    page.get_by_role("tab", name="All heads").click()
    assert page.locator(".card").first.inner_text().startswith("0.2 looks at the previous token")


def test_the_maps_of_a_comparison_use_the_width_that_there_is(look: Any, short: Recording) -> None:
    page = look(short, "view=compare", width=1700)
    page.locator(".pair canvas").nth(2).wait_for()
    plot = page.locator(".pair canvas").first.evaluate("canvas => JSON.parse(canvas.dataset.plot).width")
    assert plot > 390


def test_heads_of_the_reading_view_have_their_patterns(look: Any) -> None:
    length = 31
    q, k = torch.zeros(1, 1, length, length), torch.eye(length)[None, None]
    q[0, 0, 1:, :-1] = 400 * torch.eye(length - 1)
    stats = observe(q, k, mask=masks.causal(), what=Observe(map=length)).named("0")
    texts = tuple(f" w{n}" for n in range(length))
    page = look(Recording(HeadStats(stats.parts), About("m", {}, {}, {"0": "self"}, texts, 1, 1)), "view=reading")
    options = page.get_by_label("Head", exact=True).locator("option").all_inner_texts()
    assert [option.replace("\xa0", " ") for option in options] == ["layer 0, head 0 · previous 100 %"]


def test_a_served_page_states_that_it_has_no_steps_of_a_weight(chromium: Any, long: Recording, tmp_path: Path) -> None:
    with serving(long, tmp_path / "r.safetensors") as server:
        page = chromium.new_page()
        page.goto(f"{server.url}#view=head")
        assert "exact=[(layer, head)]" in page.locator(".why").inner_text()
        page.close()


# ---------------------------------------------------------------- several windows


def test_tokens_of_windows_are_found_by_text_and_by_position(look: Any) -> None:
    page = look(windows())
    page.keyboard.press("/")
    box = page.get_by_role("combobox", name="Find")
    box.fill("b7")
    expect(page.locator("#found [role=option]")).to_have_text(["window 1, token 7: ␣b5 ␣b6 “␣b7” ␣b8 ␣b9"])
    box.fill("24")  # 23 tokens are in the first window
    expect(page.locator("#found [role=option]")).to_have_text(["window 1, token 1: ␣b0 “␣b1” ␣b2 ␣b3"])
    page.keyboard.press("Enter")
    page.wait_for_url("**token=1*")
    box.fill("b18")
    page.keyboard.press("Enter")
    page.wait_for_url("**token=18*")


def test_enter_again_leads_to_the_next_hit(look: Any, long: Recording) -> None:
    page = look(long)
    page.keyboard.press("/")
    box = page.get_by_role("combobox", name="Find")
    box.fill("w9")  # w9, w90 to w96
    for at, nth in ((9, "1 of 8"), (90, "2 of 8"), (91, "3 of 8")):
        page.keyboard.press("Enter")
        page.wait_for_url(f"**token={at}*")
        expect(page.locator(".search .nth")).to_contain_text(nth)


def test_the_strongest_connections_of_windows_are_not_all_of_the_first_query(look: Any) -> None:
    page = look(windows((21, 21)), "view=head&head=1")
    page.get_by_text(re.compile("Strongest connections")).click()
    lines = page.locator(".largest button bdi").all_inner_texts()
    assert len(lines) > 4
    assert not any(line.startswith("query 0 ") for line in lines)
    assert "largest weights of different cells" in page.locator("details summary").first.inner_text()


def test_maps_of_windows_tell_even_from_changing_heads(look: Any) -> None:
    page = look(windows(), "pool=max")
    thumbs(page)
    assert "Each cell shows its largest weight over 2 windows." in page.locator("#view section > .hint").inner_text()
    read = """canvas => {
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      const [width, height] = [canvas.width >> 1, canvas.height >> 2]; // left and below
      const { data } = copy.getImageData(0, canvas.height - height, width, height);
      const light = (n) => data[4 * n] + data[4 * n + 1] + data[4 * n + 2];
      return Math.min(...Array.from({ length: width * height }, (_, n) => light(n)));
    }"""
    page.locator(".thumb canvas[data-drawn]").nth(1).wait_for()
    even, changing = (page.locator(".thumb canvas[data-drawn]").nth(n).evaluate(read) for n in (0, 1))
    assert even > 450  # nothing is dark
    assert changing < 150


def test_a_selection_does_not_push_the_tokens_down(look: Any) -> None:
    page = look(recorded(13, tuple(f" w{n}" for n in range(13)), Observe(map=13)), "view=head&layer=0&head=1")
    below = "document.querySelector('.pinned .strip').offsetTop - document.querySelector('.pinned').offsetTop"
    page.locator(".map canvas").wait_for()
    before = page.evaluate(below)
    page.evaluate("location.hash += '&row=9&column=5'")
    page.get_by_role("button", name="Clear the selection").wait_for()
    assert abs(page.evaluate(below) - before) <= 6


def test_on_a_phone_four_tabs_and_the_placeholder_are_in_sight(look: Any, short: Recording) -> None:
    page = look(short, "view=heads", width=390)
    seen = page.locator("[role=tab]").evaluate_all(
        "(all) => all.filter((each) => each.getBoundingClientRect().right <= innerWidth).length"
    )
    assert seen >= 4
    box = page.locator(".search input").bounding_box()
    assert box is not None
    assert box["width"] > 150


def test_the_close_button_of_the_glossary_covers_no_text(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=0&head=1")
    page.locator(".term").last.click()
    page.locator("dialog[open]").evaluate("(of) => of.scrollTo(0, 300)")
    under = page.locator(".glossary .close").evaluate(
        """(of) => { const { left, top, height } = of.getBoundingClientRect();
          return document.elementsFromPoint(left - 30, top + height / 2)[0].className; }"""
    )
    assert under == "head", "a bar with a ground of its own"


def test_a_match_states_how_it_differs_from_the_statistic_of_its_name(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=0&head=1")
    titles = [str(each.get_attribute("title")) for each in page.locator(".beside p > span[title]").all()]
    assert any("The statistic of this name in the table is another number" in title for title in titles), titles
