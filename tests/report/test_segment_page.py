"""The even share of segments on the page, and the keys of segments in statistics, merged and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope import Observe, Segments, masks, observe
from headscope.report._viewer.segments import even_shares
from headscope.stats import HeadStats, SegmentMass
from headscope.stats._segment_mass import spans_of

NAMES = ["a", "b", "c"]
IDS = [0] * 4 + [1] * 7 + [-1] * 3 + [0] * 2 + [2] * 7
SPANS = ((0, 0, 4), (1, 4, 11), (0, 14, 16), (2, 16, 23))


def observed(bins: int, mask: Any = None, ids: Any = IDS) -> Any:
    q, k = torch.randn(2, 1, 2, len(IDS), 8, generator=torch.Generator().manual_seed(2))
    return observe(
        q, k, mask=masks.causal() if mask is None else mask, what=Observe(segments=Segments(NAMES, ids), map=bins)
    )


def even(visible: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each pair of segments the mean over the rows of the first of the share of visible keys in the second."""
    ids = np.array(IDS)
    shares = np.stack([(visible & (ids == n)).sum(1) / visible.sum(1) for n in range(3)], 1)
    return np.stack([shares[ids == n].mean(0) for n in range(3)])


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (masks.causal(), np.tri(23, dtype=bool)),
        (masks.window(5), np.tri(23, dtype=bool) & ~np.tri(23, k=-5, dtype=bool)),
    ],
    ids=["causal", "window"],
)
def test_even_shares_are_those_of_the_visible_keys(mask: Any, visible: np.ndarray[Any, Any]) -> None:
    part = observed(23, mask).parts["0"]
    assert part.segments is not None
    assert even_shares(part, part.segments) == pytest.approx(np.stack([even(visible)] * 2), abs=1e-12)


def test_even_shares_of_pooled_bins_are_close() -> None:
    part = observed(11).parts["0"]
    found = even_shares(part, part.segments)
    assert found is not None
    assert found[0] == pytest.approx(even(np.tri(23, dtype=bool)), abs=0.08)
    assert not np.allclose(found[0], even(np.tri(23, dtype=bool)), atol=1e-6)


def test_without_a_map_even_shares_are_unknown() -> None:
    q = torch.randn(1, 2, len(IDS), 8)
    part = observe(q, q, what=Observe(segments=Segments(NAMES, IDS))).parts["0"]
    assert part.segments is not None
    assert even_shares(part, part.segments) is None


def test_spans_are_merged_if_they_agree_and_saved(tmp_path: Path) -> None:
    one = observed(4)
    mass = one.segments
    assert mass.spans == SPANS
    other = observed(4, ids=[*IDS[:-1], 1]).segments
    assert SegmentMass.merged([mass, mass]).spans == SPANS
    assert SegmentMass.merged([mass, other]).spans == ()
    one.save(tmp_path / "a.safetensors")
    assert HeadStats.load(tmp_path / "a.safetensors").segments.spans == SPANS


def test_different_batch_entries_have_no_spans() -> None:
    assert spans_of(torch.tensor([[0, 0, 1], [0, 0, 1]])) == ((0, 0, 2), (1, 2, 3))
    assert spans_of(torch.tensor([[0, 0, 1], [0, 1, 1]])) == ()
    assert spans_of(torch.zeros(0, 3, dtype=torch.int64)) == ()


@pytest.mark.parametrize("newlines", [False, True])
def test_patches_of_images_are_saved_with_the_segments(newlines: bool, tmp_path: Path) -> None:
    sizes = [3 * (5 + newlines), 2 * (2 + newlines)]
    ids = [1, *[9] * sizes[0], 2, *[9] * sizes[1], 3]
    segments = Segments.from_image_tokens(ids, 9, [(3, 5), (2, 2)], newlines=newlines)
    q = torch.randn(1, 1, len(ids), 4)
    stats = observe(q, q, what=Observe(segments=segments))
    first, second = 1, 2 + sizes[0]
    images = (
        ("image 0", 5, tuple(first + n * (5 + newlines) for n in range(3))),
        ("image 1", 2, tuple(second + n * (2 + newlines) for n in range(2))),
    )
    assert stats.segments is not None
    assert stats.segments.images == images
    stats.save(tmp_path / "a.safetensors")
    loaded = HeadStats.load(tmp_path / "a.safetensors").segments
    assert loaded is not None
    assert loaded.images == images
