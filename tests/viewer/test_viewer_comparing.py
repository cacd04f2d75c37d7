"""Two heads, and one head in two recordings: one scale, one direction, and what can be read comes first."""

# ruff: noqa: F401, F811  # chromium, look and short are fixtures

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope import Observe, masks, observe
from headscope.comparing import Thresholds
from headscope.watching import About, Recording
from support.browser import (
    Page,
    chromium,
    figure,
    in_a_browser,
    look,
    numbers,
    save_figure,
    short,
    texts_of,
    thumbs,
    weight,
)

pytestmark = in_a_browser

HIDDEN = "Without the first token: the other weights of each row are scaled up, so that the row keeps its sum."


def scaled(factor: float) -> Recording:
    """Heads of which one is sharper by a factor."""
    q, k = torch.randn(2, 1, 3, 13, 8, generator=torch.Generator().manual_seed(11))
    q[:, 1] *= factor
    found = observe(q, k, mask=masks.causal(), what=Observe(map=13)).named("layers.0.attention")
    kinds: Any = dict.fromkeys(found.parts, "self")
    return Recording(found, About("m", {}, {}, kinds, None, 1, 1))


@pytest.fixture
def changed(look: Any, tmp_path: Path) -> Page:
    page = look(scaled(1.0).save_html(tmp_path / "two.html", against=scaled(5.0)))
    page.locator(".changed canvas[data-drawn]").nth(2).wait_for()
    return page


def test_changes_lead_with_what_can_be_read(changed: Page) -> None:
    summary = changed.locator(".changes-summary").inner_text()
    assert re.search(r"Most: .*head 1 \(sharper: (normalized )?entropy [\d.]+ → [\d.]+\)", summary), summary
    lines = changed.locator(".changed").first.locator(".what > span").all_inner_texts()
    assert lines[0].startswith("sharper: ")
    logits = [line.startswith(("max logit", "lse")) for line in lines]
    assert logits == sorted(logits), lines
    changed.locator(".changed").first.click()
    names = changed.locator(".change-table tr.moved th").all_inner_texts()
    assert "max logit" in names[-2:]
    assert "entropy" in names[0]


def test_the_first_screen_states_when_a_head_has_moved(changed: Page) -> None:
    hints = " ".join(changed.locator(".changes-summary ~ .hint").all_inner_texts())
    limits = Thresholds()
    (line,) = re.findall(r"Moved: .*?standard errors\.", hints)
    assert numbers(line) == [
        100 * limits.share,
        limits.entropy,
        limits.ratio,
        limits.logits,
        100 * limits.map,
        limits.errors,
    ]


def test_two_heads_have_one_scale_and_the_direction_of_changes(look: Any, short: Recording) -> None:
    page = look(short, "view=compare&layer=0&head=1&other=1&otherhead=2")
    page.locator(".map canvas").nth(2).wait_for()
    a, b, less = (numbers(each.inner_text())[:2] for each in page.locator(".legend").all())
    assert a == b, "A and B share one scale"
    assert less[0] == -less[1]
    difference = weight(short, 1, 2) - weight(short, 0, 1)
    assert less[1] == pytest.approx(np.abs(difference).max(), rel=6e-3)
    assert page.locator(".choice").last.inner_text() == "Difference (B − A)"
    assert page.locator("thead th").all_inner_texts()[1:] == ["A", "B", "B − A"]
    cells = page.locator("tbody tr").first.locator("td").all_inner_texts()
    before, after, change = (float(each.replace("−", "-").replace("+", "")) for each in cells)
    assert change == pytest.approx(after - before, abs=0.02)


@pytest.mark.parametrize("view", ["view=heads", "view=head", "view=compare"])
def test_a_hidden_first_token_is_stated(view: str, look: Any, short: Recording) -> None:
    page = look(short, f"{view}&sink=hidden")
    place = page.locator("#view > section > .hint, .legend").first
    place.wait_for()
    assert HIDDEN in page.locator("#view").inner_text().replace("\n", " ")
    of = {"view=heads": "all heads", "view=head": None, "view=compare": None}[view]
    if of is None:
        of = str(page.locator(".figure-menu > button").first.get_attribute("aria-label")).removeprefix("Figure of ")
    assert HIDDEN in " ".join(texts_of(save_figure(page, of)))


def test_without_hiding_nothing_is_stated(look: Any, short: Recording) -> None:
    page = look(short, "view=head")
    page.locator(".legend").first.wait_for()
    assert "Without the first token" not in page.locator("#view").inner_text()
