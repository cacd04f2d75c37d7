"""The page of a training's history: what happened, the map of heads × steps, the slider, the bands and the curves."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

import re
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from PIL import Image
from playwright.sync_api import expect
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import History, watch
from headscope.report._viewer import from_history
from headscope.watching import Alarm, AttentionWarning, Limits
from support.browser import Page, chromium, figure, in_a_browser, look, open_menu
from support.html_pages import HOSTILE

pytestmark = in_a_browser

STEPS = 23
GUTTER = 46  # pixels at the left of the map
SCREENS = [(1280, "dark"), (360, "light"), (360, "dark")]  # besides a wide and light one
COLLAPSE = 11  # the step at which head 1 of layer 1 collapses


class Sharp(nn.Module):
    """Causal attention of each token to itself, each head as sharp as it is called with."""

    def forward(self, sharp: Tensor) -> Tensor:
        eye = torch.eye(7).expand(1, len(sharp), 7, 7)
        return F.scaled_dot_product_attention(eye * sharp[:, None, None], eye, eye, is_causal=True, scale=1.0)


class Model(nn.Module):
    def __init__(self, names: list[str], heads: int, collapsing: slice = slice(1, 2)) -> None:
        super().__init__()
        self.collapsing = collapsing
        self.layers, self.heads = nn.ModuleDict({name: Sharp() for name in names}), heads

    def forward(self, step: int) -> None:
        for at, layer in enumerate(self.layers.values()):
            sharp = torch.linspace(0.5, 2, self.heads) + 0.03 * step + at
            if at == 1 and step >= COLLAPSE:
                sharp[self.collapsing] = 30.0 + step
            if at == 1 and step >= COLLAPSE + 5:
                sharp[2] = 150.0 + step
            layer(sharp)


def run(
    path: Path,
    names: list[str],
    heads: int = 3,
    steps: int = STEPS,
    alarms: bool | Limits = True,
    collapsing: slice = slice(1, 2),
) -> History:
    history, model = History(path), Model(names, heads, collapsing)
    with warnings.catch_warnings(), watch(model, log=history, alarms=alarms):
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(steps):
            model(step)
    return history


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A training that no test changes."""
    return run(tmp_path_factory.mktemp("history") / "run.safetensors", ["a", "b"])


@pytest.fixture
def opened(look: Any, tmp_path: Path) -> Any:
    """Opens the page of a history, and waits until its map is drawn."""
    pages: list[Path] = []

    def page_of(history: History, at: str = "", **options: Any) -> Page:
        pages.append(history.save_html(tmp_path / f"history{len(pages)}.html"))
        page = look(pages[-1], at, **options)
        page.locator(".history-map canvas[data-drawn]").wait_for()
        page.locator(".history-curves svg").first.wait_for()
        return page

    return page_of


def parameters(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).fragment).items()}


def texts(page: Page, selector: str) -> list[str]:
    return [text.replace("\xa0", " ") for text in page.locator(selector).all_inner_texts()]


def pixel(page: Page, row: int, step: int) -> tuple[int, ...]:
    """The colour of the map of six heads where a head and a step are."""
    picture = Image.open(BytesIO(page.locator(".history-map canvas").screenshot())).convert("RGB")
    x = GUTTER + (picture.width - GUTTER) * (step + 0.5) / STEPS
    found = picture.getpixel((round(x), round(picture.height * (row + 0.5) / 6)))
    assert isinstance(found, tuple)
    return tuple(int(part) for part in found)


def value(history: History, layer: int, head: int, quantity: str, step: int) -> str:
    return figure(float(history[layer, head, quantity][step]))


