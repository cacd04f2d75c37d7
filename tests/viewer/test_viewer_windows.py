"""Pages of a text that was read in windows: one word for them, their texts, and what the maps merge."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

from headscope import HeadStats, Observe, masks, observe
from headscope.watching import About, Recording
from support.browser import chromium, in_a_browser, look

pytestmark = in_a_browser


def windows(lengths: tuple[int, ...], bins: int = 7) -> Recording:
    """A text in windows; in head 1 each token attends to one key, which changes from window to window."""
    parts: list[HeadStats] = []
    for run, length in enumerate(lengths):
        k = torch.eye(length)[None, None].repeat(1, 2, 1, 1)
        q = torch.zeros(1, 2, length, length)
        for n in range(length):
            q[0, 1, n, (n * (5 + 2 * run) + 1) % (n + 1)] = 400
        parts.append(observe(q, k, mask=masks.causal(), what=Observe(map=bins, edges=1)).named("0"))
    texts = tuple(tuple(f"␣{letter}{n}" for n in range(length)) for letter, length in zip("abc", lengths, strict=False))
    stats = parts[0]
    for each in parts[1:]:
        stats = stats.merge(each)
    count = len(lengths)
    return Recording(stats, About("m", {}, {}, {"0": "self"}, None, count, count, run_texts=texts))


@pytest.mark.parametrize(
    ("lengths", "bins", "legend"),
    [
        ((23, 23), 7, "Each cell is the maximum of 3–4 × 3–4 pairs of query and key, merged over 2 windows."),
        ((7, 7, 7), 7, "Each cell is one query and key: its largest weight, merged over 3 windows."),
        ((23, 19), 7, "Each cell is its largest weight, merged over 2 windows of different lengths: 7 × 7 bins"),
    ],
)
def test_the_legend_states_that_windows_are_merged(lengths: tuple[int, ...], bins: int, legend: str, look: Any) -> None:
    page = look(windows(lengths, bins), "view=head&head=1&row=5&column=1&pool=max")
    page.locator(".map canvas").wait_for()
    assert legend in page.locator(".legend").first.inner_text()
    assert f"{len(lengths)} windows" in page.locator("footer").inner_text()
    shown = page.locator("#view").inner_text()
    assert "(window " in shown
    assert "run " not in shown
    page = look(windows(lengths, bins), "view=head&head=1&row=5&column=1")
    expect(page.locator(".legend").first).to_contain_text(f"merged over {len(lengths)} windows")
    assert "largest" not in page.locator(".legend").first.inner_text(), "a page of windows starts with the means"


def test_an_entry_of_the_strongest_connections_selects_its_cell_and_window(look: Any) -> None:
    page = look(windows((23, 19)), "view=head&head=1")
    page.get_by_text(re.compile("Strongest connections")).click()
    entries = page.locator(".largest button").all()
    assert len(entries) > 3
    for entry in entries[:4]:
        query, key, run = (int(each) for each in re.findall(r"(?:query|key|window) (\d+)", entry.inner_text()))
        entry.click()
        length = (23, 19)[run]
        row, column = (((at + 1) * 7 - 1) // length for at in (query, key))
        page.wait_for_url(f"**row={row}&column={column}*")
        assert f"window={run}" in page.url


def test_a_card_opens_a_head_of_windows_with_its_example(look: Any) -> None:
    parts: list[HeadStats] = []
    for length in (23, 19):
        weights = 400 * torch.eye(length)[None, None]
        what = Observe(map=7, edges=4, keep_rows=True)
        parts.append(
            observe(weights.roll(-1, -1), torch.eye(length)[None, None], mask=masks.causal(), what=what).named("0")
        )
    texts = tuple(tuple(f"␣{letter}{n}" for n in range(length)) for letter, length in (("a", 23), ("b", 19)))
    stats = parts[0].merge(parts[1])
    page = look(Recording(stats, About("m", {}, {}, {"0": "self"}, None, 2, 2, run_texts=texts)))
    page.locator("button.card").first.click()
    expect(page.locator(".pinned")).to_contain_text("mean")
    assert "row=" in page.url
    assert "column=" in page.url


def test_a_page_without_q_and_k_states_how_to_get_a_reason(look: Any) -> None:
    page = look(windows((23, 19)), "view=head&head=1")
    expect(page.locator(".why")).to_contain_text("--keep-qk")
    expect(page.locator(".why")).to_contain_text("--exact")


def test_the_scale_states_the_windows_and_switches_to_the_maximum(look: Any) -> None:
    page = look(windows((23, 19)), "view=head&head=1")
    legend = page.locator(".legend").first
    expect(legend).to_contain_text("mean weight over 2 windows")
    expect(legend).to_contain_text("A dark cell is dark on average over 2 windows.")
    legend.get_by_role("button", name="maximum").click()
    expect(legend).to_contain_text("largest weight over 2 windows")
    expect(legend).to_contain_text(
        "A dark cell has a large weight in at least one of 2 windows; its mean may be small."
    )


def test_the_text_of_a_window_is_read_with_its_weights(look: Any) -> None:
    page = look(windows((23, 19)), "view=reading&head=1")
    tokens = page.locator(".reading-text button")
    expect(tokens).to_have_count(23)
    assert tokens.nth(4).inner_text() == " a4"
    page.get_by_label("Window").select_option("1")
    expect(tokens).to_have_count(19)
    assert tokens.nth(4).inner_text() == " b4"
    assert "window=1" in page.evaluate("new Promise((done) => setTimeout(() => done(location.hash), 400))")
    assert page.locator(".reading-text path").count() > 0
    known = 0
    for at in range(1, 19):
        tokens.nth(at).click()
        keys = page.locator(".reading-side button")
        page.locator(".reading-side h3").get_by_text(f"({at})").wait_for()
        if keys.count():
            key = (at * 7 + 1) % (at + 1)
            assert keys.first.inner_text().split()[0] == str(key), "the key that this token attends to in this window"
            known += 1
    assert known > 3
    assert "larger ones in other windows" in " ".join(page.locator(".reading-side").all_inner_texts()) or known == 18


def test_search_leads_to_the_text_of_the_window(look: Any) -> None:
    page = look(windows((23, 19)), "view=reading")
    page.get_by_role("combobox", name="Find a token").fill("b5")
    page.keyboard.press("Enter")
    chosen = page.locator(".reading-text .chosen")
    expect(chosen).to_have_text("b5")
    expect(page.get_by_label("Window")).to_have_value("1")


@pytest.mark.parametrize("language", ["de", "zh"])
def test_other_languages_have_one_word_for_a_window(language: str, look: Any) -> None:
    page = look(windows((23, 23)), f"view=head&head=1&row=5&column=1&lang={language}")
    page.locator(".map canvas").wait_for()
    word, other = {"de": ("Fenster", "Lauf"), "zh": ("窗口", "运行")}[language]
    shown = page.locator("#view").inner_text()
    assert shown.count(word) >= 2
    assert other not in shown.replace("Verlauf", "")
