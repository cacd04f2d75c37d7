"""Alike calls of a layer wait together, and are pooled to the bit as if their statistics were merged one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headscope import Observe, Recording, Segments, watch
from headscope._observe import pooling
from support.same_recordings import assert_same
from support.watched_small import Attention, Small, input_of

Lengths = list[int]
SEGMENTS = Segments.from_spans({"later": (2, 4), "last": (5, 7)}, 7)
OPTIONS = {
    "defaults": Observe(),
    "sample": Observe(rows=3),
    "windows": Observe(windows=(2, 3)),
    "largest of keys": Observe(received_max=True),
    "weights": Observe(weights=[0, 2]),
    "segments": Observe(segments=SEGMENTS),
    "rows only": Observe(received=False, extra=("second_weight",)),
}
APART = {
    "map": Observe(map=3),
    "edges": Observe(edges=2),
    "kept rows": Observe(keep_rows=True),
    "largest of rows": Observe(top=2),
    "keys only": Observe(row_stats=False),
    "first keys in segments": Observe(segments=Segments.from_spans({"first": (0, 2), "last": (5, 7)}, 7)),
}


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Merge the statistics of each call from here on."""
    return lambda: monkeypatch.setattr("headscope.watching._recording.pooled", list)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many layers were to be pooled each time, and how many were left."""
    pooled, found = pooling.pooled, list[tuple[int, int]]()

    def counted(layers: list[pooling.LayerOf]) -> list[pooling.LayerOf]:
        left = pooled(layers)
        found.append((len(layers), len(left)))
        return left

    monkeypatch.setattr("headscope.watching._recording.pooled", counted)
    return found


def recorded(model: torch.nn.Module, inputs: list[Tensor], what: Observe) -> Recording:
    with torch.no_grad(), watch(model, what=what) as recording:
        for x in inputs:
            model(x)
    return recording


def several(count: int) -> list[Tensor]:
    return [input_of(Attention()) * (1 + n % 3) for n in range(count)]


@pytest.mark.parametrize("name", OPTIONS)
def test_pooled_calls_are_those_that_are_merged(
    name: str, pools: list[tuple[int, int]], one_by_one: Callable[[], None], tmp_path: Path
) -> None:
    model, inputs = Attention(), several(39)
    pooled = recorded(model, inputs, OPTIONS[name])
    assert pooled.stats[0].rows.tolist() == [(6 if name == "sample" else 14) * 39] * 3
    assert pools == [(16, 1), (16, 1), (9, 1)]
    one_by_one()
    assert_same(pooled, recorded(model, inputs, OPTIONS[name]), tmp_path)


@pytest.mark.parametrize("name", APART)
def test_places_of_the_largest_and_sums_of_another_order_are_not_pooled(
    name: str, pools: list[tuple[int, int]], one_by_one: Callable[[], None], tmp_path: Path
) -> None:
    model, inputs = Attention(), several(17)
    apart = recorded(model, inputs, APART[name])
    assert apart.stats[0].rows.tolist() == [14 * 17] * 3
    assert pools == [(16, 16)]
    one_by_one()
    assert_same(apart, recorded(model, inputs, APART[name]), tmp_path)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "segments"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=20))
def test_calls_of_any_lengths_are_pooled(name: str, lengths: list[int], tmp_path: Path) -> None:
    """Some have no row with a quantity: the first row has no key before it."""
    model = Attention()
    inputs = [torch.randn(2, length, 15) for length in lengths]
    pooled = recorded(model, inputs, OPTIONS[name])
    assert pooled.stats.parts["Attention"].runs == len(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headscope.watching._recording.pooled", list)
        apart = recorded(model, inputs, OPTIONS[name])
    assert_same(pooled, apart, tmp_path)


def test_calls_behind_others_are_merged_one_by_one(
    pools: list[tuple[int, int]], one_by_one: Callable[[], None], tmp_path: Path
) -> None:
    """Else they would be sums of sums, which round in another order."""
    model = Attention()
    inputs = several(19)
    inputs[4][0, 3] = torch.nan  # measured by the portable form
    mixed = recorded(model, inputs, Observe())
    assert mixed.stats[0].broken.tolist() == [4] * 3
    assert pools == [(16, 13)]
    one_by_one()
    assert_same(mixed, recorded(model, inputs, Observe()), tmp_path)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    model, inputs = Small(), several(21)
    read: list[Tensor] = []
    with torch.no_grad(), watch(model) as recording:
        for x in inputs:
            model(x)
            read.append(recording.stats["entropy"].mean)
    first = recorded(model, inputs[:1], Observe())
    torch.testing.assert_close(read[0], first.stats["entropy"].mean, rtol=0, atol=0, equal_nan=True)
    assert_same(recording, recorded(model, inputs, Observe()), tmp_path)


def test_statistics_that_were_read_stay(tmp_path: Path) -> None:
    model, inputs = Attention(), several(5)
    with torch.no_grad(), watch(model) as recording:
        for x in inputs[:3]:
            model(x)
        stats = recording.stats
        before = stats.to_dict()
        for x in inputs[3:]:
            model(x)
        assert recording.stats.rows.tolist() == [5 * 14] * 3
    assert stats.to_dict() == before
    assert stats.rows.tolist() == [3 * 14] * 3
