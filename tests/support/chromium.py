"""One Chromium for all files that a process tests, and its pages, which are used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

from support.html_pages import browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

    from headscope.watching import Recording

MOST_USES = 20  # the history of a page holds 50 addresses

# A page lives for less than a second, so that compiling its script in the background costs more than it saves. Chromium
# reads the last list of features only: those of Playwright that matter here are repeated.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--num-raster-threads=1",
    "--js-flags=--single-threaded --no-maglev --no-turbofan",
    "--disable-features=DestroyProfileOnBrowserClose,HttpsUpgrades,OptimizationHints,PaintHolding,RenderDocument",
)


@pytest.fixture(scope="session")
def chromium_process() -> Iterator[Browser]:
    """A running browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        process = playwright.chromium.launch(executable_path=browser(), args=FLAGS)
        yield process
        process.close()


@pytest.fixture(scope="session")
def chromium_context(chromium_process: Browser) -> BrowserContext:
    """The context of all files that leave it as it was: a context of its own starts a renderer and compiles again."""
    context = chromium_process.new_context()
    context.set_default_timeout(20_000)
    return context


@pytest.fixture(scope="module")
def written_pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recording], Path]:
    """Writes the page of a recording once for a file of tests."""
    folder = tmp_path_factory.mktemp("pages")
    written: dict[int, tuple[Recording, Path]] = {}  # the recording stays, so that no other one gets its number

    def path_of(found: Recording) -> Path:
        if id(found) not in written:
            written[id(found)] = found, found.save_html(folder / f"{len(written)}.html")
        return written[id(found)][1]

    return path_of


_PAGES: WeakKeyDictionary[BrowserContext, Pages] = WeakKeyDictionary()


def pages_of(context: BrowserContext) -> Pages:
    """Return the pages of a context."""
    if context not in _PAGES:
        _PAGES[context] = Pages(context)
    return _PAGES[context]


class Pages:
    """The pages of a context. A page that is free is opened again: its process has compiled the script.

    A new page takes twice the time: 0.24 s in place of 0.12 s of all processes, on an AMD EPYC of 2 cores.
    """

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self._free: list[tuple[Page, int]] = []
        self._uses: dict[Page, int] = {}
        self._opened = 0

    def take(self, *, width: int = 1280, height: int = 900, scheme: Any = "light") -> Page:
        """Return a page on a screen of this size that shows anything."""
        page, uses = self._free.pop() if self._free else (self.context.new_page(), 0)
        self._uses[page] = uses + 1
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        return page

    def load(self, page: Page, url: str) -> None:
        """Load an address. Another fragment of the same file would be no other document."""
        self._opened += 1
        place, sign, fragment = url.partition("#")
        page.goto(f"{place}?{self._opened}{sign}{fragment}" if place.startswith("file:") else url)

    def give_back(self, page: Page) -> None:
        """Let a page be taken again, unless a test has closed or nearly used it up."""
        uses = self._uses.pop(page)
        if page.is_closed():
            return
        if uses >= MOST_USES or not page.url.startswith("file:"):  # the page of a server may still wait for it
            page.close()
            return
        page.emulate_media(media="null", forced_colors="null", reduced_motion="null")
        page.mouse.move(0, 0)  # in the bar, where nothing is previewed
        self._free.append((page, uses))
