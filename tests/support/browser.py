"""The viewer's page opened in a real browser: recordings to show, and what is read from the screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from headscope import Observe, masks, observe
from headscope.report.serving import Server
from headscope.watching import About, Recording
from support.chromium import pages_of
from support.html_pages import HOSTILE, browser
from support.serving import running

try:
    from playwright.sync_api import BrowserContext, Locator, Page
except ImportError:  # pragma: no cover
    pytest.skip("Playwright is not installed", allow_module_level=True)

in_a_browser = pytest.mark.skipif(browser() is None, reason="no Chromium is installed")

LONG, BINS = 97, 12


def recorded(length: int, texts: tuple[str, ...] | None, what: Observe) -> Recording:
    """Two layers of three heads over one text."""
    parts = {}
    for layer in range(2):
        q, k = 2 * torch.randn(2, 1, 3, length, 8, generator=torch.Generator().manual_seed(layer))
        found = observe(q, k, mask=masks.causal(), what=what)
        parts |= found.named(f"layers.{layer}.attention").parts
    kinds: Any = dict.fromkeys(parts, "self")
    return Recording(type(found)(parts), About("a <model>", {}, {"headscope": "0"}, kinds, texts, 1, 1))


@pytest.fixture(scope="module")
def short() -> Recording:
    """Every weight is in the map; the tokens mean harm."""
    length = len(HOSTILE)
    what = Observe(map=length, edges=5, keep_rows=True, top=2, tokens=torch.arange(length) % 3, keep_qk=True)
    return recorded(length, tuple(HOSTILE), what)


@pytest.fixture(scope="module")
def long() -> Recording:
    """Pooled maps, with q and k."""
    what = Observe(map=BINS, edges=5, keep_rows=True, top=3, keep_qk=True)
    return recorded(LONG, tuple(f" w{n}" for n in range(LONG)), what)


@pytest.fixture(scope="module")
def chromium(chromium_context: BrowserContext) -> Iterator[BrowserContext]:
    """The context of all files. The language is that of each address, and permissions end with a file."""
    yield chromium_context
    chromium_context.clear_permissions()


class Watched:
    """A page, what it wrote to the console, and what it asked for."""

    def __init__(self, chromium: BrowserContext, url: str, *, width: int = 1280, scheme: Any = "light") -> None:
        self.pages = pages_of(chromium)
        self.page: Page = self.pages.take(width=width, scheme=scheme)
        self.said: list[str] = []
        self.asked: list[str] = []
        self._listeners: dict[Any, Any] = {
            "console": lambda message: self.said.append(message.text),
            "pageerror": lambda error: self.said.append(str(error)),
            "dialog": lambda dialog: self.said.append(dialog.message),
            "request": lambda request: self.asked.append(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)
        self.pages.load(self.page, url)

    def close(self) -> None:
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self.pages.give_back(self.page)


@pytest.fixture
def look(
    chromium: BrowserContext, written_pages: Callable[[Recording], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Opens the page of a recording at an address; in the end nothing was said and nothing asked for."""
    opened: list[Watched] = []
    is_patched = "monkeypatch" in request.fixturenames  # a page may then be written in another way

    def open_page(found: Recording | Path, at: str = "", **options: Any) -> Page:
        if isinstance(found, Path):
            path = found
        elif is_patched:
            path = found.save_html(tmp_path / f"{len(opened)}.html")
        else:
            path = written_pages(found)
        watched = Watched(chromium, f"{path.as_uri()}#{at}", **options)
        opened.append(watched)
        return watched.page

    yield open_page
    for watched in opened:
        assert watched.said == []
        assert [url for url in watched.asked if not url.startswith(("data:", "blob:"))] == watched.asked[:1]
        watched.close()


def serving(recording: Recording, path: Path) -> AbstractContextManager[Server]:
    """Serve a recording that was saved to a path and loaded."""
    return running(Server(Recording.load(recording.save(path, qk=True))))


