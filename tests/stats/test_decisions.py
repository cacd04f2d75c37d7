"""Decisions from statistics: against what was planted, against the dense weights, and what they say they rest on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from headscope import HeadStats, Observe, observe
from headscope._analysis.distances import PROFILE
from headscope.decisions import Patterns, kv_budget, near_duplicates, patterns, streaming_heads
from headscope.functional import weights
from headscope.masks import KeyLengths, Mask, causal, window
from headscope.stats import pattern_scores

T = 61
TOKENS = torch.randint(0, 9, (T,), generator=torch.Generator().manual_seed(0))
EXACT = ("previous", "next", "self", "first")


def _same(i: int, after: int) -> list[int]:
    return [j + after for j in range(i) if TOKENS[j] == TOKENS[i] and j + after < i] or [0]


PLANTED: dict[str, Callable[[int], Sequence[int]]] = {
    "previous": lambda i: [max(i - 1, 0)],
    "next": lambda i: [min(i + 1, T - 1)],
    "self": lambda i: [i],
    "first": lambda i: [0],
    "duplicate": lambda i: _same(i, 0),
    "induction": lambda i: _same(i, 1),
    "local": lambda i: range(max(0, i - 3), min(T, i + 4)),
    "uniform": lambda i: (),
}
"""For each pattern the keys that its head looks at evenly; none = at all."""

BESIDE: dict[str, Callable[[int], Sequence[int]]] = {
    "every other key": lambda i: range(0, i + 1, 2),
    "previous or first": lambda i: [max(i - 1, 0)] if i % 2 else [0],
    "far": lambda i: [max(i - 30, 0)],
}
WHAT = Observe(windows=(3, 16), tokens=TOKENS, map=8)


def looking(heads: Sequence[Callable[[int], Sequence[int]]], t: int = T, sharp: float = 30.0) -> tuple[Tensor, Tensor]:
    """q and k [1, H, t, t] of heads in which query i looks at such keys, alike."""
    keys = torch.eye(t)
    q = torch.stack([torch.stack([keys[list(head(i))].sum(0) for i in range(t)]) for head in heads])
    return sharp * math.sqrt(t) * q[None], keys.expand(1, len(heads), t, t)


def seen_of(mask: Mask | None) -> Tensor | None:
    at = torch.arange(T)
    return None if mask is None else (at <= at[:, None])


def planted(mask: Mask | None, what: Observe = WHAT) -> HeadStats:
    return observe(*looking([*PLANTED.values(), *BESIDE.values()]), mask=mask, what=what)


def shown(result: Any) -> str:
    printer = Console(width=120)
    with printer.capture() as captured:
        printer.print(result)
    return captured.get()


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize("mask", [None, causal()], ids=["everything seen", "causal"])
def test_scores_from_means_are_near_those_of_the_dense_weights(mask: Mask | None) -> None:
    q, k = looking([*PLANTED.values(), *BESIDE.values()])
    dense = pattern_scores(weights(q, k, mask=mask), seen=seen_of(mask), tokens=TOKENS)
    found = patterns(planted(mask))
    for head in range(q.shape[1]):
        told = found.of("0", head)
        assert set(told) == set(dense.score)
        for name, score in told.items():
            wanted, rows = float(dense.score[name][head]), int(dense.rows[name][head])
            assert score.exact == (name in EXACT)
            assert score.score == pytest.approx(wanted, abs=1e-5 if score.exact else 0.1), f"{name} of head {head}"
            assert score.rows == rows or not score.exact, name


def test_each_planted_head_is_best_at_its_own_pattern_and_row_is_query() -> None:
    found = patterns(planted(None))
    best = {each.head: each.pattern for each in found.best}
    assert [best[head] for head in range(len(PLANTED))] == list(PLANTED)
    ahead, behind = found.of("0", list(PLANTED).index("next")), found.of("0", list(PLANTED).index("previous"))
    assert (behind["previous"].score, behind["next"].score) == (pytest.approx(1, abs=1e-5), 0)
    assert (ahead["next"].score, ahead["previous"].score) == (pytest.approx(1, abs=1e-5), 0)
    found = patterns(planted(causal()))
    assert "next" not in found.of("0", 0), "no row may see it"
    with pytest.raises(KeyError, match="layer 1, head 0: has no scores; these layers have scores: 0"):
        found.of("1", 0)


def test_scores_are_exact_over_several_lengths_and_merged_runs() -> None:
    """Padding on the right and a second text: rows pool, and the first row of each has one key."""
    heads = [PLANTED["previous"], PLANTED["self"], BESIDE["previous or first"]]
    q, k = (x.repeat(2, 1, 1, 1) for x in looking(heads))
    mask = causal() & KeyLengths(torch.tensor([T, 40]))
    stats = observe(q, k, mask=mask).merge(observe(*(x[:1] for x in (q, k)), mask=causal()))
    seen = torch.stack(
        [torch.ones(T, T).tril(), torch.ones(T, T).tril() * (torch.arange(T) < 40), torch.ones(T, T).tril()]
    )
    p = torch.cat([weights(q, k, mask=mask), weights(q[:1], k[:1], mask=causal())])
    dense = pattern_scores(p, seen=seen.bool()[:, None])
    for head in range(3):
        told = patterns(stats).of("0", head)
        for name in ("previous", "self", "first"):
            assert told[name].score == pytest.approx(float(dense.score[name][head]), abs=1e-5)
            assert (told[name].exact, told[name].rows) == (True, int(dense.rows[name][head]))


def test_a_first_key_that_not_all_rows_see_and_sinks_are_not_exact() -> None:
    q, k = looking([PLANTED["first"], PLANTED["self"]])
    narrow = patterns(observe(q, k, mask=window(7))).of("0", 0)["first"]
    assert not narrow.exact
    assert narrow.score < 0.2, "most rows cannot see it"
    sunk = observe(q / 30, k, mask=causal(), sinks=torch.zeros(2))
    assert not patterns(sunk).of("0", 1)["self"].exact
    unknown = observe(q, k, mask=causal(), what=Observe(received=False))
    assert not patterns(unknown).of("0", 0)["first"].exact
    assert patterns(observe(q, k, mask=causal())).of("0", 0)["first"].exact
    several = observe(q, k, mask=causal(), what=Observe(first=4))
    assert not patterns(several).of("0", 0)["first"].exact


def test_local_is_not_offered_where_an_even_head_would_be_local() -> None:
    wide = observe(*looking([PLANTED["uniform"]]), mask=causal(), what=Observe(windows=(30,)))
    assert "local" not in patterns(wide).of("0", 0)
    assert patterns(planted(causal())).local == {"0": 3.0}
    grid = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), -1).view(36, 2)
    around = [[j for j in range(36) if (grid[i] - grid[j]).double().norm() <= 1] for i in range(36)]
    q, k = looking([lambda i: around[i], lambda i: ()], 36)
    on_grid = patterns(observe(q, k, q_pos=grid, k_pos=grid, what=Observe(windows=(1,))))
    assert on_grid.of("0", 0)["local"].score > 0.9
    assert on_grid.of("0", 1)["local"].score < 0.1
    assert "previous" not in on_grid.of("0", 0)


def test_few_rows_tell_nothing() -> None:
    one = patterns(observe(*looking([PLANTED["self"]], 1), mask=causal()))
    assert one.scores == ()
    assert one.best == ()
    assert "layer" in shown(one)


# ---------------------------------------------------------------- streaming


def test_the_smallest_window_that_keeps_the_mass() -> None:
    found = streaming_heads(planted(causal()))
    windows = {name: head.window for name, head in zip([*PLANTED, *BESIDE], found.heads, strict=True)}
    assert windows == {
        "previous": 3, "next": None, "self": 3, "first": 3, "duplicate": None, "induction": None, "local": 3,
        "uniform": None, "every other key": None, "previous or first": 3, "far": None,
    }  # fmt: skip
    far = found.heads[-1]
    assert far.kept == pytest.approx(31 / T, abs=1e-4), "the rows that look at the first key"
    assert far.rows_kept == pytest.approx(31 / T)
    assert (far.rows, far.sees) == (T, T)
    assert found.basis.rows == (T, T)
    assert not found.basis.sampled
    assert [head.head for head in found.streaming] == [0, 2, 3, 6, 9]


def test_how_many_rows_keep_it_is_read_from_the_histogram() -> None:
    far = [BESIDE["far"]]
    stats = observe(*looking(far), mask=causal(), what=Observe(windows=(3,)))
    assert streaming_heads(stats, 0.5).heads[0].window == 3
    assert streaming_heads(stats, 0.93).heads[0].rows_kept == pytest.approx(31 / T), "the next edge is 0.95"
    assert streaming_heads(stats, 0.97).heads[0].rows_kept is None
    assert streaming_heads(stats, 0.97).to_dict()["heads"][0]["rows_kept"] is None


def test_a_window_that_holds_everything_tells_nothing() -> None:
    stats = observe(*looking([PLANTED["uniform"]]), mask=causal(), what=Observe(windows=(60, 100)))
    found = streaming_heads(stats)
    assert found.heads[0].window is None
    assert found.heads[0].kept == pytest.approx(1)
    assert "a window of 60, 100, so these windows are not informative" in found.caveat
    q, k = torch.zeros(2, 1, 1, 5, 4)  # the last row sees five keys: the first, and four within a distance of 3
    short = streaming_heads(observe(q, k, mask=causal(), what=Observe(windows=(3,))))
    assert (short.heads[0].window, short.heads[0].kept) == (None, pytest.approx(1))


@pytest.mark.parametrize("received", [True, False])
@pytest.mark.parametrize(("sees", "named", "kept"), [(9, None, 1.0), (10, 8, 0.9), (11, 8, 9 / 11)])
def test_under_a_sliding_window_of_keys_the_first_one_is_not_there(
    sees: int, named: int | None, kept: float, received: bool
) -> None:
    """A row that sees ten keys may see one beyond a window of eight, which the first key of the text is not."""
    q, k = torch.zeros(2, 1, 1, 400, 4)
    found = streaming_heads(
        observe(q, k, mask=window(sees), what=Observe(windows=(3, 8), received=received)), 0.7
    ).heads[0]
    assert (found.window, found.sees) == (named, sees)
    assert found.kept == pytest.approx(kept, abs=0.01)


def test_a_window_too_wide_to_tell_is_the_one_that_is_shown() -> None:
    """As the docs say, of the largest one: of a smaller one that holds all but a key it would be less."""
    q, k = torch.zeros(2, 1, 1, 400, 4)
    found = streaming_heads(observe(q, k, mask=window(5), what=Observe(windows=(3, 16)))).heads[0]
    assert (found.window, found.kept) == (None, pytest.approx(1))


def test_sinks_are_left_out_of_what_is_to_be_kept() -> None:
    q, k = looking([PLANTED["self"]], sharp=1.0)
    stats = observe(q, k, mask=causal(), sinks=torch.tensor([20.0]), what=Observe(windows=(0,), first=60))
    assert stats[0, 0, "mass"].mean < 0.01
    assert streaming_heads(stats).heads[0].kept > 0.98


# ---------------------------------------------------------------- budgets


def test_a_budget_keeps_the_heavy_hitters() -> None:
    found = kv_budget(planted(causal()), (1, 4, 100))
    p = weights(*looking([*PLANTED.values(), *BESIDE.values()]), mask=causal())[0].double()
    for head, line in enumerate(found.heads):
        most = p[head].sum(0).sort(descending=True).values
        wanted = [float(most[:k].sum() / T) for k in (1, 4, 100)]
        assert line.kept == pytest.approx(wanted, rel=1e-5)
        assert (line.name, line.keys) == (f"head {head}", T)
    assert not found.pooled


def test_a_group_shares_its_keys() -> None:
    heads = [lambda i: [0], lambda i: [1], lambda i: [0], lambda i: [0]]
    stats = observe(*looking(heads, 7))
    lines = {line.name: line.kept for line in kv_budget(stats, (1, 2), kv_heads=2).heads}
    assert lines["head 1"] == pytest.approx((1, 1))
    assert lines["kv 0 (heads 0-1)"] == pytest.approx((0.5, 1))
    assert lines["kv 1 (heads 2-3)"] == pytest.approx((1, 1))
    assert len(kv_budget(stats, kv_heads={"0": 4}).heads) == 8
    assert len(kv_budget(stats, kv_heads={}).heads) == 4


def test_budgets_of_a_sample_say_that_they_are_too_high() -> None:
    stats = [observe(*looking([PLANTED["previous"]]), mask=causal(), what=Observe(rows=rows)) for rows in (None, 8)]
    whole, sample = (kv_budget(each, (4,)) for each in stats)
    assert whole.heads[0].kept == pytest.approx((5 / T,), rel=1e-3)  # row 0 has the first key, too
    assert sample.heads[0].kept == pytest.approx((0.5,), rel=1e-3), "eight rows look at eight keys"
    assert ("too high" in whole.caveat, "too high" in sample.caveat) == (False, True)


def test_pooled_budgets_are_lower_bounds_and_say_so() -> None:
    heads = [lambda i: [2]], [lambda i: [5]]
    one, other = (observe(*looking(head, 7)) for head in heads)
    both = kv_budget(one.merge(other), (1,))
    assert (both.pooled, both.heads[0].kept) == (True, pytest.approx((0.5,)))
    assert "lower bound" in both.caveat
    batch = observe(*(torch.cat(x) for x in zip(*(looking(head, 7) for head in heads), strict=True)))
    assert kv_budget(batch, (1,)).pooled
    assert kv_budget(one, (1,)).heads[0].kept == pytest.approx((1.0,))


def test_steps_of_decoding_are_pooled_though_they_have_fewer_rows_than_keys() -> None:
    k = torch.randn(1, 3, 11, 5)
    steps = [observe(torch.randn(1, 3, 1, 5), k[:, :, :n]) for n in (9, 10, 11)]
    assert kv_budget(steps[0]).pooled is False
    assert kv_budget(steps[0].merge(*steps[1:])).pooled is True


@pytest.mark.parametrize(("batch", "queries", "pooled"), [(2, 1, True), (1, 13, False), (1, 1, False)])
def test_several_batch_entries_are_pooled_however_many_queries_they_have(
    batch: int, queries: int, pooled: bool
) -> None:
    q, k = torch.randn(batch, 3, queries, 5), torch.randn(batch, 3, 11, 5)
    assert kv_budget(observe(q, k, kind="cross")).pooled is pooled


# ---------------------------------------------------------------- near-duplicates


def test_near_duplicates_within_and_across_layers() -> None:
    names = ["previous", "self", "previous"]
    one = observe(*looking([PLANTED[name] for name in names]), mask=causal(), what=WHAT).named("a")
    two = observe(*looking([PLANTED["uniform"], PLANTED["self"]]), mask=causal(), what=WHAT).named("b")
    found = near_duplicates(one.merge(two))
    assert {((p.layer, p.head), (p.other_layer, p.other_head)) for p in found.pairs} == {
        (("a", 0), ("a", 2)),
        (("a", 1), ("b", 1)),
    }
    assert [pair.distance for pair in found.pairs] == [0, 0]
    assert found.bins == 8
    coarse = near_duplicates(one, 1.0).pairs[-1]
    assert coarse.map < 0.2, "previous and self fall into one bin nearly everywhere"
    assert coarse.rows > 0.9
    assert coarse.distance == coarse.rows


def test_distances_are_total_variation() -> None:
    p = weights(*looking([*PLANTED.values()]))[0].double()
    stats = observe(*looking([*PLANTED.values()]), what=Observe(map=T, row_stats=False))
    for pair in near_duplicates(stats, 1.0).pairs:
        a, b = p[pair.head] / T, p[pair.other_head] / T
        assert pair.map == pytest.approx(float((a - b).abs().sum() / 2), abs=1e-5)
        assert pair.received == pytest.approx(float((a.sum(0) - b.sum(0)).abs().sum() / 2), abs=1e-5)
        assert pair.rows == 0


@pytest.mark.parametrize("turned", [False, True])
def test_the_distance_between_rows_is_the_largest_whichever_head_has_more(turned: bool) -> None:
    names = ["first", "uniform", "previous"]
    stats = observe(*looking([PLANTED[name] for name in (names[::-1] if turned else names)]), mask=causal(), what=WHAT)
    pairs = near_duplicates(stats, 1.0).pairs
    assert len(pairs) == 3
    for pair in pairs:
        means = [[stats[0, head, name].mean for name in PROFILE] for head in (pair.head, pair.other_head)]
        gaps = [abs(a - b) for a, b in zip(*means, strict=True) if not math.isnan(a - b)]
        assert pair.rows == pytest.approx(max(gaps))


def test_what_cannot_be_compared_is_said() -> None:
    plain = observe(*looking([PLANTED["self"]] * 2), what=Observe()).named("plain")
    none = Observe(map=8, rows=torch.tensor([True, False])[:, None])
    half = observe(*looking([PLANTED["self"]] * 2), what=none).named("half")
    found = near_duplicates(plain.merge(half))
    assert found.left_out == ("plain (no map or received)", "half head 1 (no weight)")
    assert found.closest is None
    apart = near_duplicates(planted(causal()), 0.0)
    assert apart.pairs == ()
    assert apart.closest is not None
    assert f"{apart.closest.distance:.2f} apart" in apart.caption()


# ---------------------------------------------------------------- in common


def test_a_sample_is_said() -> None:
    q, k = looking([PLANTED["self"]])
    found = streaming_heads(observe(q, k, mask=causal(), what=Observe(rows=10, windows=(3,))))
    assert found.basis.sampled
    assert "a sample of 0.16 of the rows" in str(found.basis)
    assert found.to_dict()["basis"]["sampled"] is True


def test_broken_rows_are_said() -> None:
    q, k = looking([PLANTED["self"]])
    q[0, 0, 5] = math.nan
    found = kv_budget(observe(q, k, mask=causal()))
    assert str(found.basis) == "From received; 60 rows for each head in 1 forward; 1 broken rows excluded."


def test_they_take_what_holds_statistics_and_are_shown() -> None:
    class Holder:
        stats = planted(causal()).named("[bold]model.layers.0")

    for decide in (streaming_heads, kv_budget, near_duplicates, patterns):
        found = decide(Holder())
        assert "[bold]model" in shown(found) or not found.cells(), "no markup"
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["caveat"] == found.caveat
        assert "more lines" in shown(found.table(limit=0)) or not found.cells()
    marked = patterns(Holder())
    assert isinstance(marked, Patterns)
    assert "duplicate ~" in shown(marked)


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda s: streaming_heads(s, 1.0), ValueError, r"keep: got 1.0, expected a share above 0 and below 1"),
        (lambda s: streaming_heads(s), ValueError, r"no window was observed; observe with Observe\(windows="),
        (lambda s: kv_budget(s, (0,)), ValueError, r"keys: got \(0,\), expected whole numbers from 1"),
        (lambda s: kv_budget(s, ()), ValueError, r"keys: got \(\), expected whole numbers from 1"),
        (lambda s: kv_budget(s, 5), TypeError, r"keys: got 5, expected a tuple of budgets, such as \(5,\)"),
        (lambda s: kv_budget(s), ValueError, r"requires the mass that keys received"),
        (lambda s: near_duplicates(s, 2), ValueError, r"threshold: got 2, expected 0 to 1"),
        (
            lambda s: near_duplicates(s),
            ValueError,
            r"requires maps and the mass that keys received; observe with Observe\(map=",
        ),
        (lambda s: patterns(s), ValueError, r"requires row quantities, chance included"),
        (lambda s: patterns("x"), TypeError, r"stats: got str, expected HeadStats or a recording"),
    ],
)
def test_what_is_missing_is_said(ask: Callable[[HeadStats], Any], kind: type[Exception], message: str) -> None:
    bare = observe(*looking([PLANTED["self"]], 7), what=Observe(row_stats=False, received=False))
    with pytest.raises(kind, match=message):
        ask(bare)


def test_other_mistakes_are_said() -> None:
    stats = observe(*looking([PLANTED["self"]] * 3, 7), what=Observe(map=2))
    with pytest.raises(ValueError, match=r"kv_heads: got 2, expected a number that divides the 3 heads of 0"):
        kv_budget(stats, kv_heads=2)
    with pytest.raises(ValueError, match=r"kv_heads: got x, expected layers: 0"):
        kv_budget(stats, kv_heads={"x": 1})
    more = observe(*looking([PLANTED["self"]], 7), what=Observe(map=3)).named("1")
    with pytest.raises(ValueError, match=r"map: got 2, 3 bins in different layers, expected as many in each"):
        near_duplicates(stats.merge(more))


@pytest.mark.parametrize("grid", [False, True])
def test_windows_wider_than_any_integer_have_patterns(grid: bool) -> None:
    q, k = torch.randn(2, 1, 2, 9, 4)
    places = torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(3.0), indexing="ij"), -1).flatten(0, 1)
    positions = {"q_pos": places, "k_pos": places} if grid else {}
    stats = observe(q, k, what=Observe(windows=(1e99,)), **positions)
    assert patterns(stats).local == {"0": 1e99}
    assert streaming_heads(stats).to_dict()


def test_arguments_that_are_no_numbers_are_refused() -> None:
    q = torch.randn(1, 2, 9, 8)
    stats = observe(q, q, what=Observe(windows=(2,), map=3))
    wrong: Any = "0.9"
    with pytest.raises(TypeError, match="keep: got str, expected a number"):
        streaming_heads(stats, wrong)
    with pytest.raises(TypeError, match="threshold: got bool, expected a number"):
        near_duplicates(stats, threshold=True)
    answer = streaming_heads(stats)
    assert answer.table(limit=1).row_count == 1
    with pytest.raises(ValueError, match="limit: got -1, expected a whole number from 0"):
        answer.table(limit=-1)
