"""The weight between named segments: of one head as a table, of all heads as a picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from playwright.sync_api import expect

from headscope import Observe, Segments, masks, observe
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import chromium, in_a_browser, look

__all__ = ["chromium", "look"]  # fixtures

pytestmark = in_a_browser

NAMES = ["system", "<b>document</b>", "question"]
IDS = torch.tensor([0] * 4 + [1] * 7 + [-1] * 2 + [2] * 6)


@pytest.fixture(scope="module")
def recording() -> Recording:
    parts = {}
    for layer in range(2):
        q, k = 2 * torch.randn(2, 1, 3, len(IDS), 8, generator=torch.Generator().manual_seed(layer))
        what = Observe(segments=Segments(NAMES, IDS), map=4)
        parts |= observe(q, k, mask=masks.causal(), what=what).named(f"layers.{layer}").parts
    return Recording(HeadStats(parts), About("m", {}, {}, dict.fromkeys(parts, "self"), None, 1, 1))


def share(text: str) -> float:
    return 0.0 if text.startswith("<") else float(text.split()[0]) / 100


def test_a_head_has_the_table_of_its_segments(look: Any, recording: Recording) -> None:
    page = look(recording, "view=head&layer=1&head=2")
    table = page.locator(".segments table")
    assert table.locator("thead th").all_inner_texts() == ["query in", *NAMES]
    mass = recording.stats.parts["layers.1"].segments
    assert mass is not None
    for n, row in enumerate(table.locator("tbody tr").all()):
        for m, cell in enumerate(row.locator("td").all()):
            assert share(cell.inner_text()) == pytest.approx(float(mass.mean[2, n, m]), abs=6e-3)


def test_all_heads_are_shown_by_the_weight_from_one_segment_to_another(look: Any, recording: Recording) -> None:
    page = look(recording, "view=segments")
    page.get_by_label("attend to").select_option(NAMES[1])
    page.wait_for_url("**segmentTo=1*")
    masses = [part.segments for part in recording.stats.parts.values()]
    expected = [float(mass.mean[head, 2, 1]) for mass in masses if mass for head in range(3)]
    cells = page.locator(".segment-heads button").all_inner_texts()
    assert [share(text) for text in cells] == pytest.approx(expected, abs=6e-3)
    best = max(range(6), key=expected.__getitem__)
    expect(page.locator(".ranks button").first).to_have_text(f"layer {best // 3}, head {best % 3}")
    page.locator(".ranks button").first.click()
    expect(page.locator("#head-title")).to_have_text(f"Layer {best // 3}, head {best % 3}")
    assert page.locator("#view b").count() == 0 or NAMES[1] in page.locator("#view").inner_text()


def test_a_segment_without_rows_has_no_share(look: Any) -> None:
    q = torch.randn(1, 1, 3, 4)
    found = observe(q, torch.randn(1, 1, 9, 4), what=Observe(segments=Segments(["a", "b"], [0] * 6 + [1] * 3)))
    page = look(
        Recording(found.named("l"), About("m", {}, {}, {"l": "self"}, None, 1, 1)), "view=segments&segmentFrom=0"
    )
    assert page.locator(".segment-heads button").all_inner_texts() == ["–"]


def test_without_segments_there_is_no_such_view(look: Any) -> None:
    q = torch.randn(1, 1, 5, 4)
    page = look(Recording(observe(q, q).named("l"), About("m", {}, {}, {"l": "self"}, None, 1, 1)))
    assert page.get_by_role("tab", name="Segments").count() == 0
