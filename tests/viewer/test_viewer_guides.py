"""The help, the tour and the glossary of the viewer's page."""

# ruff: noqa: F401, F811  # chromium, look and short are fixtures

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

from headscope import Observe, masks, observe
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.all_views import write_history, write_pair
from support.browser import Page, chromium, in_a_browser, look, wait_until_drawn

pytestmark = in_a_browser

PATTERNS = ["previous", "next", "self", "duplicate", "induction", "fixed key", "first", "local", "uniform"]


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Two layers of heads that look at the token before."""
    length = 13
    k = torch.nn.functional.one_hot(torch.arange(length), length).float()
    q = 20 * k.roll(-1, 1)
    what = Observe(map=length, keep_rows=True, tokens=torch.arange(length) % 5)
    part = observe(q[None, None], k[None, None], mask=masks.causal(), what=what).parts["0"]
    parts = {f"layers.{n}": part for n in range(2)}
    texts = tuple("abcdefghijklm")
    return Recording(HeadStats(parts), About("m", {}, {}, dict.fromkeys(parts, "self"), texts, 1, 1))


BOXES = """() => ["tour", "tour-frame"].map((name) => {
  const { left, top, right, bottom } = document.querySelector(`.${name}`).getBoundingClientRect();
  return [left, top, right, bottom];
})"""


def beside(page: Page) -> bool:
    """Whether the sentence of the tour is in sight, and covers nothing of what its frame shows."""
    (left, top, right, bottom), frame = page.evaluate(BOXES)
    size = page.viewport_size
    assert size is not None
    assert 0 <= left < right <= size["width"]
    assert 0 <= top < bottom <= size["height"]
    assert frame[2] - frame[0] > 30
    assert frame[3] - frame[1] > 20
    return right <= frame[0] or left >= frame[2] or bottom <= frame[1] or top >= frame[3]


@pytest.mark.parametrize("size", [pytest.param((1280, 900), marks=pytest.mark.long), (360, 740)])
def test_the_tour_leads_through_the_page(look: Any, recording: Recording, size: tuple[int, int]) -> None:
    page = look(recording, "view=table")
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.locator("table.every").wait_for()
    assert page.locator(".tour").count() == 0, "it does not start by itself"
    page.keyboard.press("?")
    assert page.evaluate("document.activeElement.textContent") == "Take the tour (20 seconds)"
    page.keyboard.press("Enter")
    views: list[str] = []
    tour = page.get_by_role("dialog", name="Tour")
    for step in range(6):
        expect(tour.locator(".steps span")).to_have_text(f"{step + 1} of 6")
        page.locator(".tour-frame").wait_for()
        wait_until_drawn(page)  # what the step shows is decoded and laid out
        assert beside(page), step
        assert tour.evaluate("(e) => e.contains(document.activeElement)"), "the keyboard is in the tour"
        views.append(str(page.locator("[role=tab][aria-selected=true]").get_attribute("id")))
        page.keyboard.press("Enter")
    assert views == ["tab-heads", "tab-heads", "tab-head", "tab-head", "tab-reading", "tab-heads"]
    expect(tour).to_have_count(0)
    page.locator("table.every").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Help"


@pytest.mark.parametrize(
    ("write", "views"),
    [
        (write_pair, ["changes", "heads", "heads", "head", "head", "reading", "heads"]),
        (write_history, ["history"] * 5),
    ],
)
@pytest.mark.long
def test_the_tour_of_two_recordings_and_of_a_training(look: Any, tmp_path: Path, write: Any, views: list[str]) -> None:
    page = look(write(tmp_path))
    page.keyboard.press("?")
    keys = page.locator("dl.keys dt").all_inner_texts()
    assert ("+ − 0" in keys) == (write is write_pair), "a training has no map to zoom"
    page.keyboard.press("Enter")
    tour = page.get_by_role("dialog", name="Tour")
    for step, view in enumerate(views):
        expect(tour.locator(".steps span")).to_have_text(f"{step + 1} of {len(views)}")
        page.locator(".tour-frame").wait_for()
        wait_until_drawn(page)
        assert beside(page), step
        assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{view}"
        page.keyboard.press("Enter")
    expect(tour).to_have_count(0)
    assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{views[0]}"


def test_the_glossary_of_a_training_has_its_quantities(look: Any, tmp_path: Path) -> None:
    page = look(write_history(tmp_path))
    page.keyboard.press("?")
    page.get_by_role("button", name="Glossary").click()
    terms = page.get_by_role("dialog", name="Glossary").locator("dt").all_inner_texts()
    assert {"normalized entropy", "largest logit", "attention received"} <= {*terms}


def test_escape_leaves_the_tour(look: Any, recording: Recording) -> None:
    page = look(recording, "view=head&layer=1&head=0")
    page.locator(".map canvas").wait_for()
    page.keyboard.press("?")
    page.keyboard.press("Enter")
    page.locator(".tour-frame").wait_for()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tour .steps span")).to_have_text("2 of 6")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tour .steps span")).to_have_text("1 of 6")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Escape")
    expect(page.locator(".tour")).to_have_count(0)
    page.get_by_role("heading", name="Layer 1, head 0").wait_for()


def test_a_pattern_opens_its_entry_of_the_glossary(look: Any, recording: Recording) -> None:
    page = look(recording, "view=head&layer=0&head=0")
    page.locator(".likeness").get_by_role("button", name="a previous-token head").click()
    dialog = page.get_by_role("dialog", name="Glossary")
    chosen = dialog.locator("li.chosen")
    assert chosen.evaluate("(e) => e === document.activeElement")
    assert chosen.inner_text().split("\n") == ["previous", "Each token looks at the one just before it."]
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert page.evaluate("document.activeElement.textContent") == "a previous-token head"
    page.locator(".beside").get_by_role("button", name="normalized entropy").click()
    assert "0 to 1" in dialog.locator("div.chosen").inner_text()
    assert dialog.locator("dt", has_text="attention received").count() == 1


def test_the_glossary_has_a_picture_of_each_pattern(look: Any, recording: Recording) -> None:
    page = look(recording, "view=heads")
    page.keyboard.press("?")
    page.get_by_role("button", name="Glossary").click()
    entries = page.locator(".entries li")
    assert [entry.locator("b").inner_text() for entry in entries.all()] == PATTERNS
    for entry, name in zip(entries.all(), PATTERNS, strict=True):
        picture = entry.get_by_role("img")
        assert str(picture.get_attribute("aria-label")).startswith(f"Map of the pattern {name}: ")
        assert picture.locator("rect").count() == 64
    on = {
        name: entry.locator("rect").evaluate_all("(all) => all.flatMap((e, n) => e.matches('.on') ? [n] : [])")
        for name, entry in zip(PATTERNS, entries.all(), strict=True)
    }
    assert on["previous"] == [8 * n + n - 1 for n in range(1, 8)]
    assert on["induction"] == [8 * n + n - 3 for n in range(4, 8)]
    assert on["duplicate"] == [8 * n + n - 4 for n in range(4, 8)]
    assert on["uniform"] == [8 * i + j for i in range(8) for j in range(i + 1)]


def test_a_question_mark_in_a_field_is_a_letter(look: Any, recording: Recording) -> None:
    page = look(recording)
    page.keyboard.press("/")
    page.keyboard.type("?")
    assert page.locator(".search input").input_value() == "?"
    assert page.locator("#menu-help").is_hidden()
