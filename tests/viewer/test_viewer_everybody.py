"""The viewer's page by keyboard and screen reader: names, roles, and the rules of axe-core."""

# ruff: noqa: F401, F811  # chromium and long are fixtures

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from axe_playwright_python.sync_playwright import Axe

from headscope.watching import Recording
from support.all_views import VIEWS, first_of_each, write_pages
from support.browser import (
    BrowserContext,
    Page,
    Watched,
    attributes,
    chromium,
    in_a_browser,
    long,
    wait_until_drawn,
)

pytestmark = in_a_browser

EVERY = [(name, view) for name, views in VIEWS.items() for view in views]
FIRST_OF_EACH = first_of_each(EVERY, ("text", "history"))
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, long: Recording) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("everybody")
    strips = [("layers.0.attention", 0)]
    pages = write_pages(folder)
    pages["long"] = long.save_html(folder / "long.html", strips=strips, exact=[(0, 0)])
    return pages


@pytest.fixture
def show(chromium: BrowserContext, paths: dict[str, Path]) -> Iterator[Any]:
    """Opens a view; in the end nothing was written to the console."""
    opened: list[Watched] = []

    def of(name: str, view: str) -> Page:
        opened.append(Watched(chromium, f"{paths[name].as_uri()}#{view}"))
        page = opened[-1].page
        page.locator("#view > *").first.wait_for()
        wait_until_drawn(page)
        return page

    yield of
    for watched in opened:
        watched.close()
        assert watched.said == []


def findings(page: Page) -> list[str]:
    response: dict[str, Any] = Axe().run(page, options=RULES).response
    return [f"{rule['id']}: {rule['nodes'][0]['html'][:150]}" for rule in response["violations"]]


@pytest.mark.long  # .ci/run has it
@pytest.mark.parametrize(("name", "view"), EVERY)
def test_axe_has_no_finding(show: Any, name: str, view: str) -> None:
    page = show(name, view)
    for width, height, scheme in ((1280, 900, "dark"), (360, 740, "light")):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(60)
        assert findings(page) == [], (width, scheme)


@pytest.mark.long  # .ci/run has it
@pytest.mark.parametrize("opened", ["help", "view", "glossary", "tour", "search", "figure", "offer"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_finding_where_something_is_open(show: Any, opened: str, scheme: Any) -> None:
    page = show("text", "view=heads")
    page.emulate_media(color_scheme=scheme)
    if opened == "search":
        page.keyboard.press("/")
        page.keyboard.type("at")
    elif opened == "view":
        page.get_by_role("button", name="View").click()
    elif opened == "figure":
        page.get_by_role("button", name="Figure of all heads").click()
    elif opened == "offer":
        foreign: Any = {
            "name": "foreign.safetensors",
            "mimeType": "application/octet-stream",
            "buffer": b"no recording",
        }
        page.locator("input[type=file]").first.set_input_files(foreign)
        page.get_by_role("alert").wait_for()
    else:
        page.keyboard.press("?")
        if opened != "help":
            page.get_by_role("button", name="Glossary" if opened == "glossary" else "Take the tour").click()
    page.wait_for_timeout(100)
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 740})
        page.wait_for_timeout(60)
        assert findings(page) == [], width


# ---------------------------------------------------------------- the tree of a screen reader

NAMED = {
    "button", "tab", "combobox", "textbox", "checkbox", "slider", "spinbutton", "image", "dialog", "region", "group",
    "navigation", "tablist", "tabpanel", "heading", "table", "searchbox", "option", "MenuListPopup",
}  # fmt: skip
UNNAMED = {"group", "table", "MenuListPopup"}  # of a part whose heading or label stands before it


def tree(page: Page) -> list[tuple[str, str]]:
    """The roles and names of the nodes that a screen reader reads."""
    session = page.context.new_cdp_session(page)
    nodes: list[dict[str, Any]] = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    return [
        (str(node["role"]["value"]), str(node.get("name", {}).get("value", "")).strip())
        for node in nodes
        if not node["ignored"]
    ]


CANVASES = """() => [...document.querySelectorAll("canvas")].filter((e) => e.checkVisibility())
  .map((e) => e.closest("button") ?? e)
  .map((e) => `${e.getAttribute("role") ?? ""} ${e.getAttribute("aria-label")}`.trim())"""


@pytest.mark.parametrize(("name", "view"), FIRST_OF_EACH)
def test_a_view_is_told_to_those_who_do_not_see_it(show: Any, name: str, view: str) -> None:
    page = show(name, view)
    nodes = tree(page)
    roles = [role for role, _ in nodes]
    assert {"banner", "main", "contentinfo", "tablist", "tabpanel", "search"} <= {*roles}
    assert [role for role, text in nodes if role in NAMED - UNNAMED and not text] == []
    for words in page.evaluate(CANVASES):
        assert words.startswith(("img ", "layer ")), words
        assert len(words) >= 15, words
    assert findings(page) == []


