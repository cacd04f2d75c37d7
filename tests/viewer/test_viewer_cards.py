"""The cards on top of all heads: what they state, where they lead, and that the keyboard and the address reach them."""

# ruff: noqa: F401, F811  # chromium, look and short are fixtures

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

from headscope import Observe, load_example, masks, observe, watch
from headscope.report import image_sheet, save, text_sheet
from headscope.report.highlights import recording_highlights, sheet_highlights
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import BrowserContext, chromium, in_a_browser, look, serving, short, thumbs
from support.html_pages import HOSTILE

pytestmark = in_a_browser

# The browser makes a click of the Enter key, which stays: the pointer itself is in the long runs.
ONE_WAY = [pytest.param(False, marks=pytest.mark.long), True]
TEXT = "The cat sat on the mat. The cat sat on the mat."


@pytest.fixture(scope="module")
def cats() -> Recording:
    """The shipped model on a sentence that repeats; every weight is in the map."""
    example = load_example("text")
    ids = example.tokenizer.encode(TEXT)
    tokens = torch.tensor([ids])
    what = Observe(map=len(ids), edges=4, tokens=tokens, keep_qk=True)
    pieces = [example.tokenizer.piece(token) for token in ids]
    with torch.inference_mode(), watch(example.model, what=what, texts=pieces) as recording:
        example.model(tokens)
    return recording


def selection(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).fragment).items()}


def test_cards_state_what_python_states(look: Any, cats: Recording) -> None:
    page = look(cats)
    found = recording_highlights(cats)
    shown = [text.replace("\xa0", " ") for text in page.locator(".card").all_inner_texts()]
    assert len(shown) == len(found) == 4
    induction, previous, *counts = found
    first, uniform = sorted(counts, key=lambda each: each.pattern)
    shown[2:] = sorted(shown[2:], key=lambda text: "first token" not in text)
    assert induction.texts is not None
    one, other = induction.texts
    assert shown[0].splitlines() == [
        "3.3 looks like an induction head (85 %; also first, 32 %)",
        f"{one} → {other}, which followed {one} before",
    ]
    assert shown[1].startswith("2.0 looks at the previous token (99.6 %)")
    assert previous.pattern == "previous"
    assert shown[2].startswith(f"{first.heads} of 48 heads often look at the first token")
    assert shown[3].startswith(f"{uniform.heads} of 48 heads come closest to an even spread")


def test_cards_count_the_heads_that_captions_name(look: Any, cats: Recording) -> None:
    page = look(cats)
    texts = [text.removeprefix("partly ") for text in page.locator(".thumb small").all_inner_texts()]
    captions = [name.split()[0] for text in texts for name in text.split(" · ")]
    cards = page.locator("button.card").all_inner_texts()
    for pattern, sentence in (
        ("uniform", "come closest to an even spread"),
        ("first", "often look at the first"),
    ):
        (card,) = (text for text in cards if sentence in text)
        assert int(card.split()[0]) == captions.count(pattern) > 1
    assert page.locator(".more-heads").first.inner_text() == f"{captions.count('induction') - 1} more heads"
    assert all("match of at least 30" in text for text in cards if " of 48 heads " in text)


@pytest.mark.parametrize("keyboard", ONE_WAY)
def test_a_card_opens_its_head_with_the_example_selected(keyboard: bool, look: Any, cats: Recording) -> None:
    page = look(cats)
    card = page.locator(".card").first
    if keyboard:
        card.focus()
        page.keyboard.press("Enter")
    else:
        card.click()
    page.locator(".map canvas").wait_for()
    page.wait_for_url(lambda url: "row=" in url)
    highlight = recording_highlights(cats)[0]
    assert highlight.cell is not None
    query, key = highlight.cell
    at = selection(page.url)
    assert (at["view"], at["row"], at["column"]) == ("head", str(query), str(key))
    assert page.locator("#head-title").inner_text() == "Layer 3, head 3"
    assert page.evaluate("document.activeElement.id") == "head-title"
    assert highlight.texts is not None
    assert f"{query} “{highlight.texts[0]}”" in page.locator(".pinned").inner_text()
    page.go_back()
    page.locator(".card").first.wait_for()


def test_on_a_server_the_single_weight_is_selected(chromium: BrowserContext, cats: Recording, tmp_path: Path) -> None:
    query, key = recording_highlights(cats)[0].cell or (-1, -1)
    with serving(cats, tmp_path / "r.safetensors") as server:
        page = chromium.new_page()
        page.goto(server.url)
        page.locator(".card").first.click()
        page.wait_for_url(lambda url: "cell=" in url)
        assert selection(page.url)["cell"] == f"{query},{key}"
        page.close()


