"""The sheet and the page: all that they show was measured, and text from outside stays text."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.report import NOT_EXPLANATION, SaveError, image_sheet, page, render, save, text_sheet
from headscope.report._viewer import packing
from headscope.report.sheet import visible
from headscope.stats import best_matches, head_means, pattern_scores, row_statistics
from support.html_pages import HOSTILE, Page, map_of
from support.paths import ROOT
from support.sheets import TRACE, digit, picture, softmax, text, words


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bits", [16, 8])
def test_the_page_holds_the_weights(causal: bool, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if bits == 8:
        monkeypatch.setattr(packing, "FINE_BYTES", 10)
    sheet = text(words(13), causal=causal)
    found = Page(render(sheet))
    assert found.data["bits"] == bits
    seen = np.tril(np.ones((13, 13), bool)) if causal else np.ones((13, 13), bool)
    for layer, weights in enumerate(sheet.weights):
        for head, p in enumerate(weights):
            got = map_of(found, layer, head)["mean"]
            step = np.sqrt(p) / (2**bits - 1) + 1 / (2**bits - 1) ** 2
            np.testing.assert_array_equal(np.isnan(got), ~seen)
            np.testing.assert_array_less(np.abs(got - p)[seen], step[seen])


def test_a_mask_of_any_shape_is_in_the_page() -> None:
    seen = torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    seen |= torch.eye(7, dtype=torch.bool)
    sheet = replace(text(words(7), causal=False), seen=[None, seen.expand(3, 7, 7).numpy()])
    found = Page(render(sheet))
    np.testing.assert_array_equal(~np.isnan(map_of(found, 1, 2)["mean"]), seen.numpy())
    assert not np.isnan(map_of(found, 0, 2)["mean"]).any()


def test_each_layer_is_measured_against_what_it_may_see() -> None:
    seen = [torch.ones(7, 7, dtype=torch.bool).tril().triu(-2), torch.ones(2, 7, 7, dtype=torch.bool).tril()]
    weights = [(each / each.sum(-1, keepdim=True)).expand(2, 7, 7) for each in seen]
    sheet = text_sheet("x", words(7), weights, seen=seen)
    for layer in range(2):
        assert sheet.statistics[layer]["normalized_entropy"] == pytest.approx([1.0, 1.0])
        assert [match.pattern for match in sheet.patterns[layer] if match] == ["uniform"] * 2
    with pytest.raises(ValueError, match="seen: expected 2 layers as in weights, got 1"):
        text_sheet("x", words(7), weights, seen=seen[:1])
    with pytest.raises(ValueError, match=r"seen: layer 0 is \[6, 7\], expected \[2, 7, 7\] as in weights"):
        text_sheet("x", words(7), weights, seen=[seen[0][1:], seen[1]])
    with pytest.raises(ValueError, match=r"seen: layer 1 is torch\.float32, expected torch\.bool \(True = attend\)"):
        text_sheet("x", words(7), weights, seen=[seen[0], seen[1].float()])


def test_every_figure_of_the_page_is_the_sheets() -> None:
    for sheet in (text(words(11), ids=[n % 5 for n in range(11)], trace=TRACE), picture()):
        data = Page(render(sheet)).data
        for layer, (statistics, rows) in enumerate(zip(sheet.statistics, sheet.rows, strict=True)):
            for name, figures in statistics.items():
                assert data["statistics"][layer][name]["mean"] == list(figures)
                assert data["statistics"][layer][name]["count"] == rows[name]
        assert data["patterns"] == [
            [[[*match[:3], True]] if match and (match.is_name or match.score < 0.3) else [] for match in layer]
            for layer in sheet.patterns
        ]
        assert "mass" not in [each["name"] for each in data["names"]], "a mass of one says nothing"
        if sheet.kind == "text":
            assert data["tokens"]["labels"] == sheet.labels
        else:
            image = data["image"]
            for layer, regions in enumerate(sheet.regions):
                assert {name: data["statistics"][layer][name]["mean"] for name in regions} == {
                    name: list(figures) for name, figures in regions.items()
                }
            assert image["looks"] == [[look and list(look) for look in layer] for layer in sheet.looks]
            assert image["regions"]["edges"] == pytest.approx(sheet.region_maps["edges"], abs=1e-4)
            rgb = np.frombuffer(base64.b64decode(image["rgb"]), np.uint8).reshape(5, 7, 3)
            np.testing.assert_array_equal(rgb, np.repeat(digit()[..., None], 3, -1))


def test_the_trace_stands_in_the_page() -> None:
    found = Page(render(text(words(5), trace=TRACE, trace_title="Layer 1 & more")))
    trace = found.data["trace"]
    assert trace["title"] == "Layer 1 & more"
    (stage,) = trace["stages"]
    assert stage["name"] == "4. Scaled dot-product attention"
    (step,) = stage["steps"]
    assert (step["step"], step["axes"], step["held"]) == ("mask <b>", [["B", 1], ["H", 3]], True)
    assert step["corner"] == [["0.500", "−∞"], ["1.250", "-0.500"]]
    assert NOT_EXPLANATION in found.all("html")[0].text


def test_the_page_asks_for_nothing() -> None:
    for sheet in (text(HOSTILE, footer={"Input": HOSTILE[0]}, notes=[HOSTILE[2]]), picture()):
        html = render(sheet)
        found = Page(html)
        (policy,) = [m.attributes["content"] for m in found.all("meta") if m.attributes.get("http-equiv")]
        assert policy is not None
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'"
        assert "connect-src" not in rules
        data, blocks, code = found.all("script")
        assert data.attributes == {"type": "application/json", "id": "data"}
        assert blocks.attributes == {"type": "text/plain", "id": "blocks"}
        assert re.fullmatch(r"[A-Za-z0-9+/=]*", blocks.text)
        assert code.attributes == {}
        for element, rule in ((code, "script-src"), (found.all("style")[0], "style-src")):
            digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
            assert rules[rule] == f"'sha256-{digest}'"
        for element in found.elements:
            assert not {"src", "srcset", "style", "action", "ping"} & set(element.attributes), element
            assert not any(name.startswith("on") for name in element.attributes), element
            assert element.attributes.get("href", "data:,") == "data:,"
        names = r"http://www\.w3\.org/(2000/svg|1999/xhtml|1999/xlink|1998/Math/MathML|XML/1998/namespace|2000/xmlns/)"
        assert not re.search(r"https?:|@import|url\(h|XMLHttp|import\(|eval\(|sendBeacon", re.sub(names, "", html))


def test_the_script_is_built_from_the_source() -> None:
    """By the digest in it; ``scripts/viewer --check`` builds it anew and compares."""
    viewer = ROOT / "viewer"
    if not viewer.is_dir():
        pytest.skip("this is no checkout: there is no source of the script")
    source = hashlib.sha256()
    for name in (
        "package-lock.json",
        "vite.config.js",
        *sorted(f"src/{path.name}" for path in (viewer / "src").iterdir()),
    ):
        source.update(f"{name}\n".encode() + (viewer / name).read_bytes())
    assert source.hexdigest() in page.asset("viewer.js"), "run scripts/viewer"


def test_hostile_text_stays_text() -> None:
    plain = Page(render(text(words(len(HOSTILE)), footer={"Input": "x"}, notes=["y"])))
    title = HOSTILE[0] + HOSTILE[3]
    sheet = replace(
        text(HOSTILE, footer={"Input": HOSTILE[0]}, notes=[HOSTILE[2]], trace=TRACE),
        title=title,
        trace_title=HOSTILE[0],
    )
    html = render(sheet)
    html.encode("utf-8")
    found = Page(html)
    assert [element.tag for element in found.elements] == [element.tag for element in plain.elements]
    tokens = found.data["tokens"]
    assert tokens["labels"] == [visible(token) for token in HOSTILE]
    assert tokens["longer"]["12"] == visible(HOSTILE[12], limit=200)
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert HOSTILE[2] in [p.text for p in found.all("p")]
    data = html[html.index('id="data">') + 10 : html.index("</script>")]
    assert data.isascii()
    assert not set("<>&") & set(data)


@pytest.mark.parametrize(
    "image",
    [np.zeros((5, 7)), np.zeros((5, 7), np.float32), np.zeros((5, 7, 4), np.uint8), np.zeros((5, 7, 1), np.uint8)],
)
def test_an_image_of_another_kind_is_refused(image: np.ndarray[Any, Any]) -> None:
    with pytest.raises(
        ValueError, match=rf"image: got {image.dtype} \[5, 7.*\], expected uint8 \[h, w\] or \[h, w, 3\]"
    ):
        image_sheet("x", image, (5, 7), [softmax(1, 35)])


def test_a_token_that_grows_when_it_is_shown_is_there_at_length() -> None:
    texts = ["a", "\u200d" * 10, "b" * 25, "c" * 24]
    found = Page(render(text(texts))).data["tokens"]
    assert found["longer"] == {"1": "\\u200d" * 10, "2": "b" * 25}
    assert found["labels"] == [visible(token) for token in texts]


def test_sizes_of_pages() -> None:
    short, long, digits = (
        len(render(text(words(20), layers=6, heads=8, ids=list(range(20))))),
        len(render(text(words(256), layers=6, heads=8, ids=list(range(256))))),
        len(render(image_sheet("d", np.eye(8, dtype=np.uint8), (8, 8), [softmax(8, 64, causal=False)] * 6))),
    )
    assert short < 640_000, "most of these are the script"
    assert digits < 1_150_000
    assert long < 6_000_000
    weights = [np.zeros((8, 1, 1), np.float32)] * 6
    with pytest.raises(
        ValueError, match=r"sheet: expected at most 33,554,432 weights on one page, got [\d,]+; 3000 tokens"
    ):
        render(replace(text(words(2)), seen=[None] * 6, tokens=["x"] * 3000, weights=weights))


def test_weights_that_are_not_finite_are_left_out_with_their_rows() -> None:
    weights = softmax(2, 7)
    weights[1, 3, 2], weights[1, 4, 0] = torch.nan, torch.inf
    sheet = text_sheet("x", words(7), [weights])
    assert list(sheet.notes) == ["Layer 0, head 1: 2 of 7 rows contain NaN or infinity and are in no statistic."]
    found = Page(render(sheet))
    got = map_of(found, 0, 1)["mean"]
    assert np.flatnonzero(np.isnan(got).all(1)).tolist() == [3, 4]
    layer = found.data["layers"][0]
    assert (layer["rows"], layer["broken"]) == ([7, 5], [0, 2])
    assert found.data["statistics"][0]["entropy"]["count"] == [7, 5]
    nothing = text_sheet("x", words(7), [torch.full((1, 7, 7), torch.nan)], causal=False)
    assert Page(render(nothing)).data["statistics"][0]["entropy"]["mean"] == [None]
    assert nothing.patterns == [[None]]


def test_a_sheet_in_a_notebook() -> None:
    sheet = text(HOSTILE)
    (frame,) = Page(sheet._repr_html_()).elements
    assert frame.attributes["sandbox"] == "allow-scripts allow-downloads", "a null origin: the notebook is out of reach"
    assert frame.attributes["srcdoc"] == render(sheet)


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
    problem = "exists and is not a page that headscope wrote; choose another name, or overwrite it with force=True"
    with pytest.raises(SaveError, match=rf"thesis\.html: {problem}"):
        save(text(words(3)), path)
    assert path.read_bytes() == before
    save(text(words(3)), path, force=True)
    assert page.MARKER in path.read_text(encoding="utf-8")[:256]
    (tmp_path / "empty.html").touch()
    with pytest.raises(SaveError, match=r"empty\.html: exists and is not a page"):
        save(text(words(3)), tmp_path / "empty.html")


def test_save_says_why_it_cannot(tmp_path: Path) -> None:
    sheet = text(words(3))
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path, why in {
        tmp_path: "is a directory, expected the name of a file",
        tmp_path / "no" / "page.html": "cannot be written: No such file or directory",
        tmp_path / "file" / "page.html": "cannot be (written|read): Not a directory",
        Path(os.devnull): "is not a regular file",
        tmp_path / "a\x00b": "cannot be (written|read): .*null (byte|character)",
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
    assert Page(render(sheet)).data["patterns"] == [[[], []]]


def test_position_maps_take_part() -> None:
    weights = softmax(2, 35, causal=False)
    sheet = image_sheet("x", digit(), (5, 7), [weights], position_maps=[weights[None]])
    assert sheet.regions[0]["layout_r2"] == pytest.approx([1, 1])
    assert [look and look[0] for look in sheet.looks[0]] == ["layout", "layout"]


def test_layers_may_have_other_numbers_of_heads() -> None:
    weights = [softmax(2, 35, causal=False), softmax(3, 35, causal=False)[None]]
    sheet = image_sheet("x", digit(), (5, 7), weights, position_maps=[weights[0][None], weights[1][0]])
    assert [len(layer["layout_r2"]) for layer in sheet.regions] == [2, 3]
    assert sheet.regions[1]["layout_r2"] == pytest.approx([1, 1, 1])


def test_the_default_device_does_not_matter() -> None:
    ids = [n % 3 for n in range(7)]
    wanted = text(words(7), ids=ids), picture()
    of_text, of_image = ([torch.from_numpy(layer) for layer in sheet.weights] for sheet in wanted)
    with torch.device("meta"):
        found = text_sheet("", words(7), of_text, ids=ids), image_sheet("", digit(), (5, 7), of_image)
    for got, sheet in zip(found, wanted, strict=True):
        assert (got.statistics, got.patterns, got.regions) == (sheet.statistics, sheet.patterns, sheet.regions)


def test_sheets_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"tokens: expected at least 1, got none"):
        text_sheet("x", [], [torch.zeros(2, 0, 0)])
    with pytest.raises(ValueError, match=r"weights: expected at least 1 layer, got none"):
        text_sheet("x", ["a"], [])
    with pytest.raises(
        ValueError, match=r"weights: layer 1 is \[2, 3, 3\], expected \[H, 5, 5\], one row and column per token"
    ):
        text_sheet("x", words(5), [softmax(2, 5), softmax(2, 3)])
    with pytest.raises(ValueError, match=r"weights: layer 0 is \[2, 2, 5, 5\], expected \[H, 5, 5\]"):
        text_sheet("x", words(5), [torch.stack([softmax(2, 5)] * 2)])
    with pytest.raises(ValueError, match=r"ids: expected 5 entries, one per token, got 3"):
        text_sheet("x", words(5), [softmax(2, 5)], ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"position_maps: expected 1 layers as in weights, got 2"):
        image_sheet("x", digit(), (5, 7), [softmax(1, 35)], position_maps=[softmax(1, 35)] * 2)
    with pytest.raises(
        ValueError, match=r"position_maps: layer 0 is \[2, 35, 35\], expected \[1, 35, 35\] as in weights"
    ):
        image_sheet("x", digit(), (5, 7), [softmax(1, 35)], position_maps=[softmax(2, 35)])


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
