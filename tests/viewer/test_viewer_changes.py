"""Two recordings on a page: one that it came with, and files that are dropped onto it."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

import base64
import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headscope import Observe, Segments, load_example, masks, observe, watch
from headscope.comparing import Thresholds
from headscope.report import save, text_sheet
from headscope.stats import HeadStats
from headscope.stats._statistics_file import VERSION
from headscope.watching import About, Recording
from support.browser import Page, attributes, chromium, in_a_browser, look, numbers, open_menu, thumbs
from support.html_pages import HOSTILE
from support.paths import ROOT

pytestmark = in_a_browser

CODE = "def add(a, b):\n    return a + b\n" * 4
STORY = "the cat sat on the mat and slept.\n" * 3


def shipped(text: str, factor: float = 1.0, **what: Any) -> Recording:
    """The shipped model on a text, with the queries of layer 3 multiplied."""
    example = load_example("text")
    ids = torch.tensor([example.tokenizer.encode(text)])
    with torch.no_grad():
        example.model.layers[3].attention.qkv_proj.weight[:128].mul_(factor)
        with watch(example.model, what=Observe(**what), tokens="inputs", texts=example.tokenizer.pieces(text)) as seen:
            example.model(ids)
        example.model.layers[3].attention.qkv_proj.weight[:128].div_(factor)
    return seen


@pytest.fixture(scope="module")
def before() -> Recording:
    return shipped(CODE, map=64, keep_qk=True)


@pytest.fixture(scope="module")
def after() -> Recording:
    return shipped(CODE, 1.5, map=64, keep_qk=True)


@pytest.fixture(scope="module")
def files(before: Recording, after: Recording, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The later recording, in each form that a page reads."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "codes": after.save(folder / "codes.safetensors"),
        "weights": after.save(folder / "weights.safetensors", qk=True),
        "exact": after.save(folder / "exact.safetensors", exact=True),
        "page": after.save_html(folder / "after.html", exact=()),
    }


@pytest.fixture(scope="module")
def two(before: Recording, after: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of both recordings."""
    path = tmp_path_factory.mktemp("two") / "two.html"
    return before.save_html(path, against=after, labels=("old.safetensors", "<b>new</b>"))


def made(scale: float = 1.0, length: int = 11, bins: int = 5, **options: Any) -> Recording:
    """Two layers of three heads, without an origin."""
    given = {"texts": None, "heads": 3, "name": "layers.{}.attention", "nan": False, "batch": 1, "segments": None}
    given |= options
    parts = {}
    for layer in range(2):
        shape = 2, given["batch"], given["heads"], length, 8
        q, k = scale * torch.randn(shape, generator=torch.Generator().manual_seed(layer))
        if given["nan"]:
            q[:, 1, 4] = math.nan
        found = observe(q, k, mask=masks.causal(), what=Observe(map=bins, segments=given["segments"]))
        parts |= found.named(given["name"].format(layer)).parts
    kinds: Any = dict.fromkeys(parts, "self")
    return Recording(HeadStats(parts), About("a <model>", {}, {}, kinds, given["texts"], 1, 1))


def choose(page: Page, path: Path | list[Path]) -> None:
    page.locator("input[type=file]").first.set_input_files(path)


def compared(page: Page, path: Path) -> Page:
    """The page once it has compared itself with a file."""
    choose(page, path)
    page.locator(".changes-summary").wait_for()
    return page


def exported(page: Page) -> dict[tuple[str, int, str], dict[str, str]]:
    """Every change in full, as the page saves it."""
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    with open(download.value.path(), newline="", encoding="utf-8") as file:
        return {(line["layer"], int(line["head"]), line["quantity"]): line for line in csv.DictReader(file)}


