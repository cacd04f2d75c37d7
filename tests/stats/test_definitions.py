"""Every statistic against loops in float64 that say its definition again, and planted patterns the right way round."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headscope.stats import (
    MINIMUM_ROWS,
    PATTERNS,
    Match,
    best_matches,
    broken_rows,
    head_means,
    pattern_scores,
    row_statistics,
)

NAN = math.nan


def softmax(b: int, h: int, q: int, k: int, *, seen: Tensor | None = None, seed: int = 0) -> Tensor:
    """Random weights, exactly zero where nothing may be seen."""
    scores = 2 * torch.randn(b, h, q, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0)


def causal(q: int, k: int) -> Tensor:
    return torch.ones(q, k, dtype=torch.bool).tril(k - q)


def planted(t: int, keys: dict[int, int]) -> Tensor:
    """One head in which query i looks at key keys[i] alone, and at itself where none is given."""
    p = torch.zeros(1, 1, t, t)
    for i in range(t):
        p[0, 0, i, keys.get(i, i)] = 1
    return p


def slow(p: Tensor, seen: Tensor, tokens: Tensor | None, windows: tuple[float, ...], first: int) -> dict[str, Tensor]:
    """Every row quantity, key by key: the last Q of K positions in one dimension."""
    B, H, Q, K = p.shape
    seen = seen.expand(p.shape)
    names = [
        "entropy",
        "normalized_entropy",
        "max_weight",
        "effective_keys",
        "mass",
        "first",
        "distance",
        "self",
        "previous",
        "next",
    ]
    names += [f"window_{w:g}" for w in windows] + (["duplicate", "induction"] if tokens is not None else [])
    out = {name: torch.full((B, H, Q), NAN, dtype=torch.float64) for name in names}
    for b in range(B):
        real = [j for j in range(K) if any(bool(seen[b, h, i, j]) for h in range(H) for i in range(Q))]
        for h in range(H):
            for i in range(Q):
                at = i + K - Q
                keys = [j for j in range(K) if seen[b, h, i, j]]
                if not keys or at not in real:
                    continue
                row = {j: float(p[b, h, i, j]) for j in keys}

                def put(name: str, value: float, b: int = b, h: int = h, i: int = i) -> None:
                    out[name][b, h, i] = value

                entropy = -sum(w * math.log(w) for w in row.values() if w > 0)
                put("entropy", entropy)
                if len(keys) >= 2:
                    put("normalized_entropy", entropy / math.log(len(keys)))
                put("max_weight", max(row.values()))
                put("effective_keys", 1 / sum(w * w for w in row.values()))
                put("mass", sum(row.values()))
                put("first", sum(row.get(j, 0.0) for j in real[:first]))
                put("distance", sum(w * abs(at - j) for j, w in row.items()))
                for w in windows:
                    put(f"window_{w:g}", sum(row[j] for j in keys if abs(at - j) <= w))
                wanted = {"self": [at], "previous": [at - 1], "next": [at + 1]}
                if tokens is not None:
                    ids = tokens[b].tolist()
                    wanted["duplicate"] = [j for j in range(K) if ids[j] == ids[at] and j != at]
                    wanted["induction"] = [j for j in range(1, K) if ids[j - 1] == ids[at]]
                for name, places in wanted.items():
                    if any(j in row for j in places):
                        put(name, sum(row.get(j, 0.0) for j in places))
    return out


def padded(b: int, k: int, lengths: list[int]) -> Tensor:
    """Causal masks with padding on the left, [B, 1, K, K]."""
    real = torch.stack([torch.arange(k) >= k - n for n in lengths])
    return causal(k, k) & real[:, None, None, :]


CASES = {
    "everything": (2, 3, 7, 7, None),
    "causal": (2, 3, 11, 11, causal(11, 11)),
    "last queries": (2, 3, 5, 11, causal(5, 11)),
    "strictly before": (1, 2, 7, 7, causal(7, 7).tril(-1)),
    "window": (1, 2, 13, 13, causal(13, 13).triu(-2)),
    "padding on the left": (3, 2, 7, 7, padded(3, 7, [7, 4, 1])),
    "per head": (1, 2, 5, 5, torch.stack([causal(5, 5), causal(5, 5).mT])),
    "one token": (1, 1, 1, 1, None),
}


@pytest.mark.parametrize("case", CASES)
def test_row_statistics_are_their_definitions(case: str) -> None:
    b, h, q, k, seen = CASES[case]
    p = softmax(b, h, q, k, seen=seen)
    tokens = torch.randint(0, 3, (b, k), generator=torch.Generator().manual_seed(1))
    got = row_statistics(p, seen=seen, tokens=tokens, windows=(0, 2), first=2)
    wanted = slow(p, torch.ones(k, dtype=torch.bool) if seen is None else seen, tokens, (0, 2), 2)
    assert set(got) == set(wanted)
    for name, values in wanted.items():
        torch.testing.assert_close(got[name], values, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def test_sinks_leave_less_than_one() -> None:
    p = softmax(2, 3, 5, 5) * 0.25
    got = row_statistics(p)
    torch.testing.assert_close(got["mass"], torch.full((2, 3, 5), 0.25, dtype=torch.float64))
    wanted = slow(p, torch.ones(5, dtype=torch.bool), None, (), 1)
    torch.testing.assert_close(got["entropy"], wanted["entropy"])


def test_entropy_of_peaked_and_even_rows() -> None:
    p = torch.zeros(1, 1, 4, 5)
    p[0, 0, 0, 2] = 1
    p[0, 0, 1] = torch.tensor([1, 1e-8, 1e-8, 1e-8, 0])  # as float32 rounds it: more than 1 in all
    p[0, 0, 2] = torch.tensor([1e-38, 1, 1e-30, 0, 0])
    p[0, 0, 3] = 0.2
    entropy = row_statistics(p)["entropy"][0, 0]
    assert entropy[0] == 0
    assert math.copysign(1, float(entropy[0])) == 1
    torch.testing.assert_close(entropy[1], torch.tensor(3e-8 * math.log(1e8), dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        entropy[2], torch.tensor(1e-30 * math.log(1e30), dtype=torch.float64), rtol=1e-4, atol=1e-36
    )
    torch.testing.assert_close(entropy[3], torch.tensor(math.log(5), dtype=torch.float64), rtol=1e-6, atol=0)
    over = torch.full((1, 1, 1, 1), 1 + 1e-7)
    assert row_statistics(over)["entropy"].item() == 0, "rounding must not give an entropy below zero"


def test_positions_on_a_grid_and_without_a_place() -> None:
    p = softmax(1, 2, 7, 7)
    at = torch.tensor([(NAN, NAN)] + [(r, c) for r in range(2) for c in range(3)])  # a CLS token, then patches
    got = row_statistics(p, k_pos=at, windows=(1,))
    assert "previous" not in got
    assert "next" not in got
    assert bool(got["distance"][..., 0].isnan().all()), "the CLS row has no distance"
    assert bool(got["self"][..., 0].isnan().all())
    for i in range(1, 7):
        far = [math.dist(at[i].tolist(), at[j].tolist()) for j in range(1, 7)]
        wanted = sum(p[0, :, i, j] * d for j, d in zip(range(1, 7), far, strict=True))
        torch.testing.assert_close(got["distance"][0, :, i], torch.as_tensor(wanted))
        within = sum(p[0, :, i, j] for j, d in zip(range(1, 7), far, strict=True) if d <= 1)
        torch.testing.assert_close(got["window_1"][0, :, i], torch.as_tensor(within))
    torch.testing.assert_close(got["self"][0, :, 1:], p[0].diagonal(dim1=1, dim2=2)[:, 1:])


def test_positions_can_be_given() -> None:
    p = softmax(1, 2, 3, 5)
    got = row_statistics(p, q_pos=torch.tensor([10, 11, 12]), k_pos=torch.tensor([9, 10, 11, 12, 20]))
    torch.testing.assert_close(got["self"][0], torch.stack([p[0, :, i, i + 1] for i in range(3)], -1))
    torch.testing.assert_close(got["previous"][0], torch.stack([p[0, :, i, i] for i in range(3)], -1))
    torch.testing.assert_close(got["distance"][0, :, 2], (p[0, :, 2] * torch.tensor([3, 2, 1, 0, 8])).sum(-1))


def test_a_query_that_stands_on_no_key_has_no_token() -> None:
    p, tokens = softmax(1, 2, 3, 5), torch.tensor([4, 4, 7, 4, 7])
    got = row_statistics(p, q_pos=torch.tensor([3, 4, 9]), k_pos=torch.arange(5), tokens=tokens)
    for name in ("duplicate", "induction"):
        assert got[name].isnan()[0].tolist() == [[False, False, True]] * 2, name
    torch.testing.assert_close(got["duplicate"][0, :, 1], p[0, :, 1, 2])


def test_cross_attention_has_no_positions() -> None:
    p = softmax(2, 3, 7, 5)
    got = row_statistics(p, kind="cross", tokens=torch.zeros(5), windows=(2,))
    assert set(got) == {"entropy", "normalized_entropy", "max_weight", "effective_keys", "mass", "first"}
    assert set(pattern_scores(p, kind="cross").score) == {"first", "uniform"}


def test_rows_that_do_not_count() -> None:
    p = softmax(1, 2, 5, 5)
    rows = torch.tensor([True, False, True, True, False])
    got = row_statistics(p, rows=rows)
    for name, values in got.items():
        assert bool(values[..., ~rows].isnan().all()), name
    means = head_means(got)
    torch.testing.assert_close(means.mean["max_weight"], p[0, :, rows].amax(-1).mean(-1))
    assert means.rows["max_weight"].tolist() == [3, 3]
    assert means.rows["previous"].tolist() == [2, 2], "row 0 has no key before it"


def test_a_weight_that_is_not_finite_takes_its_row_out() -> None:
    p = softmax(1, 2, 5, 5)
    whole = head_means(row_statistics(p, rows=torch.tensor([True, True, False, True, True])))
    p[0, 1, 2, 3] = NAN
    means = head_means(row_statistics(p))
    assert means.rows["entropy"].tolist() == [5, 4]
    torch.testing.assert_close(means.mean["entropy"][1], whole.mean["entropy"][1])
    assert broken_rows(p).tolist() == [0, 1]
    p[0, 0, 0, 0] = torch.inf
    assert broken_rows(p).tolist() == [1, 1]
    assert head_means(row_statistics(p[:, :, :1])).rows["entropy"].tolist() == [0, 1]


def test_head_means_pool_batch_entries() -> None:
    rows = {"x": torch.tensor([[[1.0, NAN], [NAN, NAN]], [[4.0, 7.0], [NAN, NAN]]])}
    means = head_means(rows)
    torch.testing.assert_close(means.mean["x"], torch.tensor([4.0, NAN], dtype=torch.float64), equal_nan=True)
    assert means.rows["x"].tolist() == [3, 0]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("previous", {i: i - 1 for i in range(1, 13)}),
        ("next", {i: i + 1 for i in range(12)}),
        ("self", {}),
        ("first", dict.fromkeys(range(13), 0)),
    ],
)
def test_planted_patterns(name: str, keys: dict[int, int]) -> None:
    scores = pattern_scores(planted(13, keys))
    found = best_matches(scores)[0]
    assert found is not None
    assert (found.pattern, found.rows) == (name, int(scores.rows[name]))
    assert found.score == 1
    turned = best_matches(pattern_scores(planted(13, keys).mT))[0]  # row and column exchanged
    assert turned is None or turned.pattern != name or name == "self"


def test_planted_induction_and_duplicates() -> None:
    ids = torch.tensor([5, 3, 9, 2, 7, 1, 8, 4, 6] * 2 + [5])
    induction = planted(19, {i: i - 8 for i in range(9, 19)})  # what followed the same token nine places back
    duplicate = planted(19, {i: i - 9 for i in range(9, 19)})
    seen = causal(19, 19)
    for name, p in (("induction", induction), ("duplicate", duplicate)):
        scores = pattern_scores(p, seen=seen, tokens=ids)
        found = best_matches(scores)[0]
        assert found == Match(name, found.score, 10, found.z), found
        assert found.z > 9
        means = head_means(row_statistics(p, seen=seen, tokens=ids))
        assert means.mean[name].item() == (1 if name == "induction" else pytest.approx(1))
        assert means.rows[name].item() == 10
        other = "duplicate" if name == "induction" else "induction"
        assert means.mean[other].item() == 0
        assert scores.score[other].item() == 0


def test_the_key_after_the_query_has_the_mass_of_induction_but_is_no_pattern_of_it() -> None:
    p = planted(19, {i: i + 1 for i in range(18)})
    tokens = torch.arange(19) % 7
    got = row_statistics(p, tokens=tokens)
    assert got["induction"][0, 0, :18].tolist() == [1] * 18, "tok[j - 1] is the query's own token"
    assert pattern_scores(p, tokens=tokens).score["induction"].item() == 0, "no earlier copy of it"


def test_planted_spreads() -> None:
    t, seen = 23, causal(23, 23)
    even = seen / seen.sum(-1, keepdim=True)
    band = seen & seen.triu(-3)
    near = band / band.sum(-1, keepdim=True)
    scores = pattern_scores(torch.stack([even, near])[None], seen=seen)
    matches = best_matches(scores)
    assert [match and match.pattern for match in matches] == ["uniform", "local"]
    torch.testing.assert_close(scores.score["uniform"][0], torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(scores.score["local"][1], torch.tensor(1.0, dtype=torch.float64))
    for name in ("previous", "self", "first", "local"):
        torch.testing.assert_close(scores.score[name][0].item(), 0.0, msg=f"{name}: an even row is chance")
    assert scores.rows["uniform"].tolist() == [t - 1] * 2, "the first row has no choice"


def slow_scores(p: Tensor, seen: Tensor, tokens: Tensor, reach: float) -> dict[str, tuple[float, int]]:
    """Score and rows of each pattern for one head [T, T], by its definition."""
    T = len(p)
    sums = {name: [0.0, 0.0, 0] for name in PATTERNS}
    for i in range(T):
        keys = [j for j in range(T) if seen[i, j]]
        n = len(keys)
        wanted = {
            "previous": [i - 1],
            "next": [i + 1],
            "self": [i],
            "first": [0],
            "duplicate": [j for j in keys if tokens[j] == tokens[i] and j != i],
            "induction": [j for j in keys if j > 0 and tokens[j - 1] == tokens[i] and j - 1 != i],
            "local": [j for j in keys if abs(i - j) <= reach],
            "uniform": keys,
        }
        for name, places in wanted.items():
            places = [j for j in places if j in keys]
            m = len(places)
            if name == "uniform":
                overlap, chance = sum(min(float(p[i, j]), 1 / n) for j in keys), 1 / n
            elif name == "local":
                overlap, chance = sum(min(float(p[i, j]), 1 / m) for j in places), m / n
            else:
                overlap, chance = sum(float(p[i, j]) for j in places), m / n
            if 0 < chance < 1:
                sums[name][0] += overlap - chance
                sums[name][1] += 1 - chance
                sums[name][2] += 1
    return {
        name: (max(0.0, gain / most), rows)
        for name, (gain, most, rows) in sums.items()
        if rows >= MINIMUM_ROWS.get(name, 2)
    }


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_their_definitions(seed: int) -> None:
    t = 17
    seen = causal(t, t) if seed % 2 else torch.ones(t, t, dtype=torch.bool)
    p = softmax(1, 3, t, t, seen=seen, seed=seed)
    tokens = torch.randint(0, 5, (t,), generator=torch.Generator().manual_seed(seed))
    scores = pattern_scores(p, seen=seen, tokens=tokens, reach=2)
    for head in range(3):
        wanted = slow_scores(p[0, head], seen, tokens, 2)
        assert set(scores.score) == set(wanted)
        for name, (score, rows) in wanted.items():
            assert scores.score[name][head].item() == pytest.approx(score, abs=1e-12), name
            assert scores.rows[name][head].item() == rows, name


def test_a_pattern_without_rows_is_not_offered() -> None:
    seen = causal(7, 7)
    p = softmax(1, 2, 7, 7, seen=seen)
    different = pattern_scores(p, seen=seen, tokens=torch.arange(7))
    assert {"next", "duplicate", "induction"}.isdisjoint(different.score), "no row may see such a key"
    few = pattern_scores(p, seen=seen, tokens=torch.tensor([1, 2, 3, 1, 4, 5, 6]))
    assert "duplicate" not in few.score, "one row is too few"
    assert best_matches(pattern_scores(torch.ones(1, 3, 1, 1))) == []
    assert best_matches(pattern_scores(torch.ones(1, 1, 3, 3) / 3))[0][:3] == ("uniform", pytest.approx(1), 3)


def test_padding_shifts_nothing() -> None:
    seen = padded(1, 11, [7])
    p = softmax(1, 2, 11, 11, seen=seen)
    short, long = p[:, :, 4:, 4:], p
    tokens = torch.tensor([0, 0, 0, 0, 1, 2, 1, 3, 2, 1, 3])
    one = head_means(row_statistics(short, seen=causal(7, 7), tokens=tokens[4:]))
    other = head_means(row_statistics(long, seen=seen, tokens=tokens))
    for name in one.mean:
        torch.testing.assert_close(one.mean[name], other.mean[name], equal_nan=True, msg=name)
        torch.testing.assert_close(one.rows[name], other.rows[name], msg=name)
    a, b = pattern_scores(short, seen=causal(7, 7)), pattern_scores(long, seen=seen)
    assert set(a.score) == set(b.score)
    for name, score in a.score.items():
        torch.testing.assert_close(score, b.score[name], msg=name)


def test_what_is_refused() -> None:
    p = softmax(2, 3, 5, 7)
    with pytest.raises(ValueError, match=r"p: has 3 axes, expected 4 \(\[B, H, Q, K\]\); p \[3, 5, 7\]"):
        row_statistics(p[0])
    with pytest.raises(
        ValueError, match=r"p: \[0, 0, 0, 6\] is .* where seen is False \(True = attend\); p \[2, 3, 5, 7\]"
    ):
        row_statistics(p, seen=torch.arange(7) < 6)
    with pytest.raises(ValueError, match=r"seen: dtype is torch\.float64, expected torch\.bool; seen \[5, 7\]"):
        row_statistics(p, seen=torch.ones(5, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"seen: does not broadcast to \[2, 3, 5, 7\]; p .*, seen \[3\]"):
        pattern_scores(p, seen=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"rows: does not broadcast to \[2, 3, 5\]"):
        row_statistics(p, rows=torch.ones(4, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=r"k_pos: expected \[K\] or \[K, 2\], here \[7\] or \[7, 2\]; k_pos \[5\], p \[2, 3, 5, 7\]"
    ):
        row_statistics(p, k_pos=torch.arange(5))
    with pytest.raises(
        ValueError, match=r"q_pos: has 2 numbers for each position, k_pos has 1; q_pos \[5, 2\], k_pos \[7\]"
    ):
        row_statistics(p, q_pos=torch.zeros(5, 2))
    with pytest.raises(
        ValueError, match=r"q_pos: is required, because there are more queries \(7\) than keys \(5\); p"
    ):
        row_statistics(softmax(1, 1, 7, 5))
    with pytest.raises(
        ValueError, match=r"tokens: expected \[B, K\] or \[K\], here \[2, 7\]; tokens \[5\], p \[2, 3, 5, 7\]"
    ):
        row_statistics(p, tokens=torch.arange(5))
    with pytest.raises(ValueError, match=r"first: got 0, expected at least 1"):
        row_statistics(p, first=0)
    with pytest.raises(ValueError, match=r"windows: got -1, expected at least 0"):
        row_statistics(p, windows=(-1,))
    with pytest.raises(ValueError, match=r'kind: got \'other\', expected "self" or "cross"'):
        row_statistics(p, kind="other")  # pyright: ignore[reportArgumentType]
