"""Why a weight is large on pages of a text that was read in windows: q and k of some windows lie in the page."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from headscope import HeadStats, Observe, masks, observe
from headscope.report._viewer import exact_heads
from headscope.watching import About, Recording
from support.browser import Page as Shown
from support.browser import chromium, figure, in_a_browser, look
from support.html_pages import Page, stored_matrix

pytestmark = in_a_browser

LENGTHS = (23, 19, 21)
BINS = 7


def recorded(*held: int) -> Recording:
    """A text in three windows, with q and k of some of them."""
    torch.manual_seed(3)
    parts = []
    for length in LENGTHS:
        q, k = torch.randn(2, 1, 2, length, 5) * 2
        what = Observe(map=BINS, edges=2, keep_qk=True)
        parts.append(observe(q, k, mask=masks.causal(), what=what).named("0"))
    merged = parts[0].merge(parts[1]).merge(parts[2])
    part = merged.parts["0"]
    stats = HeadStats({"0": replace(part, tiles={run: part.tiles[run] for run in held})})
    texts = tuple(tuple(f"␣{letter}{n}" for n in range(length)) for letter, length in zip("abc", LENGTHS, strict=True))
    return Recording(stats, About("m", {}, {}, {"0": "self"}, None, 3, 3, run_texts=texts))


def written(recording: Recording, tmp_path: Path) -> tuple[Path, Page]:
    path = recording.save_html(tmp_path / "page.html")
    return path, Page(path.read_text(encoding="utf-8"))


def reasons(page: Page, head: int, window: int) -> dict[str, torch.Tensor]:
    """q · k, logits and weights [Q, K] of a window, in float64 from what the page holds."""
    (about,) = [each for each in page.data["exact"] if (each["head"], each["window"]) == (head, window)]
    queries, keys = about["lengths"]
    q, k = (stored_matrix(page, about[x], n, about["depth"]) for x, n in (("q", queries), ("k", keys)))
    lse = torch.from_numpy(np.frombuffer(page.exact(about["lse"]), "<f4").astype(float))
    dot = q @ k.T
    logit = dot * about["scale"]
    return {"dot": dot, "logit": logit, "p": (logit - lse[:, None]).exp().tril()}


def check_why(page: Shown, expected: dict[str, torch.Tensor], query: int, key: int, word: str) -> None:
    title = page.locator(".why p").get_by_text(f"query {query} “␣{word}{query}” → key {key} “␣{word}{key}”")
    title.wait_for()
    found = page.locator(".why [data-p]")
    for name, values in expected.items():
        assert float(found.get_attribute(f"data-{name}") or "nan") == pytest.approx(
            float(values[query, key]), rel=1e-6, abs=1e-6
        ), name


def test_a_weight_of_a_window_is_that_of_python(look: Any, tmp_path: Path) -> None:
    recording = recorded(1)
    path, parsed = written(recording, tmp_path)
    expected = reasons(parsed, 1, 1)
    originals = recording.stats.parts["0"].tiles[1](0, 19, 0, 19)[0, 1].double()
    torch.testing.assert_close(expected["p"], originals.nan_to_num(), rtol=1e-3, atol=1e-6)
    page = look(path, "view=head&head=1&window=1&row=3&column=1&cell=11,4")
    check_why(page, expected, 11, 4, "b")
    expect(page.locator(".why")).to_contain_text("(window 1)")
    expect(page.locator(".pinned")).to_contain_text(f"weight {figure(float(expected['p'][11, 4]))}")


def test_the_largest_weight_of_a_cell_is_explained_or_its_window_is_a_click_away(look: Any, tmp_path: Path) -> None:
    path, parsed = written(recorded(1), tmp_path)
    expected = reasons(parsed, 1, 1)
    page = look(path, "view=head&head=1")
    expect(page.locator(".why .held button")).to_have_text(["Go to window 1"])
    seen: set[bool] = set()
    for row in range(3, BINS):
        page.evaluate(f"location.hash = 'view=head&head=1&row={row}&column=1'")
        cell = page.locator(".pinned .cell")
        expect(cell).to_contain_text(f"query bin {row} (")
        query, key, window = map(int, re.findall(r"(?:query|key|window) (\d+)", cell.inner_text())[-3:])
        seen.add(window == 1)
        if window == 1:
            check_why(page, expected, query, key, "b")
            continue
        expect(page.locator(".why")).to_contain_text(f"is in window {window}, whose q and k")
        page.locator(".why .held button").click()
        bins = [[n for n in range(19) if ((n + 1) * BINS - 1) // 19 == at] for at in (row, 1)]
        part = expected["p"][bins[0]][:, bins[1]]
        at = divmod(int(part.argmax()), len(bins[1]))
        check_why(page, expected, bins[0][at[0]], bins[1][at[1]], "b")
        assert "window=1" in page.evaluate("new Promise((done) => setTimeout(() => done(location.hash), 400))")
    assert seen == {True, False}, "both were tried"


def test_one_window_alone_has_exact_cells(look: Any, tmp_path: Path) -> None:
    path, parsed = written(recorded(1), tmp_path)
    page = look(path, "view=head&head=1")
    page.locator(".legend").first.get_by_role("button", name="window 1").click()
    expect(page.locator(".exact")).to_contain_text(
        "each visible cell is one weight: queries 0–18, keys 0–18 of window 1"
    )
    canvas = page.locator(".map canvas")
    plot = page.evaluate("JSON.parse(document.querySelector('.map canvas').dataset.plot)")
    at = {name: plot[name] + plot["width"] * (n + 0.5) / 19 for name, n in (("x", 6), ("y", 14))}
    canvas.click(position=at)
    check_why(page, reasons(parsed, 1, 1), 14, 6, "b")
    page.locator(".legend").first.get_by_role("button", name="maximum").click()
    expect(page.locator(".legend").first).to_contain_text("merged over 3 windows")


def test_reading_lists_every_weight_of_a_window_and_explains_each(look: Any, tmp_path: Path) -> None:
    path, parsed = written(recorded(1), tmp_path)
    expected = reasons(parsed, 1, 1)
    page = look(path, "view=reading&head=1")
    page.get_by_role("button", name="Go to window 1").click()
    page.locator(".reading-text button").nth(12).click()
    order = expected["p"][12].argsort(descending=True).tolist()
    entries = page.locator(".reading-side .ranks li")
    expect(entries).to_have_count(10)
    assert [int(each.split()[0]) for each in entries.all_inner_texts()] == order[:10]
    check_why(page, expected, 12, order[0], "b")
    entries.nth(2).locator(".explain").click()
    check_why(page, expected, 12, order[2], "b")
    page.get_by_label("Lines").select_option("to")
    queries = expected["p"][:, 12].argsort(descending=True).tolist()
    expect(entries.first).to_contain_text(f"␣b{queries[0]}")


def test_the_page_holds_as_many_windows_as_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, page = written(recorded(0, 1, 2), tmp_path)
    assert {each["window"] for each in page.data["exact"]} == {0, 1, 2}
    sizes = len(page.script("exact"))
    monkeypatch.setattr(exact_heads, "MOST_BYTES_OF_WINDOWS", sizes - 100)
    path = recorded(0, 1, 2).save_html(tmp_path / "less.html")
    less = Page(path.read_text(encoding="utf-8"))
    assert len({each["window"] for each in less.data["exact"]}) == 2
    assert len(less.script("exact")) <= sizes - 100
    for each in less.data["exact"]:
        assert stored_matrix(less, each["k"], each["lengths"][1], 5).shape == (LENGTHS[each["window"]], 5)
