"""Two parts of a screen state the same: switches, lists, captions, equations, links."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect
from torch import nn
from torch.nn import functional as F

from headscope import HeadStats, History, Observe, Segments, masks, observe, watch
from headscope.watching import About, AttentionWarning, Recording
from support.browser import (
    LONG,
    Page,
    chromium,
    in_a_browser,
    long,
    look,
    open_menu,
    recorded,
    weight,
)

pytestmark = in_a_browser

NAMES = ["system", "document", "question"]
IDS = torch.tensor([0] * 4 + [1] * 8 + [2] * 7)
PIECES = ("the", " c", "at", " s", "at", " on", " ", "m", "at", ",", " and", " the", " do", "g", " s", "at", ".")
CHOSEN = 11  # a token with several keys
STEPS = 23


def first_heads(strengths: tuple[float, ...]) -> Recording:
    """Heads that put some of their weight on the first token, each with another strength."""
    length, heads = len(IDS), len(strengths)
    q, k = torch.ones(1, heads, length, 1), 0.3 * torch.rand(1, heads, length, 1, generator=torch.Generator())
    k[0, :, 0, 0] = torch.tensor(strengths)
    what = Observe(segments=Segments(NAMES, IDS), map=length, edges=3, keep_rows=True)
    parts = observe(q, k, mask=masks.causal(), what=what).named("0").parts
    texts = tuple(f" w{n}" for n in range(length))
    return Recording(HeadStats(parts), About("m", {}, {}, {"0": "self"}, texts, 1, 1))


def windows(lengths: tuple[int, ...]) -> Recording:
    """A text in windows, whose maps are merged."""
    parts: list[HeadStats] = []
    for run, length in enumerate(lengths):
        q, k = 3 * torch.randn(2, 1, 2, length, 5, generator=torch.Generator().manual_seed(run))
        parts.append(observe(q, k, mask=masks.causal(), what=Observe(map=7, edges=3)).named("0"))
    texts = tuple(tuple(f"␣{letter}{n}" for n in range(length)) for letter, length in zip("abc", lengths, strict=False))
    count = len(lengths)
    about = About("m", {}, {}, {"0": "self"}, None, count, count, run_texts=texts)
    return Recording(parts[0].merge(*parts[1:]), about)


@pytest.fixture(scope="module")
def pieces() -> Recording:
    """A text in which some tokens occur several times, with every weight, q and k."""
    return recorded(len(PIECES), PIECES, Observe(map=len(PIECES), edges=3, keep_rows=True, keep_qk=True))


@pytest.fixture(scope="module")
def sinks() -> Recording:
    return first_heads((0.0, 1.0, 2.0, 4.0))


def plain(text: str) -> str:
    return text.replace("\xa0", " ")


BAR = """([column, columns, y]) => {
  const canvas = document.querySelector(".map canvas"), r = devicePixelRatio, plot = JSON.parse(canvas.dataset.plot);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const pixel = (x, y) => [...copy.getImageData(x * r, y * r, 1, 1).data].join();
  return pixel(plot.x + ((column + 0.5) / columns) * plot.width, y) !== pixel(plot.x + 2, 19); // above each bar
}"""


def wait_for_bar(page: Page, column: int, high: bool, is_there: bool) -> None:
    """Wait until the bar above a column is there, or is not; a `high` one is as high as the highest."""
    foot, top = 44, 25  # pixels of the canvas
    at = [column, len(IDS), top if high else foot]
    page.wait_for_function(f"(at) => ({BAR})(at) === {str(is_there).lower()}", arg=at)


# ---------------------------------------------------------------- the first token


def test_a_head_opened_from_segments_is_shown_as_it_is(look: Any, sinks: Recording) -> None:
    page = look(sinks, "view=segments")
    page.get_by_label("without the first token").check()
    page.wait_for_url("**segmentFirst=hidden*")
    assert "sink=" not in page.url
    page.locator(".segment-heads button").nth(3).click()
    expect(page.locator(".legend").first).to_contain_text("Each cell is one weight.")
    expect(page.locator(".legend").first).not_to_contain_text("Without the first token")
    page.get_by_role("tab", name="Segments").click()
    expect(page.get_by_label("without the first token")).to_be_checked()


def test_a_hidden_first_token_is_in_no_map_and_in_segments_it_stays(look: Any, sinks: Recording) -> None:
    page = look(sinks, "view=segments&sink=hidden")
    expect(page.get_by_label("without the first token")).not_to_be_checked()
    page = look(sinks, "view=segments&segmentFirst=hidden")
    expect(page.get_by_label("without the first token")).to_be_checked()
    hint = page.locator("#segments-title ~ .hint").first
    expect(hint).to_contain_text("What chance would give is not known there, so the colour shows the share alone.")


def test_list_and_bars_of_a_head_leave_the_first_token_out_as_its_map_does(look: Any, sinks: Recording) -> None:
    page = look(sinks, "view=head&layer=0&head=3&row=15&column=2")
    listed = page.locator(".beside .context button")
    expect(listed.first).to_have_attribute("title", "Go to token 0")
    part = sinks.stats.parts["0"]
    assert part.map is not None
    p = part.map.mean[3].double()
    received = [float(p[n:, n].mean()) for n in range(len(IDS))]
    assert received[0] > 2 * max(received[1:])
    other = max(range(1, len(IDS)), key=received.__getitem__)
    wait_for_bar(page, 0, True, True)
    wait_for_bar(page, other, True, False)
    page = look(sinks, "view=head&layer=0&head=3&row=15&column=2&sink=hidden")
    expect(page.locator(".beside h3", has_text="largest weights")).to_contain_text("without the first token")
    best = int(p[15, 1:16].argmax()) + 1
    listed = page.locator(".beside .context button")
    expect(listed.first).to_have_attribute("title", f"Go to token {best}")
    assert page.locator(".beside .context button[title='Go to token 0']").count() == 0
    share = float(plain(page.locator(".beside .context li > span:last-child").first.inner_text()).split()[0])
    assert share == pytest.approx(100 * float(p[15, best] / (1 - p[15, 0])), abs=0.6)
    wait_for_bar(page, other, True, True)
    wait_for_bar(page, 0, False, False)


def test_every_head_with_a_third_of_its_share_on_the_first_token_is_marked(look: Any, sinks: Recording) -> None:
    page = look(sinks, "view=segments")
    mass = sinks.stats.parts["0"].segments
    assert mass is not None
    share, without = mass.mean[:, 2, 0].tolist(), mass.without_first()[:, 2, 0].tolist()
    marked = [head for head in range(4) if without[head] <= 2 / 3 * share[head]]
    assert any(share[head] / 2 < without[head] for head in marked), "one has more than half of its share elsewhere"
    assert len(marked) < 4
    lines = [plain(text) for text in page.locator(".ranks li").all_inner_texts()]
    assert len(lines) == 4
    for line in lines:
        found = re.match(r"layer 0, head (\d)", line)
        assert found
        head = int(found[1])
        assert ("without the first token" in line) == (head in marked)


# ---------------------------------------------------------------- windows and parts


# The search is in the bar above each view: that of a head, which reads keys itself, stays.
@pytest.mark.parametrize(
    "view", ["head", *(pytest.param(each, marks=pytest.mark.long) for each in ("heads", "segments", "table"))]
)
def test_find_leads_to_the_text_of_a_window_from_each_view(view: str, look: Any) -> None:
    page = look(windows((23, 19)), f"view={view}&head=1")
    page.get_by_role("combobox", name="Find a token").fill("b5")
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Reading")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".reading-text .chosen")).to_have_text("b5")
    expect(page.get_by_label("Window")).to_have_value("1")
    expect(page.locator(".reading-side h3")).to_contain_text("b5")


def test_a_list_states_what_share_the_page_does_not_hold(look: Any, long: Recording) -> None:
    page = look(long, f"view=reading&layer=0&head=0&token={LONG - 1}")
    held = sorted(weight(long, 0, 0)[LONG - 1])[-3:]
    found = re.match(
        r"(\d+) % of its weight is not in this page\.", plain(page.locator(".reading-side .hint").inner_text())
    )
    assert found
    assert float(found[1]) == pytest.approx(100 * (1 - sum(held)), abs=0.6)


def test_a_list_of_all_weights_states_nothing_of_the_kind(look: Any, pieces: Recording) -> None:
    page = look(pieces, f"view=reading&layer=0&head=0&token={CHOSEN}")
    page.locator(".context li").first.wait_for()
    assert "not in this page" not in page.locator(".reading-side").inner_text()


# ---------------------------------------------------------------- Reading


def test_the_list_follows_a_cell_that_is_pointed_at(look: Any, pieces: Recording) -> None:
    page = look(pieces, f"view=reading&layer=0&head=0&token={CHOSEN}")
    heading = page.locator(".reading-side h3")
    expect(heading).to_contain_text("layer 0, head 0: ")
    page.locator(".every-head [data-layer='1'][data-head='2']").hover()
    expect(heading).to_contain_text("layer 1, head 2: ")
    best = int(weight(pieces, 1, 2)[CHOSEN].argmax())
    expect(page.locator(".context button").first).to_have_attribute("title", f"Go to token {best}")
    page.locator("h1").hover()
    expect(heading).to_contain_text("layer 0, head 0: ")


def test_the_list_follows_the_direction_of_the_lines(look: Any, pieces: Recording) -> None:
    page = look(pieces, f"view=reading&layer=0&head=0&token={CHOSEN}&toward=to")
    expect(page.locator(".reading-side h3")).to_contain_text("is attended to by")
    column = weight(pieces, 0, 0)[:, CHOSEN]
    expect(page.locator(".context button").first).to_have_attribute("title", f"Go to token {int(column.argmax())}")
    expect(page.locator(".every-head .hint")).to_contain_text("The table shows “attends to”")
    page.get_by_label("Lines").select_option("both")
    expect(page.locator(".reading-side h3")).to_have_count(2)
    page.get_by_label("Lines").select_option("from")
    expect(page.locator(".every-head .hint")).not_to_contain_text("The table shows")


def test_cells_name_the_position_of_a_token_that_occurs_several_times(look: Any, pieces: Recording) -> None:
    page = look(pieces, f"view=reading&layer=0&head=0&token={CHOSEN}")
    expect(page.locator(".every-head button small")).to_have_count(6)
    several = 0
    for layer in range(2):
        for head in range(3):
            key = int(weight(pieces, layer, head)[CHOSEN].argmax())
            spot = page.locator(f".every-head [data-layer='{layer}'][data-head='{head}'] sub")
            is_repeated = PIECES.count(PIECES[key]) > 1
            several += is_repeated
            expect(spot).to_have_text([str(key)] if is_repeated else [])
    assert several > 0


# ---------------------------------------------------------------- the history


class Causal(nn.Module):
    """Attention of each token to itself, sharper at each step."""

    def forward(self, sharp: float) -> None:
        eye = torch.eye(7).expand(1, 3, 7, 7)
        F.scaled_dot_product_attention(eye * sharp, eye, eye, is_causal=True, scale=1.0)


@pytest.fixture
def run(look: Any, tmp_path: Path) -> Page:
    """The page of a training whose logits grow."""
    history, model = History(tmp_path / "run.safetensors"), nn.Sequential(Causal())
    with warnings.catch_warnings(), watch(model, log=history):
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(STEPS):
            model(1.5**step)
    page = look(history.save_html(tmp_path / "run.html"))
    page.locator(".history-map canvas[data-drawn]").wait_for()
    return page


def test_the_caption_of_the_map_is_that_of_the_step_that_a_key_reached(run: Page) -> None:
    run.locator(".history-map canvas").hover(position={"x": 300, "y": 5})
    run.keyboard.press("Home")
    expect(run.locator(".history-steps output")).to_have_text("Step 0")
    expect(run.locator(".readout").first).to_contain_text("step 0:")
    run.keyboard.press("ArrowRight")
    expect(run.locator(".history-steps output")).to_have_text("Step 1")
    expect(run.locator(".readout").first).to_contain_text("step 1:")


def test_an_axis_that_is_not_linear_says_so(run: Page) -> None:
    captions = run.locator(".history-curves figcaption")
    expect(captions.filter(has_text="largest logit")).to_contain_text("log scale")
    expect(captions.filter(has_text="max weight")).not_to_contain_text("log scale")
    expect(run.locator(".history-band figcaption", has_text="largest logit")).to_contain_text("log scale")


# ---------------------------------------------------------------- why this weight


def number(text: str) -> float:
    return float(text.strip("()").replace("−", "-").replace(",", ""))


NUMBER = r"\(?−?[\d,.]+\)?"


def decimals(text: str) -> int:
    return len(text.strip("()").partition(".")[2])


def test_equations_hold_as_they_are_printed(look: Any, tmp_path: Path) -> None:
    length = 17
    q, k = (3 * torch.randn(1, 1, length, 13, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    bias = torch.randn(length, generator=torch.Generator().manual_seed(7))
    found = observe(q, k, mask=masks.causal(), bias=bias, what=Observe(map=length, keep_qk=True))
    about = About("m", {}, {}, {"0": "self"}, None, 1, 1)
    path = Recording(found.named("0"), about).save_html(tmp_path / "page.html", exact=[(0, 0)])
    page = look(path, "view=head&row=0&column=0")
    for query, key in [(3, 1), (7, 7), (11, 10), (12, 0), (16, 5)]:
        page.evaluate(f"location.hash = '#view=head&layer=0&head=0&row={query}&column={key}'")
        page.locator(".why p", has_text=f"query {query} → key {key}").wait_for()
        text = plain(page.locator(".why").inner_text())
        first, last, difference, p = re.findall(
            rf"exp\(({NUMBER}) − ({NUMBER})\) = exp\(({NUMBER})\) = ([\d.e-]+)", text
        )[0]
        assert number(first) - number(last) == pytest.approx(number(difference), abs=1e-9)
        assert f"{torch.tensor(number(difference), dtype=torch.float64).exp():.3g}" == f"{float(p):.3g}"
        a, b, product = re.findall(rf"({NUMBER}) × ({NUMBER}) = ({NUMBER})", text)[0]
        assert round(number(a) * number(b), decimals(product)) == pytest.approx(number(product), abs=1e-9)
        c, d, total = re.findall(rf"({NUMBER}) \+ ({NUMBER}) = ({NUMBER})", text)[0]
        assert number(c) + number(d) == pytest.approx(number(total), abs=1e-9)


@pytest.mark.parametrize(
    ("row", "column", "sentence"),
    [
        (4, 4, "The key is the query token itself."),
        (4, 3, "This key followed an earlier copy of the query token"),
        (4, 3, "The key is the previous token."),
        (7, 6, "The key is the previous token."),
        (9, 0, "The key is the first token of the text."),
        (9, 2, ""),
    ],
)
def test_the_last_line_names_what_the_key_is(
    look: Any, pieces: Recording, row: int, column: int, sentence: str
) -> None:
    page = look(pieces, f"view=head&layer=0&head=0&row={row}&column={column}")
    page.locator(".why .rival").wait_for()
    lines = page.locator(".why .ending")
    expect(lines).to_have_count(1 if sentence else 0)
    if sentence:
        expect(lines).to_contain_text(sentence)
    assert PIECES[2] == PIECES[4] == "at"


# ---------------------------------------------------------------- the bar and links


def test_no_tab_moves_when_a_head_is_opened(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=heads")
    places = "[...document.querySelectorAll('[role=tab]')].map((e) => e.getBoundingClientRect().left)"
    page.locator("#heads-title").wait_for(state="attached")
    before = page.evaluate(places)
    for name in ("One head", "Reading", "Compare", "Statistics"):
        page.get_by_role("tab", name=name).click()
        expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
        assert page.evaluate(places) == before, name


# The link is in the bar above each view: those of a head and of the text, which add to the address, stay.
@pytest.mark.parametrize(
    "view", ["head", "reading", *(pytest.param(each, marks=pytest.mark.long) for each in ("heads", "table"))]
)
def test_the_text_to_copy_names_the_head_and_the_window(view: str, look: Any) -> None:
    page = look(windows((23, 19)), f"view={view}")
    part = open_menu(page).locator(".link-part")
    expect(part).to_contain_text(re.compile(r"#(.*&)?layer=0&head=[01]\b"))
    expect(part).to_contain_text("window=0")


def test_the_address_of_a_head_names_it(look: Any, pieces: Recording) -> None:
    page = look(pieces, "view=head")
    page.wait_for_url(re.compile(r"layer=\d&head=\d"))


@pytest.mark.parametrize(
    ("language", "words"),
    [("de", ("wird beachtet von", "nicht in dieser Seite")), ("zh", ("被以下词元关注", "不在本页中"))],
)
def test_other_languages_state_the_same(language: str, words: tuple[str, str], look: Any, long: Recording) -> None:
    page = look(long, f"view=reading&layer=0&head=0&token={LONG - 1}&lang={language}&toward=both")
    side = page.locator(".reading-side")
    expect(side).to_contain_text(words[1])
    expect(side.locator("h3").nth(1)).to_contain_text(words[0])