def figure(value: float) -> str:
    """A number as the page shows it."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return re.sub(r"e-0", "e-", f"{value:.2e}") if abs(value) < 1e-4 else f"{value:#.3g}".rstrip(".")


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def near(shown: float, wanted: float) -> None:
    """Three digits of a number that is kept in 16 bits."""
    assert shown == pytest.approx(wanted, rel=6e-3, abs=4e-5)


def thumbs(page: Page) -> list[str]:
    page.locator(".thumb canvas[data-drawn], .thumb .tile").first.wait_for()
    return attributes(page.locator(".thumb"), "aria-label")


def attributes(elements: Locator, name: str) -> list[str]:
    """Return an attribute of each of some elements, by one question to the page."""
    return elements.evaluate_all("(all, name) => all.map((each) => String(each.getAttribute(name)))", name)


_STILL = """(quiet) => new Promise((done) => {
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => { observer.disconnect(); requestIdleCallback(done, { timeout: 500 }); }, quiet);
  };
  const observer = new MutationObserver(wait);
  observer.observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
  wait();
})"""


def wait_until_drawn(page: Page, quiet: int = 80) -> None:
    """Wait until the page has changed nothing for so many milliseconds: its heads are decoded and drawn."""
    page.evaluate(_STILL, quiet)


# The page listens to its address from the first effects on: after the frame that follows its first drawing.
_TURNED = """(at) => new Promise((done) => {
  const drawn = () => requestAnimationFrame(() => requestAnimationFrame(done));
  requestAnimationFrame(() => setTimeout(() => {
    if (location.hash === `#${at}`) return done();
    addEventListener("hashchange", drawn, { once: true });
    location.hash = at;
  }));
})"""


def turn(page: Page, at: str) -> Page:
    """Lead a page to another address of its recording, which takes half the time of another load."""
    page.evaluate(_TURNED, at)
    return page


def open_menu(page: Page, name: str = "View") -> Page:
    """Open a menu of the bar."""
    button = page.locator(".menus").get_by_role("button", name=name)
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    return page


def save_figure(page: Page, of: str, kind: str = "SVG") -> Path:
    """Save the figure of something: the path of the file. Kinds are PNG 2×, PNG 3× and SVG."""
    button = page.get_by_role("button", name=f"Figure of {of}", exact=True)
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    with page.expect_download() as download:
        page.locator(".choices").get_by_role("button", name=kind).click()
    path = Path(download.value.path())
    return path.rename(path.with_name(download.value.suggested_filename))


def texts_of(svg: Path) -> list[str]:
    """The texts of an SVG, in its order."""
    return [each.text or "" for each in ElementTree.parse(svg).iter() if each.tag.endswith("}text")]


def weight(recording: Recording, layer: int, head: int) -> np.ndarray[Any, Any]:
    kept = recording.stats.parts[f"layers.{layer}.attention"]
    return kept.tiles[0](0, kept.lengths[0], 0, kept.lengths[1])[0, head].double().numpy()  # pyright: ignore[reportOptionalSubscript]


def place(page: Page, row: float, column: float) -> tuple[float, float]:
    """Where a place of the map, as shares, is on the screen, to which it is brought; nothing is zoomed."""
    plot = page.evaluate("JSON.parse(document.querySelector('.map canvas').dataset.plot)")

    def now() -> tuple[float, float]:
        box = page.locator(".map canvas").bounding_box()
        assert box is not None
        return box["x"] + plot["x"] + column * plot["width"], box["y"] + plot["y"] + row * plot["height"]

    beyond = now()[1] - page.evaluate("innerHeight") + 40
    if beyond > 0:
        drawn = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"  # scrolled, and told
        page.evaluate(f"(scrollBy({{ top: {beyond}, behavior: 'instant' }}), {drawn})")
    return now()


def zoom_of(url: str) -> list[float]:
    """The scale, and the middle of what is seen, that an address names."""
    return [float(part) for part in parse_qs(urlsplit(url).fragment).get("zoom", ["1,0.5,0.5"])[0].split(",")]
