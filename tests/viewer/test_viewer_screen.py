"""The viewer's page on paper, on narrow screens and in other colours: all is there, and can be read."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from headscope import Observe, observe, trace, watch
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support import seed_modules
from support.browser import (
    Page,
    chromium,
    in_a_browser,
    long,
    look,
    numbers,
    place,
    recorded,
    save_figure,
    short,
    texts_of,
    thumbs,
    turn,
    wait_until_drawn,
)

pytestmark = in_a_browser


def of_layers(parts: dict[str, Any], kind: Any = "self") -> Recording:
    return Recording(HeadStats(parts), About("m", {}, {}, dict.fromkeys(parts, kind), None, 1, 1))


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 has it."""

    def light(colour: str) -> float:
        parts = [value / 255 for value in numbers(colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def style(page: Page, selector: str, name: str) -> list[str]:
    """What is computed for each element."""
    found = "([selector, name]) => [...document.querySelectorAll(selector)].map((e) => getComputedStyle(e)[name])"
    return page.evaluate(found, [selector, name])


# ---------------------------------------------------------------- paper


def test_what_is_printed_is_whole(look: Any, short: Recording) -> None:
    part = recorded(7, None, Observe(map=7)).stats.parts["layers.0.attention"]
    page = look(of_layers({f"layers.{n}.attention": part for n in range(12)}))
    thumbs(page)
    assert page.evaluate("document.querySelectorAll('.thumb')[35].getBoundingClientRect().top") > 1200
    page.wait_for_function("() => document.querySelectorAll('canvas[data-drawn]').length === 36", timeout=5000)
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    page.locator(".strip").first.wait_for()
    page.emulate_media(media="print")
    assert {*style(page, ".bar, .strip button, .map canvas", "printColorAdjust")} == {"exact"}
    page.get_by_role("tab", name="Statistics", include_hidden=True).dispatch_event("click")
    page.set_viewport_size({"width": 1000, "height": 700})  # a sheet on its side
    page.locator("table.every").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 1000
    assert style(page, "body", "page") == ["wide"]


# ---------------------------------------------------------------- narrow


def test_long_names_of_layers_fit_a_narrow_screen(look: Any) -> None:
    part = recorded(7, None, Observe(map=7)).stats.parts["layers.0.attention"]
    names = ["encoder.layers.0.attention_of_a_very_long_name", "decoder.layers.0.other_attention_with_a_long_name"]
    page = look(of_layers(dict.fromkeys(names, part)), "view=compare", width=360)
    page.locator(".map canvas").nth(2).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_names_of_layers_break_at_dots(look: Any) -> None:
    part = recorded(7, None, Observe(map=7)).stats.parts["layers.0.attention"]
    names = ["encoder.layers.0.self_attention", "decoder.layers.1.cross_attention"]
    page = look(of_layers(dict.fromkeys(names, part)))
    thumbs(page)
    lines = page.evaluate(
        """() => [...document.querySelectorAll(".layer h3")].map((name) => {
          const found = [], range = document.createRange();
          for (const node of name.childNodes) for (let n = 0; n < (node.nodeValue ?? "").length; n++) {
            range.setStart(node, n), range.setEnd(node, n + 1);
            const { top } = range.getBoundingClientRect();
            if (top !== found.at(-1)?.top) found.push({ top, text: "" });
            found.at(-1).text += node.nodeValue[n];
          }
          return found.map((line) => line.text);
        })"""
    )
    assert any(len(each) > 1 for each in lines)
    assert all(line.endswith((".", "_")) for each in lines for line in each[:-1]), lines


def test_numbers_along_the_map_are_whole(look: Any) -> None:
    q, k = torch.randn(1, 1, 12_000, 4), torch.randn(1, 1, 16, 4)
    parts = observe(q, k, kind="cross", what=Observe(map=16)).named("0").parts
    page = look(of_layers(parts, "cross"), "view=head&layer=0&head=0", width=360)
    page.locator(".map canvas").wait_for()
    texts = texts_of(save_figure(page, "the map of layer 0, head 0"))
    assert "10,000" in texts
    assert not any("…" in text for text in texts)


def test_figures_beside_a_map_are_all_in_sight(look: Any, long: Recording) -> None:
    page = look(long, "view=head&layer=0&head=1")
    table = page.locator(".beside .scroll")
    table.wait_for()
    assert table.evaluate("(table) => table.scrollWidth <= table.clientWidth")
    assert "gradient" in style(page, ".scroll", "maskImage")[0], "elsewhere a fade marks that there is more"


# ---------------------------------------------------------------- what is pointed at


def test_a_tooltip_is_in_sight(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=2", width=700)
    page.locator(".map canvas").wait_for()
    tip = page.locator(".tip")
    page.set_viewport_size({"width": 700, "height": 640})
    fits = "() => innerHeight - document.querySelector('.map canvas').getBoundingClientRect().bottom"
    page.wait_for_function(f"() => 0 < ({fits})() && ({fits})() < 60")
    for down in (0.02, 0.98):
        page.mouse.move(*place(page, down, 0.98))
        box = tip.bounding_box()
        assert box is not None
        assert box["width"] > 120
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 700
        assert 0 <= box["y"] <= box["y"] + box["height"] <= page.viewport_size["height"]
    page.keyboard.press("Escape")
    assert tip.count() == 0
    assert page.locator(".map canvas").is_visible(), "Escape closed the tooltip alone"
    page.mouse.move(*place(page, 0.5, 0.5))
    tip.wait_for()
    page.evaluate("scrollBy(0, 40)")
    tip.wait_for(state="detached")


# ---------------------------------------------------------------- colours


def test_texts_stand_out(look: Any, short: Recording) -> None:
    page = look(short)
    thumbs(page)
    assert page.locator(".weak").count() > 0
    grounds: list[str] = []
    for _ in each_scheme(page):
        grounds += style(page, "section", "backgroundColor")
        assert {*style(page, ".thumb small", "opacity")} == {"1"}
        assert min(contrast(colour, grounds[-1]) for colour in style(page, ".thumb small", "color")) >= 4.5
    assert len({*grounds}) == 2, "one light, one dark"
    for head in range(3):
        turn(page, f"view=head&layer=1&head={head}&row=9&column=5")
        page.locator(".strip").first.wait_for()
        for _ in each_scheme(page):
            chips = [style(page, ".strip button", name) for name in ("color", "backgroundColor")]
            assert min(contrast(*each) for each in zip(*chips, strict=True)) >= 4.5


def each_scheme(page: Page) -> Iterator[None]:
    """Show the page in each scheme of colours, one after the other."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        wait_until_drawn(page)
        yield


def test_forced_colours_leave_what_colours_say(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    page.locator(".strip").first.wait_for()
    before = style(page, ".strip button", "backgroundColor")
    page.emulate_media(forced_colors="active")
    assert style(page, ".strip button", "backgroundColor") == before
    assert "gradient" in style(page, ".bar", "backgroundImage")[0]
    tabs = style(page, "[role=tab]", "backgroundColor")
    assert tabs.count(tabs[1]) == 1, "the selected one is told from the others"


def test_stacked_marks_stay_on_their_chip(look: Any) -> None:
    texts = ("a" + "\u0301" * 40, *"bcdefg")
    page = look(recorded(7, texts, Observe(map=7, tokens=torch.arange(7))), "view=head")
    page.locator(".strip").first.wait_for()
    assert {*style(page, ".strip button", "overflow")} <= {"hidden", "clip"}


# ---------------------------------------------------------------- first colours


@pytest.mark.parametrize(
    ("length", "bins", "texts", "scale"), [(7, 7, 2, "linear"), (67, 67, 1, "linear"), (67, 13, 1, "log")]
)
def test_colours_are_linear_where_each_cell_is_one_pair(
    look: Any, length: int, bins: int, texts: int, scale: str
) -> None:
    q = torch.randn(texts, 3, length, 8, generator=torch.Generator().manual_seed(3))
    part = observe(q, q, what=Observe(map=bins)).parts["0"]
    page = look(of_layers({"layer": part}))
    thumbs(page)
    assert page.get_by_label("Scale").input_value() == scale


def test_an_unusual_step_stands_out(look: Any, tmp_path: Path) -> None:
    module, x = seed_modules.FoldedHeads(6, 2), torch.randn(2, 7, 6)
    with watch(module) as recording:
        module(x)
    page = look(recording.save_html(tmp_path / "steps.html", trace=trace(module, x)), "view=trace")
    notes = page.locator(".step .note")
    assert notes.count() == 1
    assert "! unusual: divided by √E" in notes.inner_text()
