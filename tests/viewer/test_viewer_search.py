"""One box finds heads, positions and tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import expect

from headscope import Observe
from headscope.report import save, text_sheet
from support.browser import LONG, chromium, in_a_browser, long, look, recorded, short, weight

__all__ = ["chromium", "long", "look", "short"]  # fixtures

pytestmark = in_a_browser


def repeated(letters: str, folder: Path) -> Path:
    """Letters twice: head 0 attends to what followed the earlier copy, and else to the token itself; head 1 evenly."""
    length = 2 * len(letters)
    weights = torch.eye(length).repeat(2, 1, 1)
    for query in range(len(letters), length):
        weights[0, query] = torch.eye(length)[query - len(letters) + 1]
    weights[1] = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
    numbers = [*range(len(letters))] * 2
    return save(text_sheet("Letters", [*letters, *letters], [weights], ids=numbers), folder / "letters.html")


def search(page: Any, text: str) -> Any:
    page.keyboard.press("/")
    box = page.get_by_role("combobox", name="Find")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "combobox"
    box.fill(text)
    return page.locator("#found [role=option]:not(.hint)")


def test_a_head_is_opened_by_its_number(look: Any, short: Any) -> None:
    page = look(short)
    expect(search(page, "1.2")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("#head-title")).to_have_text("Layer 1, head 2")
    search(page, "1.3")
    expect(page.get_by_role("status").filter(has_text="Nothing fits.")).to_be_visible()


def test_of_a_number_beyond_the_text_the_box_states_how_long_it_is(look: Any, long: Any) -> None:
    page = look(long)
    search(page, "10240")
    expect(page.get_by_role("status").filter(has_text="The text has 97 tokens")).to_be_visible()
    offered = str(page.get_by_role("combobox", name="Find").get_attribute("placeholder"))
    (at,) = re.findall(r"\b(\d+),", offered)
    assert int(at) < 97
    (head,) = re.findall(r"\d+\.\d+", offered)
    expect(search(page, head)).to_have_count(1)


def test_a_position_and_the_tokens_that_fit_are_listed_with_those_around_them(look: Any, long: Any) -> None:
    page = look(long)
    found = search(page, "w7")  # w7, w70 to w79
    expect(found).to_have_count(8)
    expect(found.first).to_have_text("7: ␣w5 ␣w6 “␣w7” ␣w8 ␣w9")
    expect(page.locator("#found .hint")).to_have_text("and 3 more")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**token=70*")
    expect(page.locator(".reading-text [data-at='70']")).to_have_attribute("aria-pressed", "true")
    search(page, str(LONG - 1))
    page.keyboard.press("Enter")
    page.wait_for_url(f"**token={LONG - 1}*")
    search(page, str(LONG))
    expect(page.locator("#found [role=option]")).to_have_count(0)


def test_in_a_head_the_token_is_selected_with_the_key_that_it_attends_to_most(look: Any, short: Any) -> None:
    page = look(short, "view=head&layer=0&head=1")
    page.locator(".map canvas").first.wait_for()
    search(page, "3").first.wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**row=3&column={weight(short, 0, 1)[3].argmax()}*")
    page.get_by_role("tab", name="Reading").click()
    expect(page.locator(".reading-text [data-at='3']")).to_have_attribute("aria-pressed", "true")


def test_a_pattern_is_found_with_the_heads_that_it_names(look: Any, tmp_path: Path) -> None:
    page = look(repeated("abcdefghijkl", tmp_path))
    expect(search(page, "induction")).to_have_text("induction: 1 head, 0.0 (100 %)")
    page.keyboard.press("Enter")
    expect(page.locator(".thumb")).to_have_count(1)
    expect(search(page, "prev")).to_have_text(
        "No head is named “previous”. By its mean weight 0.1 leads, 0.12 (Statistics)."
    )


def test_of_a_pattern_that_too_few_tokens_show_the_box_and_the_head_say_so(look: Any, tmp_path: Path) -> None:
    page = look(repeated("abcd", tmp_path))
    found = search(page, "induction")
    expect(found).to_contain_text("No score for induction: 4 of 8 tokens have an earlier copy, and a score needs 8.")
    expect(found).to_contain_text("By its mean weight 0.0 leads, 1.0 (Statistics).")
    page.keyboard.press("Enter")
    page.wait_for_url("**view=table*sort=induction*")
    expect(page.locator("table.every tbody th").first).to_have_text("layer 0, head 0")
    page.get_by_role("tab", name="All heads").click()
    expect(page.locator("#heads-title + .hint")).to_contain_text("Sorted by induction, largest first.")
    page.goto(page.url.split("#")[0] + "#view=head&layer=0&head=0")
    expect(page.locator(".likeness.unscored")).to_contain_text("Perhaps an induction head, too: only 4 of 8 tokens")
    page.goto(page.url.split("#")[0] + "#view=head&layer=0&head=1")
    expect(page.locator("#head-title")).to_have_text("Layer 0, head 1")
    expect(page.locator(".likeness.unscored")).to_have_count(0)


def test_texts_that_mean_harm_are_shown_as_they_are(look: Any, short: Any) -> None:
    page = look(short)
    for text in ("<", "script", "'", '"'):
        search(page, text)
        page.keyboard.press("Escape")
    assert page.locator("#found script, #found img").count() == 0


def test_a_word_is_found_over_several_tokens(look: Any) -> None:
    length = 6
    recording = recorded(length, ("The", " c", "at", " s", "at", "."), Observe(map=length))
    page = look(recording)
    expect(search(page, "cat")).to_have_text(["1: The “␣c” at ␣s"])
    expect(search(page, "at")).to_have_count(2)
    expect(search(page, " sat.")).to_have_text(["3: ␣c at “␣s” at ."])


def test_a_page_without_tokens_says_that_it_finds_heads_only(look: Any) -> None:
    page = look(recorded(7, None, Observe(map=7)))
    box = page.get_by_role("combobox", name="Find")
    expect(box).to_have_attribute("placeholder", "Find a head: 3.3")
    search(page, "cat")
    expect(page.locator(".search .none")).to_contain_text("Heads only")
    expect(search(page, "1.2")).to_have_count(1)
