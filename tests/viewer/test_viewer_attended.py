"""An image on the first screen: the selected patch is named and framed, and where it attends lies over the image."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headscope import Observe, observe
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import chromium, in_a_browser, look

pytestmark = in_a_browser

ROWS, COLUMNS, QUERY, KEY = 5, 7, 17, 31
SIDE = 11  # pixels of a patch


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of two heads over 5 x 7 patches: in head 1 each query attends to one patch, in head 0 to the next one."""
    count = ROWS * COLUMNS
    k = torch.eye(count)[None, None].repeat(1, 2, 1, 1)
    q = torch.zeros(1, 2, count, count)
    q[0, 0] = torch.eye(count).roll(1, 1)
    q[0, 1, :, KEY] = 1
    found = observe(200 * q, k, what=Observe(map=count, edges=2)).named("0")
    recording = Recording(HeadStats(found.parts), About("m", {}, {}, {"0": "self"}, None, 1, 1))
    image = torch.full((ROWS * SIDE, COLUMNS * SIDE), 90, dtype=torch.uint8)
    path = tmp_path_factory.mktemp("image") / "page.html"
    return recording.save_html(path, image=image, grid=(ROWS, COLUMNS))


def colour(page: Any, number: int, key: int) -> list[int]:
    """The colour in the middle of a patch of a picture."""
    canvas = page.locator(".attended canvas[data-drawn]").nth(number)
    row, column = divmod(key, COLUMNS)
    at = [(column + 0.5) / COLUMNS, (row + 0.5) / ROWS]
    read = """(c, [x, y]) => {
      const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(c, 0, 0);
      return [...copy.getImageData(x * c.width, y * c.height, 1, 1).data].slice(0, 3);
    }"""
    return canvas.evaluate(read, at)


def test_the_first_screen_shows_the_image_and_where_the_named_query_attends(look: Any, page_path: Path) -> None:
    page = look(page_path, f"head=1&row={QUERY}")
    page.locator(".attended canvas[data-drawn]").nth(1).wait_for()
    box = page.locator(".attended").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 300
    image, head = page.locator(".attended figcaption").all_inner_texts()
    assert "patch row 2, column 3" in image
    assert "0.1" in head
    assert "patch row 2, column 3" in head
    assert "patch row 4, column 3 (100 %)" in head.replace("\xa0", " ")
    assert colour(page, 0, KEY) == [90, 90, 90]
    red, green, blue = colour(page, 1, KEY)
    assert red > green > blue
    assert colour(page, 1, KEY - 1) == [90, 90, 90]


def test_a_click_on_the_image_selects_another_query(look: Any, page_path: Path) -> None:
    page = look(page_path, "head=0")
    canvas = page.locator(".attended canvas[data-drawn]").first
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": 2.5 * box["width"] / COLUMNS, "y": 1.5 * box["height"] / ROWS})
    page.wait_for_url("**row=9**")
    caption = page.locator(".attended figcaption").nth(1)
    caption.filter(has_text="patch row 1, column 2").wait_for()
    assert "Most: patch row 1, column 3" in caption.inner_text()
    canvas.press("ArrowDown")
    page.wait_for_url("**row=16**")


def test_a_card_under_the_pointer_shows_its_head(look: Any, page_path: Path) -> None:
    page = look(page_path, f"head=0&row={QUERY}")
    card = page.locator("button.card", has_text="0.1").first
    card.hover()
    page.locator(".attended figcaption", has_text="Head 0.1").wait_for()
    page.mouse.move(5, 880)
    page.locator(".attended figcaption", has_text="Head 0.0").wait_for()


@pytest.mark.parametrize(
    ("thumbs", "hint"),
    [("received", "on average over all queries"), ("patch", "patch row 2, column 3 (framed) attends")],
)
def test_the_pictures_name_their_query(look: Any, page_path: Path, thumbs: str, hint: str) -> None:
    page = look(page_path, f"thumbs={thumbs}&row={QUERY}")
    assert hint in page.locator("#view section > .hint").inner_text()