def test_the_first_screen_states_which_head_collapsed_and_when(opened: Any, history: History) -> None:
    page = opened(history)
    first, second, *others = texts(page, ".card")
    assert first.splitlines()[0] == f"▼ Head 1.1 (b) collapses at step {COLLAPSE}"
    alarm = next(each for each in history.alarms if each.what == "entropy collapse")
    before, now = figure(alarm.reference), figure(alarm.value)
    since = next(
        n for n, each in enumerate(history[1, 1, "normalized_entropy"]) if float(each) == pytest.approx(alarm.reference)
    )
    assert first.splitlines()[1].startswith(f"normalized entropy {before} at step {since} → {now} (alarm below 0.1)")
    assert second.splitlines()[0] == f"▲ Head 1.2 (b): logits grow too large at step {COLLAPSE + 5}"
    assert page.locator(".cards li").nth(1).locator(".more-heads").count() == 0
    assert page.locator(".history-steps output").inner_text() == f"Step {COLLAPSE}", "the page opens there"
    assert texts(page, ".history-side h2") == [f"All heads at step {COLLAPSE}", "Head 1.1 (b): all quantities"]
    assert texts(page, "[role=tab]") == ["Training", f"Alarms ({len(history.alarms)})"], "what does not apply is absent"
    assert others == [], "no head turns to the first token"


class Spreading(Model):
    """The weight of all heads but the first of each layer spreads evenly from a step on; that one is sharper later."""

    def forward(self, step: int) -> None:
        for layer in self.layers.values():
            sharp = torch.full((self.heads,), 4.0)
            if step > COLLAPSE:
                sharp[1:] = 4.0 / (step - COLLAPSE + 1)
            if step >= COLLAPSE + 5:
                sharp[0] = 150.0 + step
            layer(sharp)


@pytest.mark.parametrize("alarms", [True, False])
def test_a_rise_of_the_entropy_of_most_heads_has_a_card(alarms: bool, opened: Any, tmp_path: Path) -> None:
    history, model = History(tmp_path / "run.safetensors"), Spreading(["a", "b"], heads=3)
    with warnings.catch_warnings(), watch(model, log=history, alarms=alarms):
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(STEPS):
            model(step)
    page = opened(history)
    title = f"From step {COLLAPSE} the entropy of 4 of 6 heads rises"
    card = page.locator(".card", has_text=title)
    card.click()
    assert page.locator(".history-steps output").inner_text() == f"Step {COLLAPSE}"
    assert card.get_attribute("aria-pressed") == "true"
    assert re.search(r"Head [01]\.[12] ", texts(page, ".history-side h2")[1]), "a head that rises"
    if alarms:
        steps = [int(re.findall(r"step (\d+)", text)[0]) for text in texts(page, ".card b")]
        assert len(steps) > 2
        assert steps == sorted(steps), "cards are in the order of the steps"
        assert steps[0] == COLLAPSE


def test_heads_that_collapse_at_once_are_counted(opened: Any, tmp_path: Path) -> None:
    page = opened(run(tmp_path / "run.safetensors", ["a", "b"], heads=5, collapsing=slice(1, 4)))
    first, *_ = texts(page, ".card")
    assert "2 more heads" not in first
    more = page.locator(".more-heads").inner_text()
    assert "2 more heads by step" in more
    assert "2 of them at the same step" in more
    page.locator(".more-heads").click()
    expect(page.locator("#alarms-title")).to_contain_text("4 alarms")


def test_it_is_not_compared_with_a_recording(opened: Any, history: History) -> None:
    page = opened(history)
    assert page.get_by_role("button", name="View").count() == 1
    assert page.locator(".compare-with").count() == 0


def test_the_curves_have_the_values_of_the_step(opened: Any, history: History) -> None:
    page = opened(history, "layer=0&head=2&step=5")
    shown = dict(
        text.replace(" log scale", "").rsplit(" ", 1)
        for text in (t.replace("\n", " ") for t in texts(page, ".history-curves figcaption"))
    )
    assert shown["normalized entropy"] == value(history, 0, 2, "normalized_entropy", 5)
    assert shown["largest logit"] == value(history, 0, 2, "max_logit_max", 5)
    label = page.locator(".history-curves svg").nth(1).get_attribute("aria-label")
    curve = history[0, 2, "entropy"]
    low, high = figure(float(curve.min())), figure(float(curve.max()))
    assert label == f"entropy of Head 0.2 (a): {value(history, 0, 2, 'entropy', 5)} at step 5; from {low} to {high}."


