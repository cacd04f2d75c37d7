"""The text with lines: each one is a weight, and the list beside it holds the largest ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from headscope import Observe
from support.browser import LONG, attributes, chromium, in_a_browser, long, look, recorded, short, weight

__all__ = ["chromium", "long", "look", "short"]  # fixtures

pytestmark = in_a_browser

FAINTEST = 0.02
OVERVIEW = 0.15


def token(page: Any, at: int) -> Any:
    return page.locator(f".reading-text [data-at='{at}']")


def test_a_token_has_a_line_to_each_key_that_it_attends_to(look: Any, short: Any) -> None:
    page = look(short, "view=reading&layer=1&head=2")
    p = weight(short, 1, 2)
    at = len(p) - 2
    token(page, at).hover()
    drawn = sum(value >= FAINTEST for key, value in enumerate(p[at]) if key != at)
    expect(page.locator(".reading-text path")).to_have_count(int(drawn))
    assert drawn > 0
    page.get_by_label("Lines").select_option("to")
    token(page, at).hover()
    back = sum(row[at] >= FAINTEST for query, row in enumerate(p) if query != at)
    expect(page.locator(".reading-text path")).to_have_count(int(back))


def test_until_a_token_is_chosen_the_largest_weights_are_drawn(look: Any, short: Any) -> None:
    page = look(short, "view=reading&layer=0&head=1")
    p = weight(short, 0, 1)
    drawn = sum(value >= OVERVIEW for query, row in enumerate(p) for key, value in enumerate(row) if 0 < key < query)
    expect(page.locator(".reading-text path")).to_have_count(int(drawn))


def test_a_kept_token_lists_its_largest_keys_and_the_address_holds_it(look: Any, short: Any) -> None:
    page = look(short, "view=reading&layer=0&head=0")
    p = weight(short, 0, 0)
    at = len(p) - 1
    token(page, at).focus()
    page.keyboard.press("Enter")
    page.locator(".context li").first.wait_for()
    order = [int(key) for key in np.argsort(-p[at]) if p[at][key] >= 0.001][:10]
    titles = attributes(page.locator(".context button"), "title")
    assert titles == [f"Go to token {key}" for key in order]
    shown = page.locator(".context li > span:last-child").all_inner_texts()
    assert float(shown[0].split()[0]) == pytest.approx(100 * p[at].max(), abs=0.6)
    page.wait_for_url(f"**token={at}*")
    page.locator(".context button").first.click()
    page.wait_for_url(f"**token={order[0]}*")
    assert token(page, order[0]).get_attribute("aria-pressed") == "true"


def test_several_heads_have_several_colours(look: Any, short: Any) -> None:
    page = look(short, "view=reading&layer=0&head=0")
    page.get_by_label("Add").select_option("1.2")
    page.wait_for_url("**also=1.2*")
    both = [weight(short, 0, 0), weight(short, 1, 2)]
    counts = [
        [sum(p >= FAINTEST for key, p in enumerate(row) if key != query) for query, row in enumerate(each)]
        for each in both
    ]
    at = next(query for query, (one, other) in enumerate(zip(*counts, strict=True)) if one and other)
    token(page, at).hover()
    expect(page.locator(".reading-text path")).to_have_count(int(counts[0][at] + counts[1][at]))
    colours = page.eval_on_selector_all(
        ".reading-text path", "paths => [...new Set(paths.map((each) => each.style.stroke))]"
    )
    assert len(colours) == 2
    page.get_by_role("button", name="Remove layer 1, head 2").click()
    page.wait_for_url(lambda url: "also" not in url)


def test_a_pooled_map_shows_the_largest_weights_of_each_token(look: Any, long: Any) -> None:
    page = look(long, f"view=reading&layer=0&head=0&token={LONG - 1}")
    p = weight(long, 0, 0)
    page.locator(".context li").first.wait_for()
    titles = attributes(page.locator(".context button"), "title")
    assert titles == [f"Go to token {int(key)}" for key in np.argsort(-p[LONG - 1])[:3]]
    assert "largest weights of each token only" in page.locator("#view").inner_text()


def test_a_long_text_has_pages_and_a_key_on_another_one_is_a_click_away(look: Any) -> None:
    length = 449
    recording = recorded(
        length, tuple(f" w{n}" for n in range(length)), Observe(map=8, keep_rows=True, top=5, keep_qk=True)
    )
    page = look(recording, f"view=reading&layer=0&head=0&token={length - 1}")
    assert token(page, length - 1).is_visible()
    assert token(page, 0).count() == 0
    p = weight(recording, 0, 0)[length - 1]
    key = int(np.argmax(np.where(np.arange(length) < 400, p, 0)))
    assert key in np.argsort(-p)[:5], "the seed gives a large weight on an earlier page"
    page.get_by_title(f"Go to token {key}").click()
    token(page, key).wait_for()
    page.get_by_role("button", name="Later").click()
    assert token(page, key + 200).count() or key >= 200


def test_without_tokens_there_is_no_reading(look: Any) -> None:
    page = look(recorded(7, None, Observe(map=7)))
    assert page.get_by_role("tab", name="Reading").count() == 0
