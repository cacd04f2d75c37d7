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


def mean_of(recording: Recording, head: int, name: str) -> float:
    return float(recording.stats.parts["layers.0.attention"].moments[name].mean[head])


def test_on_a_page_of_two_recordings_compare_shows_one_head_of_a_and_of_b(changed: Page) -> None:
    changed.get_by_role("tab", name="Compare").click()
    changed.locator(".map canvas").nth(2).wait_for()
    labels = [each.split("\n")[0].strip() for each in changed.locator(".choice label").all_inner_texts()]
    assert [label[0] for label in labels] == ["A", "B"]
    places = [each.input_value() for each in changed.locator(".choice select").all()]
    assert f"b.{places[0]}" == places[1]
    changed.locator(".choice select").first.select_option("0.1")
    assert changed.locator(".choice select").last.input_value() == "b.0.1", "the second one follows"
    line = changed.locator("tbody tr", has_text="max weight").first
    line.get_by_text(figure(mean_of(scaled(5.0), 1, "max_weight")), exact=True).wait_for()
    assert line.locator("td").first.inner_text() == figure(mean_of(scaled(1.0), 1, "max_weight"))


def test_two_heads_of_a_are_named_so_that_nobody_takes_them_for_b(changed: Page) -> None:
    changed.get_by_role("tab", name="Compare").click()
    changed.locator(".choice select").last.select_option("0.2")
    changed.get_by_role("columnheader", name="second − first").wait_for()
    assert [each.split(maxsplit=1)[0][0] for each in changed.locator(".choice label").all_inner_texts()] == ["A", "A"]
    assert "B − A" not in changed.locator("#view").inner_text()


@pytest.mark.parametrize("view", ["All heads", "One head", "Statistics"])
def test_each_view_of_one_recording_names_it_and_switches_to_the_other(view: str, changed: Page) -> None:
    changed.get_by_role("tab", name=view).click()
    group = changed.get_by_role("group", name="This view shows")
    assert [each.get_attribute("aria-pressed") for each in group.get_by_role("button").all()] == ["true", "false"]
    shown = changed.locator("#view").inner_text()
    group.get_by_role("button", name=re.compile("^B")).click()
    assert [each.get_attribute("aria-pressed") for each in group.get_by_role("button").all()] == ["false", "true"]
    if view != "All heads":
        head = changed.evaluate("new URLSearchParams(location.hash.slice(1)).get('head')") or "1"
        value = figure(mean_of(scaled(5.0), int(head), "max_weight"))
        changed.locator("#view").get_by_text(value, exact=True).first.wait_for()
    group.get_by_role("button", name=re.compile("^A")).click()
    changed.wait_for_function("(before) => document.querySelector('#view').innerText === before", arg=shown)


def test_the_address_names_the_recording(look: Any, tmp_path: Path) -> None:
    path = scaled(1.0).save_html(tmp_path / "two.html", against=scaled(5.0))
    page = look(path, "view=head&layer=0&head=1&side=b")
    of_b = figure(mean_of(scaled(5.0), 1, "max_weight"))
    page.locator("tr[data-name=max_weight]").get_by_text(of_b, exact=True).first.wait_for()
    assert page.get_by_role("button", name=re.compile("^B")).get_attribute("aria-pressed") == "true"


def test_a_recording_of_another_length_is_not_shown_as_this_one(look: Any, tmp_path: Path) -> None:
    q, k = torch.randn(2, 1, 3, 17, 8, generator=torch.Generator().manual_seed(11))
    found = observe(q, k, mask=masks.causal(), what=Observe(map=17)).named("layers.0.attention")
    kinds: Any = dict.fromkeys(found.parts, "self")
    other = Recording(found, About("m", {}, {}, kinds, None, 1, 1))
    page = look(scaled(1.0).save_html(tmp_path / "two.html", against=other), "view=head&side=b")
    button = page.get_by_role("button", name=re.compile("^B"))
    button.wait_for()
    assert button.get_attribute("aria-disabled") == "true"
    assert page.get_by_role("button", name=re.compile("^A")).get_attribute("aria-pressed") == "true"
    assert "lengths" in page.locator(".whose").inner_text()


def test_a_head_that_moved_by_its_values_alone_states_so(look: Any, tmp_path: Path) -> None:
    q, k, v = torch.randn(3, 1, 3, 13, 8, generator=torch.Generator().manual_seed(11))
    later = v.clone()
    later[:, 1] *= 4
    kinds: Any = {"layers.0.attention": "self"}
    a, b = (
        Recording(
            observe(q, k, each, mask=masks.causal(), what=Observe(map=13)).named("layers.0.attention"),
            About("m", {}, {}, kinds, None, 1, 1),
        )
        for each in (v, later)
    )
    page = look(a.save_html(tmp_path / "two.html", against=b))
    assert "1 of 3 heads moved" in page.locator(".changes-summary").inner_text()
    assert "only the value norm, not the attention" in page.locator(".changed").first.inner_text()
    page.locator(".changed").first.click()
    assert "only the value norm" in page.locator(".change-head").inner_text()


def test_the_legend_of_a_difference_states_that_it_is_linear(changed: Page) -> None:
    changed.locator(".changed").first.click()
    changed.locator(".map canvas").nth(2).wait_for()
    assert "logarithmic" not in changed.locator("#view").inner_text()
    changed.evaluate("location.hash += '&scale=log'")
    changed.locator(".legend").last.get_by_text("This scale is linear").wait_for()
    assert changed.get_by_text("This scale is linear").count() == 1