def agree(page: Page, one: Recording, other: Recording, *, map: float = 1e-3) -> None:
    """The page found what ``compare`` finds: the same values, sizes and heads that moved."""
    lines = exported(page)
    comparison = one.compare(other)
    for head in comparison.heads:
        for change in head.changes:
            line = lines.pop((head.layer, head.head, change.name))
            assert line["moved"] == str(change.moved).lower(), (head, line)
            if math.isnan(change.size):
                assert line["thresholds"] == ""
            elif math.isinf(change.size):
                assert line["thresholds"] == "Infinity"
            else:
                assert float(line["thresholds"]) == pytest.approx(change.size, rel=1e-4, abs=1e-5)
                assert float(line["before"]) == pytest.approx(change.before, rel=1e-6, abs=1e-30)
                assert float(line["after"]) == pytest.approx(change.after, rel=1e-6, abs=1e-30)
        for name, value in (("map", head.map), ("received", head.received)):
            line = lines.pop((head.layer, head.head, name), None)
            assert (line is None) == (value is None), name
            if line is not None and value is not None:
                assert float(line["after"]) == pytest.approx(value, abs=map)
        broken = lines.pop((head.layer, head.head, "broken"))
        assert (int(broken["before"]), int(broken["after"])) == head.broken
    assert not lines
    summary = page.locator(".changes-summary").inner_text()
    count = len(comparison.moved)
    assert summary.startswith(f"{count} of {len(comparison.heads)} heads moved" if count else "None of the"), summary
    framed = [label.split(":")[0] for label in attributes(page.locator(".changed.moved"), "aria-label")]
    order = [*one.layers]
    names = {f"layer {order.index(name)}" if name.startswith("layers.") else name for name in order}
    names &= {
        f"layer {order.index(head.layer)}" if head.layer.startswith("layers.") else head.layer
        for head in comparison.moved
    }
    assert len(framed) == min(count, 60)
    assert {name.split(", head")[0] for name in framed} <= names


def test_thresholds_and_formats_of_the_page_are_those_of_python() -> None:
    limits = re.search(r"LIMITS = \{(.*?)\}", (ROOT / "viewer/src/comparing.ts").read_text(encoding="utf-8"))
    assert limits is not None
    found = {name: float(value) for name, value in re.findall(r"(\w+): ([\d.]+)", limits[1])}
    expected = asdict(Thresholds())
    assert found == {"nats" if name == "entropy" else name: value for name, value in expected.items()}
    assert f"const NEWEST = {VERSION};" in (ROOT / "viewer/src/recording_file.ts").read_text(encoding="utf-8")


# ---------------------------------------------------------------- a page of two


def test_the_page_opens_on_the_heads_that_moved(look: Any, before: Recording, after: Recording, two: Path) -> None:
    page = look(two)
    summary = page.locator(".changes-summary")
    expect(summary).to_contain_text("all in layer 3. Most: 3.6 (sharper: normalized entropy ")
    assert page.get_by_role("tab").first.inner_text() == "Changes"
    expect(page.locator(".changes-summary + .hint")).to_contain_text("A: old.safetensors. B: <b>new</b>.")
    page.locator(".changed canvas[data-drawn]").nth(2).wait_for()
    first = page.locator(".changed").first
    assert first.locator("canvas").count() == 3
    assert first.locator(".what > span").count() in (2, 3)
    agree(page, before, after)
    page.get_by_label("Only heads that moved").uncheck()
    expect(page.locator(".changed")).to_have_count(48)
    moved = page.locator(".changed").evaluate_all("(all) => all.map((each) => each.classList.contains('moved'))")
    assert moved == sorted(moved, reverse=True), "those that moved come first"
    assert "moved=0" in page.evaluate("new Promise((done) => setTimeout(() => done(location.hash), 400))")


