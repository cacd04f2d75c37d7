"""Rows that are a part of a sequence: the statistics of its chunks merge to those of the whole."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headscope import HeadStats, Observe, masks, observe
from headscope.masks import Band


def draw(length: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k and v with two key/value heads for four query heads."""
    random = torch.Generator().manual_seed(seed)
    return [(2 * torch.randn(2, heads, length, 5, generator=random)).to(dtype) for heads in (4, 2, 2)]


def of_chunks(
    qkv: list[Tensor], cuts: list[int], what: Observe, window: int | None, *, with_all_keys: bool
) -> HeadStats:
    q, k, v = qkv
    total = q.shape[2]
    stats: HeadStats | None = None
    for start, stop in pairwise(cuts):
        end = total if with_all_keys else stop
        mask = Band(window, 0, offset=start)
        chunk = observe(q[:, :, start:stop], k[:, :, :end], v[:, :, :end], mask=mask, rows_at=(start, total), what=what)
        stats = chunk if stats is None else stats.merge(chunk)
    assert stats is not None
    return stats


@settings(max_examples=50)
@given(
    length=st.integers(2, 61), bins=st.integers(1, 67), data=st.data(), window=st.none() | st.integers(0, 9),
    with_all_keys=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_chunks_merge_to_the_whole(
    length: int, bins: int, data: Any, window: int | None, with_all_keys: bool, dtype: torch.dtype
) -> None:
    inner = data.draw(st.lists(st.integers(1, length - 1), max_size=4, unique=True))
    qkv = draw(length, data.draw(st.integers(0, 99)), dtype)
    what = Observe(map=bins, edges=7, windows=(3,), keep_rows=True, top=2)
    whole = observe(*qkv, mask=Band(window, 0), what=what)
    parts = of_chunks(qkv, [0, *sorted(inner), length], what, window, with_all_keys=with_all_keys)
    one, other = whole.parts["0"], parts.parts["0"]
    assert (other.lengths, other.of) == (one.lengths, one.of) == ((length, length), 2 * length)
    assert one.map is not None
    assert other.map is not None
    assert torch.equal(one.map.count, other.map.count)
    torch.testing.assert_close(other.map.sum, one.map.sum, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(other.map.max, one.map.max, rtol=1e-5, atol=1e-9, equal_nan=True)
    assert one.edges is not None
    assert other.edges is not None
    torch.testing.assert_close(other.edges.p, one.edges.p, rtol=1e-5, atol=1e-9, equal_nan=True)
    for name in whole.names:
        assert torch.equal(whole[name].count, parts[name].count), name
        torch.testing.assert_close(parts[name].mean, whole[name].mean, rtol=1e-5, atol=1e-6, equal_nan=True)
    keys = one.received
    assert keys is not None
    torch.testing.assert_close(other.received, keys, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([rows.queries for rows in other.kept]), torch.arange(length))
    places = torch.cat([rows.values["top_keys"] for rows in other.kept], 2)
    assert torch.equal(places[..., 0], one.kept[0].values["top_keys"][..., 0])


def test_places_count_from_the_first_row_of_the_whole() -> None:
    k = 40 * torch.eye(11)[None, None]
    q = k[:, :, 7:9]  # rows 7 and 8, each like its own key
    stats = observe(q, k[:, :, :9], mask=masks.causal(), rows_at=(7, 11), what=Observe(map=11, edges=2))
    assert stats.edges is not None
    assert [(edge.i, edge.j) for edge in stats.edges.of(0)] == [(7, 7), (8, 8)]
    assert stats.map is not None
    assert stats.map.argmax[0, 7, 7].tolist() == [0, 0, 7, 7]
    assert stats["distance"].mean.item() == pytest.approx(0, abs=1e-6)


def test_rows_of_cross_attention_have_all_keys() -> None:
    q, k = torch.randn(1, 2, 13, 4), torch.randn(1, 2, 5, 4)
    what = Observe(map=5)
    whole = observe(q, k, kind="cross", what=what)
    parts = [observe(q[:, :, at : at + 7], k, kind="cross", rows_at=(at, 13), what=what) for at in (0, 7)]
    both = parts[0].merge(parts[1])
    assert whole.map is not None
    assert both.map is not None
    assert torch.equal(both.map.count, whole.map.count)
    torch.testing.assert_close(both.map.sum, whole.map.sum)


@pytest.mark.parametrize("of_keys", [True, False])
def test_padding_on_the_left_is_known_from_a_mask_of_keys(of_keys: bool) -> None:
    qkv = draw(23, 5, torch.float32)
    visible = torch.ones(2, 1, 1, 23, dtype=torch.bool)
    visible[1, ..., :4] = False
    mask = masks.Dense(visible) & Band(2, 0)
    whole = observe(*qkv, mask=mask)
    q, k, v = qkv
    merged: HeadStats | None = None
    for start, stop in ((0, 7), (7, 23)):
        part = masks.Dense(visible[..., :stop]) & Band(2, 0, offset=start)
        if not of_keys:  # the same pairs, as a table of rows
            part = masks.Dense(part.dense(2, 1, stop - start, stop))
        chunk = observe(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask=part, rows_at=(start, 23))
        merged = chunk if merged is None else merged.merge(chunk)
    assert merged is not None
    assert torch.equal(merged["first"].count, whole["first"].count)
    if of_keys:
        torch.testing.assert_close(merged["first"].mean, whole["first"].mean)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rows_at": 3}, TypeError, "rows_at: got int, expected (start, total)"),
        ({"rows_at": (-1, 9)}, ValueError, "rows_at: got -1, expected a whole number from 0"),
        ({"rows_at": (4, 6)}, ValueError, "rows_at: 3 rows from row 4 end at 7, expected at most 6"),
        ({"rows_at": (0, 4)}, ValueError, "rows_at: got 4 rows in all, expected at least as many as keys: 5"),
        ({"rows_at": (2, 9), "q_pos": torch.arange(3)}, ValueError, "rows_at: got q_pos or k_pos too"),
        (
            {"rows_at": (4, 9), "mask": masks.causal()}, ValueError,
            "rows_at: row 0 is row 4 of the sequence, and the mask places it at key 2; pass the first 7 keys, or",
        ),
    ],
)  # fmt: skip
def test_places_that_do_not_fit(options: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    with pytest.raises(error, match=re.escape(message)):
        observe(q, k, **options)


def test_the_statistics_of_a_chunk_are_saved(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 9, 8)
    part = observe(q[:, :, :4], q[:, :, :4], mask=masks.causal(), rows_at=(0, 9), what=Observe(map=3))
    saved = HeadStats.load(part.save(tmp_path / "chunk.safetensors"))
    assert saved.rows.tolist() == [4, 4]
    torch.testing.assert_close(saved["entropy"].mean, part["entropy"].mean)


@pytest.mark.parametrize("mask", [masks.causal(), masks.causal() & masks.KeyLengths(torch.tensor([9, 12]))])
def test_a_default_device_changes_nothing(mask: masks.Mask) -> None:
    q, k = torch.randn(2, 2, 2, 12, 4, generator=torch.Generator().manual_seed(0))
    what = Observe(weights=(1,), map=3)
    expected = observe(q[:, :, 5:], k, mask=mask, rows_at=(5, 12), what=what)
    with torch.device("meta"):
        got = observe(q[:, :, 5:], k, mask=mask, rows_at=(5, 12), what=what)
    assert torch.equal(got["first"].mean, expected["first"].mean)
    assert torch.equal(got.weights[1], expected.weights[1])
    assert torch.equal(got.map.count, expected.map.count)
