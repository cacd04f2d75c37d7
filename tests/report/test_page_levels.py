"""A page that holds every weight stays small: heads that compress badly have fewer levels, with a bounded error."""

from __future__ import annotations

import base64
import json
import re
import zlib
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from headscope import Observe, masks, observe
from headscope.report._viewer import levels, packing
from headscope.report.viewer import render_recording
from headscope.stats import HeadStats
from headscope.watching import About, Recording

LENGTH = 61
PLAIN = 1  # the head whose weights repeat


def recorded(mask: Any) -> Recording:
    """A layer of three heads with random weights, except for one whose rows are even."""
    q, k = 2 * torch.randn(2, 1, 3, LENGTH, 8, generator=torch.Generator().manual_seed(3))
    q[:, PLAIN] = 0
    found = observe(q, k, mask=mask, what=Observe(map=LENGTH, edges=2, keep_qk=True)).named("0")
    return Recording(HeadStats(found.parts), About("m", {}, {}, {"0": "self"}, None, 1, 1))


def text_of(html: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>(.*?)</', html, re.DOTALL)
    assert found is not None
    return found[1]


def weights_of(html: str, head: int) -> tuple[np.ndarray[Any, Any], int]:
    """The visible weights of a head as the page has them, row by row, and its levels."""
    facts = json.loads(text_of(html, "data"))["layers"][0]
    start, length = facts["blocks"][head]
    block = zlib.decompress(base64.b64decode(text_of(html, "blocks"))[start : start + length], -15)
    rows, columns = facts["map"]["rows"], facts["map"]["columns"]
    mask = base64.b64decode(json.loads(text_of(html, "data"))["masks"][facts["map"]["masks"][head]])
    visible = np.unpackbits(np.frombuffer(mask, np.uint8))[: rows * columns].reshape(rows, columns).astype(bool)
    top = (facts["map"]["levels"] or [255] * 3)[head]
    largest, _, differs = np.frombuffer(block, "<f4", 3)
    end, count = len(block), int(visible.sum())
    if top == 255:
        assert not differs
        codes = np.frombuffer(block[end - count :], np.uint8)
        return largest * (codes / 255.0) ** 2, top
    many = max(n for n in range(1, 9) if (top + 1) ** n <= 256)
    coded = np.frombuffer(block[end - -(-count // many) :], np.uint8).astype(int)
    codes = np.stack([coded // (top + 1) ** n % (top + 1) for n in range(many)], 1).ravel()[:count]
    planes = np.frombuffer(block[end - len(coded) - 2 * rows : end - len(coded)], np.uint8).reshape(2, rows).astype(int)
    row_tops = largest * ((planes[0] + 256 * planes[1]) / 65535) ** 2
    return row_tops[np.nonzero(visible)[0]] * (codes / top) ** 2, top


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("budget", [9_000, 5_000])
def test_a_page_over_its_budget_has_fewer_levels(monkeypatch: pytest.MonkeyPatch, mask: Any, budget: int) -> None:
    recording = recorded(mask)
    monkeypatch.setattr(packing, "FINE_BYTES", 0)
    plain = render_recording(recording, exact=())
    monkeypatch.setattr(levels, "EVERY_WEIGHT_BYTES", budget)
    small = render_recording(recording, exact=())
    sizes = [len(base64.b64decode(text_of(html, "blocks"))) for html in (plain, small)]
    if sizes[0] <= budget:
        assert small == plain
        return
    assert sizes[1] < 1.1 * budget + 300
    kept = recording.stats.parts["0"].tiles[0](0, LENGTH, 0, LENGTH)
    assert kept is not None
    chosen: list[int] = []
    for head in range(3):
        exact = kept[0, head].double().numpy()
        visible = ~np.isnan(exact) if mask is None else np.tri(LENGTH, dtype=bool)
        shown, top = weights_of(small, head)
        error = np.abs(shown - exact[visible])
        row_tops = np.where(visible, exact, 0).max(1)[np.nonzero(visible)[0]]
        assert (error <= (1 / top + 1e-4) * row_tops).all()
        chosen.append(top)
    assert chosen[0] < 255
    assert chosen[PLAIN] == 255 or mask is not None


@pytest.mark.parametrize("base", [3, 4, 6, 16, 17, 192])
def test_codes_in_one_byte_are_told_apart(base: int) -> None:
    codes = np.random.default_rng(base).integers(0, base, 101)
    joined = np.frombuffer(levels.joined(codes, base - 1), np.uint8).astype(int)
    many = max(n for n in range(1, 9) if base**n <= 256)
    assert len(joined) == -(-101 // many)
    again = [byte // power % base for byte in joined for power in accumulate([1] + [base] * (many - 1), int.__mul__)]
    assert again[:101] == codes.tolist()