def test_a_count_shows_only_its_heads_and_all_of_them_again(look: Any, cats: Recording) -> None:
    page = look(cats)
    at = next(n for n, each in enumerate(recording_highlights(cats)) if each.pattern == "first")
    count = page.locator(".card").nth(at)
    heads = recording_highlights(cats)[at].heads
    assert count.get_attribute("aria-pressed") == "false"
    assert len(thumbs(page)) == 48
    count.click()
    assert len(thumbs(page)) == heads
    assert all("first" in each for each in thumbs(page))
    assert any("· first" in each for each in page.locator(".thumb small").all_inner_texts()), (
        "a second name counts, too"
    )
    assert count.get_attribute("aria-pressed") == "true"
    count.click()
    assert len(thumbs(page)) == 48


@pytest.mark.parametrize("keyboard", ONE_WAY)
def test_show_all_ends_the_filters(keyboard: bool, look: Any, cats: Recording) -> None:
    page = look(cats)
    assert page.locator(".show-all").count() == 0
    page.locator(".more-heads").click()
    found = thumbs(page)
    assert 1 < len(found) < 48
    assert all("induction" in each for each in found)
    button = page.locator(".show-all")
    assert button.inner_text() == "Show all"
    if keyboard:
        button.focus()
        page.keyboard.press("Enter")
    else:
        button.click()
    page.wait_for_function("() => document.activeElement.matches('.thumb')")
    assert len(thumbs(page)) == 48
    assert button.count() == 0


def test_cards_can_be_hidden_and_the_address_holds_it(look: Any, cats: Recording) -> None:
    page = look(cats)
    page.locator(".cards .hide").click()
    assert page.locator(".card").count() == 0
    page.wait_for_url(lambda url: "cards=0" in url)
    again = look(cats, at="cards=0")
    again.locator(".thumb").first.wait_for()
    assert again.locator(".card").count() == 0
    again.locator(".cards-hidden button").click()
    assert again.locator(".card").count() == 4


@pytest.mark.parametrize("width", [1280, 360])
def test_cards_are_one_compact_row(width: int, look: Any, cats: Recording) -> None:
    page = look(cats, width=width)
    boxes = [each.bounding_box() for each in page.locator(".card").all()]
    assert all(40 <= box["height"] <= (90 if width == 1280 else 150) for box in boxes)
    assert len({box["y"] for box in boxes}) == 1, "on a phone the row scrolls"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_a_head_beyond_chance_the_card_is_a_sentence(look: Any, tmp_path: Path) -> None:
    weights = torch.full((2, 17, 17), 1 / 17)
    sheet = text_sheet("t", ["w"] * 17, [weights], causal=False)
    page = look(save(sheet, tmp_path / "even.html"))
    assert page.locator("p.card").inner_text() == "No head matches a pattern clearly better than chance"
    assert "2 of 2 heads come closest to an even spread" in page.locator("button.card").inner_text()


def test_an_image_has_cards_of_regions_and_no_filter(look: Any, tmp_path: Path) -> None:
    example = load_example("digits")
    with torch.inference_mode():
        _, weights = example.model(example.samples[3].image[None], need_weights=True)
    pixels = (example.samples[3].image * 255).round().byte().numpy()
    sheet = image_sheet("a digit", pixels, (8, 8), weights)
    page = look(save(sheet, tmp_path / "digit.html"))
    found = sheet_highlights(sheet)
    assert page.locator(".card").count() == sum(each.layer is not None for each in found), (
        "none counts a label of no head"
    )
    assert "× chance" in page.locator(".card").first.inner_text()
    fixed = next(n for n, each in enumerate(found) if each.pattern == "fixed key")
    assert "of its attention on one patch" in page.locator(".card").nth(fixed).inner_text()
    page.locator(".card").nth(fixed).click()
    page.locator(".likeness").wait_for()
    assert "fixed-key head" in page.locator(".likeness").inner_text()
    assert not any(each.pattern in ("uniform", "first") and each.layer is not None for each in found)


def test_hostile_tokens_and_layers_stay_text(look: Any) -> None:
    length = len(HOSTILE)
    p = torch.eye(length).roll(-1, 1).tril() * 50
    stats = observe(
        torch.eye(length)[None, None], p.mT[None, None], mask=masks.causal(), scale=1.0, what=Observe(map=7)
    )
    stats = stats.named("<img src=x onerror=alert(1)>")
    kinds: Any = dict.fromkeys(stats.parts, "self")
    page = look(Recording(HeadStats(stats.parts), About("m", {}, {}, kinds, tuple(HOSTILE), 1, 1)))
    card = page.locator(".card").first
    assert card.inner_text().startswith("<img src=x onerror=alert(1)>, head 0 looks at the previous token")
    assert card.locator("img").count() == 0
