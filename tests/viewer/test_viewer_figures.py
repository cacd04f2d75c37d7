"""Figures for papers, as the page saves them: sizes, what they contain, and what they leave out."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

import base64
import io
import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

pytest.importorskip("playwright", reason="the playwright package is not installed")

from headscope import HeadStats, Observe, Recording, Segments, observe
from headscope.report import save
from headscope.watching import About
from support.browser import (
    chromium,
    in_a_browser,
    long,
    look,
    open_menu,
    place,
    recorded,
    save_figure,
    short,
    texts_of,
    thumbs,
    weight,
)
from support.sheets import picture, text, words

pytestmark = in_a_browser

WHITE, GREY = (255, 255, 255), (0xE9, 0xE6, 0xEC)


def pixels(path: Path) -> NDArray[np.int16]:
    """The colours of a PNG, [height, width, 3]; signed, for differences."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(np.int16)


def size_of(svg: Path) -> tuple[float, float]:
    root = ElementTree.parse(svg).getroot()
    return float(root.get("width", 0)), float(root.get("height", 0))


def boxes(svg: Path) -> list[tuple[float, float, float, float, str]]:
    """The filled rectangles of an SVG: x, y, width, height, colour."""
    filled = [each for each in ElementTree.parse(svg).iter() if each.tag.endswith("}rect")]
    names = ("x", "y", "width", "height")
    found: list[Any] = [(*(float(each.get(name, 0)) for name in names), each.get("fill")) for each in filled]
    return [box for box in found if box[4] != "none"]


def reddish(colours: NDArray[np.int16]) -> int:
    """How many pixels have the colour of the selection, of the light or the dark page."""
    red = colours[colours[..., 0] - colours[..., 1] > 50]  # few pixels have any colour but a blue
    accents = np.array([[0xB3, 0x26, 0x1E], [0xFF, 0x8A, 0x7D]], np.int16)
    return int((np.abs(red[:, None] - accents).sum(-1) < 40).sum())


# ---------------------------------------------------------------- one head


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.long), "dark"])
def test_a_png_has_the_stated_size_and_shows_a_scale_but_no_selection(look: Any, short: Recording, scheme: str) -> None:
    page = look(short, "view=head&layer=1&head=1&row=5&column=3", scheme=scheme)
    page.mouse.move(*place(page, 0.7, 0.3))
    svg = save_figure(page, "the map of layer 1, head 1")
    width, height = size_of(svg)
    for times in (2, 3):
        path = save_figure(page, "the map of layer 1, head 1", f"PNG {times}×")
        assert path.name == "headscope-layer-1-head-1.png"
        drawn = pixels(path)
        assert drawn.shape[:2] == (times * height, times * width)
        with Image.open(path) as image:
            assert image.info["dpi"] == pytest.approx((96 * times,) * 2, rel=1e-3), "the same size in print"
        assert tuple(drawn[2, 2]) == WHITE, "on white, whatever the theme"
        assert reddish(drawn) == 0, "no selection"
        # the scale: a column in the right part with all colours from white to ink, darker upwards
        right = drawn[:, int(0.8 * drawn.shape[1]) :: 4].sum(-1)
        levels = [len(np.unique(column[(column > 40) & (column < 740)])) for column in right.T]
        column = right.T[int(np.argmax(levels))]
        assert max(levels) > 60
        bar = column[np.flatnonzero(column < 740)[5] : np.flatnonzero(column < 740)[-5]]
        assert (np.diff(bar[bar.cumsum() > 0]) >= -6).mean() > 0.98
    if scheme == "dark":
        assert reddish(pixels(_screenshot(page))) > 50, "the page itself shows a selection"


def _screenshot(page: Any) -> Any:
    return io.BytesIO(page.locator(".map canvas").screenshot())


