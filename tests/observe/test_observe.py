"""observe: what it measures, of which rows, and what it refuses; every definition is in test_observe_fuzz."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headscope
from headscope import Observe, observe
from headscope._attend.backends import native
from headscope._observe import inputs
from headscope.functional import weights
from headscope.masks import Band, Dense, KeyLengths, causal
from headscope.stats import HeadStats, head_means, row_statistics
from support.attention_cases import OPTIONS

INF = torch.inf
OF_WEIGHTS = {
    "lse", "max_logit", "entropy", "normalized_entropy", "max_weight", "effective_keys", "mass", "first",
    "chance",
}  # fmt: skip
OF_PLACES = {"distance", "self", "previous", "next"}


def made(b: int, h: int, q: int, k: int, d: int = 5, *, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = ((b, h, q, d), (b, kv_heads or h, k, d), (b, kv_heads or h, k, 7))
    q_, k_, v_ = (torch.randn(shape, generator=random) for shape in shapes)
    return q_, k_, v_


def looking(keys: list[int], t: int, sharp: float = 30.0) -> tuple[Tensor, Tensor]:
    """q and k of one head in which query i looks at key keys[i]."""
    k = torch.eye(t)
    return (sharp * math.sqrt(t) * k[keys])[None, None], k[None, None]


def mean(stats: HeadStats, name: str, head: int = 0) -> float:
    return stats[0, head, name].mean


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("option", OPTIONS)
def test_it_says_what_row_statistics_says_of_the_dense_weights(option: str, dtype: torch.dtype) -> None:
    asked = OPTIONS[option](dtype)
    given = {name: x for name, x in asked.tensors.items() if name != "v"}
    p = weights(**given, **asked.said)
    visible = torch.ones(p.shape, dtype=torch.bool) if "seen" not in asked.seen else asked.seen["seen"]
    if "bias" in given:
        visible = visible & (given["bias"] != -INF)
    stats = observe(**given, **asked.said, what=Observe(windows=(2,), first=2))
    dense = head_means(row_statistics(p, seen=visible, windows=(2,), first=2))
    offset = getattr(asked.said.get("mask"), "offset", None)
    for name, wanted in dense.mean.items():
        if offset is not None and name not in OF_WEIGHTS:
            continue  # row_statistics knows no mask: it stands the queries at the end
        if offset is None:
            assert stats[0, name].count.tolist() == dense.rows[name].tolist(), name
            torch.testing.assert_close(stats[0, name].mean, wanted, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)
    names = {*OF_WEIGHTS, *OF_PLACES, "window_2", "streaming_2"}
    assert set(stats.names) == names


def test_planted_patterns_have_their_orientation() -> None:
    t = 13
    places = {
        "previous": [max(i - 1, 0) for i in range(t)],
        "next": [min(i + 1, t - 1) for i in range(t)],
        "self": list(range(t)),
        "first": [0] * t,
    }
    for name, keys in places.items():
        q, k = looking(keys, t)
        stats = observe(q, k, what=Observe(map=t, edges=t))
        assert mean(stats, name) == pytest.approx(1, abs=1e-6), name
        for other in {*places} - {name}:
            assert mean(stats, other) < 0.2, f"{name} looks like {other}"
        pairs = {(edge.i, edge.j) for edge in stats.edges.of(0)}
        assert pairs == {(i, j) for i, j in enumerate(keys)}, "row is query"
        assert torch.equal(stats.map.mean[0] > 0.5, torch.eye(t, dtype=torch.bool)[keys]), "row is query"
        received = torch.zeros(t).double().index_add(0, torch.tensor(keys), torch.ones(t).double())
        torch.testing.assert_close(stats.received[0], received, atol=1e-5, rtol=0)


def test_planted_induction_and_duplicates() -> None:
    tokens = torch.tensor([5, 3, 9, 2, 7, 1, 8, 4, 6] * 2 + [5])
    for name, back in (("induction", 8), ("duplicate", 9)):
        q, k = looking([i - back if i >= 9 else i for i in range(19)], 19)
        stats = observe(q, k, mask=causal(), what=Observe(tokens=tokens))
        assert stats[0, 0, name].count == 10
        assert mean(stats, name) == pytest.approx(1, abs=1e-6)
        assert mean(stats, "duplicate" if name == "induction" else "induction") < 1e-6


def test_the_entropy_of_peaked_rows_does_not_cancel() -> None:
    """A row with p = 1 - n e: lse - Σ p s would lose it in the size of the logits."""
    k = torch.zeros(1, 1, 11, 1)
    k[..., 0, 0] = 1
    for gap in (5.0, 12.0, 20.0, 30.0):
        q = torch.full((1, 1, 1, 1), gap)
        p = torch.softmax(torch.tensor([gap] + [0.0] * 10, dtype=torch.float64), 0)
        wanted = float(torch.special.entr(p).sum())
        bias = torch.full((1, 1, 1, 11), 100.0)  # moves every logit, and no weight
        assert mean(observe(q, k, scale=1.0), "entropy") == pytest.approx(wanted, rel=1e-5)
        assert mean(observe(q, k, scale=1.0, bias=bias), "entropy") == pytest.approx(wanted, rel=1e-5)
    one = observe(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
    assert mean(one, "entropy") == 0
    assert math.copysign(1, mean(one, "entropy")) == 1


def test_of_equal_weights_the_first_comes_first() -> None:
    q, k = torch.zeros(2, 1, 5, 3), torch.zeros(2, 1, 7, 3)
    stats = observe(q, k, kind="cross", what=Observe(map=2, edges=9, top=3, keep_rows=True))
    assert [edge[:2] + edge[3:4] for edge in stats.edges.of(0)] == [
        (0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 4, 0), (0, 5, 0), (0, 6, 0), (1, 0, 0), (1, 1, 0),
    ]  # fmt: skip
    assert stats.map.argmax[0].tolist() == [[[0, 0, 0, 0], [0, 0, 0, 3]], [[0, 0, 2, 0], [0, 0, 2, 3]]]
    assert stats.kept[0].values["top_keys"].unique(dim=2).tolist() == [[[[0, 1, 2]]]] * 2
    assert not stats.kept[0].values["argmax"].any()


def test_ties_of_float64_come_in_order_too() -> None:
    q, k = torch.zeros(1, 1, 3, 3).double(), torch.zeros(1, 1, 5, 3).double()
    stats = observe(q, k, kind="cross", what=Observe(edges=6))
    assert [(edge.i, edge.j) for edge in stats.edges.of(0)] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]


def test_a_map_of_more_bins_than_keys_has_empty_ones() -> None:
    q, k, _ = made(1, 2, 3, 3)
    stats = observe(q, k, mask=causal(), what=Observe(map=5))
    p = weights(q, k, mask=causal())
    at = [1, 3, 4]  # ⌊b·3/5⌋ <= 0, 1, 2 < ⌊(b + 1)·3/5⌋
    seen = torch.zeros(5, 5, dtype=torch.bool)
    for i, row in enumerate(at):
        for j in range(i + 1):
            seen[row, at[j]] = True
            torch.testing.assert_close(stats.map.mean[:, row, at[j]].float(), p[0, :, i, j])
    assert torch.equal(stats.map.mean.isnan(), ~seen.expand(2, 5, 5))
    assert torch.equal(stats.map.max.isnan(), ~seen.expand(2, 5, 5))


def test_sinks_take_mass_from_the_keys() -> None:
    q, k, _ = made(1, 2, 5, 5)
    stats = observe(q, k, sinks=torch.tensor([-INF, 100.0]))
    assert mean(stats, "mass", 0) == pytest.approx(1, abs=1e-6)
    assert mean(stats, "mass", 1) < 1e-30
    assert stats[0, 1, "lse"].mean == pytest.approx(100)
    assert stats[0, 1, "max_logit"].max < 10
    empty = observe(q, k, sinks=torch.zeros(2), mask=Band(0, 0, offset=9))
    assert empty.rows.tolist() == [0, 0], "a row that sees nothing but the sink is empty"


def test_value_norm_is_there_if_values_are() -> None:
    q, k, v = made(2, 6, 5, 7, kv_heads=3)
    stats = observe(q, k, v)
    p = weights(q, k).double()
    wanted = (p @ v.double().norm(dim=-1).repeat_interleave(2, 1)[..., None]).mean((0, 2, 3))
    torch.testing.assert_close(stats[0, "value_norm"].mean, wanted)
    assert "value_norm" not in observe(q, k).names


# ---------------------------------------------------------------- what is asked for


def test_only_what_is_asked_for_is_there() -> None:
    q, k, _ = made(1, 2, 5, 5)
    nothing = observe(q, k, what=Observe(row_stats=False, received=False))
    assert nothing.names == ()
    for what, asking in (
        ("received", "received=True"),
        ("eligible", "received=True"),
        ("map", "map=64"),
        ("edges", "edges=32"),
    ):
        with pytest.raises(ValueError, match=rf"{what}: was not observed; observe with Observe\({asking}\)"):
            getattr(nothing, what)
    with pytest.raises(ValueError, match=r"kept: was not observed; observe with Observe\(keep_rows=True\) or"):
        _ = nothing.kept
    with pytest.raises(ValueError, match=r"tile: q and k were not retained; observe with Observe\(keep_qk=True\)"):
        nothing.tile(0, 1, 0, 1)
    edges = observe(q, k, what=Observe(row_stats=False, edges=2))
    assert edges.names == ()
    assert edges.edges.p.tolist() == observe(q, k, what=Observe(edges=2)).edges.p.tolist()
    assert set(observe(q, k).names) == OF_WEIGHTS | OF_PLACES
    top = observe(q, k, what=Observe(row_stats=False, top=2))
    assert set(top.kept[0].values) == {"top_keys", "top_weights"}


def test_cross_attention_has_no_places() -> None:
    q, k, _ = made(2, 3, 7, 5)
    what = Observe(windows=(2,), tokens=torch.zeros(5, dtype=torch.int64))
    stats = observe(q, k, kind="cross", what=what, mask=Dense(torch.arange(5) > 0))
    assert set(stats.names) == OF_WEIGHTS
    assert stats.rows.tolist() == [14] * 3, "no row is padding"


def test_attend_observes() -> None:
    q, k, v = made(2, 6, 7, 7, kv_heads=3)
    q.requires_grad_()
    what = Observe(map=3, edges=4)
    got = headscope.attend(q, k, v, mask=causal(), softcap=3.0, observe=what)
    alone = observe(q, k, v, mask=causal(), softcap=3.0, what=what)
    assert got.stats is not None
    for name in alone.names:
        torch.testing.assert_close(got.stats[name].mean, alone[name].mean, equal_nan=True, msg=name)
    assert torch.equal(got.stats.map.count, alone.map.count)
    got.out.sum().backward()
    assert q.grad is not None
    assert headscope.attend(q, k, v).stats is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_given_lse_changes_nothing_but_rounding(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in made(2, 3, 11, 11))
    own = observe(q, k, mask=causal())
    given = observe(q, k, mask=causal(), lse=headscope.attend(q, k, v, mask=causal()).lse)
    for name in own.names:
        assert torch.equal(own[name].mean.nan_to_num(), given[name].mean.nan_to_num()), name


WIDTHS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("size", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("form", ["native", "portable"])
def test_a_given_lse_is_taken_for_the_rows_own_within_rounding_alone(
    form: str, size: float, dtype: torch.dtype
) -> None:
    """On both sides of the width, which counts from 1 on for a small lse; positions that are given need no kernels."""
    if form == "native" and native.extension is None:
        pytest.skip("the native extension was not built: no C++ compiler")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = torch.ones(1, 1, 1, 1, dtype=wide), torch.full((1, 1, 2, 1), size, dtype=wide)
    k[..., 1, :] -= 50.0  # lse is the size, but for rounding
    options: dict[str, Any] = {"scale": 1.0, "kind": "self", "q_pos": torch.zeros(1) if form == "portable" else None}
    own = observe(q, k, **options)[0, 0, "mass"].mean
    width, grid = WIDTHS[dtype] * max(1.0, size), torch.finfo(dtype).eps * size
    for sign in (1, -1):
        for times, is_near in ((0.5, True), (2.5, False), (5.0, False)):
            lse = torch.full((1, 1, 1), size + sign * max(times * width, grid if times > 1 else 0), dtype=dtype)
            off = float(lse.double()) - size
            assert (abs(off) < width) == is_near, "a number of the dtype on the side that is meant"
            assert abs(off) < 7 * width, "and less than ten times the width away"
            if off < -0.01 and not is_near:
                with pytest.raises(ValueError, match=r"lse: got .* which gives a weight of \d"):
                    observe(q, k, lse=lse, **options)
                continue
            mass = observe(q, k, lse=lse, **options)[0, 0, "mass"].mean
            if is_near:
                assert mass == own
            else:
                assert mass == pytest.approx(math.exp(-max(0.0, off)), rel=0.1 * abs(off))


def test_another_lse_is_taken_as_it_stands() -> None:
    """A part of the keys with the lse of all: the weights are those of all."""
    q, k, _ = made(1, 2, 5, 9)
    p = weights(q, k)
    lse = torch.logsumexp(q @ k.mT / math.sqrt(5), -1)
    part = observe(q, k[:, :, :4], lse=lse, kind="cross")
    torch.testing.assert_close(part[0, "mass"].mean, p[..., :4].sum(-1).mean((0, 2)).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part.received, p[..., :4].sum((0, 2)).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["native", "portable"])
def test_an_lse_below_the_largest_logit_is_refused(form: str) -> None:
    """No weights are above 1; an lse by another base, or of other logits, would make them so without a word."""
    if form == "native" and native.extension is None:
        pytest.skip("the native extension was not built: no C++ compiler")
    q, k, v = made(2, 3, 5, 5)
    options: dict[str, Any] = {"mask": causal(), "q_pos": torch.arange(5) if form == "portable" else None}
    lse = headscope.attend(q, k, v, mask=causal()).lse
    with pytest.raises(ValueError, match=r"lse: got .* for a row whose largest logit is .* expected the natural log"):
        observe(q, k, lse=lse - 1, **options)
    lse[1, 2, 0] -= 0.02  # the row of one key
    with pytest.raises(ValueError, match=r"which gives a weight of 1.02"):
        observe(q, k, lse=lse, **options)
    lse[1, 2, 0] += 0.015  # another kernel's rounding
    rounded = observe(q, k, lse=lse, **options)
    assert rounded[0, 2, "max_weight"].max == 1
    assert rounded[0, 2, "entropy"].min == 0


# ---------------------------------------------------------------- which rows


def test_an_even_sample_says_how_many_rows_it_stands_on() -> None:
    q, k, _ = made(2, 3, 11, 11)
    every = observe(q, k, mask=causal(), what=Observe(keep_rows=True))
    some = observe(q, k, mask=causal(), what=Observe(rows=4, keep_rows=True, edges=3, map=2))
    assert some.kept[0].queries.tolist() == [1, 4, 6, 9], "the middle of each of four parts"
    assert some.sampled
    assert not every.sampled
    assert "a sample of 8 of 22 rows" in repr(some)
    assert some[0, 0, "entropy"].count == 8
    for name, values in some.kept[0].values.items():
        wanted = every.kept[0].values[name][..., some.kept[0].queries]
        torch.testing.assert_close(values, wanted, equal_nan=True, msg=name)
    assert {edge.i for edge in some.edges.of(0)} <= {1, 4, 6, 9}
    assert some.eligible[0].tolist() == [8, 8, 6, 6, 6, 4, 4, 2, 2, 2, 0]
    assert some.map.count[0].tolist() == [[14, 0], [20, 14]]
    assert not observe(q, k, what=Observe(rows=11)).sampled
    assert torch.equal(observe(q, k, what=Observe(rows=99)).received, observe(q, k).received), (
        "more than there are is all of them"
    )


def test_a_mask_says_which_rows_count() -> None:
    q, k, _ = made(2, 3, 5, 5)
    rows = torch.tensor([True, False, True, True, False])
    stats = observe(q, k, what=Observe(rows=rows, keep_rows=True))
    assert stats.rows.tolist() == [6] * 3
    assert stats.kept[0].queries.tolist() == [0, 2, 3]
    assert not stats.sampled
    heads = torch.tensor([True, False, True])[:, None].expand(3, 5)
    stats = observe(q, k, what=Observe(rows=heads, edges=2))
    assert stats.rows.tolist() == [10, 0, 10]
    assert stats.received[1].tolist() == [0.0] * 5
    assert stats.edges.of(1) == []
    assert math.isnan(mean(stats, "entropy", 1))
    assert stats[0, 1, "entropy"].std != 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_rows_do_not_count(side: str) -> None:
    """A batch of padded texts gives what the texts give alone, merged."""
    q, k, v = made(3, 2, 7, 7)
    tokens = torch.randint(3, (3, 7), generator=torch.Generator().manual_seed(1))
    lengths = [7, 4, 1]
    real = torch.stack([torch.arange(7) >= 7 - n if side == "left" else torch.arange(7) < n for n in lengths])
    tokens[~real] = 9  # no word of the text: what stands before the first real key can be read
    mask = causal() & (Dense(real[:, None, None]) if side == "left" else KeyLengths(torch.tensor(lengths)))
    batch = observe(q, k, v, mask=mask, what=Observe(tokens=tokens, windows=(2,)))
    parts = [
        observe(
            *(x[b : b + 1, :, real[b]] for x in (q, k, v)),
            mask=causal(), what=Observe(tokens=tokens[b, real[b]], windows=(2,)),
        )
        for b in range(3)
    ]  # fmt: skip
    alone = HeadStats.merge(*parts)
    assert batch.rows.tolist() == [12, 12]
    for name in batch.names:
        assert torch.equal(batch[name].count, alone[name].count), name
        torch.testing.assert_close(batch[name].mean, alone[name].mean, equal_nan=True, msg=name)


def test_hidden_keys_are_never_read() -> None:
    q, k, v = made(2, 2, 7, 7)
    lengths = torch.tensor([5, 3])
    clean = observe(q, k, v, mask=causal() & KeyLengths(lengths), what=Observe(map=3, edges=4, top=2))
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = math.nan, INF
    spoilt = observe(q, k, v, mask=causal() & KeyLengths(lengths), what=Observe(map=3, edges=4, top=2))
    for name in clean.names:
        assert torch.equal(clean[name].mean.nan_to_num(), spoilt[name].mean.nan_to_num()), name
    assert torch.equal(clean.received, spoilt.received)
    assert torch.equal(clean.map.sum, spoilt.map.sum)
    assert torch.equal(clean.edges.at, spoilt.edges.at)
    assert spoilt.broken.tolist() == [0, 0]


def test_the_length_of_a_value_that_is_infinite_reaches_who_may_see_it() -> None:
    q, k, v = made(1, 2, 5, 5)
    v[:, :, 3, 1] = INF
    found = observe(q, k, v, mask=causal(), what=Observe(keep_rows=True)).kept[0].values["value_norm"]
    v[:, :, 3, 1] = 0
    wanted = observe(q, k, v, mask=causal(), what=Observe(keep_rows=True)).kept[0].values["value_norm"]
    assert found[:, :, 3:].isnan().all()
    torch.testing.assert_close(found[:, :, :3], wanted[:, :, :3])


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    q, k, v = made(1, 2, 5, 5)
    rest = observe(q, k, v, what=Observe(rows=torch.arange(5) != 2))
    q[0, 1, 2] = math.nan
    stats = observe(q, k, v)
    assert stats.broken.tolist() == [0, 1]
    assert stats.rows.tolist() == [5, 4]
    assert mean(stats, "entropy", 1) == pytest.approx(mean(rest, "entropy", 1), rel=1e-6)
    torch.testing.assert_close(stats.received[1], rest.received[1], rtol=1e-6, atol=0)
    v[0, 0, 3] = math.nan
    spoilt = observe(q, k, v, mask=causal())
    assert spoilt[0, 0, "value_norm"].count == 3, "rows that may see the NaN have no value_norm"
    assert spoilt[0, 0, "entropy"].count == 5


def test_empty_rows_take_part_in_nothing() -> None:
    q, k, _ = made(1, 2, 7, 5)
    stats = observe(q, k, mask=causal(), what=Observe(map=2, edges=40))
    assert stats.rows.tolist() == [5, 5], "bottom-right: the first two queries stand before the first key"
    assert stats.eligible[0].tolist() == [5, 4, 3, 2, 1]
    assert len(stats.edges.of(0)) == 15
    assert stats.edges.at[0, 15:].eq(-1).all()
    for shape in ((0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)):
        none = observe(*made(*shape)[:2], what=Observe(map=2, edges=2, top=2, keep_rows=True))
        assert none.rows.tolist() == [0, 0]
        assert none[0, 0, "entropy"].count == 0
        assert math.isnan(none[0, 0, "entropy"].mean)


def test_no_head_has_no_statistics() -> None:
    """q without heads and k with some: attention returns an empty output, and so observing returns empty statistics."""
    q, k = torch.randn(2, 0, 5, 8), torch.randn(2, 2, 6, 8)
    assert observe(q, k)["lse"].mean.shape == (1, 0)
    what = Observe(received=True, map=2, edges=2, top=2, keep_rows=True, keep_qk=True, windows=(1,))
    stats = observe(q, k, k, mask=causal(), what=what)
    assert (stats.rows.shape, stats.broken.shape) == ((0,), (0,))
    assert stats.received.shape == (0, 6)
    assert stats.tile(0, 5, 0, 6).shape == (2, 0, 5, 6)
    attended = headscope.attend(q, k, k, observe=Observe()).stats
    assert attended is not None
    assert attended.rows.shape == (0,)


# ---------------------------------------------------------------- where rows stand


def test_queries_stand_where_the_mask_says() -> None:
    q, k = looking([3, 4, 5], 9)
    assert mean(observe(q, k, mask=Band(None, 0, offset=3)), "self") == pytest.approx(1, abs=1e-6)
    assert mean(observe(q, k, mask=Band(None, 1, offset=2)), "next") == pytest.approx(1, abs=1e-6)
    assert mean(observe(q, k), "distance") == pytest.approx(3, abs=1e-4), "bottom-right: at 6, 7 and 8"
    two = causal() & Band(None, None, offset=3)
    assert mean(observe(q, k, mask=two), "distance") == pytest.approx(3, abs=1e-4), "one of the bands is bottom-right"
    both = observe(q.expand(2, -1, -1, -1), k, mask=Band(None, None, offset=(3, 4)), what=Observe(keep_rows=True))
    torch.testing.assert_close(
        both.kept[0].values["distance"][:, 0], torch.tensor([[0.0] * 3, [1.0] * 3]), atol=1e-5, rtol=0
    )


def test_queries_stand_at_the_end_where_the_bands_of_a_mask_disagree() -> None:
    q, k, _ = made(1, 2, 4, 9)
    mask = Band(None, 0, offset=2) | Band(1, 1, offset=3)
    found, wanted = (observe(q, k, mask=mask, q_pos=at) for at in (None, torch.arange(5, 9)))
    for name in ("distance", "self", "previous", "next"):
        torch.testing.assert_close(found[name].mean, wanted[name].mean, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_positions_can_be_given() -> None:
    q, k = looking([0, 1, 2], 5)
    stats = observe(q, k, q_pos=torch.tensor([10, 11, 12]), k_pos=torch.tensor([9, 10, 11, 12, 20]))
    assert mean(stats, "previous") == pytest.approx(1, abs=1e-6)
    grid = torch.tensor(
        [(math.nan, math.nan)] + [(r, c) for r in range(2) for c in range(3)]
    )  # a CLS token, then patches
    q, k = looking([0, 6, 5, 4, 3, 2, 1], 7)
    stats = observe(q, k, q_pos=grid, k_pos=grid, what=Observe(windows=(1,)))
    assert "previous" not in stats.names
    assert stats[0, 0, "distance"].count == 6, "the CLS row has no distance"
    assert mean(stats, "distance") == pytest.approx((4 * math.sqrt(5) + 2) / 6, rel=1e-5)
    assert stats[0, 0, "window_1"].mean == pytest.approx(2 / 6, rel=1e-5)
    each = torch.stack([torch.arange(7), torch.arange(7) + 40])[..., None]
    moved = observe(*(x.expand(2, -1, -1, -1) for x in (q, k)), q_pos=each, k_pos=each)
    assert mean(moved, "distance") == pytest.approx(mean(observe(q, k), "distance"), rel=1e-6)


def test_what_stands_at_infinity_has_no_position() -> None:
    q, k = looking([1, 3, 0, 2], 4)
    nowhere, infinite = (torch.tensor([at, 0.0, 1.0, 2.0]) for at in (math.nan, INF))
    kept = Observe(keep_rows=True)
    wanted = observe(q, k, q_pos=nowhere, k_pos=nowhere, what=kept).kept[0].values["distance"][0, 0]
    torch.testing.assert_close(wanted, torch.tensor([math.nan, 2, 0, 1]), equal_nan=True)
    got = observe(q, k, q_pos=infinite, k_pos=infinite, what=kept).kept[0].values["distance"][0, 0]
    dense = row_statistics(weights(q, k), q_pos=infinite, k_pos=infinite)["distance"][0, 0]
    torch.testing.assert_close(got, wanted, equal_nan=True)
    torch.testing.assert_close(dense.float(), wanted, equal_nan=True)


def test_what_a_streaming_cache_keeps_and_what_an_even_row_gives() -> None:
    """Two keys of padding, then rows that look at the first real key, near it, and nowhere in particular."""
    q, k = looking([0, 0, 2, 2, 2, 5, 3], 7)
    q[0, 0, 6] = 0.0  # an even row
    what = Observe(windows=(0, 1), first=2, keep_rows=True)
    stats = observe(q, k, mask=causal() & Dense(torch.arange(7) >= 2), what=what)
    rows = stats.kept[0].values
    nan = math.nan
    for name, wanted in {
        "chance": [nan, nan, 1, 1 / 2, 1 / 3, 1 / 4, 1 / 5],
        "window_1": [nan, nan, 1, 1, 0, 1, 2 / 5],
        "streaming_0": [nan, nan, 1, 1, 1, 1, 3 / 5],
        "streaming_1": [nan, nan, 1, 1, 1, 1, 4 / 5],
    }.items():
        torch.testing.assert_close(rows[name][0, 0], torch.tensor(wanted), equal_nan=True, msg=name)
    assert stats[0, 0, "streaming_1"].histogram[-1] == 4, "0.95 is an edge"


def test_padding_is_found_by_place_where_positions_repeat() -> None:
    """Left padding, with the position ids of the padding set to 1, as some models do."""
    q, k, _ = made(1, 2, 6, 6)
    at = torch.tensor([1, 1, 1, 0, 1, 2])
    mask = causal() & Dense(torch.arange(6) >= 3)
    stats = observe(q, k, mask=mask, q_pos=at, k_pos=at, what=Observe(keep_rows=True))
    assert stats.kept[0].counted[0, 0].tolist() == [False] * 3 + [True] * 3


def test_of_keys_at_one_position_a_real_one_is_the_querys_own() -> None:
    q, k, _ = made(1, 2, 2, 4)
    hidden = Dense(torch.tensor([False, True, True, True]))
    where = {"q_pos": torch.tensor([5, 6]), "k_pos": torch.tensor([5, 5, 6, 7])}
    stats = observe(q, k, mask=hidden, what=Observe(keep_rows=True), **where)
    assert stats.kept[0].counted[0, 0].tolist() == [True, True], "key 0 is padding, key 1 stands there, too"


def test_received_is_filed_by_absolute_position() -> None:
    q, k, _ = made(1, 2, 2, 4)
    early = observe(q, k, k_pos=torch.arange(4))
    late = observe(q, k, k_pos=torch.arange(3, 7))
    assert late.received.shape == (2, 7)
    assert torch.equal(late.received[:, 3:], early.received)
    assert early.merge(late).eligible.tolist() == [[2, 2, 2, 4, 2, 2, 2]] * 2


# ---------------------------------------------------------------- how


def test_a_second_run_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = made(2, 6, 23, 29, kv_heads=3)
    what = Observe(map=4, edges=9, top=3, windows=(3,), keep_rows=True)
    one, other = (observe(q, k, v, mask=causal(), what=what) for _ in range(2))
    assert one.flat() == other.flat()
    assert torch.equal(one.edges.p, other.edges.p)
    assert torch.equal(one.map.sum, other.map.sum)
    monkeypatch.setattr(inputs, "BLOCK", 40)
    small = observe(q, k, v, mask=causal(), what=what)
    assert torch.equal(one.map.argmax, small.map.argmax)
    assert torch.equal(one.edges.at, small.edges.at)
    for name in one.names:
        torch.testing.assert_close(one[name].mean, small[name].mean, equal_nan=True, msg=name)


class _Largest(TorchDispatchMode):
    """How many elements the largest tensor has that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                # what is expanded takes no memory
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK", 1 << 10)
    what = Observe(map=8, edges=8, top=2, windows=(3,), tokens=torch.zeros(256, dtype=torch.int64), keep_rows=True)
    q, k, v = made(1, 2, 256, 256)
    with _Largest() as largest:
        observe(q, k, v, mask=causal() & Dense(torch.rand(256) < 0.9), what=what)
    assert largest.elements <= 2 * 8 * 256, f"{largest.elements} elements; the matrix has {2 * 256 * 256}"


