"""What stands around the maps on the page of a recording: what is wrong with it, how it is read, and of what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pages import Page
from sheets import picture, softmax, words

from headscope import Observe, masks, observe
from headscope.report import render, text_sheet
from headscope.report.viewer import render_recording
from headscope.stats import HeadStats
from headscope.watching import About, Recording


def recorded(layers: int, broken: int = 0, **about: Any) -> Recording:
    """Layers of three heads over 7 tokens; in the first so many, one row of each head is broken."""
    parts = {}
    for layer in range(layers):
        q, k = torch.randn(2, 1, 3, 7, 5)
        if layer < broken:
            q[:, :, 4] = torch.nan
        found = observe(q, k, mask=masks.causal(), what=Observe(map=7))
        parts |= found.named(f"layers.{layer}.attn").parts
    kinds: Any = dict.fromkeys(parts, "self")
    said = {"model": "m", "options": {}, "versions": {}, "kinds": kinds, "texts": None, "forwards": 1, "ran": 1}
    return Recording(HeadStats(parts), About(**{**said, **about}))


def notes(html: str) -> list[str]:
    return [p.text for p in Page(html).all("p") if p.attributes.get("class") == "note"]


def footer(html: str) -> dict[str, str]:
    page = Page(html)
    return {name.text: value.text for name, value in zip(page.all("dt"), page.all("dd"), strict=True)}


# ---------------------------------------------------------------- what is wrong with it


@pytest.mark.parametrize(
    ("layers", "broken", "said"),
    [
        (2, 0, []),
        (1, 1, ["3 rows of heads hold NaN or infinity and are in no figure: in layer layers.0.attn."]),
        (3, 1, ["3 rows of heads hold NaN or infinity and are in no figure: in layer 0."]),
        (3, 2, ["6 rows of heads hold NaN or infinity and are in no figure: in layers 0, 1."]),
        (
            20,
            17,
            [
                "51 rows of heads hold NaN or infinity and are in no figure: in 17 layers: "
                "0, 1, 2, 3, 4, 5, 6, 7 and 9 more."
            ],
        ),
    ],
)
def test_all_broken_rows_are_told_in_one_line(layers: int, broken: int, said: list[str]) -> None:
    assert notes(render_recording(recorded(layers, broken))) == said


def test_a_sheet_tells_all_broken_rows_in_one_line() -> None:
    weights = [softmax(4, 7) for _ in range(3)]
    for layer in weights:
        layer[:, 5, 2] = torch.nan
    sheet = text_sheet("x", words(7), weights)
    assert notes(render(sheet)) == [
        "12 rows of 12 heads hold NaN or infinity and are in no statistic: layer 0 head 0, layer 0 head 1, "
        "layer 0 head 2, layer 0 head 3, layer 1 head 0, layer 1 head 1, layer 1 head 2, layer 1 head 3 and 4 more."
    ]


# ---------------------------------------------------------------- how it is read, and of what it is


def test_the_page_says_how_a_map_is_read() -> None:
    page = Page(render_recording(recorded(2)))
    (lead,) = [p.text for p in page.all("p") if p.attributes.get("class") == "lead"]
    assert lead == (
        "2 layers, 6 heads. A row of a map is a query, which looks; a column is a key, which is looked at. "
        "Layers, heads, queries and keys are counted from 0."
    )
    plain = observe(*torch.randn(2, 1, 1, 7, 5)).named("a")
    page = Page(render_recording(Recording(plain, About("m", {}, {}, {"a": "self"}, None, 1, 1))))
    (lead,) = [p.text for p in page.all("p") if p.attributes.get("class") == "lead"]
    assert (
        lead
        == "1 layer, 1 head. A query looks, a key is looked at. Layers, heads, queries and keys are counted from 0."
    )


def test_the_footer_of_a_recording() -> None:
    options = {
        "rows": None, "row_stats": True, "received": False, "map": 7, "edges": 0, "top": 0, "windows": [3, 16],
        "first": 1, "tokens": "Tensor", "keep_rows": True, "keep_qk": False, "every": 1, "kinds": {},
        "positions": "Tensor", "accelerate": False, "layers": ["layers.*"], "input": {"source": "a.txt", "tokens": 7},
    }  # fmt: skip
    found = footer(render_recording(recorded(2, options=options, versions={"headscope": "1", "torch": "2"})))
    assert found == {
        "Model": "m",
        "Input": "a.txt; 7 queries × 7 keys; 1 forward pass",
        "Rows": "each head's figures stand on 7 rows at most",
        "Layers": "layers.*.attn",
        "Options": "received=False, map=7, windows=[3, 16], tokens given, keep_rows=True, positions given, "
        "layers=['layers.*']",
        "Versions": "headscope 1, torch 2",
    }
    one = observe(*torch.randn(2, 1, 1, 1, 5)).named("a")
    found = footer(render_recording(Recording(one, About("m", {}, {}, {"a": "self"}, None, 2, 2))))
    assert found["Input"] == "1 query × 1 key; 2 forward passes"
    assert found["Rows"] == "each head's figures stand on 1 row at most"
    assert found["Options"] == "none"
    assert footer(render_recording(recorded(1, ran=9, forwards=3)))["Input"].endswith(
        "; 3 of 9 forward passes looked at"
    )


def test_the_footer_of_a_sheet_says_on_how_many_rows_its_figures_stand() -> None:
    weights = [softmax(4, 7) for _ in range(3)]
    weights[1][2, 5, 2] = torch.nan
    found = footer(render(text_sheet("x", words(7), weights, footer={"Model": "m", "Input": "i", "Options": "none"})))
    assert list(found) == ["Model", "Input", "Options", "Rows", "Versions"]
    assert found["Rows"] == "each head's figures stand on 6 to 7 rows at most"
    assert footer(render(picture()))["Rows"] == "each head's figures stand on 35 rows at most"