def test_an_svg_has_title_tokens_caption_and_the_colours_of_the_weights(look: Any, tmp_path: Path) -> None:
    sheet = text(words(7), footer={"Model": "a small model", "Input": "seven words"})
    page = look(save(sheet, tmp_path / "sheet.html"), "view=head&layer=1&head=2")
    page.locator(".map canvas").wait_for()
    svg = save_figure(page, "the map of layer 1, head 2")
    texts = texts_of(svg)
    pattern = sheet.patterns[1][2]
    named = f" · {pattern.name} {round(100 * pattern.score)}\u00a0%" if pattern and pattern.is_name else ""
    assert texts[0] == f"Layer 1, head 2{named}"
    assert [text for text in texts if text.startswith("␣w")] == [f"␣w{n % 5}" for n in range(7)] * 2
    assert {"query", "key", "weight, linear", "0"} <= set(texts)
    caption = " ".join(texts[-4:])
    for each in ("Model: a small model.", "Input: seven words.", "Rows: query 0–6; columns: key 0–6.", "Grey: masked."):
        assert each in caption
    # a cell's rectangle has the colour of its weight
    p = sheet.weights[1][2]
    cells = [box for box in boxes(svg) if box[4] not in ("#ffffff", "#55505c", "#e9e6ec") and box[3] == 48]
    left, top = min(x for x, *_ in cells), min(y for _, y, *_ in cells)
    rows = np.tril_indices(7)
    dark = {
        (round((y - top) / 48), round((x - left) / 48) + n): _light(fill)
        for x, y, w, _, fill in cells
        for n in range(round(w / 48))
    }
    order = sorted(dark, key=lambda at: dark[at])
    weights = [p[at] for at in order]
    assert len(order) > 15
    assert all(a >= b - 0.01 for a, b in itertools.pairwise(weights)), "darker = larger"
    assert max(float(p[r, c]) for r, c in zip(*rows, strict=True) if (r, c) not in dark) < 0.01, "white cells are small"


def _light(colour: str) -> int:
    return sum(int(colour[n : n + 2], 16) for n in (1, 3, 5))