def test_the_words_of_a_map_tell_what_is_seen(show: Any) -> None:
    page = show("text", "view=head&layer=3&head=3")
    images = [text for role, text in tree(page) if role == "image" and text.startswith("Layer 3, head 3: ")]
    (words,) = images
    assert "20 × 20 weights; mostly looks like an induction head (79 %; also first, 43 %)" in words.replace("\xa0", " ")
    assert "of the weight is on the first token" in words
    assert "strongest: ‘␣m’ (18) to ‘at’ (8), 0.998; ‘␣s’ (14) to ‘at’ (4), 0.997" in words
    page = show("text", "view=compare")
    words = [text for role, text in tree(page) if role == "image"]
    assert len(words) == 3
    assert "largest differences: " in words[2]
    page = show("long", "view=head&layer=0&head=0")
    words = [text for role, text in tree(page) if role == "image"]
    assert "97 × 97 weights in 12 × 12 cells" in words[0]
    assert "Nearby tokens of layer 0, head 0, queries 0 to 96. Strongest: query " in words[1]
    page = show("image", "view=head&row=9&column=9")
    words = [text for role, text in tree(page) if role == "image"]
    label = r"Image, layer \d, head \d. An image of 8 × 8 patches. Arrow keys select a patch."
    assert re.fullmatch(label, words[0])
    assert "Most: row " in words[1]


# ---------------------------------------------------------------- keys

INTERACTIVE = """() => {
  const all = [...document.querySelectorAll("button, select, input, summary, a[href], [tabindex]")];
  const visible = (e) => e.checkVisibility({ visibilityProperty: true }) && !e.closest("[hidden]");
  // by their places: a token in focus previews its keys, so that lists are made anew
  window.placeOf = (e) => {
    const above = e.parentElement;
    return above ? `${placeOf(above)} ${[...above.children].indexOf(e)}` : "";
  };
  window.at = (place) => place.trim().split(" ").reduce((e, n) => e.children[n], document.documentElement);
  window.every = all.filter((e) => visible(e) && !e.matches("h2")).map(placeOf);
  return every.length;
}"""
FOCUSED = """() => {
  const e = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(e);
  return [every.indexOf(placeOf(e)), e === document.body, outlineStyle !== "none" && parseFloat(outlineWidth) >= 1];
}"""
GROUPS = """(at) => {
  const groups = ".grid, .layer-strip, [role=tablist], .strip, .reading-text, table";
  const group = window.at(every[at]).closest(groups);
  return group ? [...document.querySelectorAll(groups)].indexOf(group) : -1;
}"""


@pytest.mark.parametrize(("name", "view"), FIRST_OF_EACH)
def test_tab_and_arrows_reach_everything(show: Any, name: str, view: str) -> None:
    page = show(name, view)
    count = page.evaluate(INTERACTIVE)
    page.evaluate("document.activeElement?.blur()")
    reached: set[int] = set()
    for _ in range(count + 5):
        page.keyboard.press("Tab")
        at, is_end, visible = page.evaluate(FOCUSED)
        if is_end or at in reached:
            break
        assert visible, page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
        reached.add(at)
    else:
        pytest.fail("the Tab key does not come to an end")
    groups = {page.evaluate(GROUPS, at) for at in reached} - {-1}
    missing = [at for at in range(count) if at not in reached and page.evaluate(GROUPS, at) not in groups]
    assert [page.evaluate("(n) => at(every[n]).outerHTML.slice(0, 200)", at) for at in missing] == []
    assert len(reached) < 90, "many buttons are one stop"


@pytest.mark.parametrize(
    ("name", "view", "selector"),
    [
        ("text", "view=reading", ".reading-text button"),
        ("text", "view=head&layer=3&head=3", ".strip:first-of-type button"),
        ("watch", "view=segments", ".segment-heads button"),
        ("text", "view=table", "table.every tbody button"),
    ],
)
def test_arrows_walk_through_a_group(show: Any, name: str, view: str, selector: str) -> None:
    page = show(name, view)
    items = page.locator(selector)
    items.first.focus()
    texts = items.all_inner_texts()
    assert len(texts) > 10
    for n in range(1, 10):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("(s) => [...document.querySelectorAll(s)].indexOf(document.activeElement)", selector) == n
    page.keyboard.press("Home")
    assert items.first.evaluate("(e) => e === document.activeElement")
    assert attributes(items, "tabindex").count("0") == 1
    assert "view=" + view.split("=")[1].split("&")[0] in page.url, "the arrows changed nothing else"


def test_the_selected_cell_stays_in_sight(show: Any) -> None:
    page = show("text", "view=head&layer=3&head=3&row=0&column=0&zoom=4,0.125,0.125")
    page.locator(".map canvas").focus()
    for _ in range(8):
        page.keyboard.press("Shift+ArrowDown")
    page.wait_for_function("() => location.hash.includes('row=8')")
    middle = float(unquote(page.url).partition("zoom=4,")[2].split(",")[1].split("&")[0])
    assert abs(middle - 8.5 / 20) < 0.125