def test_keys_and_the_slider_move_through_the_steps(opened: Any, history: History) -> None:
    page = opened(history, "step=5")
    output = page.locator(".history-steps output")
    page.keyboard.press("ArrowRight")
    assert output.inner_text() == "Step 6"
    page.keyboard.press("Shift+ArrowLeft")
    assert output.inner_text() == "Step 0"
    page.keyboard.press("End")
    assert output.inner_text() == f"Step {STEPS - 1}"
    slider = page.get_by_role("slider", name="Step")
    assert slider.get_attribute("aria-valuetext") == f"Step {STEPS - 1}"
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert output.inner_text() == f"Step {STEPS - 2}", "once, not twice"
    page.wait_for_url(lambda url: f"step={STEPS - 2}" in url)
    grid = page.locator(".history-grid")
    page.locator(f".history-grid[data-drawn='{STEPS - 2}']").wait_for()
    assert f"at step {STEPS - 2}: " in str(grid.get_attribute("aria-label"))


def test_the_map_is_clicked_and_walked_through(opened: Any, history: History) -> None:
    page = opened(history)
    canvas = page.locator(".history-map canvas")
    box = canvas.bounding_box()
    assert box is not None
    left, width = GUTTER, box["width"] - GUTTER
    canvas.click(position={"x": left + width * 3.5 / STEPS, "y": box["height"] * 2.5 / 6})
    assert page.locator(".history-steps output").inner_text() == "Step 3"
    assert texts(page, ".history-side h2")[1] == "Head 0.2 (a): all quantities"
    assert texts(page, ".history-map + .readout") == [
        f"Head 0.2 (a), step 3: normalized entropy {value(history, 0, 2, 'normalized_entropy', 3)}"
    ]
    page.keyboard.press("ArrowDown")
    assert texts(page, ".history-side h2")[1] == "Head 1.0 (b): all quantities"
    page.keyboard.press("ArrowRight")
    assert page.locator(".history-steps output").inner_text() == "Step 4"
    page.wait_for_url(lambda url: "step=4" in url)
    assert parameters(page)["head"] == "0"
    assert "layer" not in parameters(page), "that of the first alarm"
    canvas.hover(position={"x": left + width * (COLLAPSE + 0.5) / STEPS, "y": box["height"] * 4.5 / 6})
    assert "▼ entropy collapse: " in texts(page, ".history-map + .readout")[0]


def test_colours_and_flags_are_where_the_values_are(opened: Any, history: History) -> None:
    page = opened(history, "quantity=max_logit_max&layer=0&head=0&step=0")
    assert sum(pixel(page, 3, 2)) > sum(pixel(page, 5, STEPS - 1)) + 200, "white is small, ink is large"
    assert pixel(page, 4, COLLAPSE) == (0xB3, 0x26, 0x1E), "a flag"
    page.emulate_media(color_scheme="dark")
    for _ in range(100):  # it is drawn again, soon
        if sum(pixel(page, 3, 2)) < 200:
            break
        page.wait_for_timeout(25)
    assert sum(pixel(page, 3, 2)) < 200, "on a dark page small is dark"


def test_quantity_order_and_head_are_in_the_address(opened: Any, history: History) -> None:
    page = opened(history)
    page.get_by_label("Show").select_option("first")
    page.get_by_label("Rows").select_option("change")
    page.wait_for_url(lambda url: "rows=change" in url)
    assert parameters(page)["quantity"] == "first"
    page.locator(".history-map canvas[aria-label^='Map of first']").wait_for()
    page = opened(history, urlsplit(page.url).fragment)
    page.locator(".history-map canvas[aria-label^='Map of first']").wait_for()
    assert page.get_by_label("Rows").input_value() == "change"
    changes = (history["first"].max(0).values - history["first"].min(0).values).flatten()
    page.locator(".history-map canvas").focus()
    for _ in range(6):
        page.keyboard.press("ArrowUp")
    layer, head = divmod(int(changes.argmax()), 3)
    assert texts(page, ".history-side h2")[1] == f"Head {layer}.{head} ({'ab'[layer]}): all quantities", "the first row"
    page.locator(".card").nth(1).click()
    page.wait_for_url(lambda url: "quantity=max_logit_max" in url)
    assert texts(page, ".history-side h2")[1] == "Head 1.2 (b): all quantities"
    assert page.locator(".card").nth(1).get_attribute("aria-pressed") == "true"


