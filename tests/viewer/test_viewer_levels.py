"""Weights with fewer levels than 8 bits: what a cell shows is within the error that the page states."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from headscope import Observe, masks, observe
from headscope.report._viewer import levels, packing
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import chromium, in_a_browser, look, place

pytestmark = in_a_browser

LENGTH = 53


def test_a_cell_is_within_the_error_that_the_legend_states(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = 2 * torch.randn(2, 1, 2, LENGTH, 8, generator=torch.Generator().manual_seed(1))
    found = observe(q, k, mask=masks.causal(), what=Observe(map=LENGTH, keep_qk=True)).named("0")
    recording = Recording(HeadStats(found.parts), About("m", {}, {}, {"0": "self"}, None, 1, 1))
    monkeypatch.setattr(packing, "FINE_BYTES", 0)
    monkeypatch.setattr(levels, "EVERY_WEIGHT_BYTES", 2_000)
    page = look(recording, "view=head&head=1&row=2&column=1")
    page.locator(".pinned .cell").wait_for()
    stated = re.search(r"within ([\d.]+)\s%", page.locator(".drawing .binning").inner_text())
    assert stated is not None
    bound = float(stated[1]) / 100
    assert bound < 0.5
    kept = found.parts["0"].tiles[0](0, LENGTH, 0, LENGTH)
    assert kept is not None
    for row, column in ((30, 17), (52, 3), (9, 9)):
        page.mouse.click(*place(page, (row + 0.5) / LENGTH, (column + 0.5) / LENGTH))
        page.wait_for_url(f"**row={row}&column={column}**")
        shown = re.search(r"≈ ([\d.e-]+)", page.locator(".pinned .cell").inner_text())
        weights = kept[0, 1, row, : row + 1].double()
        value = 0.0 if shown is None else float(shown[1])
        assert abs(value - float(weights[column])) <= (bound + 0.05) * float(weights.max())