def test_hostile_tokens_are_text_in_a_figure(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=0&head=0")
    page.locator(".map canvas").wait_for()
    svg = save_figure(page, "the map of layer 0, head 0")
    tags = {each.tag.rpartition("}")[2] for each in ElementTree.parse(svg).iter()}
    assert tags <= {"svg", "title", "text", "rect", "image"}, "no element of a token"
    texts = texts_of(svg)
    assert texts.count("<!--") == 2
    assert texts.count("\\u202egnp.exe") == 2
    assert texts.count("\"&'") == 2
    assert len([text for text in texts if text.startswith("</script>")]) == 2
    assert not any("\u202e" in text for text in texts)
    assert max(map(len, texts)) < 200, "10,000 letters are cut"


@pytest.mark.long
def test_labels_of_a_figure_do_not_overlap(look: Any) -> None:
    """At every number of tokens: all, some with their positions, positions."""
    wide = """(texts) => {
      const ruler = document.createElement("canvas").getContext("2d");
      ruler.font = "10px sans-serif";
      return texts.map((text) => ruler.measureText(text).width);
    }"""
    for length in (3, 29, 61, 131, 211, 397):
        page = look(
            recorded(length, tuple(f" a{n}" for n in range(length)), Observe(map=length)), "view=head&layer=0&head=0"
        )
        page.locator(".map canvas").wait_for()
        svg = save_figure(page, "the map of layer 0, head 0")
        labels = [
            each
            for each in ElementTree.parse(svg).iter()
            if each.tag.endswith("}text") and each.get("font-size") == "10"
        ]
        rows = [each for each in labels if each.get("text-anchor") == "end" and not each.get("transform")]
        assert len(rows) >= 3, length
        places = sorted(float(each.get("y", 0)) for each in rows)
        assert min(np.diff(places), default=99) >= 10.9, length
        turned = [each for each in labels if each.get("transform") and each.get("text-anchor") == "end"]
        if length <= 200:
            assert len(turned) == len(rows)
            assert min(np.diff([float(each.get("x", 0)) for each in turned])) >= 10.9
            first = "␣a0" if length <= 50 else "0 ␣a0"
            assert turned[0].text == rows[0].text == first
        else:
            assert not turned
            numbers = [
                each for each in labels if each.get("text-anchor") == "middle" and re.fullmatch(r"\d+", each.text or "")
            ]
            widths = page.evaluate(wide, [each.text for each in numbers])
            ends = [
                (float(each.get("x", 0)) - w / 2, float(each.get("x", 0)) + w / 2)
                for each, w in zip(numbers, widths, strict=True)
            ]
            assert len(ends) >= 4
            assert all(right < left for (_, right), (left, _) in itertools.pairwise(ends))
        page.close()


def test_a_figure_shows_what_is_in_sight(look: Any, long: Recording) -> None:
    """Of a zoomed map the tile, exact, with the positions of its part."""
    page = look(long, "view=head&layer=0&head=2&zoom=8,0.2,0.6")
    page.locator(".exact").wait_for()
    texts = texts_of(save_figure(page, "the map of layer 0, head 2"))
    found = re.search(r"Rows: query (\d+)–(\d+); columns: key (\d+)–(\d+)\.", " ".join(texts))
    assert found is not None
    top, bottom, left, right = map(int, found.groups())
    assert (top, left) == (int(97 * (0.6 - 1 / 16)), int(97 * (0.2 - 1 / 16)))
    assert {f"␣w{n}" for n in (top, bottom, left, right)} <= set(texts)
    p = weight(long, 0, 2)[top : bottom + 1, left : right + 1]
    largest = [text for text in texts if re.fullmatch(r"(≥ )?0?\.?\d+", text)][-1]
    assert float(largest.removeprefix("≥ ")) == pytest.approx(p.max(), rel=0.06)


def test_a_map_of_512_tokens_is_a_small_svg(look: Any) -> None:
    page = look(recorded(512, None, Observe(map=512)), "view=head&layer=1&head=1")
    page.locator(".map canvas").wait_for()
    svg = save_figure(page, "the map of layer 1, head 1")
    assert svg.stat().st_size < 2_000_000
    images = [each for each in ElementTree.parse(svg).iter() if each.tag.endswith("}image")]
    inside = max((_image(each.get("href", "")) for each in images), key=lambda image: image.size)
    side = inside.shape[0] // 512
    assert inside.shape[:2] == (512 * side, 512 * side), "each cell is there, in whole pixels"
    cells = inside[::side, ::side]
    assert (cells[..., 3] == 0)[np.triu_indices(512, 1)].all(), "masked"
    assert np.array_equal(inside[side - 1 :: side, side - 1 :: side], cells), "lossless"
    assert len(np.unique(cells[..., :3].reshape(-1, 3), axis=0)) > 100


def _image(href: str) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(base64.b64decode(href.partition(",")[2]))) as image:
        return np.asarray(image.convert("RGBA"))


