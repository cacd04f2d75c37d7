"""``Observe(weights=...)``: the weights of chosen heads, against float64, and their limits, files and sequences."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headscope
from headscope import Observe, attend, masks, observe
from headscope._attend.interface import accumulate_dtype
from headscope._observe import inputs
from headscope.stats import HeadStats, HeadWeights, merge
from headscope.stats._head_weights import sequences
from support import oracle, oracle_weights
from support.attention_fuzz import Case, cases, sizes_of

ONLY = {"row_stats": False, "received": False}
RELATIVE, ABSOLUTE = 1e-5, 1e-7


@dataclass(repr=False)
class Chosen:
    """A call, its chosen heads and rows, and how it is observed."""

    case: Case
    heads: list[int]
    rows: Any
    only: bool
    lse: str
    kind: str
    block: int

    def __repr__(self) -> str:
        return f"Chosen({vars(self)})"


@st.composite
def choices(draw: st.DrawFn) -> Chosen:
    case = draw(cases())
    lead, heads, queries, _ = sizes_of(case)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    rows: Any = draw(st.sampled_from((None, None, "sample", "mask")))
    if rows == "sample":
        rows = draw(st.integers(1, queries + 2))
    elif rows == "mask":
        shape = draw(st.sampled_from(((queries,), (heads, queries), (*lead, heads, queries), (*lead, 1, 1))))
        rows = torch.rand(shape, generator=random) < 0.6
    return Chosen(
        case,
        sorted(draw(st.sets(st.integers(0, heads - 1), min_size=1))),
        rows,
        draw(st.booleans()),
        draw(st.sampled_from(("none", "own", "other"))),
        draw(st.sampled_from(("self", "cross"))),
        draw(st.sampled_from((1 << 19, 1, 10, 64))),
    )


def queries_of(rows: Any, queries: int) -> list[int]:
    if rows is None or (isinstance(rows, int) and rows >= queries):
        return [*range(queries)]
    if isinstance(rows, int):
        return [(2 * r + 1) * queries // (2 * rows) for r in range(rows)]
    table = rows.expand(*rows.shape[:-1], queries)
    return [i for i in range(queries) if bool(table[..., i].any())]


def check(chosen: Chosen) -> None:
    case = chosen.case
    lead, _, queries, _ = sizes_of(case)
    told = {**case.tensors(), **case.numbers, "seen": case.seen}
    rows = queries_of(chosen.rows, queries)
    exact = oracle_weights.weights_of_heads(told, chosen.heads, rows)
    wide = {name: x.to(accumulate_dtype(case.q.dtype)) for name, x in case.tensors().items()}
    plain = oracle.plain(**wide, **case.numbers, seen=case.seen).weights
    plain = plain.reshape(-1, *plain.shape[-3:]) if plain.numel() else plain.reshape(math.prod(lead), *plain.shape[-3:])
    lse, factor = None, 1.0
    if chosen.lse != "none":
        lse = oracle.attention(**told).lse.to(wide["q"].dtype)
    if lse is not None and chosen.lse == "other":
        lse, factor = lse + 0.7, math.exp(-0.7)
    what = Observe(rows=chosen.rows, weights=chosen.heads, **(ONLY if chosen.only else {}))
    usual, inputs.BLOCK = inputs.BLOCK, chosen.block
    try:
        options: Any = {**case.tensors(), **case.numbers, "kind": chosen.kind}
        stats = observe(**options, lse=lse, mask=case.mask, what=what)
    finally:
        inputs.BLOCK = usual
    (run,) = stats.weights_runs
    if math.prod(lead) == 0:  # a mask of rows selects none
        assert run.p.shape[0] == 0
        return
    assert (run.heads, run.queries.tolist(), run.length) == (tuple(chosen.heads), rows, queries)
    for head in chosen.heads:
        got, wanted = run.of(head), factor * exact[head]
        assert got.dtype == wide["q"].dtype
        assert got.shape == wanted.shape
        assert torch.equal(got.isnan(), wanted.isnan())
        assert not bool(got[wanted == 0].abs().gt(0).any()) or factor != 1.0
        apart = (got.double() - wanted).nan_to_num(0.0).abs()
        room = 1e-3 if case.q.dtype == torch.float64 else 1.0
        noise = (factor * plain[:, head][:, rows].double() - wanted).nan_to_num(0.0).abs()
        noise = noise.max() if noise.numel() else 0.0
        bound = room * (RELATIVE * wanted.nan_to_num(0.0) + ABSOLUTE) + 4 * noise
        if chosen.lse != "none":  # a specified lse is rounded
            finite = torch.as_tensor(lse).double().nan_to_num(0.0, 0.0, 0.0).abs()
            bound = bound + 1e-6 * (1 + (finite.max() if finite.numel() else 0)) * wanted.nan_to_num(0.0)
        assert bool((apart <= bound).all()), (head, float(apart.max()))


@settings(max_examples=50, deadline=None)
@given(choices())
def test_weights_are_those_of_float64(chosen: Chosen) -> None:
    check(chosen)


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@given(choices())
def test_weights_are_those_of_float64_in_many_calls(chosen: Chosen) -> None:
    check(chosen)


def call(
    queries: int = 11, keys: int = 13, heads: int = 6, kv_heads: int = 3, batch: int = 2, seed: int = 0
) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(queries + keys + 1000 * seed)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return tuple(torch.randn(batch, *size, 8, generator=random) for size in sizes)


def test_attending_gives_the_same_bits_with_weights_and_without() -> None:
    q, k, v = call()
    plain = attend(q, k, v, mask=masks.causal(), observe=Observe())
    for what in (Observe(weights=(1, 4)), Observe(weights=(1, 4), **ONLY)):
        for _ in range(3):  # the second time is the short way of similar calls
            result = attend(q, k, v, mask=masks.causal(), observe=what)
            assert torch.equal(result.out, plain.out)
            assert torch.equal(result.lse, plain.lse)
            assert result.stats is not None
            p = headscope.functional.weights(q, k, mask=masks.causal())
            torch.testing.assert_close(result.stats.weights[4], p[:, 4])
            q2 = 2 * q  # other tensors of the same sizes
            again = attend(q2, k, v, mask=masks.causal(), observe=what).stats
            assert again is not None
            torch.testing.assert_close(again.weights[1], headscope.functional.weights(q2, k, mask=masks.causal())[:, 1])


def test_counts_are_those_of_other_statistics_if_only_weights_are_measured() -> None:
    q, k, v = call(7, 11)
    hidden = torch.zeros(2, 1, 7, 11, dtype=torch.bool)
    hidden[0, 0, 2:] = True
    hidden[1, 0, :, 3:] = True
    k[1, 2, 5, 0] = torch.nan  # of query heads 4 and 5
    what = Observe(weights=(0, 4, 5))
    whole = observe(q, k, v, mask=hidden, kind="cross", what=what)
    only = observe(q, k, v, mask=hidden, kind="cross", what=Observe(weights=(0, 4, 5), **ONLY))
    assert torch.equal(only.rows, whole.rows)
    assert torch.equal(only.broken, whole.broken)
    assert torch.equal(only.weights[4].isnan(), hidden[:, 0] & torch.tensor([False, True])[:, None, None])
    assert only.names == ()


def test_a_sample_of_rows_names_its_queries() -> None:
    q, k, v = call()
    stats = observe(q, k, v, what=Observe(weights=[5], rows=3, keep_rows=True))
    assert stats.weights_rows.tolist() == stats.kept[0].queries.tolist() == [1, 5, 9]
    whole = observe(q, k, v, what=Observe(weights=[5]))
    torch.testing.assert_close(stats.weights[5], whole.weights[5][:, [1, 5, 9]])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"weights": 3}, TypeError, "weights: got int, expected a tuple of heads"),
        ({"weights": "03"}, TypeError, "weights: got str"),
        ({"weights": [1.5]}, TypeError, "weights: got float"),
        ({"weights": [-1]}, ValueError, "weights: got -1, expected a whole number from 0"),
        ({"weights": [2, 2]}, ValueError, "expected each head once"),
        ({"weights_gib": 0}, ValueError, "weights_gib: got 0"),
        ({"weights_gib": math.inf}, ValueError, "weights_gib: got inf"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Observe(**options)


def test_a_head_that_does_not_exist() -> None:
    q, k, v = call()
    for what in (Observe(weights=[0, 6]), Observe(weights=[0, 6], **ONLY)):
        with pytest.raises(ValueError, match="weights: head 6 does not exist; expected heads 0 to 5"):
            observe(q, k, v, what=what)
        with pytest.raises(ValueError, match="weights: head 6 does not exist"):
            attend(q, k, v, observe=what)


def test_weights_that_do_not_fit_raise_before_anything_is_measured() -> None:
    length = 1 << 20  # 16 TiB of weights: far more than any machine of the tests has
    q = torch.zeros(1, 1, 1, 1).expand(1, 4, length, 1)
    text = (
        r"weights: those of heads 0, 1, 2, 3, \[B, heads, R, K\] = \[1, 4, 1048576, 1048576\], need 1.64e\+04 GiB; "
        r"expected at most 2 GiB; observe fewer rows \(rows=\) or heads, .*tile\(...\), or raise weights_gib="
    )
    with pytest.raises(ValueError, match=text):
        observe(q, q, what=Observe(weights=range(4)))
    with pytest.raises(ValueError, match=r"\[1, 4, 2, 1048576\], need 0.0312 GiB; expected at most 0.01 GiB"):
        observe(q, q, what=Observe(weights=range(4), rows=2, weights_gib=0.01))
    some = torch.zeros(length, dtype=torch.bool)
    some[[7, 100, 1000]] = True
    with pytest.raises(ValueError, match=r"\[1, 4, 3, 1048576\]"):
        observe(q, q, what=Observe(weights=range(4), rows=some, weights_gib=0.01))


def test_what_was_not_observed_is_an_error() -> None:
    q, k, v = call()
    stats = observe(q, k, v, what=Observe(weights=[1, 3]))
    with pytest.raises(ValueError, match=r"head: got 2, .* were not observed; expected one of the heads 1, 3"):
        stats.weights_of(2)
    with pytest.raises(ValueError, match=r"weights: were not observed; observe with Observe\(weights=\(0, 5\)\)"):
        _ = observe(q, k, v).weights
    with pytest.raises(ValueError, match="there are 2 layers"):
        _ = HeadStats({"a": stats.parts["0"], "b": stats.parts["0"]}).weights


# ---------------------------------------------------------------- runs and sequences


def steps(lengths: list[int]) -> tuple[list[HeadStats], Tensor]:
    """Observe the steps of a sequence with a cache; return also the weights of head 1, by definition."""
    q, k, v = call(sum(lengths), sum(lengths), 4, 2)
    seen = torch.ones(q.shape[2], q.shape[2]).tril().bool()
    told = {"q": q, "k": k, "v": v, "seen": seen}
    exact = oracle_weights.weights_of_heads(told, [1], range(q.shape[2]))[1]
    parts: list[HeadStats] = []
    end = 0
    for length in lengths:
        start, end = end, end + length
        cut = (q[:, :, start:end], k[:, :, :end], v[:, :, :end])
        parts.append(observe(*cut, mask=masks.causal(), what=Observe(weights=[1, 2])))
    return parts, exact


def test_runs_of_a_sequence_with_a_cache_are_joined() -> None:
    parts, exact = steps([5, 1, 1, 3, 1])
    stats = merge(*parts)
    assert [run.p.shape for run in stats.weights_runs] == [
        (2, 2, n, k) for n, k in ((5, 5), (1, 6), (1, 7), (3, 10), (1, 11))
    ]
    wanted = oracle_weights.joined([run.of(1)[0] for run in stats.weights_runs], 11)
    assert torch.equal(stats.weights[1][0].double(), wanted)
    torch.testing.assert_close(stats.weights[1].double(), exact, rtol=RELATIVE, atol=ABSOLUTE)
    assert stats.weights_rows.tolist() == [*range(11)]
    assert merge(merge(*parts[:2]), merge(*parts[2:])).weights[2].equal(stats.weights[2])


def test_runs_of_several_sequences_are_a_list() -> None:
    parts, exact = steps([5, 1, 1])
    for several, shapes in (
        ([*parts, *parts], [(2, 7, 7), (2, 7, 7)]),
        ([parts[0], parts[2]], [(2, 5, 5), (2, 1, 7)]),  # a step was not recorded
        ([parts[1], parts[0]], [(2, 1, 6), (2, 5, 5)]),
    ):
        stats = merge(*several)
        assert [p.shape for p in stats.weights_of(1)] == shapes
        with pytest.raises(ValueError, match=r"the runs are of 2 sequences, expected one; use weights_of\(head\)"):
            _ = stats.weights
    torch.testing.assert_close(merge(*parts, *parts).weights_of(1)[1].double(), exact, rtol=RELATIVE, atol=ABSOLUTE)


def test_steps_of_cross_attention_are_joined_where_the_keys_are_the_same() -> None:
    q, k, v = call(7, 13)
    what = Observe(weights=[3])

    def step(start: int, stop: int, keys: Tensor = k) -> HeadStats:
        return observe(q[:, :, start:stop], keys, v, kind="cross", what=what)

    whole = observe(q, k, v, kind="cross", what=what).weights[3]
    joined = merge(step(0, 4), step(4, 5), step(5, 6), step(6, 7))
    torch.testing.assert_close(joined.weights[3], whole)
    assert joined.weights_rows.tolist() == [*range(7)]
    other = merge(step(0, 1), step(1, 2), step(0, 1, 2 * k), step(1, 2, 2 * k))  # another source
    assert [p.shape for p in other.weights_of(3)] == [(2, 2, 13), (2, 2, 13)]
    assert [p.shape for p in merge(step(0, 4), step(0, 4)).weights_of(3)] == [(2, 4, 13), (2, 4, 13)]
    assert [p.shape for p in merge(step(0, 4), observe(q, k, v, what=what)).weights_of(3)] == [(2, 4, 13), (2, 7, 13)]


def test_a_cache_that_slides_keeps_its_columns() -> None:
    q, k, v = call(6, 6, 2, 2)
    what, window = Observe(weights=[0]), 3
    parts: list[HeadStats] = []
    for i in range(6):
        first = max(0, i + 1 - window)
        at = slice(first, i + 1)
        place = {"q_pos": torch.tensor([i]), "k_pos": torch.arange(first, i + 1)}
        parts.append(observe(q[:, :, i : i + 1], k[:, :, at], v[:, :, at], what=what, **place))
    p = headscope.functional.weights(q, k, mask=masks.window(window))
    torch.testing.assert_close(merge(*parts).weights[0], p[:, 0])


def test_a_cache_with_room_is_joined_by_the_offset_of_its_mask() -> None:
    q, k, v = call(6, 11, 2, 2)
    parts: list[HeadStats] = []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        mask = masks.Band(None, 0, offset=start)
        parts.append(observe(q[:, :, start:stop], k, v, mask=mask, what=Observe(weights=[1])))
    p = headscope.functional.weights(q, k, mask=masks.Band(None, 0, offset=0))
    torch.testing.assert_close(merge(*parts).weights[1], p[:, 1])


def test_merging_refuses_other_heads_and_parts_without_weights() -> None:
    q, k, v = call()
    some = observe(q, k, v, what=Observe(weights=[0, 1]))
    with pytest.raises(ValueError, match=r"layer 0: weights: cannot merge those of heads 0, 1 with those of 2"):
        merge(some, observe(q, k, v, what=Observe(weights=[2])))
    with pytest.raises(ValueError, match="weights: cannot merge, only one of the two has it"):
        merge(some, observe(q, k, v))


# ---------------------------------------------------------------- files and copies


def test_weights_are_saved_loaded_copied_and_moved(tmp_path: Any) -> None:
    parts, last = (several := steps([5, 1, 1, 1])[0])[:3], several[3]
    stats = merge(*parts)
    loaded = HeadStats.load(stats.save(tmp_path / "stats.safetensors"))
    for other in (loaded, copy.deepcopy(stats), stats.to("cpu"), HeadStats.load(loaded.save(tmp_path / "again"))):
        assert torch.equal(other.weights[2], stats.weights[2])
        assert torch.equal(other.weights_rows, stats.weights_rows)
        assert [run.length for run in other.weights_runs] == [5, 1, 1]
    assert merge(loaded, last).weights[1].shape == (2, 8, 8)
    moved = stats.to("meta").parts["0"].weights[0]
    assert (moved.p.device.type, moved.queries.device.type, moved.place.device.type) == ("meta", "meta", "meta")


def test_the_dictionary_names_heads_and_sizes() -> None:
    parts, _ = steps([5, 1])
    entry = merge(*parts).to_dict()["layers"]["0"]
    assert entry["weights"] == {"heads": [1, 2], "shapes": [[2, 5, 5], [2, 1, 6]]}
    q, k, v = call()
    assert "weights" not in observe(q, k, v).to_dict()["layers"]["0"]


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_of_two_texts_in_turns_are_not_joined(batch: int) -> None:
    """They stand at the positions that follow each other, but the keys before them are not the same."""
    texts = [[x[:batch] for x in call(8, 8, 4, 2, seed)] for seed in (1, 2)]
    what = Observe(weights=[1])

    def step(text: int, start: int, stop: int) -> HeadStats:
        q, k, v = texts[text]
        return observe(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask=masks.causal(), what=what)

    turns = merge(*(step(text, *at) for at in ((0, 5), (5, 6), (6, 7), (7, 8)) for text in (0, 1)))
    shapes = [(5, 5), (5, 5), (1, 6), (1, 6), (1, 7), (1, 7), (1, 8), (1, 8)]
    assert [p.shape[1:] for p in turns.weights_of(1)] == shapes
    after = merge(step(0, 0, 5), step(0, 5, 6), step(1, 6, 7), step(1, 7, 8))
    assert [p.shape[1:] for p in after.weights_of(1)] == [(6, 6), (2, 8)]


def test_steps_of_a_beam_search_are_joined_where_it_moves_the_entries() -> None:
    q, k, v = call(8, 8, 4, 2)
    parts: list[HeadStats] = []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8)):
        cut = (q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])
        parts.append(observe(*cut, mask=masks.causal(), what=Observe(weights=[1])))
        q, k, v = (x[[1, 1]] if start == 5 else x[[1, 0]] for x in (q, k, v))
    assert [p.shape for p in merge(*parts).weights_of(1)] == [(2, 8, 8)]


def test_steps_of_files_without_keys_are_joined_by_their_positions() -> None:
    runs = [part.weights_runs[0] for part in steps([5, 1, 1])[0]]
    earlier = [HeadWeights(run.heads, run.queries, run.p, run.length, run.place) for run in runs]
    for several in (runs, earlier, [runs[0], *earlier[1:]]):
        assert [p.shape[1:] for p, _ in sequences(several, 1)] == [(7, 7)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keys_that_differ_by_a_bit_are_not_of_one_sequence(dtype: torch.dtype, tmp_path: Any) -> None:
    q, k, v = (x.to(dtype) for x in call(8, 8, 4, 4))
    first = observe(q[:, :, :5], k[:, :, :5], v[:, :, :5], mask=masks.causal(), what=Observe(weights=[1]))
    loaded = HeadStats.load(first.save(tmp_path / "first"))
    for changed in (False, True):
        if changed:
            k[:, 0, 4, 7] = torch.nextafter(k[:, 0, 4, 7], k.new_tensor(9.0))
        step = observe(q[:, :, 5:6], k[:, :, :6], v[:, :, :6], mask=masks.causal(), what=Observe(weights=[1]))
        shapes = [(5, 5), (1, 6)] if changed else [(6, 6)]
        for before in (first, loaded):
            assert [p.shape[1:] for p in merge(before, step).weights_of(1)] == shapes
