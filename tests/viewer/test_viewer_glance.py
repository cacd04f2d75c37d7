"""What is visible at a glance: lines in a text, one token in all heads, long maps, and all heads in one window."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from headscope import Observe, masks, observe
from headscope.watching import About, Recording
from support.all_views import shipped
from support.browser import chromium, in_a_browser, long, look, recorded, save_figure, short, texts_of, thumbs, weight

__all__ = ["chromium", "long", "look", "short"]  # fixtures

pytestmark = in_a_browser

PIECES = (
    "the",
    " c",
    "at",
    " s",
    "at",
    " on",
    " ",
    "m",
    "at",
    ",",
    " and",
    " the",
    " do",
    "g",
    " s",
    "at",
    " on",
    " it",
    ".",
)


@pytest.fixture(scope="module")
def pieces() -> Recording:
    """A text of pieces of words; one token is only a space."""
    return recorded(len(PIECES), PIECES, Observe(map=len(PIECES), edges=3, keep_rows=True, keep_qk=True))


@pytest.fixture(scope="module")
def wide() -> Recording:
    """A text with more tokens than a map of a linear scale to its largest weight has."""
    return recorded(
        211, tuple(f" w{n % 10}" for n in range(211)), Observe(map=211, edges=3, keep_rows=True, keep_qk=True)
    )


def heights(page: Any) -> list[tuple[float, float]]:
    """The span and the height of each arc, the narrowest first."""
    found = page.eval_on_selector_all(
        ".reading-text path", "(all) => all.map((e) => e.getBBox()).map(({ width, height }) => [width, height])"
    )
    return sorted((width, height) for width, height in found)


def test_wider_arcs_are_higher_and_have_room_above_the_first_line(look: Any, pieces: Recording) -> None:
    page = look(pieces, f"view=reading&layer=0&head=0&token={len(PIECES) - 1}")
    page.locator(".reading-text path").nth(3).wait_for(state="attached")
    arcs = heights(page)
    assert all(high <= higher for (_, high), (_, higher) in itertools.pairwise(arcs))
    assert arcs[-1][1] > 60, "the widest arc has much more than a line of text"
    above = page.evaluate(
        "Math.min(...[...document.querySelectorAll('.reading-text path')].map((e) => e.getBoundingClientRect().top))"
        " - document.querySelector('.reading-text').getBoundingClientRect().top"
    )
    assert above >= -1, "no arc leaves the frame of the text"


def test_the_pieces_of_a_word_touch_and_a_space_is_a_space(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=reading&layer=0&head=0")
    texts = page.locator(".reading-text button").all_inner_texts()
    assert texts[1] == " c"
    assert texts[6].strip() == "", "a space is a space wherever it is"
    blank = page.locator(".reading-text [data-at='6']")
    assert blank.evaluate("(of) => getComputedStyle(of).borderBottomStyle") == "dotted", "it is underlined"
    assert blank.bounding_box()["width"] > 6
    boxes = [page.locator(f".reading-text [data-at='{at}']").bounding_box() for at in (1, 2)]
    assert boxes[1]["x"] - (boxes[0]["x"] + boxes[0]["width"]) < 1
    assert page.locator(".reading-text .word", has=page.locator("[data-at='1']")).locator("button").count() == 2
    assert "␣c" in page.locator(".reading-text [data-at='1']").get_attribute("title")
    svg = texts_of(save_figure(page, "the text"))
    assert {"c", "at", "␣"} <= {*svg}
    assert "␣c" not in svg


def test_the_first_picture_of_a_long_text_has_forty_lines_and_says_so(look: Any, wide: Recording) -> None:
    page = look(wide, "view=reading&layer=0&head=0")
    p = weight(wide, 0, 0)
    large = sum(value >= 0.15 for query, row in enumerate(p) for key, value in enumerate(row) if 0 < key < query)
    assert large > 40, "the seed gives many large weights"
    expect(page.locator(".reading-text path")).to_have_count(40)
    assert "the 40 largest weights" in page.locator("#reading-title + .hint").inner_text()
    assert page.locator(".reading-text button").count() == 211, "eleven more tokens stay on the page"
    assert page.get_by_role("button", name="Later").count() == 0


def test_one_token_in_all_heads(look: Any, pieces: Recording) -> None:
    at = 11
    page = look(pieces, f"view=reading&layer=0&head=0&token={at}")
    cells = page.locator(".every-head button")
    expect(cells).to_have_count(6)
    for layer in range(2):
        for head in range(3):
            p = weight(pieces, layer, head)[at]
            cell = page.locator(f".every-head [data-layer='{layer}'][data-head='{head}']")
            key = int(np.argmax(p))
            label = PIECES[key].replace(" ", "␣")
            expect(cell).to_have_attribute(
                "aria-label", re.compile(rf"^layer {layer}, head {head}: {key} “{re.escape(label)}”, ")
            )
            shown = float(cell.locator("small").inner_text().split()[0])
            assert shown == pytest.approx(100 * p[key], abs=0.6)
    cells.nth(5).hover()
    drawn = sum(value >= 0.02 for key, value in enumerate(weight(pieces, 1, 2)[at]) if key != at)
    expect(page.locator(".reading-text path")).to_have_count(int(drawn))
    cells.first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".every-head [data-layer='1'][data-head='0']")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Head", exact=True)).to_have_value("1.0")
    page.locator(".reading-text [data-at='3']").hover()
    expect(page.locator(".every-head .hint")).to_contain_text("(3)")


def test_a_page_without_all_heads_has_no_table_of_them(look: Any, long: Recording) -> None:
    page = look(long, "view=reading&layer=0&head=0")
    page.locator(".every-head button").first.wait_for()
    bare = recorded(53, tuple(f" w{n}" for n in range(53)), Observe(map=7, keep_qk=True))
    assert look(bare, "view=heads").locator(".every-head").count() == 0


def test_the_list_shows_the_key_that_it_lists(look: Any) -> None:
    words = tuple(f" {'long' * 4}{n}" for n in range(31))
    recording = recorded(31, words, Observe(map=31, keep_rows=True, keep_qk=True))
    page = look(recording, "view=reading&layer=0&head=0&token=30", width=900)
    page.locator(".context li b").first.wait_for()
    inside = page.eval_on_selector_all(
        ".context li",
        """(all) => all.map((e) => ["b", "button"].map((part) => e.querySelector(part).getBoundingClientRect()))
          .map(([key, list]) => key.left >= list.left && key.right <= list.right + 1 && key.width > 60)""",
    )
    assert inside
    assert all(inside)


def darkest(page: Any, selector: str) -> np.ndarray[Any, Any]:
    """The red channel of a canvas."""
    return np.array(
        page.eval_on_selector(
            selector,
            """(e) => { const { data } = e.getContext("2d").getImageData(0, 0, e.width, e.height);
              const row = (y) => Array.from({ length: e.width }, (_, x) => data[4 * (y * e.width + x)]);
              return Array.from({ length: e.height }, (_, y) => row(y)); }""",
        )
    )


def test_a_small_map_of_many_tokens_has_a_line_of_large_weights(look: Any) -> None:
    """A head that attends to the token 40 places before, which a mean of neighbours would hide."""
    length, back = 211, 40
    rates = torch.logspace(0, -1.5, 32)

    def turned(by: int) -> torch.Tensor:
        angles = (torch.arange(length)[:, None] - by) * rates
        return torch.cat([angles.cos(), angles.sin()], -1)[None, None]

    found = observe(30 * turned(back), turned(0), mask=masks.causal(), what=Observe(map=length, keep_rows=True))
    named = found.named("layers.0.attention")
    texts = tuple(f" w{n}" for n in range(length))
    page = look(Recording(type(named)(named.parts), About("m", {}, {}, {"layers.0.attention": "self"}, texts, 1, 1)))
    thumbs(page)
    assert page.get_by_label("Scale").input_value() == "linear"
    hint = page.locator("#heads-title + .hint").inner_text()
    assert "linear colour scale. The scale ends at the 99.5 % quantile. A pixel that holds several cells" in hint
    red = darkest(page, ".thumb canvas")
    side = len(red)
    rows = range(side // 2, side - 2)
    line = [
        red[row, max(0, round(row - back * side / length) - 2) : round(row - back * side / length) + 3].min()
        for row in rows
    ]
    assert max(line) < 110, "every row has a dark pixel at the key 40 places before"


def test_the_legend_of_a_long_map_names_its_quantile(look: Any, wide: Recording, short: Recording) -> None:
    page = look(wide, "view=head&layer=0&head=0")
    text = page.locator(".drawing .legend").inner_text()
    assert "The scale ends at the 99.5 % quantile." in text
    assert "or more" in text
    assert "quantile" not in look(short, "view=head&layer=0&head=0").locator(".drawing .legend").inner_text()


def test_a_few_layers_fit_the_window(look: Any) -> None:
    parts = {}
    for layer in range(6):
        part = recorded(13, None, Observe(map=13)).stats.parts["layers.0.attention"]
        parts[f"layers.{layer}.attention"] = part
    source = recorded(13, None, Observe(map=13))
    kinds: Any = dict.fromkeys(parts, "self")
    recording = Recording(type(source.stats)(parts), type(source.about)("m", {}, {}, kinds, None, 1, 1))
    page = look(recording)
    thumbs(page)
    bottom = page.locator(".grid").evaluate("(e) => e.getBoundingClientRect().bottom")
    assert bottom <= 900
    assert page.locator(".thumb canvas").first.evaluate("(e) => e.clientWidth") >= 60


def test_a_head_under_the_pointer_is_described(look: Any, pieces: Recording) -> None:
    page = look(pieces)
    thumbs(page)
    tip = page.get_by_role("tooltip", include_hidden=True)
    page.locator(".thumb[data-layer='1'][data-head='2']").hover()
    tip.wait_for()
    p = weight(pieces, 1, 2).copy()
    p[0] = 0
    query, key = np.unravel_index(np.argmax(p), p.shape)
    pair = f"{PIECES[query]} → {PIECES[key]}".replace(" ", "␣").replace("␣→␣", " → ")
    assert f"Strongest: {pair}, " in tip.inner_text()
    assert "Layer 1, head 2" in tip.inner_text()
    assert "Effective keys: " in tip.inner_text()
    page.mouse.move(2, 2)
    expect(tip).to_have_count(0)
    page.locator(".thumb[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    tip.wait_for()
    page.keyboard.press("Escape")
    expect(tip).to_have_count(0)


def test_the_heads_of_the_layer_stand_above_the_map(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=head&layer=1&head=0")
    strip = page.get_by_role("group", name="Heads of layer 1")
    expect(strip.locator("canvas[data-drawn]")).to_have_count(3)
    expect(strip.locator("[aria-current]")).to_have_attribute("data-head", "0")
    strip.locator("[data-head='2']").click()
    expect(strip.locator("[aria-current]")).to_have_attribute("data-head", "2")
    page.keyboard.press("ArrowLeft")
    expect(strip.locator("[data-head='1']")).to_be_focused()
    expect(page.locator("#head-title")).to_have_text("Layer 1, head 1")


def test_masked_cells_of_a_difference_are_hatched(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=compare&layer=0&head=0&other=1&otherhead=1")
    page.locator(".map canvas").nth(2).wait_for()
    plot = page.locator(".map canvas").nth(2)
    colours = plot.evaluate(
        """(e) => { const { x, y, width, height } = JSON.parse(e.dataset.plot); const ratio = e.width / e.clientWidth;
          const corner = [x + 0.7 * width, y + 0.05 * height].map((at) => at * ratio);
          const { data } = e.getContext("2d").getImageData(...corner, 30, 30);
          return new Set(Array.from({ length: 900 }, (_, n) => data.slice(4 * n, 4 * n + 3).join())).size; }"""
    )
    assert colours > 1, "lines on the ground, not one grey"


def test_an_address_with_a_view_that_the_page_lacks_says_so(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=segments")
    note = page.get_by_text("This page has no view “Segments”, which its address names. It shows “All heads”.")
    note.wait_for()
    page.get_by_role("tab", name="Statistics").click()
    expect(note).to_have_count(0)


def test_the_statistics_have_tints_and_no_empty_column(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=table")
    cells = page.locator("table.every tbody tr").evaluate_all(
        """(rows) => rows.map((row) => [...row.querySelectorAll("td:not(.text)")]
          .map((e) => [e.innerText, getComputedStyle(e).backgroundColor]))"""
    )
    for column in zip(*cells, strict=True):
        assert any(text != "–" for text, _ in column)
        values = {text for text, _ in column}
        assert len({colour for _, colour in column}) > 1 or len(values) == 1


def test_what_scrolls_fades_until_its_end(look: Any) -> None:
    recording = recorded(13, None, Observe(map=13))
    part = recording.stats.parts["layers.0.attention"]
    parts = {f"layers.{n}.attention": part for n in range(23)}
    kinds: Any = dict.fromkeys(parts, "self")
    page = look(
        Recording(type(recording.stats)(parts), type(recording.about)("m", {}, {}, kinds, None, 1, 1)), "view=table"
    )
    below = "() => parseFloat(getComputedStyle(document.querySelector('.scroll')).getPropertyValue('--below'))"
    page.wait_for_function(f"{below} > 5")
    page.evaluate("document.querySelector('.scroll').scrollTop = 1e6")
    page.wait_for_function(f"{below} < 1")


def test_head_b_of_compare_is_that_of_the_second_card(look: Any, tmp_path: Path) -> None:
    page = look(shipped(1.0).save_html(tmp_path / "one.html"), "view=heads")
    cards = page.locator(".cards .card b").all_inner_texts()
    named = [text for text in cards if re.fullmatch(r"\d+\.\d+", text)]
    assert len(named) > 1
    page.get_by_role("tab", name="Compare").click()
    expect(page.get_by_label("Head A")).to_have_value(named[0])
    expect(page.get_by_label("Head B")).to_have_value(named[1])


def test_the_title_and_the_placeholder_are_not_cut_where_there_is_room(
    look: Any, pieces: Recording, tmp_path: Path
) -> None:
    path = pieces.save_html(tmp_path / "titled.html", title="the cat sat on the mat, and")
    page = look(path, width=1430)
    room = page.locator(".search input").evaluate(
        """(e) => { const ruler = document.createElement("canvas").getContext("2d");
          const { font, paddingLeft, paddingRight } = getComputedStyle(e);
          ruler.font = font;
          const padding = parseFloat(paddingLeft) + parseFloat(paddingRight);
          return e.clientWidth - padding - ruler.measureText(e.placeholder).width; }"""
    )
    assert room >= -1
    assert page.locator("h1").evaluate("(e) => e.scrollWidth <= e.clientWidth")


def test_a_note_is_a_grey_line_unless_it_warns(look: Any, tmp_path: Path) -> None:
    q = torch.randn(1, 3, 13, 8, generator=torch.Generator().manual_seed(5))
    colours = []
    for name, value in (("sample", q), ("broken", q.clone().index_fill_(2, torch.arange(3, 13), torch.nan))):
        found = observe(value, q, what=Observe(map=13, rows=5)).named("layers.0.attention")
        about = About("m", {}, {}, {"layers.0.attention": "self"}, None, 1, 1)
        page = look(Recording(type(found)(found.parts), about).save_html(tmp_path / f"{name}.html"))
        thumbs(page)
        notes = page.locator("#viewer > :is(.note, .noted):not(.drop-here)")
        colours.append(notes.evaluate_all("(all) => all.map((e) => getComputedStyle(e).backgroundColor)"))
        assert "NaN" in notes.first.inner_text() or name == "sample"
    clear = "rgba(0, 0, 0, 0)"
    assert [[each == clear for each in page] for page in colours] == [[True], [False, True]]


def test_the_fill_of_a_token_ends_at_its_edges(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=reading&layer=0&head=0&token=5&also=1.1")
    page.locator(".reading-text button[style*='gradient']").first.wait_for()
    styles = page.locator(".reading-text button[style*='gradient']").evaluate_all(
        """(all) => all.map((e) => getComputedStyle(e))
          .map(({ backgroundRepeat, backgroundOrigin }) => `${backgroundRepeat} ${backgroundOrigin}`)"""
    )
    assert {*styles} == {"no-repeat border-box"}


def test_the_scale_of_a_long_map_ends_at_the_quantile(look: Any) -> None:
    length = 101
    recording = recorded(
        length, tuple(f" w{n}" for n in range(length)), Observe(map=length, keep_rows=True, keep_qk=True)
    )
    page = look(recording, "view=head&layer=1&head=1")
    p = weight(recording, 1, 1)
    cells = np.concatenate([row[: query + 1] for query, row in enumerate(p) if query >= 2])
    end = np.sort(cells)[int(0.995 * (len(cells) - 1))]
    shown = re.search(r"([\d.e-]+) or more", page.locator(".drawing .legend").inner_text())
    assert shown is not None
    assert float(shown[1]) == pytest.approx(end, rel=0.01)