def test_a_dark_figure_is_a_choice_and_log_scales_have_decades(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=1&scale=log&colours=magma")
    page.locator(".map canvas").wait_for()
    button = page.get_by_role("button", name="Figure of the map of layer 1, head 1")
    button.click()
    page.get_by_label("on dark ground").check()
    svg = save_figure(page, "the map of layer 1, head 1")
    assert boxes(svg)[0][4] == "#1b191f"
    texts = texts_of(svg)
    assert {"0.1", "0.01", "0.001", "weight, log"} <= set(texts)
    assert any(text.startswith("≤ ") for text in texts)
    assert "Logarithmic colour scale over four decades." in " ".join(texts)


def test_a_difference_says_which_colour_is_which(look: Any, short: Recording) -> None:
    page = look(short, "view=compare&layer=0&head=1&other=1&otherhead=2")
    page.locator(".map canvas").nth(2).wait_for()
    svg = save_figure(page, "the map of layer 1, head 2 − layer 0, head 1")
    texts = texts_of(svg)
    assert texts[0] == "Layer 1, head 2 − layer 0, head 1"
    p = weight(short, 1, 2) - weight(short, 0, 1)
    top = f"{np.abs(p).max():.2g}"
    assert {f"−{top}", "0", top, "difference, linear"} <= set(texts)
    assert "Orange: B is larger; purple: A is larger. Hatched: masked." in " ".join(texts)


# ---------------------------------------------------------------- all heads and the other views


def test_the_figure_of_all_heads_names_rows_columns_and_scale(look: Any, short: Recording) -> None:
    page = look(short)
    thumbs(page)
    svg = save_figure(page, "all heads")
    assert svg.name == "headscope-heads.svg"
    texts = texts_of(svg)
    assert texts[:3] == ["6 heads", "head", "layer"]
    assert {"0", "1", "2", "share of the largest weight of each map, linear"} <= set(texts)
    assert "Each map has its own colour scale." in " ".join(texts)
    images = [each for each in ElementTree.parse(svg).iter() if each.tag.endswith("}image")]
    assert len(images) == 7, "six maps and the scale"
    drawn = pixels(save_figure(page, "all heads", "PNG 3×"))
    width, height = size_of(svg)
    assert drawn.shape[:2] == (3 * height, 3 * width)
    open_menu(page).get_by_label("Sort by").select_option("entropy")
    page.keyboard.press("Escape")
    texts = texts_of(save_figure(page, "all heads"))
    assert texts[0] == "6 heads, sorted by entropy"
    assert {f"{layer}·{head}" for layer in range(2) for head in range(3)} == {
        text.split()[0] for text in texts if "·" in text
    }


def test_the_text_with_lines_is_a_figure(look: Any, tmp_path: Path) -> None:
    what = Observe(map=41)
    found = recorded(41, tuple(f" token{n}" for n in range(41)), what)
    page = look(found, "view=reading&layer=0&head=1&also=1.2&token=20")
    page.locator(".reading-text button").first.wait_for()
    svg = save_figure(page, "the text")
    assert svg.name == "headscope-reading-0.1-1.2.svg"
    texts = texts_of(svg)
    assert [text for text in texts if text.startswith("token")] == [f"token{n}" for n in range(41)]
    assert {"Layer 0, head 1", "Layer 1, head 2"} <= set(texts)
    lines = [each for each in ElementTree.parse(svg).iter() if each.tag.endswith("}path")]
    for head, colour in (((0, 1), "#1f6feb"), ((1, 2), "#c2410c")):
        p = weight(recorded_qk(41), *head)[20]
        drawn = [each for each in lines if each.get("stroke") == colour]
        assert len(drawn) == int((np.delete(p, 20) >= 0.02).sum()), head
    with Image.open(save_figure(page, "the text", "PNG 2×")) as image:
        assert image.size == tuple(2 * each for each in size_of(svg))


def recorded_qk(length: int) -> Recording:
    return recorded(length, None, Observe(map=length, keep_qk=True))


def test_patches_are_a_figure(look: Any, tmp_path: Path) -> None:
    page = look(save(picture(), tmp_path / "picture.html"), "view=head&layer=1&head=2&row=9&column=9")
    page.locator("canvas.patches[data-drawn]").first.wait_for()
    svg = save_figure(page, "What the selected patch attends to")
    texts = texts_of(svg)
    assert "What row 1, column 2 attends to; the frame marks it." in " ".join(texts)
    assert {"weight, linear", "0"} <= set(texts)
    drawn = pixels(save_figure(page, "Average", "PNG 2×"))
    assert tuple(drawn[1, 1]) == WHITE


def test_segments_are_a_figure(look: Any) -> None:
    names = {"system": (0, 2), "<b>image</b>": (2, 4), "answer": (4, 7)}
    found = recorded(7, None, Observe(map=7, segments=Segments.from_spans(names, 7)))
    page = look(found, "view=head&layer=0&head=1")
    page.locator(".segments table").wait_for()
    table = [text.split("\n")[0] for text in page.locator(".segments td").all_inner_texts()]  # without the even share
    texts = texts_of(save_figure(page, "the segments of layer 0, head 1"))
    assert [text for text in texts if text.endswith("%") and "·" not in text] == table
    assert texts.count("<b>image</b>") == 2
    page.locator("#tab-segments").click()
    page.locator(".segment-heads").wait_for()
    shown = page.locator(".segment-heads td").all_inner_texts()
    texts = texts_of(save_figure(page, "the segments of all heads"))
    assert texts[0] == "Segments: from “answer” to “system”"
    assert [text for text in texts if text.endswith("%")] == shown


# ---------------------------------------------------------------- the menu


def test_a_figure_takes_three_clicks_and_the_keyboard(look: Any, short: Recording) -> None:
    page = look(short)
    thumbs(page)
    page.locator(".thumb").nth(4).click()
    page.locator(".map canvas").wait_for()
    page.get_by_role("button", name=re.compile("^Figure of the map")).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG 2×").click()
    name = download.value.suggested_filename
    assert name == "headscope-layer-1-head-1.png"
    page.get_by_text(f"Saved {name}").wait_for()
    assert page.locator(".choices").count() == 0
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "Figure of the map of layer 1, head 1"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "PNG 2×"
    page.keyboard.press("Escape")
    assert page.locator(".choices").count() == 0
    assert page.evaluate(focused) == "Figure of the map of layer 1, head 1", "Escape closes the menu only"


@pytest.mark.long
def test_a_figure_is_copied_or_the_page_says_why_not(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=1")
    page.locator(".map canvas").wait_for()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.get_by_role("button", name="Figure of the map of layer 1, head 1")
    button.click()
    page.get_by_role("button", name="Copy figure").click()
    page.get_by_text("Copied", exact=True).wait_for()
    size = page.evaluate(
        """async () => {
          const [item] = await navigator.clipboard.read();
          const bitmap = await createImageBitmap(await item.getType("image/png"));
          return [bitmap.width, bitmap.height];
        }"""
    )
    width, height = size_of(save_figure(page, "the map of layer 1, head 1"))
    assert size == [3 * width, 3 * height]
    refused = "Promise.reject(new DOMException('no', 'NotAllowedError'))"
    page.evaluate(f"() => {{ navigator.clipboard.write = () => {refused}; }}")
    button.click()
    page.get_by_role("button", name="Copy figure").click()
    page.get_by_text("The browser does not allow a page to copy pictures here. Save the PNG instead.").wait_for()
    page.context.clear_permissions()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 23), (3, 500), (131_072, 7)])