def test_alarms_are_listed_and_stepped_through(opened: Any, history: History) -> None:
    page = opened(history)
    page.get_by_role("button", name="Next alarm").click()
    assert page.locator(".history-steps output").inner_text() == f"Step {COLLAPSE + 5}"
    assert texts(page, ".history-side h2")[1] == "Head 1.2 (b): all quantities"
    assert page.get_by_role("button", name="Next alarm").get_attribute("aria-disabled") == "true"
    page.get_by_role("tab", name="Alarms").click()
    lines = [text.split("\t") for text in page.locator("tbody tr").all_inner_texts()]
    assert len(lines) == len(history.alarms) >= 3
    first = history.alarms[0]
    entropies = history["normalized_entropy"][: history.steps.index(COLLAPSE), 1, 1]
    before = f"{figure(first.reference)} at step {history.steps[int(entropies.argmax())]}"
    assert lines[0] == [
        str(COLLAPSE), "Head 1.1 (b)", "▼ entropy collapse", figure(first.value), "0.1", before,
    ]  # fmt: skip
    page.locator("tbody button").first.click()
    page.locator(".history-map canvas[data-drawn]").wait_for()
    assert page.locator(".history-steps output").inner_text() == f"Step {COLLAPSE}"
    page.go_back()
    page.locator("#alarms-title").wait_for()


def test_the_bands_have_the_quantiles_and_the_limits(opened: Any, history: History) -> None:
    page = opened(history, "step=7")
    entropy, logit = page.locator(".history-band svg").all()
    ordered = history["normalized_entropy"][7].flatten().sort().values
    parts = [figure(float(ordered[rank])) for rank in (0, 0, 2, 4, 5)]  # of 6 heads, the nearest rank
    label = str(entropy.get_attribute("aria-label"))
    assert label.startswith("normalized entropy over all heads. At step 7: ")
    found = [part.rsplit(" ", 1)[1] for part in label.partition("step 7: ")[2].rstrip(".").split(", ")]
    assert (found[0], found[3], found[4]) == (parts[0], parts[3], parts[4])
    assert page.locator(".history-band .history-limit").all_text_contents() == ["┄ alarm 0.1", "┄ alarm 100"]
    box = logit.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + GUTTER + (box["width"] - GUTTER) * 20.5 / STEPS, box["y"] + 20)
    assert page.locator(".history-steps output").inner_text() == "Step 20"


def test_without_alarms_the_page_says_so(opened: Any, tmp_path: Path) -> None:
    history = run(tmp_path / "a.safetensors", ["a", "b"], steps=5)
    page = opened(history)
    layer, head = divmod(
        int((history["normalized_entropy"].max(0).values - history["normalized_entropy"].min(0).values).argmax()), 3
    )
    changed = f"Most change in normalized entropy: Head {layer}.{head} ({'ab'[layer]})"
    assert texts(page, ".card") == [f"No alarm in 5 steps.\n{changed}"]
    assert page.locator(".card").get_attribute("aria-pressed") == "true", "the page opens on it"
    assert page.locator(".history-steps output").inner_text() == "Step 4", "the last one"
    page = opened(run(tmp_path / "b.safetensors", ["a", "b"], alarms=False))
    (card,) = texts(page, ".card")
    assert card.splitlines()[0] == "No alarms were requested: watch(alarms=True) raises them."
    assert page.locator(".limit, .history-limit").count() == 0