def test_one_head_opens_in_both(look: Any, before: Recording, after: Recording, two: Path) -> None:
    page = look(two)
    page.get_by_role("button", name="layer 3, head 3").click()
    page.locator(".map canvas").nth(2).wait_for()
    assert page.locator("#change-title").inner_text() == "layer 3, head 3"
    assert page.evaluate("document.activeElement.id") == "change-title"
    assert page.get_by_role("tab", selected=True).inner_text() == "Changes"
    plots = page.locator(".map canvas").evaluate_all("(all) => all.map((each) => each.dataset.plot)")
    assert len(set(plots)) == 1, "the three maps have one size"
    box = page.locator(".map canvas").first.bounding_box()
    assert box is not None
    row, column, plot = 30, 20, page.evaluate("JSON.parse(document.querySelector('.map canvas').dataset.plot)")
    length = before.stats.parts["layers.3.attention"].lengths[0]  # pyright: ignore[reportOptionalSubscript]
    cell = plot["width"] / length
    page.mouse.click(box["x"] + plot["x"] + (column + 0.5) * cell, box["y"] + plot["y"] + (row + 0.5) * cell)
    shown = page.locator(".three p[aria-live] b")
    expect(shown).to_have_count(3)
    values = [float(each.replace("−", "-").replace("+", "")) for each in shown.all_inner_texts()]
    bins = before.stats.parts["layers.3.attention"].map.bins  # pyright: ignore[reportOptionalMemberAccess]
    place = [((at + 1) * bins - 1) // length for at in (row, column)]
    real = [each.stats.parts["layers.3.attention"].map.mean[3][tuple(place)].item() for each in (before, after)]  # pyright: ignore[reportOptionalMemberAccess]
    assert values == pytest.approx([*real, real[1] - real[0]], rel=6e-3, abs=4e-5)
    page.mouse.move(box["x"] + plot["x"] + 60, box["y"] + plot["y"] + 60)
    page.mouse.wheel(0, -400)
    page.wait_for_function("() => location.hash.includes('zoom=')")
    zoom = page.evaluate("location.hash")
    assert "view=change&" in zoom
    assert "row=30" in zoom, "the address holds the selection"
    page.locator("body").press("ArrowRight")
    expect(page.locator("#change-title")).not_to_have_text("layer 3, head 3")
    page.locator("body").press("Escape")
    page.locator(".changed").first.wait_for()
    page.go_back()
    page.locator("#change-title").wait_for()


def test_an_address_leads_to_a_head_in_both(look: Any, before: Recording, two: Path) -> None:
    page = look(two, "view=change&layer=2&head=5")
    page.locator(".map canvas").nth(2).wait_for()
    assert page.locator("#change-title").inner_text() == "layer 2, head 5"
    expect(page.locator(".change-head")).to_contain_text("did not move")
    page = look(before, "view=change&layer=2&head=5")
    thumbs(page)
    assert "Changes" not in page.get_by_role("tablist").inner_text(), "a page of one recording has nothing to compare"


def test_the_keyboard_moves_along_the_list(look: Any, two: Path) -> None:
    page = look(two)
    page.locator(".changed").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.changed')[1]")
    label = str(page.locator(".changed").nth(1).get_attribute("aria-label"))
    page.keyboard.press("Enter")
    title = page.locator("#change-title")
    title.wait_for()
    assert label.startswith(f"{title.inner_text()}, moved: ")


def test_equal_recordings_did_not_move(look: Any, before: Recording, tmp_path: Path) -> None:
    page = look(before.save_html(tmp_path / "two.html", against=before))
    expect(page.locator(".changes-summary")).to_have_text("None of the 48 heads moved.")
    expect(page.locator(".changes-summary + .hint")).to_contain_text(re.compile("linear|logarithmic"))
    expect(page.locator(".changed")).to_have_count(48)
    assert page.get_by_label("Only heads that moved").count() == 0


def test_without_maps_statistics_are_compared(look: Any, tmp_path: Path) -> None:
    one, other = shipped(CODE), shipped(CODE, 1.5)
    page = look(one.save_html(tmp_path / "two.html", against=other))
    expect(page.locator("#view")).to_contain_text("No maps were recorded, so only statistics are compared.")
    agree(page, one, other)
    assert page.locator(".changed canvas").count() == 0
    page.locator(".changed").first.click()
    page.locator(".change-table").wait_for()
    assert page.locator(".map").count() == 0


# ---------------------------------------------------------------- files


def test_a_file_is_compared_as_python_compares_it(
    look: Any, before: Recording, after: Recording, files: dict[str, Path]
) -> None:
    """Each file replaces the one before."""
    page = look(before)
    for form in ("codes", "weights", "exact", "page"):
        choose(page, files[form])
        expect(page.locator(".changes-summary + .hint")).to_contain_text(f"B: {files[form].name}.")
        agree(page, before, after)
        page.locator(".changed canvas[data-drawn]").nth(2).wait_for()
        page.locator(".changed").first.click()
        page.locator(".map canvas").nth(2).wait_for()


def test_pooled_maps_and_inputs_of_a_batch_are_compared(look: Any, tmp_path: Path) -> None:
    one, other = (made(scale, 23, 5, batch=2) for scale in (1.0, 1.7))
    page = compared(look(one), other.save(tmp_path / "b.safetensors"))
    agree(page, one, other)
    page = compared(look(one), other.save_html(tmp_path / "b.html", force=True))
    agree(page, one, other)


@pytest.mark.parametrize("form", ["file", "page"])
def test_segments_are_compared_with_and_without_the_first_token(form: str, look: Any, tmp_path: Path) -> None:
    segments = Segments(["system", "answer"], [0] * 4 + [1] * 7)
    one, other = made(segments=segments), made(scale=2.0, segments=segments)
    file = other.save(tmp_path / "other.safetensors")
    path = file if form == "file" else other.save_html(tmp_path / "other.html", exact=())
    page = compared(look(one), path)
    lines = exported(page)
    changes = {
        (head.layer, head.head, change.name): change
        for head in one.compare(other).heads
        for change in head.changes
        if change.name.startswith("segments/")
    }
    assert {name for *_, name in changes if name.endswith("/without_first")} == {
        "segments/system/system/without_first",
        "segments/answer/system/without_first",
    }
    assert {place for place in lines if place[2].startswith("segments/")} == set(changes)
    for place, change in changes.items():
        assert float(lines[place]["before"]) == pytest.approx(change.before, abs=2e-5)
        assert float(lines[place]["after"]) == pytest.approx(change.after, abs=2e-5)


def test_maps_of_8_bits_are_compared_nearly_and_the_page_states_it(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headscope.report._viewer.packing.FINE_BYTES", 0)
    one, other = (made(scale, 97, 97) for scale in (0.5, 1.0))
    rough = "the share of the attention that is elsewhere may be off by up to 2 percentage points"
    page = compared(look(one), other.save(tmp_path / "b.safetensors"))
    agree(page, one, other, map=0.02)
    expect(page.locator(".changes-notes")).to_contain_text(rough)
    page = look(one.save_html(tmp_path / "two.html", against=other))
    agree(page, one, other, map=1e-6)
    assert rough not in page.locator("#view").inner_text(), "these distances are those of Python"


def test_a_recording_of_format_1_is_compared(look: Any, tmp_path: Path) -> None:
    """Earlier versions stored maps as four tensors with every bin."""
    one, other = made(), made(1.7)
    page = compared(look(one), as_format_1(other, tmp_path / "old.safetensors"))
    agree(page, one, other)


def as_format_1(recording: Recording, path: Path) -> Path:
    recording.save(path)
    tensors = {name: x for name, x in load_file(path).items() if "/map/" not in name}
    for n, part in enumerate(recording.stats.parts.values()):
        assert part.map is not None
        whole = {name: getattr(part.map, name) for name in ("sum", "count", "max", "argmax")}
        tensors |= {f"{n}/map/{name}": x.contiguous() for name, x in whole.items()}
    with safe_open(path, "pt") as file:
        entries = dict(file.metadata())
    del entries["headscope.checksums"]
    header = json.loads(entries["headscope.stats"])
    del header["checksums"]
    for layer in header["layers"]:
        del layer["cells"]
        layer["map"] = True
    entries["headscope.stats"] = json.dumps(header | {"version": 1})
    save_file(tensors, path, entries)
    assert Recording.load(path).stats.parts.keys() == recording.stats.parts.keys()
    return path


def test_rows_of_nan_and_one_token(look: Any, tmp_path: Path) -> None:
    for one, other in ((made(), made(nan=True)), (made(nan=True), made()), (made(length=1), made(2.0, length=1))):
        page = compared(look(one), other.save(tmp_path / "b.safetensors", force=True))
        agree(page, one, other)
        page.locator(".changed").first.click()
        page.locator(".change-table").wait_for()


def test_another_prompt_is_compared_by_its_statistics(look: Any, before: Recording, tmp_path: Path) -> None:
    other = shipped(STORY, map=64)
    page = compared(look(before), other.save(tmp_path / "story.safetensors"))
    expect(page.locator(".changes-notes")).to_contain_text(
        "The maps of A and B have different sizes, so only statistics are compared."
    )
    agree(page, before, other)
    page.locator(".changed").first.click()
    page.locator(".map canvas").nth(1).wait_for()
    assert page.locator(".map").count() == 2
    expect(page.locator(".three")).to_contain_text("so there is no difference map")
    pooled = [shipped(text, map=5) for text in (CODE, STORY)]
    page = compared(look(pooled[0]), pooled[1].save(tmp_path / "pooled.safetensors"))
    agree(page, *pooled)
    expect(page.locator(".changes-notes")).to_contain_text("So a cell covers another number of tokens in B")
    assert page.locator(".changed").first.locator("canvas").count() == 3, "bins are shares of either text"


def test_each_side_shows_its_own_tokens(look: Any, tmp_path: Path) -> None:
    """Texts of the same length: the axes of B have the tokens of B."""
    one, other = (made(1.0, 5, 5, texts=tuple(f"{name}{n}" for n in range(5))) for name in "xy")
    page = compared(look(one), other.save(tmp_path / "b.safetensors"))
    page.locator(".changed").first.click()
    page.locator(".map canvas").nth(2).wait_for()
    for n, name in enumerate("xyy"):
        canvas = page.locator(".map canvas").nth(n)
        plot = canvas.evaluate("(e) => JSON.parse(e.dataset.plot)")
        canvas.hover(position={"x": plot["x"] + 5, "y": plot["y"] + plot["height"] - 5})
        assert f"query 4 “{name}4” → key 0 “{name}0”" in page.locator(".tip").inner_text()


def test_pages_of_two_texts_are_compared(look: Any, tmp_path: Path) -> None:
    later = torch.ones(4, 4).triu(1).bool()
    random = [torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    weights = [torch.softmax(each.masked_fill(later, -math.inf), -1) for each in random]
    paths = [
        save(text_sheet(title, [*"abcd"], [weight]), tmp_path / f"{title}.html")
        for title, weight in zip(("one", "two"), weights, strict=True)
    ]
    page = compared(look(paths[0]), paths[1])
    expect(page.locator(".changes-notes")).to_contain_text("does not hold the spread of the rows")
    expect(page.locator(".changes-summary + .hint")).to_contain_text("A: one. B: two.html.")


def test_a_file_is_dropped_anywhere(look: Any, before: Recording, files: dict[str, Path]) -> None:
    page = look(before, "view=table")
    page.get_by_role("table").wait_for()
    page.evaluate(
        """([name, content]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name));
            const event = (type) => new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true });
            document.body.dispatchEvent(event("dragover"));
            window.invited = getComputedStyle(document.querySelector(".drop-here")).display;
            window.prevented = !document.body.dispatchEvent(event("drop"));
        }""",
        ["later.safetensors", base64.b64encode(files["codes"].read_bytes()).decode()],
    )
    page.locator(".changes-summary").wait_for()
    assert page.evaluate("window.prevented"), "the browser does not open the file"
    assert page.evaluate("window.invited") == "grid"
    assert page.locator(".drop-here").is_hidden()
    expect(page.locator(".changes-summary")).to_contain_text("all in layer 3")


def test_the_button_is_in_the_menu_of_a_phone(look: Any, before: Recording, files: dict[str, Path]) -> None:
    page = look(before, width=360)
    assert page.locator(".menus > .compare-with button").is_hidden()
    button = open_menu(page).locator(".panel").get_by_role("button", name="Compare with…")
    with page.expect_file_chooser() as chooser:
        button.click()
    chooser.value.set_files(files["codes"])
    page.locator(".changes-summary").wait_for()
    page.mouse.click(10, 700)
    wide = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(wide)
    page.locator(".changed").first.click()
    page.locator(".map canvas").nth(2).wait_for()
    assert page.evaluate(wide)


def test_a_later_file_replaces_the_earlier(
    look: Any, before: Recording, files: dict[str, Path], tmp_path: Path
) -> None:
    page = compared(look(before), files["codes"])
    choose(page, before.save(tmp_path / "same.safetensors"))
    expect(page.locator(".changes-summary")).to_contain_text("None of the 48 heads moved.")
    expect(page.locator(".changes-summary + .hint")).to_contain_text("B: same.safetensors.")


def test_hostile_names_and_texts_of_a_file_are_shown_as_text(look: Any, tmp_path: Path) -> None:
    texts = tuple(each.encode("utf-8", "replace").decode() for each in HOSTILE)
    one, other = (made(scale, len(HOSTILE), 13, texts=texts, name="<i>{}</i>") for scale in (1.0, 1.7))
    page = compared(look(one), other.save(tmp_path / "<img src=x onerror=alert(1)>.safetensors"))
    agree(page, one, other)
    page.locator(".changed").first.click()
    page.locator(".map canvas").nth(2).wait_for()
    assert page.locator("#view img, #view i:not(.bar)").count() == 0
    canvas = page.locator(".map canvas").nth(1)
    plot = canvas.evaluate("(e) => JSON.parse(e.dataset.plot)")
    canvas.hover(position={"x": plot["x"] + 5, "y": plot["y"] + plot["height"] * 3.5 / 13})
    assert "\\u202egnp.exe" in page.locator(".tip").inner_text()


# ---------------------------------------------------------------- files that cannot be compared


def refused(page: Page, path: Path | list[Path]) -> str:
    """Why a page did not take a file; the page is as it was."""
    address = page.evaluate("location.hash")
    choose(page, path)
    error = page.get_by_role("alert")
    error.wait_for()
    text = error.inner_text().removesuffix("Close").strip()
    assert page.evaluate("location.hash") == address
    assert page.locator(".changes-summary").count() == 0
    assert page.locator(".thumb").count() > 0
    error.get_by_role("button", name="Close").click()
    error.wait_for(state="detached")
    return text


def test_damaged_and_foreign_files_leave_the_page_as_it_was(look: Any, files: dict[str, Path], tmp_path: Path) -> None:
    page = look(made())
    thumbs(page)
    whole, html = files["codes"].read_bytes(), files["page"].read_bytes()
    header = int.from_bytes(whole[:8], "little")
    at = whole.index(b"looked_at")
    save_file({"a": torch.zeros(3)}, tmp_path / "weights-of-a-model.safetensors")
    cases = {
        "cut.safetensors": (whole[: len(whole) // 2], "is truncated: its end is missing"),
        "long.safetensors": (whole + b"\0", "is damaged (its tensors do not fill it)"),
        "head.safetensors": (whole[: at + 12] + b"9" + whole[at + 13 :], "is damaged"),
        "header.safetensors": (whole[: 8 + header // 2], ""),
        "model.safetensors": ((tmp_path / "weights-of-a-model.safetensors").read_bytes(), "is not a recording of head"),
        "note.txt": (b"Dear reader, this is not a recording.", "is not a recording of headscope"),
        "short": (b"abc", "is not a recording of headscope"),
        "empty.safetensors": (b"", "is empty"),
        "huge.safetensors": (b"\xff" * 64, "is not a recording of headscope"),
        "cut.html": (html[: len(html) // 2], "is truncated: its end is missing"),
        "other.html": (b"<!DOCTYPE html><p>a page</p></html>", "is not a recording of headscope"),
        "data.html": (html.replace(b'"layers":[{', b'"layers":[{"heads":-1},{', 1), "is damaged (its data)"),
        "json.html": (html.replace(b'"layers":[', b'"layers"[', 1), "is damaged (its data)"),
    }
    for name, (content, expected) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        text = refused(page, path)
        assert text.startswith(name), text
        assert expected in text
        assert text.count(". ") <= 1, "one sentence, and what to do"
    assert "Drop one file at a time, not 2." in refused_several(page, [files["codes"], files["exact"]])


def refused_several(page: Page, paths: list[Path]) -> str:
    page.locator("input[type=file]").first.evaluate("(e) => (e.multiple = true)")
    return refused(page, paths)


def test_a_changed_byte_of_each_tensor_that_is_read_is_noticed(
    look: Any, before: Recording, files: dict[str, Path], tmp_path: Path
) -> None:
    page = look(before)
    thumbs(page)
    whole = bytearray(files["weights"].read_bytes())
    with safe_open(files["weights"], "pt") as file:
        names = list(file.keys())
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    for name in ("3/moments/entropy/mean", "2/received", "1/qk/0/k", "0/map/counted/0"):
        assert name in names
        at = 8 + length + entries[name]["data_offsets"][0] + 1
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path = tmp_path / "damaged.safetensors"
        path.write_bytes(damaged)
        assert refused(page, path) == f"damaged.safetensors is damaged ({name}). Copy or save it again."


def test_recordings_of_other_models_are_refused(look: Any, before: Recording, tmp_path: Path) -> None:
    page = look(before)
    thumbs(page)
    model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with watch(model, what=Observe(map=4)) as small:
        model(torch.zeros(1, 4, 8))
    text = refused(page, small.save(tmp_path / "small.safetensors"))
    assert text == (
        "These recordings are of different models: TextModel and TransformerEncoderLayer. Compare recordings of one "
        "architecture."
    )
    text = refused(page, small.save_html(tmp_path / "small.html"))
    assert text.startswith("These recordings are of different models: TextModel and TransformerEncoderLayer.")
    text = refused(page, made(name="h.{}.attn").save(tmp_path / "none.safetensors"))
    assert text.startswith("These recordings have no layer in common (the first ones: layers.0.attention, h.0.attn).")


def test_layers_and_quantities_of_one_side_are_listed(look: Any, tmp_path: Path) -> None:
    one, other = made(), made(1.7)
    fewer = Recording(HeadStats({"layers.0.attention": other.stats.parts["layers.0.attention"]}), other.about)
    page = compared(look(one), fewer.save(tmp_path / "fewer.safetensors"))
    expect(page.locator(".changes-only")).to_contain_text("Only in A: layer 1.")
    expect(page.locator(".changes-notes")).to_contain_text("A and B do not state the model")
    assert "3 of 3 heads" in page.locator(".changes-switches").inner_text()


def test_many_heads_are_listed_in_parts(look: Any, tmp_path: Path) -> None:
    one, other = (made(scale, 7, 7, heads=41) for scale in (1.0, 3.0))
    page = look(one.save_html(tmp_path / "two.html", against=other))
    expect(page.locator(".changed")).to_have_count(60)
    page.get_by_role("button", name="Show 22 more").click()
    expect(page.locator(".changed")).to_have_count(82)
    assert page.get_by_role("button", name="more").count() == 0