def test_maps_of_any_shape_are_figures(look: Any, queries: int, keys: int) -> None:
    """No label is cut, and rows and columns are large enough to be seen."""
    q, k = torch.randn(1, 1, queries, 4), torch.randn(1, 1, keys, 4)
    parts = observe(q, k, kind="cross", what=Observe(map=16)).named("0").parts
    page = look(Recording(HeadStats(parts), About("m", {}, {}, {"0": "cross"}, None, 1, 1)), "view=head&layer=0&head=0")
    page.locator(".map canvas").wait_for()
    svg = save_figure(page, "the map of layer 0, head 0")
    texts = " ".join(texts_of(svg))
    shown = [f"0–{each - 1:,}" if each > 1 else "0" for each in (queries, keys)]
    assert f"Rows: query {shown[0]}; columns: key {shown[1]}." in texts
    frame = next(each for each in ElementTree.parse(svg).iter() if each.get("fill") == "none")
    assert min(float(frame.get(name, 0)) for name in ("width", "height")) >= 60
    width, height = size_of(svg)
    for each in ElementTree.parse(svg).iter():
        if each.tag.endswith("}text"):
            assert 0 <= float(each.get("x", 0)) <= width
            assert 0 <= float(each.get("y", 0)) <= height


def test_a_row_of_nan_is_named_in_the_caption(look: Any) -> None:
    q, k = torch.randn(1, 1, 7, 4), torch.randn(1, 1, 7, 4)
    q[0, 0, 3] = torch.nan
    parts = observe(q, k, what=Observe(map=7)).named("0").parts
    page = look(Recording(HeadStats(parts), About("m", {}, {}, {"0": "self"}, None, 1, 1)), "view=head&layer=0&head=0")
    page.locator(".map canvas").wait_for()
    texts = " ".join(texts_of(save_figure(page, "the map of layer 0, head 0")))
    assert "Grey: masked, or the row contains NaN or infinity." in texts