def test_one_step_and_one_head(opened: Any, tmp_path: Path) -> None:
    history = run(tmp_path / "a.safetensors", ["a"], heads=1, steps=1)
    page = opened(history)
    assert texts(page, ".history-side h2") == ["All heads at step 0", "Head 0: all quantities"]
    page.keyboard.press("ArrowRight")
    assert page.locator(".history-steps output").inner_text() == "Step 0"


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), *(pytest.param(*each, marks=pytest.mark.long) for each in SCREENS)]
)
def test_it_fits_the_screen(width: int, scheme: str, opened: Any, history: History) -> None:
    page = opened(history, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator(".history-map canvas").bounding_box()
    assert box is not None
    assert box["y"] < (240 if width == 1280 else 420), "the map is on the first screen"


def test_hostile_names_stay_text(opened: Any, tmp_path: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", "\u202egnp"]
    page = opened(run(tmp_path / "a.safetensors", names))
    assert texts(page, ".card")[0].startswith("▼ ")
    assert page.locator("img").count() == 0
    page = opened(run(tmp_path / "b.safetensors", names[:1], alarms=False))
    assert page.locator("img").count() == 0


def test_many_heads_scroll_and_those_with_alarms_come_first(opened: Any, tmp_path: Path) -> None:
    history = run(tmp_path / "a.safetensors", [*"abc"], heads=211, steps=COLLAPSE + 7)
    page = opened(history)
    assert page.get_by_label("Rows").input_value() == "alarm"
    canvas = page.locator(".history-map canvas")
    box, frame = canvas.bounding_box(), page.locator(".history-map").bounding_box()
    assert box is not None
    assert frame is not None
    assert box["height"] <= frame["height"], "a canvas of all rows may be too large for a browser"
    canvas.click(position={"x": 100, "y": 1})
    assert texts(page, ".history-side h2")[1] == "Head 1.1 (b): all quantities", "the first row"
    page.get_by_label("Rows").select_option("layer")
    last = "Head 2.210 (c): all quantities"
    for _ in range(100):  # it is soon drawn there; the new order may scroll to the selected head first
        page.locator(".history-map").evaluate("(map) => { map.scrollTop = 1e6; }")
        canvas.click(position={"x": 100, "y": box["height"] - 1})
        if texts(page, ".history-side h2")[1] == last:
            break
        page.wait_for_timeout(25)
    assert texts(page, ".history-side h2")[1] == last, "the last row"


def test_infinite_and_missing_values_are_shown(opened: Any, tmp_path: Path) -> None:
    history = run(tmp_path / "a.safetensors", ["a", "b"])
    column = history._table.column("layers.a", "max_logit_max")
    assert column is not None
    column[4, 0], column[5, 0] = float("inf"), float("nan")
    page = opened(history, "quantity=max_logit_max&layer=0&head=0&step=4")
    assert texts(page, ".history-map + .readout") == ["Head 0.0 (a), step 4: largest logit ∞"]
    page.keyboard.press("ArrowRight")
    assert texts(page, ".history-map + .readout") == ["Head 0.0 (a), step 5: largest logit –"]


def test_a_large_page_states_its_error_and_keeps_to_it(
    opened: Any, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_history, "EXACT_VALUES", 10)
    page = opened(history, "layer=1&head=1&step=14")
    hint = texts(page, ".history .hint")[0]
    error = float(hint.partition("Stored in 8 bits: ± ")[2].rstrip("."))
    assert 0 < error < 0.003
    shown = float(texts(page, ".history-map + .readout")[0].rsplit(" ", 1)[1])
    assert abs(shown - float(history[1, 1, "normalized_entropy"][14])) <= 1.02 * error + 5e-4
    page = opened(history, "quantity=max_logit_max&layer=1&head=2&step=20")
    assert "Logarithmic scale." in page.locator(".history .legend").inner_text()
    shown = float(texts(page, ".history-map + .readout")[0].rsplit(" ", 1)[1])
    assert shown == pytest.approx(170, rel=0.02)


def test_the_search_finds_heads_and_steps_and_the_menu_has_palettes(opened: Any, history: History) -> None:
    page = opened(history)
    page.keyboard.press("/")
    page.keyboard.type("0.2")
    page.get_by_role("option").first.click()
    assert texts(page, ".history-side h2")[1] == "Head 0.2 (a): all quantities"
    page.keyboard.press("Escape")
    page.get_by_role("combobox", name="Find").fill("step 3")
    page.get_by_role("option", name="Step 3").click()
    assert page.locator(".history-steps output").inner_text() == "Step 3"
    open_menu(page)
    page.get_by_label("Colours").select_option("magma")
    page.wait_for_url(lambda url: "colours=magma" in url)
