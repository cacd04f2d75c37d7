"""What stands around the maps on the page of a recording: what is wrong with it, how it is read, and of what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pages import Page
from sheets import softmax, words

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
