"""The viewer's page in German and Chinese: no text is left in English, and numbers are written as in the language."""

# ruff: noqa: F401, F811  # chromium and long are fixtures

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope import Observe, trace, watch
from headscope.report.words import PATTERNS, REGIONS, STAGES, STATISTICS
from headscope.tracing._explanations import EXPLANATIONS
from headscope.tracing._written.explanations import _MORE
from headscope.watching import Recording
from support.all_views import VIEWS, first_of_each, write_pages
from support.browser import BrowserContext, Page, chromium, in_a_browser, long, turn, wait_until_drawn
from support.chromium import pages_of
from support.paths import ROOT

pytestmark = in_a_browser

EVERY = [
    *((name, view) for name, views in VIEWS.items() for view in views),
    ("steps", "view=trace"),
    ("broken", "view=head"),
]

SAME = {
    "de": r"Deutsch|English|Enter|Esc|Filter|Heads?|Head [AB]|Head \d\.\d|Keys|Query|Tab|Training|linear|Streaming|"
    "Segments?|Softmax|Layout",
    "zh": r"Deutsch|English|Enter|Esc|Tab|Shift \+ .*|softmax|lse( \S+ → .*)?",
}
"""Texts that are the same in both languages."""

NAMES = (
    r"PNG|SVG|CSV|CLS|viridis|cividis|magma|float(16|32|64)|lse( = .*)?|headscope \d.*|layers[.\d*a-z]*|w\d+|"
    r"TextModel|_Model|a <model>|MultiheadAttention|fox|hare|(map|keep_qk|rows|tokens)=.*|(o|p|out|q, k, v) = .*|"
    r"the cat sat on the mat.*|\d+: .*"
)
"""Names, equations, options, and what the reader wrote."""

TEXTS = """() => {
  const found = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement;
    if (parent.closest("script, style, bdi, noscript, code")) continue;
    found.add(walk.currentNode.textContent.trim());
  }
  for (const name of ["aria-label", "title", "placeholder"])
    for (const each of document.querySelectorAll(`[${name}]`)) found.add(each.getAttribute(name));
  return [...found];
}"""

LITTLE = (
    "the|of|and|with|for|each|are|which|that|from|by|not|its|their|attends?|looks?|tokens?|rows?|weights?|heads?|layers?|"
    "keys?|quer(?:y|ies)|mean"
)
GERMAN = {"head", "heads", "key", "keys", "query", "token", "tokens", "queries"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, long: Recording) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("languages")
    strips = [("layers.0.attention", 0)]
    pages = write_pages(folder)
    pages["long"] = long.save_html(folder / "long.html", strips=strips, exact=[(0, 0)])
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(0))
    with watch(module, what=Observe(map=11)) as recording:
        module(x, x, x)
    pages["steps"] = recording.save_html(folder / "steps.html", trace=trace(module, x))
    x[0, 3] = torch.nan
    with watch(module, what=Observe(map=11, rows=5), verify=2) as recording:
        module(x, x, x)
    pages["broken"] = recording.save_html(folder / "broken.html")
    return pages


@pytest.fixture
def page(chromium: BrowserContext) -> Iterator[Page]:
    pages = pages_of(chromium)
    opened = pages.take()
    yield opened
    pages.give_back(opened)


def load(page: Page, path: Path, fragment: str) -> None:
    pages_of(page.context).load(page, f"{path.as_uri()}#{fragment}")


def texts(page: Page, view: str, language: str) -> set[str]:
    """All that a reader of a view sees or hears, with the menus and the glossary."""
    turn(page, f"{view}&lang={language}")
    page.locator("#view > *").first.wait_for()
    wait_until_drawn(page)
    page.keyboard.press("?")
    page.locator(".guides button").nth(1).click()
    page.locator(".glossary").wait_for()
    found = {*page.evaluate(TEXTS)}
    page.keyboard.press("Escape")
    return found


@pytest.mark.parametrize(("name", "view"), first_of_each(EVERY, ("text", "pair")))
def test_nothing_is_left_in_english(page: Page, paths: dict[str, Path], name: str, view: str) -> None:
    load(page, paths[name], f"{view}&lang=en")
    english = texts(page, view, "en")
    assert len(english) > 100
    for language in ("de", "zh"):
        translated = texts(page, view, language)
        equal = {text for text in english & translated if re.search("[A-Za-z]{2}", text)}
        assert {text for text in equal if not re.fullmatch(f"{SAME[language]}|{NAMES}", text)} == set(), language
        assert half_english(translated, language) == [], language


def half_english(found: set[str], language: str) -> list[str]:
    """Texts with a small English word; tokens and what stands in quotes are the reader's."""
    parts: list[str] = []
    for text in found:
        read = re.sub(r"[“„‘‚][^”“’‘]*[”“’‘]|layers[.*]\S*|\w+=\S*", "", text)
        words = {word.lower() for word in re.findall(rf"\b(?:{LITTLE})\b", read)}
        # the placeholder has a word of the text
        own = re.match(r"\d+(: |：)|the cat sat on|(Suche: |查找：)", text) is not None
        if words - (GERMAN if language == "de" else set()) and not own:
            parts.append(text)
    return parts