def test_exact_tiles_on_demand() -> None:
    q, k, _ = made(2, 6, 11, 13, kv_heads=3)
    stats = observe(q, k, mask=causal(), what=Observe(keep_qk=True, row_stats=False, rows=2))
    p = weights(q, k, mask=causal())
    for i0, i1, j0, j1 in ((0, 11, 0, 13), (3, 5, 2, 9), (4, 4, 0, 3), (0, 2, 5, 5)):
        torch.testing.assert_close(stats.tile(i0, i1, j0, j1), p[:, :, i0:i1, j0:j1])
    with pytest.raises(ValueError, match=r"i0, i1: got 3, 12, expected 0 <= start <= stop <= 11 \(Q\)"):
        stats.tile(3, 12, 0, 1)
    with pytest.raises(ValueError, match=r"j0, j1: got 5, 4, expected 0 <= start <= stop <= 13 \(K\)"):
        stats.tile(0, 1, 5, 4)
    with pytest.raises(ValueError, match=r"run: got 1, expected -1 to 0"):
        stats.tile(0, 1, 0, 1, run=1)
    both = stats.merge(observe(k, k, what=Observe(keep_qk=True, row_stats=False))) if k.shape[1] == 6 else stats
    torch.testing.assert_close(both.tile(0, 1, 0, 2, run=0), p[:, :, :1, :2])


