"""The sheet and the page: all that they show was measured, and text from outside stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sheets import TRACE, digit, picture, softmax, text, words

from headscope.report import NOT_EXPLANATION, SaveError, image_sheet, page, render, save, text_sheet
from headscope.report.recording import visible
from headscope.stats import best_matches, head_means, pattern_scores, row_statistics

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<img src=x onerror=alert(1)>",
    "\u202egnp.exe",
    "\u200f\u2067",
    "😀",
    "𝔘",
    "é̂",
    "\"&'",
    "\x00\x1b[31m",
    "\ud800",
    "",
    "x" * 10_000,
]

# ---------------------------------------------------------------- the page, as a browser takes it apart


@dataclass
class Element:
    """An element with its attributes and its own text."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    cells: list[Element] = field(default_factory=list)


class Page(HTMLParser):
    """A page as a list of elements."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in ("meta", "link", "br"):
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    @property
    def data(self) -> dict[str, Any]:
        (script,) = [script for script in self.all("script") if script.attributes.get("id") == "data"]
        return json.loads(script.text)


def weights_of(data: dict[str, Any], layer: int) -> NDArray[np.float64]:
    """A layer's weights as the page says that they are encoded."""
    encoding, length, heads = data["encoding"], len(data["tokens"]), data["heads"][layer]
    codes = np.frombuffer(base64.b64decode(data["weights"][layer]), f"<u{encoding['bits'] // 8}")
    values = np.where(codes == encoding["broken"], np.nan, (codes / encoding["top"]) ** 2)
    if not encoding["triangle"]:
        return values.reshape(heads, length, length)
    out = np.zeros((heads, length, length))
    rows, columns = np.tril_indices(length)
    out[:, rows, columns] = values.reshape(heads, -1)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bits", [16, 8])
