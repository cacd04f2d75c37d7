"""The weight between named segments: of one head as a table, of all heads as a picture."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

from headscope import Observe, Segments, masks, observe
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import attributes, chromium, in_a_browser, look, turn

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
    assert [text.strip() for text in table.locator("thead th").all_inner_texts()] == ["query in", *NAMES]
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


def test_a_head_of_the_first_token_is_named_beside_its_share(look: Any) -> None:
    q, k = torch.ones(1, 1, 19, 8), torch.zeros(1, 1, 19, 8)
    k[:, :, 0] = 1.4
    parts = observe(q, k, mask=masks.causal(), what=Observe(segments=Segments(NAMES, IDS), map=19)).named("a").parts
    page = look(Recording(HeadStats(parts), About("m", {}, {}, {"a": "self"}, None, 1, 1)), "view=segments")
    mass = parts["a"].segments
    assert mass is not None
    share, without = float(mass.mean[0, 2, 0]), float(mass.without_first()[0, 2, 0])
    assert without < share / 2
    line = page.locator(".ranks li").first.inner_text().replace("\xa0", " ")
    assert f"({100 * without:.1f} % without the first token)" in line
    assert re.search(r"· first 8\d %$", line)
    page.get_by_label("without the first token").check()
    page.wait_for_url("**segmentFirst=hidden*")
    cell = page.locator(".segment-heads button")
    expect(cell).to_have_text(f"{100 * without:.1f}\xa0%")
    page.get_by_label("attend to").select_option("question")
    page.wait_for_url("**segmentTo=2*")
    expect(page.get_by_label("without the first token")).to_have_count(0), "it is not in that segment"
    expect(cell).to_have_text(f"{100 * float(mass.mean[0, 2, 2]):.1f}\xa0%")


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


def banded(length: int, bins: int) -> Recording:
    """Head 0 has even rows, head 1 attends to the first segment only."""
    ids = torch.arange(length) * 3 // length
    q, k = torch.zeros(2, 1, 2, length, 4)
    k[0, 1, ids == 0, 0] = 100
    q[0, 1, :, 0] = 1
    what = Observe(segments=Segments(NAMES, ids), map=bins, edges=2)
    parts = observe(q, k, mask=masks.causal(), what=what).named("0").parts
    return Recording(HeadStats(parts), About("m", {}, {}, {"0": "self"}, None, 1, 1))


def test_bands_along_both_axes_have_the_colours_of_the_legend(look: Any) -> None:
    page = look(banded(31, 31), "view=head&head=1")
    page.locator(".band-legend").wait_for()
    assert page.locator(".band-legend bdi").all_inner_texts() == NAMES
    swatches = [
        [int(n) for n in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        for colour in page.locator(".band-legend i").evaluate_all(
            "all => all.map(e => getComputedStyle(e).backgroundColor)"
        )
    ]
    read = """([x, y]) => {
      const canvas = document.querySelector(".map canvas"), r = devicePixelRatio;
      const plot = JSON.parse(canvas.dataset.plot);
      const at = x === null ? [plot.x - 3, plot.y + y * plot.height] : [plot.x + x * plot.width, plot.y - 3];
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      return [...copy.getImageData(at[0] * r, at[1] * r, 1, 1).data].slice(0, 3);
    }"""
    for segment, middle in enumerate((0.17, 0.5, 0.83)):
        assert page.evaluate(read, [middle, None]) == swatches[segment]
        assert page.evaluate(read, [None, middle]) == swatches[segment]


def test_thumbnails_have_the_bands_where_they_fit(look: Any) -> None:
    page = look(banded(31, 31))
    thumb = page.locator(".thumb canvas[data-drawn]").first
    thumb.wait_for()
    read = """(canvas, at) => {
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      return [...copy.getImageData(1, at * canvas.height, 1, 1).data].slice(0, 3).join(",");
    }"""
    assert len({thumb.evaluate(read, at) for at in (0.2, 0.5, 0.9)}) == 3


def test_a_share_stands_beside_its_even_share_and_is_grey_if_it_is_near(look: Any) -> None:
    recording = banded(31, 31)
    page = look(recording, "view=head&head=1")
    last = page.locator(".segments tbody tr").last.locator("td")
    ids = torch.arange(31) * 3 // 31
    rows = torch.arange(31)[ids == 2]
    even = sum(float((ids == 0).sum()) / (int(row) + 1) for row in rows) / len(rows)
    text = last.first.inner_text().replace("\xa0", " ")
    assert text.split() == ["100", "%", "even:", f"{100 * even:.0f}", "%"]
    assert "dim" not in str(last.first.get_attribute("class"))
    page = look(recording, "view=head&head=0")
    assert {cell.get_attribute("class") for cell in page.locator(".segments tbody tr").last.locator("td").all()} == {
        "dim"
    }
    page = look(recording, "view=segments")
    cells = page.locator(".segment-heads button")
    assert [cell.get_attribute("class") for cell in cells.all()] == ["dim", ""]
    assert "An even spread would give" in str(cells.first.get_attribute("title"))


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", "without the first token:"), ("de", "ohne das erste Token:"), ("zh", "不含第一个词元：")],
)
def test_the_table_has_the_share_without_the_first_token(language: str, words: str, look: Any) -> None:
    q, k = torch.ones(1, 2, 19, 8), torch.zeros(1, 2, 19, 8)
    k[:, 0, 0] = 3
    parts = observe(q, k, mask=masks.causal(), what=Observe(segments=Segments(NAMES, IDS))).named("a").parts
    mass = parts["a"].segments
    assert mass is not None
    recording = Recording(HeadStats(parts), About("m", {}, {}, {"a": "self"}, None, 1, 1))
    page = look(recording, f"view=head&head=0&lang={language}")
    cells = page.locator(".segments tbody tr").last.locator("td")
    assert cells.nth(0).locator(".without").inner_text().strip().startswith(words)
    assert cells.nth(1).locator(".without").count() == 0
    turn(page, f"view=head&head=1&lang={language}")
    expect(page.locator(".segments tbody tr").last.locator(".without")).to_have_count(0)  # an even head
    page = look(recording, "view=segments&lang=en")
    rows = torch.arange(19)[torch.as_tensor(IDS) == len(NAMES) - 1]
    even = float((((torch.as_tensor(IDS) == 0).sum() - 1) / (rows + 1)).mean())
    expect(page.locator(".segment-summary")).to_contain_text(
        f"Without the first token it is <0.1\xa0%; a, head 1 ({100 * even:.0f}\xa0%) then reads it most."
    )


def test_a_share_that_chance_explains_is_grey(look: Any) -> None:
    length = 61
    ids = torch.arange(length) * 3 // length
    q, k = torch.randn(2, 1, 4, length, 8, generator=torch.Generator().manual_seed(3))
    what = Observe(segments=Segments(NAMES, ids))
    parts = observe(q, 1.5 * k, mask=masks.causal(), what=what).named("a").parts
    mass = parts["a"].segments
    assert mass is not None
    assert mass.null is not None
    far = (mass.mean - mass.null.mean).abs()
    clear = (mass.z.abs() >= 3) & (far >= 0.01)
    ratio = mass.mean / mass.null.mean
    assert (~clear & (ratio > 1.2) & (far >= 0.01)).any(), "a fifth more than chance, and explained by it"
    page = look(Recording(HeadStats(parts), About("m", {}, {}, {"a": "self"}, None, 1, 1)), "view=table")
    for head in range(4):
        turn(page, f"view=head&head={head}")
        rows = page.locator(".segments tbody tr")
        rows.first.wait_for()
        for n, row in enumerate(rows.all()):
            classes = attributes(row.locator("td"), "class")
            assert [each != "dim" for each in classes] == clear[head, n].tolist()


def hue(cell: Any) -> str:
    """The colour of a cell: blue, orange, or none."""
    red, _, blue = (
        int(each) for each in re.findall(r"\d+", cell.evaluate("(of) => getComputedStyle(of).backgroundColor"))[:3]
    )
    return "blue" if blue > red + 12 else "orange" if red > blue + 12 else "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_blue_is_above_chance_orange_below_and_grey_within(scheme: str, look: Any) -> None:
    length = 61
    ids = torch.arange(length) * 3 // length
    q, k = torch.randn(2, 1, 4, length, 8, generator=torch.Generator().manual_seed(3))
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[0, 1, ids == 0, 0] = k[0, 2, ids == 2, 0] = 1.5
    what = Observe(segments=Segments(["a", "b", "c"], ids))
    parts = observe(q, k, mask=masks.causal(), what=what).named("0").parts
    mass = parts["0"].segments
    assert mass is not None
    assert mass.null is not None
    recording = Recording(HeadStats(parts), About("m", {}, {}, {"0": "self"}, None, 1, 1))
    seen = set()
    page = look(recording, "view=table", scheme=scheme)
    for to in range(3):
        turn(page, f"view=segments&segmentFrom=2&segmentTo={to}")
        clear = (mass.z[:, 2, to].abs() >= 3) & ((mass.mean - mass.null.mean)[:, 2, to].abs() >= 0.01)
        above = mass.mean[:, 2, to] > mass.null.mean[:, 2, to]
        expected = ["none" if not c else "blue" if a else "orange" for c, a in zip(clear, above, strict=True)]
        assert [hue(cell) for cell in page.locator(".segment-heads button").all()] == expected
        seen |= set(expected)
        summary = page.locator(".segment-summary").inner_text().replace("\xa0", " ")
        if "blue" in expected:
            best = max((n for n in range(4) if expected[n] == "blue"), key=lambda n: float(mass.mean[n, 2, to]))
            assert summary.startswith(f"0.{best} reads “{'abc'[to]}” most: {100 * float(mass.mean[best, 2, to]):.0f} %")
        else:
            assert summary.startswith(f"No head clearly reads “{'abc'[to]}” more than chance.")
        assert f"{expected.count('orange')} " in summary
        assert "points below" in page.locator(".legend.chance").inner_text()
    assert seen == {"none", "blue", "orange"}


def test_an_item_of_the_list_ends_without_a_dot(look: Any) -> None:
    q, k = torch.ones(1, 2, 19, 8), torch.zeros(1, 2, 19, 8)
    k[:, :, 0, 0] = 3
    parts = observe(q, k, mask=masks.causal(), what=Observe(segments=Segments(NAMES, IDS))).named("a").parts
    page = look(Recording(HeadStats(parts), About("m", {}, {}, {"a": "self"}, None, 1, 1)), "view=segments")
    lines = [each.inner_text().strip() for each in page.locator(".segment-columns .ranks li > :last-child").all()]
    assert any("% without the first token)" in line for line in lines), lines
    assert not [line for line in lines if line.endswith("·")]


# ---------------------------------------------------------------- images in a prompt

GRIDS = [(5, 7), (2, 3)]
PROMPT = [1, 2, *[99] * 35, 3, *[99] * 6, 4, 5, 6]


def prompted(bins: int) -> Recording:
    """A prompt with two images; in head 1 each token attends to key 18, a patch of the first one."""
    length = len(PROMPT)
    segments = Segments.from_image_tokens(PROMPT, 99, GRIDS, names=["photo", "<i>tile</i>"])
    k = torch.eye(length)[None, None].repeat(1, 2, 1, 1)
    q = torch.zeros(1, 2, length, length)
    q[0, 1, :, 18] = 400
    what = Observe(segments=segments, map=bins, edges=2)
    parts = observe(q, k, mask=masks.causal(), what=what).named("0").parts
    return Recording(HeadStats(parts), About("m", {}, {}, {"0": "self"}, None, 1, 1))


def test_weights_on_image_tokens_are_laid_out_as_images(look: Any) -> None:
    length = len(PROMPT)
    page = look(prompted(length), f"view=head&head=1&row={length - 1}&column=0")
    pictures = page.locator(".image-tokens canvas[data-drawn]")
    expect(pictures).to_have_count(2)
    captions = page.locator(".image-tokens figcaption bdi")
    expect(captions).to_have_text(["photo: 100\xa0% of the weight", "<i>tile</i>: 0\xa0% of the weight"])
    box = pictures.first.bounding_box()
    assert box is not None
    row, column = divmod(18 - 2, 7)
    place = {"x": (column + 0.5) * box["width"] / 7, "y": (row + 0.5) * box["height"] / 5}
    pictures.first.hover(position=place)
    shown = page.locator(".image-tokens figcaption").first
    expect(shown).to_contain_text(f"row {row}, column {column}: 1.00")
    pictures.first.click(position=place)
    page.wait_for_url(f"**row={length - 1}&column=18*")
    page.get_by_label("Attention on the images").select_option(label="all tokens of “photo”, on average")
    page.wait_for_url("**patchesOf=0*")
    # the queries from key 18 on attend to it, those before it evenly to the keys so far, two of which are no patches
    even = [(n - 1) / (n + 1) for n in range(2, 18)]
    expect(captions.first).to_contain_text(f"{100 * (sum(even) + 19) / 35:.0f}\xa0%")


def test_a_pooled_map_states_that_it_cannot_be_laid_over_images(look: Any) -> None:
    page = look(prompted(9), "view=head&head=1")
    page.locator(".map canvas").wait_for()
    assert f"Observe(map={len(PROMPT)})" in page.locator("#view").inner_text()
    assert page.locator(".image-tokens").count() == 0
