"""What chance gives: the null of row quantities, and the names that rest on it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope import HeadStats, Observe, observe
from headscope._observe import native_observer
from headscope.decisions import patterns
from headscope.examples.text import TextConfig, TextModel
from headscope.masks import Band, Dense, KeyLengths, Mask, causal, window
from headscope.stats import best_matches, pattern_scores
from support import oracle_null

TOKENS = torch.arange(31) % 13
ALL = Observe(windows=(3,), first=2, tokens=TOKENS)
NAMES = ("first", "distance", "self", "previous", "window_3", "streaming_3", "duplicate", "induction")


def drawn(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def test_the_closed_form_is_that_of_all_orders() -> None:
    for n in (1, 2, 3, 5, 6):
        weights, factors = (x[:n].abs().tolist() for x in drawn(7))
        for got, exact in zip(
            oracle_null.of_row(weights, factors), oracle_null.by_all_orders(weights, factors), strict=True
        ):
            assert got == pytest.approx(exact, rel=1e-12, abs=1e-15)


def test_a_row_by_hand() -> None:
    q = 40 * torch.eye(3)[None, None]  # each row attends to its own key, one of three
    column = observe(q, q)[0, "self"]
    assert column.null is not None
    assert column.null.mean.item() == pytest.approx(1 / 3)
    assert column.null.std.item() == pytest.approx(math.sqrt(2 / 9 / 3)), "of a mean of three rows"
    assert column.z.item() == pytest.approx((1 - 1 / 3) / math.sqrt(2 / 27))


def test_what_does_not_depend_on_which_keys_have_weight_has_no_null() -> None:
    q, k = drawn(1, 2, 7, 5)
    stats = observe(q, k)
    for name in ("entropy", "max_weight", "effective_keys", "mass", "chance", "lse"):
        assert stats[name].null is None
        assert bool(stats[name].z.isnan().all())


def test_even_rows_are_not_any_number_of_deviations_from_chance() -> None:
    q = torch.zeros(1, 2, 37, 8)
    stats = observe(q, q, mask=causal(), what=Observe(windows=(3,)))
    for name in ("first", "self", "previous", "distance", "window_3"):
        column = stats[0, name]
        assert column.null is not None
        torch.testing.assert_close(column.null.mean, column.mean, rtol=1e-6, atol=1e-8)
        assert column.null.std.tolist() == [0, 0], name
        assert bool(column.z.isnan().all()), name


def masks() -> dict[str, Mask | None]:
    dense = torch.rand(1, 2, 31, 31, generator=torch.Generator().manual_seed(1)) < 0.6
    return {
        "none": None,
        "causal": causal(),
        "window": window(5) & causal(),
        "lengths": causal() & KeyLengths(torch.tensor([31, 17])),
        "dense": Dense(dense | torch.eye(31, dtype=torch.bool)),
    }


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", masks())
def test_both_forms_sum_the_same(name: str, rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(2, 2, 31, 5)
    what = Observe(rows=rows, windows=(3,), first=2, tokens=TOKENS)
    native = observe(q, k, mask=masks()[name], what=what)
    monkeypatch.setattr(native_observer, "refuses", lambda *_: ["this test compares"])
    portable = observe(q, k, mask=masks()[name], what=what)
    for quantity in NAMES:
        got, expected = native[0, quantity].null, portable[0, quantity].null
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got.mean, expected.mean, rtol=1e-6, atol=1e-9, equal_nan=True)
        torch.testing.assert_close(got.std, expected.std, rtol=1e-5, atol=1e-9, equal_nan=True)


def test_spans_and_blocks_give_the_same() -> None:
    q, k = drawn(2, 2, 31, 5)
    spans = observe(q, k, mask=causal(), what=ALL)
    blocks = observe(q, k, mask=Dense(torch.ones(31, 31, dtype=torch.bool).tril()), what=ALL)
    for name in NAMES:
        for got, expected in zip(spans[0, name].null or (), blocks[0, name].null or (), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


def test_one_pass_with_attending_gives_the_same() -> None:
    q, k = drawn(1, 3, 31, 5)
    once = headscope.attend(q, k, k, mask=causal(), observe=ALL).stats
    after = observe(q, k, k, mask=causal(), what=ALL)
    assert once is not None
    for name in NAMES:
        for got, expected in zip(once[0, name].null or (), after[0, name].null or (), strict=True):
            assert torch.equal(got, expected), name


def test_far_queries_do_not_overflow() -> None:
    q, k = drawn(1, 1, 7, 5)
    null = observe(q, k, mask=Band(None, 0, offset=2**40))[0, "distance"].null
    near = observe(q, k, mask=Band(None, 0, offset=6))[0, "distance"].null
    assert null is not None
    assert near is not None
    assert null.mean.item() == pytest.approx(2**40, rel=1e-5)
    assert torch.equal(null.std, near.std), "all keys are on one side"


# ---------------------------------------------------------------- merging and files


def layers(*seeds: int, length: int = 31) -> list[HeadStats]:
    return [observe(*drawn(1, 2, length, 5, seed=seed), mask=causal(), what=ALL) for seed in seeds]


def check_equal(got: HeadStats, expected: HeadStats) -> None:
    assert got.names == expected.names
    for name in NAMES:
        for one, other in zip(got[0, name].null or (), expected[0, name].null or (), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_merging_gives_the_null_of_both() -> None:
    q, k = drawn(2, 2, 31, 5)
    whole = observe(q, k, mask=causal(), what=ALL)
    one, other = (observe(q[n : n + 1], k[n : n + 1], mask=causal(), what=ALL) for n in (0, 1))
    check_equal(one.merge(other), whole)


def test_a_null_of_only_some_rows_is_none() -> None:
    one, other = layers(0, 1)
    part = other.parts["0"]
    without = HeadStats({"0": type(part)(**{**vars(part), "nulls": None})})
    assert one.merge(without)["first"].null is None
    assert without.merge(one)["first"].null is None
    assert bool(one.merge(without)["first"].z.isnan().all())


def test_a_merged_layer_with_other_quantities_has_their_nulls() -> None:
    one = layers(0)[0]
    q, k = drawn(1, 2, 31, 5, seed=1)
    both = one.merge(observe(q, k, mask=causal(), what=Observe(windows=(5,), first=2)))
    for got, expected in zip(both[0, "window_3"].null or (), one[0, "window_3"].null or (), strict=True):
        assert torch.equal(got, expected)
    assert both["window_5"].null is not None
    assert both["first"].null is not None


def test_files_hold_it(tmp_path: Path) -> None:
    (stats,) = layers(0)
    check_equal(HeadStats.load(stats.save(tmp_path / "stats.safetensors")), stats)


def test_files_of_earlier_versions_have_none() -> None:
    old = HeadStats.load(Path(__file__).parents[1] / "data" / "recording_v1.safetensors")
    assert old["first"].null is None
    assert bool(old["first"].z.isnan().all())
    scores = patterns(old).scores
    assert all(math.isnan(each.z) for each in scores)
    assert all(each.is_clear == (each.score >= 0.3) for each in scores if each.pattern != "uniform")


@pytest.mark.parametrize("wrong", [-1.0, math.nan, 1e9])
def test_impossible_sums_are_damage(wrong: float, tmp_path: Path) -> None:
    (stats,) = layers(0)
    nulls = stats.parts["0"].nulls
    assert nulls is not None
    nulls.sums[1, nulls.names.index("self"), 0] = wrong
    with pytest.raises(ValueError, match="0/nulls: self is not possible for any rows"):
        HeadStats.load(stats.save(tmp_path / "stats.safetensors"))


# ---------------------------------------------------------------- names


def planted(name: str, length: int) -> tuple[Tensor, Tensor, Any]:
    """q and k with which each row attends to the keys of a pattern, tokens that repeat, and the mask."""
    place = torch.arange(length)
    target = {
        "previous": place - 1,
        "next": place + 1,
        "self": place,
        "first": torch.zeros_like(place),
        "duplicate": place - 13,
        "induction": place - 12,
    }.get(name)
    k = torch.eye(length)
    if name == "local":
        near = (place[:, None] - place).abs() <= 3
        q = 9.0 * near
    elif target is None:
        q = torch.zeros(length, length)
    else:
        inside = (target >= 0) & (target < length)
        q = 12.0 * k[target.clamp(0, length - 1)] * inside[:, None]
    return q[None, None], k[None, None], None if name == "next" else causal()


@pytest.mark.parametrize("name", ["previous", "next", "self", "first", "duplicate", "induction", "local", "uniform"])
def test_a_head_of_each_kind_is_named(name: str) -> None:
    q, k, mask = planted(name, 53)
    what = Observe(windows=(3,), tokens=torch.arange(53) % 13)
    stats = observe(q, k, mask=mask, what=what, scale=1.0)
    (best,) = patterns(stats).names
    assert best.pattern == name
    assert best.is_clear == (name != "uniform"), "an even spread is what chance gives"
    visible = torch.ones(53, 53, dtype=torch.bool)
    visible = visible if mask is None else visible.tril()
    p = (q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1)
    dense = pattern_scores(p, seen=visible, tokens=what.tokens)
    match = best_matches(dense)[0]
    assert match is not None
    assert (match.pattern, match.is_name) == (name, True)
    if name in ("previous", "next", "self", "first", "duplicate", "local"):
        assert match.z == pytest.approx(best.z, rel=1e-4)


def test_no_head_of_random_weights_is_named() -> None:
    for seed in range(23):
        torch.manual_seed(seed)
        q, k = drawn(1, 11, 37, 16, seed=seed)
        stats = observe(q, k, mask=causal(), what=Observe(windows=(3,), tokens=torch.randint(11, (37,))))
        assert [each for each in patterns(stats).scores if each.is_clear] == []


def test_no_head_of_an_untrained_model_is_named() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = TextModel(TextConfig(vocab_size=101, context=61, embed_dim=32, num_layers=2))
        tokens = torch.randint(101, (1, 61))
        with headscope.watch(model, tokens=tokens) as recording, torch.no_grad():
            model(tokens)
        scores = patterns(recording.stats).scores
        assert [each for each in scores if each.is_clear] == []
        assert {each.pattern for each in patterns(recording.stats).names} <= {"uniform"}


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("mask", [causal(), window(20)])
def test_chunks_of_a_text_have_the_null_of_the_whole(mask: Mask, tokens: bool) -> None:
    length, borders = 97, [0, 31, 60, 97]
    q, k = drawn(1, 4, length, 16)
    ids = torch.randint(9, (length,))

    def options(keys: int) -> Observe:
        return Observe(windows=(3,), tokens=ids[:keys] if tokens else None)

    whole = observe(q, k, mask=mask, what=options(length))
    chunks = [
        observe(q[:, :, a:b], k[:, :, :b], mask=mask, what=options(b), rows_at=(a, length))
        for a, b in pairwise(borders)
    ]
    merged = chunks[0].merge(*chunks[1:])
    assert "distance" in whole.names
    for name in whole.names:
        expected, null = whole[name].null, merged[name].null
        assert (expected is None) == (null is None)
        if expected is not None and null is not None:
            torch.testing.assert_close(null.mean, expected.mean, rtol=1e-12, atol=0, equal_nan=True)
            torch.testing.assert_close(null.std, expected.std, rtol=1e-6, atol=0, equal_nan=True)