def test_tiles_are_those_of_q_and_k_as_they_were() -> None:
    """A model may write to its own tensors, and a cache is made to be written to."""
    q, k, _ = made(1, 2, 5, 7)
    stats = observe(q, k, what=Observe(keep_qk=True))
    before = weights(q, k)
    q.zero_()
    k.mul_(-2)
    torch.testing.assert_close(stats.tile(0, 5, 0, 7), before)


def test_what_a_broken_row_sees_is_nan_in_its_tile_and_what_it_does_not_see_is_zero() -> None:
    q, k, _ = made(1, 2, 5, 5)
    q[0, 1, 2, 0] = torch.nan
    p = observe(q, k, mask=causal(), what=Observe(keep_qk=True)).tile(0, 5, 0, 5)
    wanted = weights(q.nan_to_num(0), k, mask=causal())
    wanted[0, 1, 2, :3] = torch.nan
    torch.testing.assert_close(p, wanted, equal_nan=True)
    whole = observe(q, k, what=Observe(keep_qk=True)).tile(0, 5, 0, 5)
    assert whole[0, 1, 2].isnan().all(), "without a mask it sees every key"
    assert int(whole.isnan().sum()) == 5


def test_leading_axes_are_one_batch() -> None:
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in made(6, 2, 5, 5))
    rows = torch.arange(30).reshape(2, 3, 1, 5) % 7 > 0
    what = Observe(rows=rows, tokens=torch.arange(30).reshape(2, 3, 5) % 4, keep_qk=True)
    stats = observe(q, k, v, what=what, lse=headscope.attend(q, k, v).lse)
    flat = Observe(rows=rows.reshape(6, 1, 5), tokens=what.tokens.reshape(6, 5) if what.tokens is not None else None)
    wanted = observe(*(x.reshape(6, *x.shape[2:]) for x in (q, k, v)), what=flat)
    assert stats.flat() == wanted.flat()
    assert stats.tile(0, 2, 0, 3).shape == (2, 3, 2, 2, 3)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"rows": 0}, ValueError, r"rows: got 0, expected a whole number from 1, a boolean tensor or None"),
        ({"rows": 2.5}, TypeError, r"rows: got float, expected a whole number from 1, a boolean tensor or None"),
        ({"rows": True}, TypeError, r"rows: got bool, expected a whole number"),
        ({"rows": torch.ones(3)}, TypeError, r"rows: dtype is float32, expected bool \(True = counts\)"),
        ({"row_stats": 1}, TypeError, r"row_stats: got int, expected True or False"),
        ({"map": 0}, ValueError, r"map: got 0, expected a whole number from 1 or None"),
        ({"map": "64"}, TypeError, r"map: got str, expected a whole number from 1 or None"),
        ({"edges": -1}, ValueError, r"edges: got -1, expected a whole number from 0"),
        ({"top": 1.0}, TypeError, r"top: got float, expected a whole number from 0"),
        ({"first": 0}, ValueError, r"first: got 0, expected a whole number from 1"),
        ({"windows": 3}, TypeError, r"windows: got int, expected a tuple of distances"),
        ({"windows": ("3",)}, TypeError, r"windows: got str, expected a number"),
        ({"windows": (-1,)}, ValueError, r"windows: got -1, expected a finite number from 0"),
        ({"windows": (math.nan,)}, ValueError, r"windows: got nan, expected a finite number from 0"),
        ({"windows": (2, math.inf)}, ValueError, r"windows: got inf, expected a finite number from 0"),
        ({"windows": (2, 2.0)}, ValueError, r"windows: got \(2, 2.0\), expected each distance once"),
        ({"tokens": [1, 2]}, TypeError, r"tokens: got list, expected a tensor of whole numbers"),
        ({"tokens": torch.ones(3)}, TypeError, r"tokens: dtype is float32, expected whole numbers"),
        (
            {"keep_rows": True, "row_stats": False},
            ValueError,
            r"keep_rows: expected False together with row_stats=False",
        ),
    ],
)
def test_what_cannot_be_observed(said: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Observe(**said)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"kind": "other"}, ValueError, r'kind: got \'other\', expected "self" or "cross"'),
        ({"what": "all"}, TypeError, r"what: got str, expected a headscope.Observe"),
        ({"lse": 3.0}, TypeError, r"lse: got float, expected a torch.Tensor or None"),
        ({"lse": torch.zeros(2, 3, 5, dtype=torch.int64)}, TypeError, r"lse: dtype is int64, expected a floating one"),
        (
            {"lse": torch.zeros(2, 5, 3)},
            ValueError,
            r"lse: expected \[B, H, Q\] = \[2, 3, 5\]; lse \[2, 5, 3\], q \[2, 3, 5, 11\]",
        ),
        (
            {"k_pos": torch.zeros(5)},
            ValueError,
            r"k_pos: expected \[K\] or \[K, 2\], or \[B, K, 1 or 2\], here K = 7 and B = 2; k_pos \[5\]",
        ),
        ({"q_pos": torch.zeros(2, 5)}, ValueError, r"q_pos: expected \[Q\] or \[Q, 2\], .*; q_pos \[2, 5\]"),
        ({"q_pos": [1]}, TypeError, r"q_pos: got list, expected a torch.Tensor or None"),
        ({"q_pos": torch.ones(5) > 0}, TypeError, r"q_pos: dtype is bool, expected numbers"),
        ({"q_pos": torch.zeros(5, 2)}, ValueError, r"q_pos: has 2 numbers for each position, k_pos has 1"),
        (
            {"what": Observe(tokens=torch.arange(5))},
            ValueError,
            r"tokens: expected \[K\] or \[B, K\], here \[7\] or \[2, 7\]; tokens \[5\], k \[2, 3, 7, 11\]",
        ),
        (
            {"what": Observe(rows=torch.ones(2, 5) > 0)},
            ValueError,
            r"rows: does not broadcast to \[B, H, Q\] = \[2, 3, 5\]; for the same rows in every head, pass .*; "
            r"rows \[2, 5\], q \[2, 3, 5, 11\]",
        ),
        ({"mask": torch.zeros(5, 7)}, TypeError, r"mask: dtype is float32, expected bool"),
        ({"softcap": 0.0}, ValueError, r"softcap: got 0.0, expected a finite number above 0"),
        ({"dropout": 1.0}, ValueError, r"dropout: got 1.0, expected a probability in \[0, 1\)"),
        ({"backend": "fast"}, ValueError, r"backend: got 'fast', expected one of"),
    ],
)
def test_what_is_refused(said: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, _ = made(2, 3, 5, 7, 11)
    with pytest.raises(error, match=message):
        observe(q, k, **said)


def test_positions_of_keys_alone_place_no_more_queries_than_keys() -> None:
    q, k, _ = made(1, 2, 7, 5)
    with pytest.raises(
        ValueError, match=r"q_pos: is required, because there are more queries \(7\) than keys \(5\); q"
    ):
        observe(q, k, k_pos=torch.arange(5))


def test_other_devices_are_refused() -> None:
    q, k, _ = made(1, 2, 5, 5)
    with pytest.raises(ValueError, match=r"lse: is on meta, q is on cpu"):
        observe(q, k, lse=torch.zeros(1, 2, 5, device="meta"))
    with pytest.raises(ValueError, match=r"rows: is on meta, q is on cpu"):
        observe(q, k, what=Observe(rows=torch.ones(5, dtype=torch.bool, device="meta")))
    with pytest.raises(TypeError, match=r"lse: layout is torch.sparse_coo, expected an ordinary tensor"):
        observe(q, k, lse=torch.zeros(1, 2, 5).to_sparse())
    with pytest.raises(TypeError, match=r"k: got list, expected a torch.Tensor"):
        observe(q, [1])  # pyright: ignore[reportArgumentType]


def test_autocast_and_inference_mode_change_nothing() -> None:
    q, k, v = made(1, 2, 11, 11)
    usual = observe(q, k, v, mask=causal()).flat()
    with torch.autocast("cpu", torch.bfloat16):
        assert observe(q, k, v, mask=causal()).flat() == usual
    with torch.inference_mode():
        assert observe(q.clone(), k.clone(), v.clone(), mask=causal()).flat() == usual


def test_logits_that_overflow_spoil_their_rows_alone() -> None:
    q, k, _ = made(1, 1, 3, 3)
    k = 100 * k.abs()
    rest = observe(q, k, what=Observe(rows=torch.arange(3) != 1))
    q[0, 0, 1] = 1e38
    stats = observe(q, k)
    assert stats.broken.tolist() == [1]
    torch.testing.assert_close(stats["entropy"].mean, rest["entropy"].mean, rtol=1e-5, atol=0)
    k[0, 0, 2] = 1e38  # and so does what is hidden
    hidden = observe(q, k, mask=Dense(torch.arange(3) < 2), what=Observe(rows=torch.arange(3) != 1))
    assert hidden.broken.tolist() == [0]
    assert hidden.rows.tolist() == [1], "the last row is padding"


def test_no_batch_entry_with_positions_of_keys_and_an_offset_each() -> None:
    """What a mask or a position has for each batch entry may be for none."""
    q = torch.randn(0, 2, 3, 4)
    none = torch.empty(0, dtype=torch.int64)
    for offset in (none, ()):
        mask = Band(right=0, offset=offset)
        assert headscope.attention(q, q, q, mask=mask).shape == q.shape
        found = headscope.observe(q, q, mask=mask, k_pos=torch.arange(3))
        assert found["entropy"].count.numel() == 2
        assert not found["entropy"].count.any()