def test_the_language_is_that_of_the_address_then_the_reader_s_then_the_browser_s(
    chromium: BrowserContext, paths: dict[str, Path]
) -> None:
    browser = chromium.browser
    assert browser is not None
    context = browser.new_context(locale="de-AT")
    page = context.new_page()
    tab = page.locator("#tab-table")
    page.goto(paths["text"].as_uri())
    assert tab.inner_text() == "Statistik"
    assert page.locator("html").get_attribute("lang") == "de"
    page.goto("about:blank")
    page.goto(f"{paths['text'].as_uri()}#lang=zh")
    assert tab.inner_text() == "统计"
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    page.goto("about:blank")
    page.goto(paths["text"].as_uri())
    page.locator(".menu.view > button").click()
    choice = page.get_by_label("Sprache (Language)")
    choice.select_option("en")
    assert tab.inner_text() == "Statistics"
    assert page.locator("#menu-view").is_visible(), "the menu is still open"
    assert "lang=" not in page.url
    page.goto("about:blank")
    page.goto(paths["image"].as_uri())
    assert tab.inner_text() == "Statistics", "the choice is that of all pages"
    page.goto("about:blank")
    page.goto(f"{paths['text'].as_uri()}#lang=de")
    page.locator(".menu.view > button").click()
    page.get_by_label("Sprache (Language)").select_option("zh")
    page.wait_for_function("() => location.hash.includes('lang=zh')")
    context.close()


def test_what_the_reader_wrote_stays(page: Page, paths: dict[str, Path]) -> None:
    load(page, paths["text"], "lang=zh")
    page.locator("#view > *").first.wait_for()
    assert "“the cat sat on the mat, and the dog sat on the mat”，20 个词元" in page.locator("footer").inner_text()
    assert page.locator("h1").inner_text() == "the cat sat on the mat, and the dog sat on the mat"
    load(page, paths["watch"], "lang=de")
    assert (
        page.locator("h1")
        .inner_text()
        .startswith("Das mitgelieferte Sprachmodell: “Once upon a time there was a fox. The")
    )


def test_an_unknown_language_is_english(page: Page, paths: dict[str, Path]) -> None:
    load(page, paths["text"], "lang=fr")
    assert page.locator("#tab-table").inner_text() == "Statistics"


def test_numbers_are_written_as_the_language_writes_them(page: Page, paths: dict[str, Path]) -> None:
    load(page, paths["text"], "view=head")
    for language, weight, share in (("en", "0.", " %"), ("de", "0,", " %"), ("zh", "0.", "%")):
        turn(page, f"view=head&layer=3&head=3&row=9&column=5&lang={language}")
        cell = page.locator(".beside tr[data-name=normalized_entropy] td").first
        assert cell.inner_text().startswith(weight + "2")
        assert re.search(rf"\D79{share}\D", page.locator(".likeness").inner_text().replace("\xa0", " "))


def test_canvases_are_drawn_in_the_language(page: Page, paths: dict[str, Path]) -> None:
    load(page, paths["text"], "view=head&layer=3&head=3&lang=de")
    page.locator(".map canvas").wait_for()
    page.locator(".map .figure-menu > button").click()
    with page.expect_download() as download:
        page.locator(".map .choices").get_by_role("button", name="SVG").click()
    svg = Path(download.value.path()).read_text(encoding="utf-8")
    assert ">Query<" in svg
    assert "Schicht 3, Head 3 · Induktion 79" in svg.replace("\xa0", " ")
    assert "Lineare Farbskala." in svg
    for english in ("Layer", "Rows", "columns", "colour scale", "Grey", "Model:"):
        assert english not in svg


def test_patches_of_cards_are_named_in_the_language(page: Page, paths: dict[str, Path]) -> None:
    load(page, paths["image"], "lang=de")
    names = page.locator(".cards .card bdi").all_inner_texts()
    assert names
    assert [name for name in names if not re.fullmatch(r"Zeile \d, Spalte \d", name)] == []


def test_notes_of_a_comparison_follow_the_language(page: Page, long: Recording, tmp_path: Path) -> None:
    path = long.save_html(tmp_path / "notes.html", against=long)
    load(page, path, "lang=de")
    notes = page.locator(".changes-notes")
    assert "A und B nennen das Modell nicht" in notes.inner_text()
    page.evaluate("location.hash = 'lang=zh'")
    page.locator("html[lang=zh-Hans]").wait_for()
    assert "A 和 B 没有注明模型" in notes.inner_text()


def test_what_python_writes_has_a_translation() -> None:
    """An entry of phrases.ts for each meaning of a statistic, of steps.ts for each step of a trace."""
    source = ROOT / "viewer" / "src"
    if not source.exists():
        pytest.skip("this is no checkout: there is no source of the script")
    phrases = (source / "phrases.ts").read_text(encoding="utf-8")
    steps = (source / "steps.ts").read_text(encoding="utf-8")
    meanings = [word.meaning for word in (*STATISTICS.values(), *REGIONS.values()) if word.meaning]
    sentences = [*meanings, *PATTERNS.values(), *(stage for stage in STAGES.values() if stage != "Input")]
    assert [text for text in sentences if f'["{text}", ' not in phrases and f"['{text}', " not in phrases] == []
    names = [*EXPLANATIONS, *_MORE]
    assert [name for name in names if not re.search(rf'^  "?{re.escape(name)}"?: {{$', steps, re.MULTILINE)] == []
