"""Counts of what is not listed lead to it, and the edge of a panel shows that more is below."""

# ruff: noqa: F401, F811  # chromium, look and short are fixtures

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

from headscope import Observe, load_example, masks, observe, trace, watch
from headscope.report import image_sheet, save
from headscope.report.highlights import recording_highlights, sheet_highlights
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import chromium, in_a_browser, look, open_menu, recorded, short

pytestmark = in_a_browser

CATS = "the cat sat on the mat, and the dog sat on the mat, and the cat sat"


def test_more_heads_of_a_card_are_shown_by_a_click(look: Any) -> None:
    example = load_example("text")
    ids = torch.tensor([example.tokenizer.encode(CATS)])
    with torch.inference_mode(), watch(example.model, what=Observe(map=64), tokens="inputs") as recording:
        example.model(ids)
    induction = recording_highlights(recording)[0]
    assert (induction.pattern, induction.heads > 1) == ("induction", True)
    page = look(recording)
    more = page.locator(".more-heads").first
    assert more.inner_text() == f"{induction.heads - 1} more heads"
    more.click()
    expect(page.locator(".thumb")).to_have_count(induction.heads)
    assert all("induction" in label for label in page.locator(".thumb small").all_inner_texts())
    expect(more).to_have_attribute("aria-pressed", "true")
    more.click()
    expect(page.locator(".thumb")).to_have_count(48)


def test_more_heads_of_a_region_are_those_that_the_card_counts(look: Any, tmp_path: Path) -> None:
    example = load_example("digits")
    with torch.inference_mode():
        _, weights = example.model(example.samples[0].image[None], need_weights=True)
    sheet = image_sheet("a digit", (example.samples[0].image * 255).round().byte().numpy(), (8, 8), weights)
    page = look(save(sheet, tmp_path / "digit.html"))
    several = [each for each in sheet_highlights(sheet) if each.layer is not None and each.heads > 1]
    assert len(several) == page.locator(".more-heads").count() > 1
    for n, each in enumerate(several):
        page.locator(".more-heads").nth(n).click()
        expect(page.locator(".thumb")).to_have_count(each.heads)


def test_more_hits_of_a_search_unfold(look: Any) -> None:
    page = look(recorded(97, tuple("ab"[n % 2] for n in range(97)), Observe(map=12)))
    box = page.get_by_role("combobox", name="Find a token")
    box.fill("b")
    hits = page.locator("#found [role=option]")
    expect(hits).to_have_count(9)
    hits.last.click()
    expect(hits).to_have_count(48)
    box.fill("a")
    for _ in range(8):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(hits).to_have_count(49)
    assert hits.nth(8).get_attribute("aria-selected") == "true", "the first one that was not listed"


def test_more_of_what_one_recording_alone_has_unfolds(look: Any, tmp_path: Path) -> None:
    def layers(count: int) -> Recording:
        q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(2))
        part = observe(q, q, mask=masks.causal(), what=Observe(map=5)).parts["0"]
        parts = {f"layers.{n}.attention": part for n in range(count)}
        kinds: Any = dict.fromkeys(parts, "self")
        return Recording(HeadStats(parts), About("m", {}, {}, kinds, None, 1, 1))

    page = look(layers(11).save_html(tmp_path / "two.html", against=layers(2)))
    only = page.locator(".changes-only").filter(has_text="Only in A")
    expect(only).to_contain_text("layer 7.")
    only.get_by_role("button", name="and 3 more").click()
    expect(only).to_contain_text("layer 10.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_edge_of_the_panel_shows_that_more_is_below(scheme: str, look: Any, short: Recording) -> None:
    page = look(short, "view=head", scheme=scheme)
    panel = page.locator(".beside")
    expect(panel).to_have_attribute("data-more", "")
    shade = "getComputedStyle(document.querySelector('.beside'), '::after')"
    assert page.evaluate(f"{shade}.backgroundImage").startswith("linear-gradient")
    panel.evaluate("(each) => each.scrollTo({ top: each.scrollHeight, behavior: 'instant' })")
    page.wait_for_function("() => !('more' in document.querySelector('.beside').dataset)")
    assert page.evaluate(f"{shade}.content") == "none", "nothing covers the last line"


def test_the_steps_of_a_trace_state_why_they_are_of_one_layer(look: Any, short: Recording, tmp_path: Path) -> None:
    module = load_example("text").model.layers[0].attention
    path = short.save_html(tmp_path / "steps.html", trace=trace(module, torch.randn(1, 5, module.embed_dim)))
    page = look(path, "view=trace")
    assert "A trace is of one module" in page.locator("#view .hint").first.inner_text()
