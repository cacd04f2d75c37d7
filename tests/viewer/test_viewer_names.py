"""The name of a head in words on the page, in its three languages: partly below a match of 50 %."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

from typing import Any

import pytest
import torch

from headscope import Observe, masks, observe
from headscope.report import save, text_sheet
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import BrowserContext, chromium, in_a_browser, look, turn

pytestmark = in_a_browser

LENGTH = 29
TOKENS = [f"w{n}" for n in range(LENGTH)]


def weights(*, previous: float, own: float) -> torch.Tensor:
    """Causal weights of one head: these shares on the previous and own key, the rest evenly."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()
    p = (1 - previous - own) * visible / visible.sum(-1, keepdim=True)
    at = torch.arange(LENGTH)
    p[at, (at - 1).clamp_min(0)] += previous
    p[at, at] += own
    return p


HEADS = torch.stack([weights(previous=0.4, own=0.33), weights(previous=0.6, own=0.3)])


def recorded() -> Recording:
    q = torch.eye(LENGTH, dtype=torch.float64).expand(1, 2, -1, -1)
    k = HEADS.clamp_min(1e-30).log().mT[None]
    stats = observe(q, k, mask=masks.causal(), scale=1.0, what=Observe(map=LENGTH)).named("layers.0.attention")
    kinds: Any = {"layers.0.attention": "self"}
    return Recording(HeadStats(stats.parts), About("m", {}, {}, kinds, tuple(TOKENS), 1, 1))


WORDS = {
    "en": (
        "partly previous 36 %",
        "Partly looks like a previous-token head (match 36 %, from 28 tokens; also self, 28 %). "
        "In part: each token looks at the one just before it.",
        "partly looks like a previous-token head (36 %; also self, 28 %)",
        "partly previous",
    ),
    "de": (
        "teils vorheriges 36 %",
        "Ähnelt teils einem Previous-Token-Head (Übereinstimmung 36 %, aus 28 Tokens; auch selbst, 28 %). "
        "Zum Teil: Jedes Token achtet auf das unmittelbar davor.",
        "ähnelt teils einem Previous-Token-Head (36 %; auch selbst, 28 %)",
        "teils vorheriges",
    ),
    "zh": (
        "部分前一个 36%",
        "部分像是前一词元头（匹配度 36%，基于 28 个词元；也有自身，28%）。其中一部分：每个词元关注紧邻其前的一个。",
        "部分像是前一词元头（36%；也有自身，28%）",
        "部分前一个",
    ),
}


@pytest.mark.parametrize("language", WORDS)
def test_a_partial_name_has_the_same_words_in_every_view(language: str, look: Any) -> None:
    caption, sentence, alternative, name = WORDS[language]
    page = look(recorded(), f"view=heads&lang={language}")

    def plain(selector: str) -> str:
        return page.locator(selector).first.inner_text().replace("\xa0", " ")

    assert plain(".thumb small") == caption
    turn(page, f"view=head&layer=0&head=0&lang={language}")
    assert plain(".likeness") == sentence
    labels = page.locator("canvas[aria-label]").evaluate_all(
        "all => all.map((each) => each.getAttribute('aria-label'))"
    )
    assert any(alternative in label.replace("\xa0", " ") for label in labels)
    turn(page, f"view=table&lang={language}")
    assert name in [text.strip() for text in page.locator("td.text").all_inner_texts()]


CARDS = {
    "en": "0.0 partly looks at the previous token (36 %; also self, 28 %)",
    "de": "0.0 achtet teils auf das vorige Token (36 %; auch selbst, 28 %)",
    "zh": "0.0 部分地关注前一个词元（36%；也有自身，28%）",
}


@pytest.mark.parametrize("language", CARDS)
def test_the_card_of_a_partial_name(language: str, look: Any, tmp_path: Any) -> None:
    path = save(text_sheet("m", TOKENS, [HEADS[:1].float()]), tmp_path / "sheet.html")
    page = look(path, f"lang={language}")
    assert page.locator(".card").first.inner_text().replace("\xa0", " ").splitlines()[0] == CARDS[language]


BOTH = {
    "en": (
        "previous 50 % · self",
        "Mostly looks like a previous-token head (match 50 %, from 28 tokens; also self, 34 %). "
        "For the most part: each token looks at the one just before it.",
        "0.0 mostly looks at the previous token (50 %; also self, 34 %)",
    ),
    "de": (
        "vorheriges 50 % · selbst",
        "Ähnelt überwiegend einem Previous-Token-Head (Übereinstimmung 50 %, aus 28 Tokens; auch selbst, 34 %). "
        "Zum größten Teil: Jedes Token achtet auf das unmittelbar davor.",
        "0.0 achtet überwiegend auf das vorige Token (50 %; auch selbst, 34 %)",
    ),
    "zh": (
        "前一个 50% · 自身",
        "大体上像是前一词元头（匹配度 50%，基于 28 个词元；也有自身，34%）。其中大部分：每个词元关注紧邻其前的一个。",
        "0.0 大体上关注前一个词元（50%；也有自身，34%）",
    ),
}


@pytest.mark.parametrize("language", BOTH)
def test_a_second_name_has_the_same_words_in_every_view(language: str, look: Any, tmp_path: Any) -> None:
    caption, sentence, card = BOTH[language]
    heads = torch.stack([weights(previous=0.55, own=0.41), weights(previous=0.6, own=0.3)])
    path = save(text_sheet("m", TOKENS, [heads.float()]), tmp_path / "sheet.html")

    def plain(page: Any, selector: str) -> str:
        return page.locator(selector).first.inner_text().replace("\xa0", " ").splitlines()[0]

    page = look(path, f"view=heads&lang={language}")
    assert plain(page, ".thumb small") == caption
    turn(page, f"view=head&layer=0&head=0&lang={language}")
    assert plain(page, ".likeness") == sentence
    turn(page, f"view=heads&pattern=self&by=score&least=0.3&lang={language}")
    assert page.locator(".thumb").count() == 1, (
        "the score is that of the pattern: 34 % of the first head, 25 % of the other"
    )
    turn(page, f"view=heads&pattern=self&by=score&least=0.4&lang={language}")
    page.locator(".grid .hint").wait_for()
    assert page.locator(".thumb").count() == 0
    path = save(text_sheet("m", TOKENS, [heads[:1].float()]), tmp_path / "one.html")
    page = look(path, f"lang={language}")
    assert plain(page, ".card") == card