def test_the_page_holds_the_weights(causal: bool, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if bits == 8:
        monkeypatch.setattr(page, "FINE_BYTES", 10)
    sheet = text(words(13), causal=causal)
    data = Page(render(sheet)).data
    assert data["encoding"] == {"bits": bits, "top": 2**bits - 2, "broken": 2**bits - 1, "triangle": causal}
    assert data["seen"] == ("causal" if causal else "all")
    for layer, weights in enumerate(sheet.weights):
        got = weights_of(data, layer)
        step = np.sqrt(weights) / data["encoding"]["top"] + 1 / data["encoding"]["top"] ** 2
        np.testing.assert_array_less(np.abs(got - weights), step)


def test_a_mask_of_any_shape_is_in_the_page() -> None:
    seen = torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    seen |= torch.eye(7, dtype=torch.bool)
    sheet = replace(text(words(7), causal=False), seen=seen.numpy())
    data = Page(render(sheet)).data
    bits = np.unpackbits(np.frombuffer(base64.b64decode(data["seen"]), np.uint8))[:49]
    np.testing.assert_array_equal(bits.reshape(7, 7).astype(bool), seen.numpy())


def test_every_figure_of_the_page_is_the_sheets() -> None:
    for sheet in (text(words(11), ids=[n % 5 for n in range(11)], trace=TRACE), picture()):
        found = Page(render(sheet))
        data = found.data
        assert data["statistics"] == [dict(layer) for layer in sheet.statistics]
        assert data["rows"] == [dict(layer) for layer in sheet.rows]
        assert data["patterns"] == [[match and list(match) for match in layer] for layer in sheet.patterns]
        assert data["tokens"] == list(sheet.tokens)
        assert data["labels"] == sheet.labels
        if sheet.kind == "image":
            assert data["regions"] == [dict(layer) for layer in sheet.regions]
            assert data["looks"] == [[look and list(look) for look in layer] for layer in sheet.looks]
            assert data["regionMaps"] == sheet.region_maps
            rgb = np.frombuffer(base64.b64decode(data["image"]["rgb"]), np.uint8).reshape(5, 7, 3)
            np.testing.assert_array_equal(rgb, np.repeat(digit()[..., None], 3, -1))


def test_the_table_shows_the_sheets_figures() -> None:
    sheet = picture()
    found = Page(render(sheet))
    headings = [th.text for th in found.all("th") if th.attributes.get("aria-sort")]
    values = [td.attributes["data-value"] for td in found.all("td") if "data-value" in td.attributes]
    shown = [td.text for td in found.all("td") if "data-value" in td.attributes]
    width = len(headings) - 1
    assert len(values) == 2 * 3 * width
    for layer in range(2):
        for head in range(3):
            row = slice((layer * 3 + head) * width, (layer * 3 + head + 1) * width)
            cells = dict(zip(headings[1:], zip(values[row], shown[row], strict=True), strict=True))
            look, match = sheet.looks[layer][head], sheet.patterns[layer][head]
            assert look is not None
            assert match is not None
            assert cells["looks most at"] == (look[0], look[0])
            assert cells["× chance"] == (str(look[1]), f"{look[1]:.2f}")
            assert cells["pattern"] == (match.pattern, match.pattern)
            assert cells["score"] == (str(match.score), f"{match.score:.2f}")
            assert cells["edges"][0] == str(sheet.regions[layer]["edges"][head])
            assert cells["entropy"][0] == str(sheet.statistics[layer]["entropy"][head])
            assert "mass" not in cells, "a mass of one says nothing"


def test_the_trace_stands_in_the_page() -> None:
    html = render(text(words(5), trace=TRACE, trace_title="Layer 1 & more"))
    found = Page(html)
    assert "mask <b>" in [th.text for th in found.all("th")]
    assert "mask &lt;b&gt;" in html
    assert {"0.500", "−∞", "1.250", "-0.500"} <= {td.text for td in found.all("td")}
    assert "4. Scaled dot-product attention" in [th.text for th in found.all("th")]
    assert "Layer 1 & more" in [h2.text for h2 in found.all("h2")]
    assert NOT_EXPLANATION in found.all("html")[0].text


def test_the_page_asks_for_nothing() -> None:
    for sheet in (text(HOSTILE, footer={"Input": HOSTILE[0]}, notes=[HOSTILE[2]]), picture()):
        html = render(sheet)
        found = Page(html)
        (policy,) = [m.attributes["content"] for m in found.all("meta") if m.attributes.get("http-equiv")]
        assert policy is not None
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'"
        data, code = found.all("script")
        assert data.attributes == {"type": "application/json", "id": "data"}
        assert code.attributes == {}
        for element, rule in ((code, "script-src"), (found.all("style")[0], "style-src")):
            digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
            assert rules[rule] == f"'sha256-{digest}'"
        for element in found.elements:
            assert not {"src", "srcset", "style", "action", "ping"} & set(element.attributes), element
            assert not any(name.startswith("on") for name in element.attributes), element
            assert element.attributes.get("href", "data:,") == "data:,"
        assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttp|import\(|eval\(|innerHTML|sendBeacon", html)


def test_hostile_text_stays_text() -> None:
    plain = Page(render(text(words(len(HOSTILE)), footer={"Input": "x"}, notes=["y"])))
    title = HOSTILE[0] + HOSTILE[3]
    sheet = replace(
        text(HOSTILE, footer={"Input": HOSTILE[0]}, notes=[HOSTILE[2]]), title=title, trace_title=HOSTILE[0]
    )
    html = render(sheet)
    html.encode("utf-8")
    found = Page(html)
    assert [element.tag for element in found.elements] == [element.tag for element in plain.elements]
    assert found.data["tokens"] == HOSTILE
    assert all(label == visible(token) for label, token in zip(found.data["labels"], HOSTILE, strict=True))
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert HOSTILE[2] in [p.text for p in found.all("p")]
    data = html[html.index('id="data">') + 10 : html.index("</script>")]
    assert data.isascii()
    assert not set("<>&") & set(data)


def test_sizes_of_pages() -> None:
    short, long, digits = (
        len(render(text(words(20), layers=6, heads=8, ids=list(range(20))))),
        len(render(text(words(256), layers=6, heads=8, ids=list(range(256))))),
        len(render(image_sheet("d", np.eye(8, dtype=np.uint8), (8, 8), [softmax(8, 64, causal=False)] * 6))),
    )
    assert short < 200_000
    assert digits < 1_000_000
    assert long < 6_000_000
    with pytest.raises(ValueError, match=r"sheet: .* weights do not fit one page, which holds 33,554,432; 3000 tokens"):
        render(replace(text(words(2)), tokens=["x"] * 3000, weights=[np.zeros((8, 1, 1), np.float32)] * 6))


def test_weights_that_are_not_finite_are_shown_as_such() -> None:
    weights = softmax(2, 7)
    weights[1, 3, 2], weights[1, 4, 0] = torch.nan, torch.inf
    sheet = text_sheet("x", words(7), [weights])
    assert list(sheet.notes) == ["Layer 0, head 1: 2 of 7 rows hold NaN or infinity and are in no statistic."]
    data = Page(render(sheet)).data
    got = weights_of(data, 0)
    assert np.argwhere(np.isnan(got)).tolist() == [[1, 3, 2], [1, 4, 0]]
    assert data["rows"][0]["entropy"] == [7, 5]
    nothing = text_sheet("x", words(7), [torch.full((1, 7, 7), torch.nan)], causal=False)
    assert Page(render(nothing)).data["statistics"][0]["entropy"] == [None]
    assert nothing.patterns == [[None]]


def test_a_sheet_in_a_notebook() -> None:
    sheet = text(HOSTILE)
    (frame,) = Page(sheet._repr_html_()).elements
    assert frame.attributes["sandbox"] == "allow-scripts", "a null origin: the notebook is out of its reach"
    assert frame.attributes["srcdoc"] == render(sheet)


def browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium is installed")
@pytest.mark.parametrize("kind", ["text", "image"])
def test_the_page_opens_in_a_browser(kind: str, tmp_path: Path) -> None:
    sheet = text(HOSTILE, trace=TRACE) if kind == "text" else picture()
    path = save(sheet, tmp_path / "page.html")
    quiet = ("gpu", "background-networking", "sync", "component-update")
    command = [str(browser()), "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    command += ["--dump-dom", f"{path.as_uri()}#layer=1&head=2&token=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = Page(done.stdout)
    assert "Layer 1, head 2" in [h2.text for h2 in found.all("h2")]
    thumbs = [b for b in found.all("button") if b.attributes.get("class") == "thumb"]
    assert len(thumbs) == 6
    assert [b.attributes.get("aria-current") for b in thumbs] == [None] * 5 + ["true"]
    assert len(found.all("script")) == 2, "no text became a script"
    facts = {div.text for div in found.all("div") if "On " in (div.attributes.get("title") or "")}
    entropy = sheet.statistics[1]["entropy"][2]
    assert f"entropy{entropy:.2f}" in facts


# ---------------------------------------------------------------- the file


def test_save_writes_and_replaces_its_own(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert save(text(words(3)), path) == path
    first = path.read_text(encoding="utf-8")
    assert save(text(words(5)), str(path)) == path
    assert path.read_text(encoding="utf-8") != first
    assert os.listdir(tmp_path) == ["page.html"]
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_save_leaves_other_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.html"
    path.write_text("<!DOCTYPE html><p>mine" + " " * 500 + page.MARKER, encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(
        SaveError, match=r"thesis\.html: holds a file that is no page of headscope's own; choose another"
    ):
        save(text(words(3)), path)
    assert path.read_bytes() == before
    save(text(words(3)), path, force=True)
    assert page.MARKER in path.read_text(encoding="utf-8")[:256]
    (tmp_path / "empty.html").touch()
    with pytest.raises(SaveError, match=r"empty\.html: holds a file"):
        save(text(words(3)), tmp_path / "empty.html")


def test_save_says_why_it_cannot(tmp_path: Path) -> None:
    sheet = text(words(3))
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path, why in {
        tmp_path: "is a directory, wanted the name of a file",
        tmp_path / "no" / "page.html": "cannot be written: No such file or directory",
        tmp_path / "file" / "page.html": "cannot be (written|read): Not a directory",
        Path(os.devnull): "is no regular file",
        tmp_path / "a\x00b": "cannot be (written|read): .*null byte",
        tmp_path / ("x" * 300): "cannot be (written|read): File name too long",
    }.items():
        for force in (False, True):
            with pytest.raises(SaveError, match=why) as caught:
                save(sheet, path, force=force)
            assert "\n" not in str(caught.value)
            assert "\x00" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(text(words(3)), tmp_path / "page.html")
    before = path.read_bytes()

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(SaveError, match=r"page\.html: cannot be written: No space left on device"):
        save(text(words(5)), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["page.html"]


# ---------------------------------------------------------------- the sheet


def test_a_sheet_says_what_the_statistics_say() -> None:
    weights, ids, seen = softmax(3, 11), torch.arange(11) % 3, torch.ones(11, 11, dtype=torch.bool).tril()
    sheet = text_sheet("x", words(11), [weights[None]], ids=ids.tolist())
    means = head_means(row_statistics(weights[None], seen=seen, tokens=ids))
    for name, values in means.mean.items():
        wanted = [None if value != value else value for value in values.tolist()]
        assert sheet.statistics[0][name] == wanted, name
        assert sheet.rows[0][name] == means.rows[name].tolist(), name
    assert sheet.patterns[0] == best_matches(pattern_scores(weights[None], seen=seen, tokens=ids))
    np.testing.assert_array_equal(sheet.weights[0], weights.numpy())
    assert (sheet.layers, sheet.heads) == (1, 3)
    assert "headscope" in sheet.footer["Versions"]


def test_one_token() -> None:
    sheet = text_sheet("x", ["a"], [torch.ones(2, 1, 1)], ids=[0])
    assert sheet.patterns == [[None, None]]
    assert Page(render(sheet)).data["patterns"] == [[None, None]]


def test_position_maps_take_part() -> None:
    weights = softmax(2, 35, causal=False)
    sheet = image_sheet("x", digit(), (5, 7), [weights], position_maps=[weights[None]])
    assert sheet.regions[0]["layout_r2"] == pytest.approx([1, 1])
    assert [look and look[0] for look in sheet.looks[0]] == ["layout", "layout"]


def test_sheets_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"tokens: there is none, wanted at least 1"):
        text_sheet("x", [], [torch.zeros(2, 0, 0)])
    with pytest.raises(ValueError, match=r"weights: there is no layer, wanted at least 1"):
        text_sheet("x", ["a"], [])
    with pytest.raises(
        ValueError, match=r"weights: layer 1 is \[2, 3, 3\], wanted \[H, 5, 5\], one row and column a token"
    ):
        text_sheet("x", words(5), [softmax(2, 5), softmax(2, 3)])
    with pytest.raises(ValueError, match=r"weights: layer 0 is \[2, 2, 5, 5\], wanted \[H, 5, 5\]"):
        text_sheet("x", words(5), [torch.stack([softmax(2, 5)] * 2)])
    with pytest.raises(ValueError, match=r"ids: has 3 entries, tokens has 5"):
        text_sheet("x", words(5), [softmax(2, 5)], ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"position_maps: has 2 layers, weights has 1"):
        image_sheet("x", digit(), (5, 7), [softmax(1, 35)], position_maps=[softmax(1, 35)] * 2)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (" a b", "␣a␣b"),
        ("\n\t\r", "⏎⇥␍"),
        ("", "∅"),
        ("\u202ex", "\\u202ex"),
        ("\x1b[0m", "\\u001b[0m"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
        ("\u0301x", "◌\u0301x"),
        ("日本", "日本"),
        ("x" * 24, "x" * 24),
        ("x" * 25, "x" * 23 + "…"),
    ],
)
def test_every_character_can_be_seen(raw: str, shown: str) -> None:
    assert visible(raw) == shown
    assert visible(raw, blanks=False) == shown.replace("␣", " ")
