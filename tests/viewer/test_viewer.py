"""The viewer's page in a real browser: what is on the screen is what the recording says, and nothing else happens."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import expect

from headscope import Observe, observe
from headscope.report import image_sheet, save
from headscope.report.sheet import visible
from headscope.report.viewer import render_recording
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.all_views import write_history, write_pair
from support.browser import (
    BINS,
    LONG,
    BrowserContext,
    Watched,
    chromium,
    figure,
    in_a_browser,
    long,
    look,
    near,
    numbers,
    open_menu,
    place,
    recorded,
    save_figure,
    serving,
    short,
    texts_of,
    thumbs,
    turn,
    weight,
    zoom_of,
)
from support.html_pages import HOSTILE
from support.sheets import TRACE, digit, picture, softmax, text, words

pytestmark = in_a_browser


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize("kind", ["short", "long", "text", "image", "no map"])
def test_every_view_opens_without_a_word_or_a_request(
    kind: str, look: Any, short: Recording, long: Recording, tmp_path: Path
) -> None:
    if kind in ("text", "image"):
        found: Any = save(text(HOSTILE, trace=TRACE) if kind == "text" else picture(), tmp_path / "sheet.html")
    elif kind == "no map":
        found = recorded(7, None, Observe())
    else:
        found = short if kind == "short" else long
    page = look(found, "layer=999&head=-1&zoom=NaN,1,1&row=1e9&sort=__proto__&least=Infinity&pool=x&view=toString")
    assert len(thumbs(page)) == 6, "what an address says wrongly is as at first"
    tabs = page.get_by_role("tab").all()
    assert len(tabs) == {"no map": 4, "text": 6}.get(kind, 5)
    for tab in tabs:
        tab.click()
        assert page.get_by_role("tabpanel").get_by_role("heading").first.is_visible()
    assert page.locator("script").count() == 3 + (kind in ("short", "long")), "no text became a script"
    assert "attention is not explanation" in page.locator("footer").inner_text()


def test_hostile_tokens_stay_text(look: Any, short: Recording) -> None:
    page = look(short, "view=head&row=12&column=0")
    chips = page.locator(".strip").first.locator("button")
    chips.first.wait_for()
    assert chips.all_inner_texts() == [visible(token) for token in HOSTILE]
    assert page.locator("h1").inner_text() == "a <model>"
    assert page.locator("img, iframe, object").count() == 0
    assert visible(HOSTILE[12], limit=200) in page.locator(".pinned").inner_text()


def test_it_fits_a_narrow_screen(look: Any, short: Recording, tmp_path: Path) -> None:
    others = [write_pair(tmp_path), write_history(tmp_path)]
    for found in (short, save(picture(), tmp_path / "sheet.html"), *others):
        page = look(found, width=360)
        for width in (360, 240):
            page.set_viewport_size({"width": width, "height": 900})
            for tab in page.get_by_role("tab").all():
                tab.click()
                fits = "width => document.documentElement.scrollWidth === width"  # soon
                assert page.wait_for_function(fits, arg=width, timeout=20000)


def test_light_and_dark(look: Any, short: Recording) -> None:
    page = look(short, scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    open_menu(page).get_by_label("Theme").select_option("light")
    light = page.evaluate(ground)
    assert sum(numbers(dark)) < 100 < 700 < sum(numbers(light))


# ---------------------------------------------------------------- the grid and the table


def test_heads_are_sorted_and_filtered_by_their_figures(look: Any, short: Recording) -> None:
    page = look(short)
    entropy = {
        f"layer {layer}, head {head}": short.stats[layer, head, "entropy"].mean
        for layer in range(2)
        for head in range(3)
    }
    open_menu(page).get_by_label("Sort by").select_option("entropy")
    found = thumbs(page)
    ordered = sorted(entropy, key=lambda name: -entropy[name])
    assert [label.split(", ")[:2] for label in found] == [name.split(", ") for name in ordered]
    assert [label.rsplit(" ", 1)[1] for label in found] == [figure(entropy[name]) for name in ordered]
    page.get_by_label("Order").select_option("smallest first")
    assert [label.split(", ")[:2] for label in thumbs(page)] == [name.split(", ") for name in ordered[::-1]]
    page.get_by_label("Filter").select_option("entropy")
    limit = (entropy[ordered[1]] + entropy[ordered[2]]) / 2
    page.get_by_label("limit").fill(f"{limit}")
    assert len(thumbs(page)) == 2
    page.get_by_label("at least or at most").select_option("≤")
    assert len(thumbs(page)) == 4
    page.wait_for_url(re.compile("under=1"))
    again = look(short, urlsplit(page.url).fragment)
    assert thumbs(again) == thumbs(page), "the address leads back"


def test_the_table_and_its_csv_have_the_figures(look: Any, short: Recording) -> None:
    page = look(short, "view=table")
    headings = page.locator("table.every thead th").all_inner_texts()
    first = page.locator("table.every tbody tr").nth(4).locator("th, td").all_inner_texts()
    shown = dict(zip(headings, first, strict=True))
    summary = short.stats[1, 1, "entropy"]
    assert (shown["head"], shown["entropy"]) == ("layer 1, head 1", figure(summary.mean))
    assert shown["self"] == figure(short.stats[1, 1, "self"].mean)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    lines = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    assert [(line["layer"], line["head"]) for line in lines][3] == ("layers.1.attention", "0")
    for name in short.stats.names:
        mean = short.stats[1, 1, name].mean
        assert lines[4][name] == "" if np.isnan(mean) else float(lines[4][name]) == pytest.approx(mean, rel=1e-6), name


def test_keys_move_among_heads_and_layers(look: Any, short: Recording) -> None:
    page = look(short)
    thumbs(page)
    page.locator(".thumb").first.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("layer 1, head 2")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus is visible"
    page.keyboard.press("Enter")
    heading = page.get_by_role("heading", level=2)
    assert heading.inner_text() == "Layer 1, head 2"
    page.locator("body").press("ArrowUp")
    page.locator("body").press("ArrowLeft")
    heading.filter(has_text="Layer 0, head 1").wait_for()
    page.get_by_role("tab", selected=True).press("ArrowRight")
    assert page.get_by_role("tab", selected=True).inner_text() == "Reading"


def test_tab_leads_to_one_head_that_the_filters_leave(look: Any, short: Recording) -> None:
    stop = ".thumb[tabindex='0']"
    page = look(short, "layer=0&head=1")
    assert page.locator(stop).get_attribute("aria-label") == thumbs(page)[1]
    one, other = (short.stats[0, head, "entropy"].mean for head in (0, 1))
    page = look(short, f"layer=0&head=0&by=entropy&least={(one + other) / 2}&under={int(other < one)}")
    left = thumbs(page)
    assert not any(label.startswith("layer 0, head 0") for label in left)
    assert page.locator(stop).get_attribute("aria-label") == left[0]


def test_each_small_picture_says_that_its_scale_is_its_own(look: Any, short: Recording, tmp_path: Path) -> None:
    for found in (short, save(picture(), tmp_path / "sheet.html")):
        assert "colour scale" in look(found).locator("#heads-title + .hint").inner_text()
    assert "scale" not in look(recorded(7, None, Observe())).locator("#heads-title + .hint").inner_text()


# ---------------------------------------------------------------- one head


def test_a_cell_is_pointed_at_and_pinned(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=2")
    page.locator(".map canvas").wait_for()
    length = len(HOSTILE)
    p = weight(short, 1, 2)
    at = place(page, (9 + 0.5) / length, (5 + 0.5) / length)
    page.mouse.move(*at)
    tip = page.locator(".tip")
    assert tip.inner_text().startswith(f"query 9 “{visible(HOSTILE[9], limit=200)}” → key 5 “😀”")
    near(float(tip.locator("b").inner_text()), p[9, 5])
    page.mouse.click(*at)
    near(float(page.locator(".pinned p b").inner_text()), p[9, 5])
    page.wait_for_url(re.compile("row=9&column=5"))
    hidden = place(page, 2.5 / length, 7.5 / length)
    page.mouse.move(*hidden)
    assert tip.inner_text().endswith(": masked")
    near(numbers(page.locator(".strip").first.locator("button").nth(3).get_attribute("title"))[-1], p[9, 3])
    near(numbers(page.locator(".strip").nth(1).locator("button").nth(12).get_attribute("title"))[-1], p[12, 5])
    chip, titles = page.locator(".strip").first.locator("button").nth(5), page.locator(".pinned h4")
    chip.hover()
    best = int(np.nanargmax(p[5]))
    previewed = titles.all_inner_texts()
    assert previewed[0] == "😀 (5) attends to"
    near(numbers(page.locator(".strip").nth(1).locator("button").nth(8).get_attribute("title"))[-1], p[8, best])
    chip.click()  # what the preview showed is now selected
    page.wait_for_url(re.compile(f"row=5&column={best}"))
    assert titles.all_inner_texts() == previewed
    chip.click()  # and no longer, although the pointer is still there
    page.wait_for_url(lambda url: "row=" not in url)
    assert titles.all_inner_texts() != previewed
    chip.click()
    page.mouse.move(1, 1)
    page.get_by_text("Strongest connections").click()
    edge = next(edge for edge in short.stats[1].edges.of(2) if (edge.i, edge.j) != (0, 0))
    assert page.locator(".largest button b").first.inner_text() == figure(edge.p)
    page.get_by_role("button", name="Clear the selection").click()
    assert page.locator(".pinned p b").count() == 0


def test_without_the_sink_rows_are_renormalised(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=0&head=1&row=11&column=3&sink=hidden")
    p = weight(short, 0, 1)
    shown = page.locator(".pinned .cell").inner_text()
    near(numbers(shown)[-1], p[11, 3] / (1 - p[11, 0]))


def test_a_pooled_map_says_that_it_is(look: Any, long: Recording, tmp_path: Path) -> None:
    page = look(long.save_html(tmp_path / "pooled.html", exact=()), "view=head&layer=1&head=0&row=10&column=2")
    cell = page.locator(".pinned .cell")
    cell.wait_for()
    rows, columns = (slice(n * LONG // BINS, (n + 1) * LONG // BINS) for n in (10, 2))
    p = weight(long, 1, 0)[rows, columns]
    mean, largest = (float(each.inner_text()) for each in cell.locator("b").all())
    near(mean, p.mean())
    near(largest, p.max())
    query, key = np.unravel_index(p.argmax(), p.shape)
    assert f"at query {rows.start + query} “␣w{rows.start + query}” → key {columns.start + key}" in cell.inner_text()
    assert "Each cell averages 8–9 × 8–9 pairs of query and key." in page.locator(".legend").first.inner_text()
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_text("Zooming in adds no detail.").wait_for()
    top = page.locator(".largest li b").all()[:3]
    kept = long.stats.parts["layers.1.attention"].kept[0]
    for shown, wanted in zip(top, kept.values["top_weights"][0, 0, rows.start].tolist(), strict=True):
        near(float(shown.inner_text()), wanted)


def test_strips_hold_the_weights_near_the_diagonal(look: Any, long: Recording) -> None:
    page = look(long, "view=head&layer=0&head=2")
    band = page.locator("canvas.band[data-drawn]")
    band.wait_for()
    band.scroll_into_view_if_needed()
    box = band.bounding_box()
    assert box is not None
    side = (box["width"] - 58) / LONG
    p = weight(long, 0, 2)
    readout = page.locator(".strips .readout")
    page.mouse.move(box["x"] + 58 + 40.5 * side, box["y"] + 3.5 * 11)
    assert "query 40 “␣w40” → key 37 “␣w37”" in readout.inner_text()
    assert numbers(readout.inner_text())[-1] == pytest.approx(p[40, 37], abs=5e-3)
    page.mouse.move(box["x"] + 58 + 90.5 * side, box["y"] + 33.5 * 11 + 8)
    assert "→ key 1 “␣w1”" in readout.inner_text()
    assert numbers(readout.inner_text())[-1] == pytest.approx(p[90, 1], abs=5e-3)
    path = save_figure(page, "the nearby tokens")
    assert path.name == "headscope-layer-0-head-2-strip.svg"
    cells = [element for element in ElementTree.parse(path).iter() if element.tag.endswith("rect")]
    assert len({cell.get("fill") for cell in cells}) > 10, "a colour for each weight"
    assert {"itself", "key 0", "distance of the key", "weight, log"} <= set(texts_of(path))


def test_strips_have_a_legend_and_the_name_of_their_layer(look: Any) -> None:
    what = Observe(map=5, keep_qk=True)
    parts = {
        name: recorded(length, None, what).stats.parts["layers.0.attention"] for name, length in (("0", 300), ("1", 20))
    }
    kinds: Any = dict.fromkeys(parts, "self")
    page = look(Recording(HeadStats(parts), About("m", {}, {}, kinds, None, 1, 1)), "view=head&layer=0&head=1")
    band, strips = page.locator("canvas.band[data-drawn]"), page.locator(".strips")
    label = r"Nearby tokens of layer {}, head 1, queries 0 to {}. Strongest: query .+. Arrow keys move to a weight."
    expect(band).to_have_attribute("aria-label", re.compile(label.format(0, 99)))
    assert strips.locator(".legend").inner_text().split("\n")[:3] == ["weight, log", "≤ 0.000100", "1"]
    strips.get_by_label("Queries shown").select_option("200")
    page.get_by_role("button", name="next layer").click()
    page.get_by_role("heading", name="Layer 1, head 1").wait_for()
    expect(band).to_have_attribute("aria-label", re.compile(label.format(1, 19)))
    page.get_by_role("button", name="previous layer").click()
    page.get_by_role("heading", name="Layer 0, head 1").wait_for()
    assert strips.get_by_label("Queries shown").input_value() == "200"


def test_a_map_of_calls_of_different_lengths_has_axes_of_bins(look: Any) -> None:
    what = Observe(map=8)
    both = [recorded(length, None, what).stats for length in (16, 64)]
    kinds: Any = dict.fromkeys(both[0].parts, "self")
    page = look(
        Recording(both[0].merge(both[1]), About("m", {}, {}, kinds, None, 2, 2)),
        "view=head&layer=0&head=1&row=7&column=0",
    )
    assert page.locator(".pinned .cell").inner_text().startswith("query bin 7 (0–7) → key bin 0 (0–7)")
    texts = texts_of(save_figure(page, "the map of layer 0, head 1"))
    assert texts.count("query bin") == texts.count("key bin") == 1
    assert [text for text in texts if text.isdecimal()].count("7") == 2, "bins along both axes"


def test_zooming_panning_and_showing_all(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=1")
    page.locator(".map canvas").wait_for()
    page.mouse.move(*place(page, 0.75, 0.25))
    for _ in range(4):
        page.mouse.wheel(0, -240)
    page.wait_for_url(lambda url: zoom_of(url)[0] > 3.5)  # all four turns of the wheel
    scale, x, y = zoom_of(page.url)
    assert x < 0.45 < 0.55 < y
    page.mouse.down()
    page.mouse.move(*place(page, 0.75, 0.45), steps=3)
    page.mouse.up()
    page.wait_for_url(lambda url: zoom_of(url)[1] < x)
    assert zoom_of(page.url)[::2] == [scale, y], "it went aside alone"
    assert page.get_by_text("Click a cell or a token to select it.").is_visible(), "a drag selects nothing"
    page.get_by_role("button", name="Show all").click()
    page.wait_for_url(lambda url: "zoom=" not in url)


def test_two_heads_are_compared(look: Any, short: Recording) -> None:
    page = look(short, "view=compare&layer=0&head=1&other=1&otherhead=2")
    canvas = page.locator(".map canvas")
    canvas.nth(2).wait_for()
    assert page.get_by_label("Head B").input_value() == "1.2"
    at = page.locator("tbody tr th").all_inner_texts().index("entropy")
    one, other = (short.stats[layer, head, "entropy"].mean for layer, head in ((0, 1), (1, 2)))
    change = figure(float(f"{other:.7g}") - float(f"{one:.7g}")).replace("-", "−")
    assert page.locator("tbody tr").nth(at).locator("td").all_inner_texts() == [figure(one), figure(other), change]
    box, plot = canvas.nth(2).bounding_box(), page.evaluate("document.querySelectorAll('.map canvas')[2].dataset.plot")
    x, y, width = (numbers(plot)[n] for n in (0, 1, 2))
    page.mouse.move(box["x"] + x + 4.5 / 13 * width, box["y"] + y + 8.5 / 13 * width)
    wanted = weight(short, 1, 2)[8, 4] - weight(short, 0, 1)[8, 4]
    assert numbers(page.locator(".tip").inner_text())[-1] == pytest.approx(wanted, abs=1e-4)


def test_a_served_page_computes_what_one_zooms_into(chromium: BrowserContext, long: Recording, tmp_path: Path) -> None:
    with serving(long, tmp_path / "long.safetensors") as server:
        watched = Watched(chromium, f"{server.url}#view=head&layer=1&head=2&zoom=6,0.4,0.6")
        page = watched.page
        page.get_by_text("Exact: each visible cell is one weight").wait_for()
        shown = re.findall(r"[\d]+", page.locator(".exact").inner_text())
        i0, i1, j0, j1 = map(int, shown)
        assert (i0, j0) == (int((0.6 - 1 / 12) * LONG), int((0.4 - 1 / 12) * LONG))
        page.mouse.move(*place(page, 0.5, 0.5))
        tip = page.locator(".tip").inner_text()
        query, key = (int(found) for found in re.findall(r"(?:query|key) (\d+)", tip))
        assert (query, key) == (int(0.6 * LONG), int(0.4 * LONG))
        assert i0 <= query <= i1
        assert j0 <= key <= j1
        assert figure(float(np.float32(weight(long, 1, 2)[query, key]))) in tip
        assert "exact" in tip
        page.mouse.click(*place(page, 0.5, 0.5))
        listed = page.get_by_label("Query", exact=True).input_value()
        assert listed == str(query), "the largest weights are of the pinned query"
        band = page.locator("canvas.band[data-drawn]")
        band.scroll_into_view_if_needed()
        box = band.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 58 + 40.5 * (box["width"] - 58) / LONG, box["y"] + 3.5 * 11)
        near(
            numbers(page.locator(".strips .readout").inner_text())[-1],
            (round(weight(long, 1, 2)[40, 37] ** 0.5 * 254) / 254) ** 2,
        )
        assert watched.said == []
        assert all(url.startswith(server.url) for url in watched.asked)
        watched.close()


@pytest.mark.parametrize(  # fewer bins than either length, and more than the shorter one
    "bins", [8, pytest.param(BINS, marks=pytest.mark.long), 31], ids=lambda bins: f"{bins} bins"
)
def test_of_calls_of_different_lengths_the_page_zooms_into_the_last(
    chromium: BrowserContext, bins: int, tmp_path: Path
) -> None:
    both = [recorded(length, None, Observe(map=bins, keep_qk=True)) for length in (61, 29)]
    found = Recording(both[0].stats.merge(both[1].stats), both[0].about)
    with serving(found, tmp_path / "both.safetensors") as server:
        watched = Watched(chromium, f"{server.url}#view=head&layer=1&head=2&zoom=3,0.4,0.6")
        page = watched.page
        exact = page.get_by_text("Exact: each visible cell is one weight")
        exact.wait_for()
        assert exact.inner_text().endswith("queries 12–22, keys 6–16 of the first input of the last call.")
        page.mouse.move(*place(page, 0.5, 0.5))
        query, key = int(0.6 * 29), int(0.4 * 29)
        p = weight(both[1], 1, 2)
        tip = page.locator(".tip").inner_text()
        assert tip.startswith(f"query {query} → key {key}")
        assert figure(float(np.float32(p[query, key]))) in tip
        band = page.locator("canvas.band[data-drawn]")
        assert "These are weights of the first input of the last call." in page.locator(".strips .legend").inner_text()
        band.scroll_into_view_if_needed()
        box = band.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 58 + 20.5 * (box["width"] - 58) / 29, box["y"] + 3.5 * 11)
        readout = page.locator(".strips .readout").inner_text()
        assert readout.startswith("query 20 → key 17: ")
        near(numbers(readout)[-1], (round(p[20, 17] ** 0.5 * 254) / 254) ** 2)
        texts = texts_of(save_figure(page, "the map of layer 1, head 2"))
        assert {"query of the last call", "key of the last call", "12", "21", "15"} <= set(texts)
        page.get_by_role("button", name="Show all").click()
        exact.wait_for(state="detached")
        assert watched.said == []
        watched.close()


def test_of_calls_of_different_lengths_strips_are_those_of_the_last(look: Any, tmp_path: Path) -> None:
    both = [recorded(length, None, Observe(map=8, keep_qk=True)) for length in (300, 200)]
    found = Recording(both[0].stats.merge(both[1].stats), both[0].about)
    path = found.save_html(tmp_path / "both.html", strips=[("layers.0.attention", 1)])
    page = look(path, "view=head&layer=0&head=1&row=4&column=0")
    band = page.locator("canvas.band[data-drawn]")
    label = "Nearby tokens of layer 0, head 1, queries 50 to 149. Strongest: "
    assert str(band.get_attribute("aria-label")).startswith(label), "bin 4 of 8 is in the middle"
    assert "These are weights of the first input of the last call." in page.locator(".strips .legend").inner_text()


# ---------------------------------------------------------------- images, steps, notebooks


def test_a_patch_is_chosen_on_an_image(look: Any, tmp_path: Path) -> None:
    sheet = picture()
    page = look(save(sheet, tmp_path / "sheet.html"), "view=head&layer=1&head=0")
    page.locator(".patches[data-drawn]").nth(3).wait_for()
    box = page.locator(".patches").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 4.5 / 7 * box["width"], box["y"] + 3.5 / 5 * box["height"])
    caption = page.locator("figcaption").nth(1).inner_text()
    row = sheet.weights[1][0][3 * 7 + 4]
    best = int(row.argmax())
    assert caption.startswith(
        f"Where the framed patch row 3, column 4 attends. Most: row {best // 7}, column {best % 7}, "
    )
    near(numbers(caption)[4], float(row.max()))
    page.locator(".patches").nth(1).hover()
    readout = page.locator(".pictures + .readout")
    assert readout.inner_text().startswith("row 3, column 4 → row 2, column 3: ")
    page.locator(".patches").nth(1).press("ArrowLeft")
    assert readout.inner_text() == "Hover over a patch to read its weight."
    assert "Where the framed patch row 3, column 3 attends." in page.locator("figcaption").nth(1).inner_text()
    assert "The line marks × 1, an even spread." in page.locator(".beside").inner_text()


def test_a_sentence_names_the_region_that_a_head_looks_at(look: Any, tmp_path: Path) -> None:
    """Where the ratio to chance is shown as 1.2 or more; the thumbnail then has the region, too."""
    sheet = picture()
    looks: list[Any] = [("edges", 1.16), ("far", 1.14), None][: sheet.heads]
    page = look(save(replace(sheet, looks=[looks] * sheet.layers), tmp_path / "sheet.html"))
    names = [
        str(each.get_attribute("aria-label")).partition(", ")[2].partition(", ")[2]
        for each in page.locator(".thumb").all()
    ]
    assert names[:2] == ["edges × 1.2", "–"]
    for head, sentence in enumerate(
        (
            "Looks at edges (1.2 × chance): 1.2 times as much as an even spread.",
            "Looks at none of the regions much more than an even spread does.",
        )
    ):
        turn(page, f"view=head&layer=0&head={head}")
        assert page.locator(".likeness").inner_text() == sentence


def test_keys_before_the_patches_are_no_patches(look: Any, tmp_path: Path) -> None:
    recording = recorded(2 + 12, None, Observe(map=14, keep_qk=True))
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    path = recording.save_html(tmp_path / "vit.html", image=pixels, grid=(3, 4))
    page = look(path, "view=head&layer=0&head=1&row=13&column=13")
    buttons = page.locator(".specials button")
    buttons.first.wait_for()
    p = weight(recording, 0, 1)
    assert [button.inner_text().split()[0] for button in buttons.all()] == ["CLS", "register"]
    near(numbers(buttons.first.inner_text())[-1], p[13, 0])
    buttons.nth(1).click()
    assert page.locator("figcaption").nth(1).inner_text().startswith("Where the framed register 1 attends.")


def test_the_mean_picture_names_all_queries_that_it_averages(look: Any, tmp_path: Path) -> None:
    q, k = 2 * torch.randn(2, 1, 1, 2 + 12, 8, generator=torch.Generator().manual_seed(0))
    found = observe(q, k, what=Observe(map=14)).named("a")
    recording = Recording(found, About("m", {}, {}, {"a": "self"}, None, 1, 1))
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    path = recording.save_html(tmp_path / "vit.html", image=pixels, grid=(3, 4))
    thumbnails = look(path).get_by_label("Thumbnails").locator("option")
    assert thumbnails.all_inner_texts() == ["mean over all queries", "selected patch", "full map"]
    p = (q @ k.mT / 8**0.5).softmax(-1)[0, 0, :, 2:]  # on the patches
    of_all, of_patches = p.mean(0), p[2:].mean(0)
    assert float((of_all.max() - of_patches[of_all.argmax()]).abs()) > 0.005
    caption = look(path, "view=head&row=13&column=13").locator("figcaption").nth(3)
    row, column = divmod(int(of_all.argmax()), 4)
    said = f"Mean over all queries, CLS and registers included. Most: row {row}, column {column}, "
    assert caption.inner_text().startswith(said)
    near(numbers(caption.inner_text().removeprefix(said))[0], float(of_all.max()))
    thumbnails = look(save(picture(), tmp_path / "sheet.html")).get_by_label("Thumbnails").locator("option")
    assert thumbnails.all_inner_texts()[0] == "mean over all patches", "every query is a patch"


def test_a_patch_whose_row_is_broken_looks_at_none(look: Any, tmp_path: Path) -> None:
    weights = [softmax(3, 35, causal=False)]
    weights[0][0, 9] = torch.nan
    path = save(image_sheet("a digit", digit(), (5, 7), weights), tmp_path / "sheet.html")
    page = look(path, "view=head&layer=0&head=0&row=9&column=9")
    captions = page.locator("figcaption")
    assert (
        captions.nth(1)
        .inner_text()
        .startswith("Where the framed patch row 1, column 2 attends. No patch has a weight here: all are masked")
    )
    turn(page, "view=head&layer=0&head=1&row=0&column=0&sink=hidden")
    row = weights[0][1, 0]
    assert (
        f"Most: {patch(int(row.argmax()))}, {figure(float(row.max()))}, "
        in page.locator("figcaption").nth(1).inner_text()
    )
    p = figure(float(row[0]))
    assert page.locator(".pinned .cell b").inner_text() == p, "no column is a sink, whatever the address says"


def test_a_sheet_opens_on_the_head_that_was_chosen(look: Any, tmp_path: Path) -> None:
    sheet = text(words(6))
    for at in ((0, 2), (1, 0)):
        page = look(save(replace(sheet, opens_on=at), tmp_path / f"{at[0]}.html"))
        framed = page.locator(".thumb[aria-current=true]")
        assert str(framed.get_attribute("aria-label")).startswith(f"layer {at[0]}, head {at[1]}")
        framed.click()
        page.get_by_role("heading", name=f"Layer {at[0]}, head {at[1]}", exact=True).wait_for()


def patch(at: int) -> str:
    return f"row {at // 7}, column {at % 7}"


def test_an_image_has_to_fit(short: Recording) -> None:
    short = Recording(short.stats, replace(short.about, texts=None))
    pixels = np.zeros((6, 8), np.uint8)
    with pytest.raises(ValueError, match=r"grid: expected rows x columns that match the 13 keys, got 5 x 7 patches"):
        render_recording(short, image=pixels, grid=(5, 7))
    with pytest.raises(ValueError, match=r"image: got float64 \[2, 2\], expected uint8 \[h, w\] or \[h, w, 3\]"):
        render_recording(short, image=np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"special: expected 0 to 12, fewer than the 13 keys, got 20"):
        render_recording(short, image=pixels, special=20)
    with pytest.raises(ValueError, match=r"special: got -1, expected a whole number from 0"):
        render_recording(short, image=pixels, special=-1)
    with pytest.raises(
        ValueError,
        match=r"grid: missing; the 10 keys after the 3 special ones do not form a square, so pass its rows and columns",
    ):
        render_recording(short, image=pixels, special=3)
    with pytest.raises(
        ValueError, match=r"grid: expected rows and columns of patches, each at least 1, got \(3, 4, 1\)"
    ):
        render_recording(short, image=pixels, grid=(3, 4, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"grid: expected rows and columns of patches, each at least 1, got \(0, 4\)"):
        render_recording(short, image=pixels, grid=(0, 4))
    with pytest.raises(ValueError, match=r"grid, special: expected together with image=, got no image"):
        render_recording(short, grid=(3, 4))
    with pytest.raises(
        ValueError,
        match=r"strips: layer 2 with head 0 does not exist; expected layers 0 to 1 or their names, of 3 heads",
    ):
        render_recording(short, strips=[(2, 0)])
    for wrong in ((0, 0.0), (0,), 0):
        with pytest.raises(ValueError, match=r"strips: expected pairs of a layer and the number of a head, got .*0.*"):
            render_recording(short, strips=[wrong])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"strips: expected at most 16 heads, got 17"):
        render_recording(short, strips=[(0, 0)] * 17)
    with pytest.raises(ValueError, match=r"strips: q and k were not saved; record with Observe\(keep_qk=True\)"):
        render_recording(recorded(7, None, Observe(map=7)), strips=[(0, 0)])


def test_the_steps_are_shown(look: Any, tmp_path: Path) -> None:
    page = look(save(text(words(5), trace=TRACE, trace_title="Layer 1 & more"), tmp_path / "s.html"), "view=trace")
    shown = page.get_by_role("tabpanel").inner_text()
    for part in (
        "Layer 1 & more",
        "4. Scaled dot-product attention",
        "mask <b>",
        "✓ no weight on the future",
        "−∞",
        "polarity",
    ):
        assert part in shown


def test_a_notebook_shows_the_page_in_a_frame(chromium: BrowserContext, short: Recording) -> None:
    watched = Watched(chromium, "about:blank")
    watched.page.set_content(short._repr_html_())
    frame = watched.page.frame_locator("iframe")
    frame.locator(".thumb canvas[data-drawn]").first.wait_for()
    frame.locator(".thumb").nth(4).press("Enter")
    frame.get_by_role("heading", name="Layer 1, head 1").wait_for()
    watched.page.wait_for_timeout(250)
    assert watched.said == []
    watched.close()
