"""The mask algebra: values, predicates, and the plan against the whole matrix."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from headscope import attention, observe
from headscope._attend import prepare
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Plan, Prefix, _base, causal, window
from support import oracle

SIZES = [(2, 3, 5, 7), (2, 1, 7, 7), (3, 2, 11, 5), (1, 1, 1, 13), (2, 2, 13, 1), (1, 1, 1, 1)]


class Pair(NamedTuple):
    """A mask and the predicate that it should come to."""

    mask: Mask
    sees: oracle.Predicate


def primitives(sizes: tuple[int, int, int, int]) -> dict[str, Pair]:
    """At least one of every kind, for the given sizes."""
    batch, heads, queries, keys = sizes
    random = torch.Generator().manual_seed(sum(sizes))
    starts = [keys - queries - 1 + b for b in range(batch)]
    lengths = [(keys * (b + 1)) // (batch + 1) for b in range(batch)]
    runs = [torch.sort(torch.randint(3, (batch, n), generator=random)).values for n in (queries, keys)]
    mixed = [torch.randint(3, (batch, n), generator=random) for n in (queries, keys)]
    one_row = torch.randint(2, (1, queries), generator=random, dtype=torch.int32)
    dense = torch.rand(batch, heads, queries, keys, generator=random) < 0.5
    by_key = torch.rand(keys, generator=random) < 0.5
    return {
        "causal": Pair(causal(), oracle.band(None, 0, keys - queries)),
        "top-left": Pair(Band(None, 0, offset=0), oracle.band(None, 0, 0)),
        "window": Pair(window(3), oracle.band(2, 0, keys - queries)),
        "ahead": Pair(Band(-1, 2), oracle.band(-1, 2, keys - queries)),
        "each": Pair(Band(1, 1, offset=starts), oracle.band(1, 1, starts)),
        "each tensor": Pair(Band(None, 0, offset=torch.tensor(starts)), oracle.band(None, 0, starts)),
        "one tensor": Pair(Band(2, None, offset=torch.tensor(1)), oracle.band(2, None, 1)),
        "nothing": Pair(Band(-9, -9), oracle.band(-9, -9, keys - queries)),
        "prefix": Pair(Prefix(2), oracle.prefix(2)),
        "lengths": Pair(KeyLengths(torch.tensor(lengths)), oracle.key_lengths(lengths)),
        "runs": Pair(Documents(*runs), oracle.documents(*(x.tolist() for x in runs))),
        "mixed": Pair(Documents(*mixed), oracle.documents(*(x.tolist() for x in mixed))),
        "one row": Pair(
            Documents(one_row, mixed[1]), oracle.documents(one_row.expand(batch, -1).tolist(), mixed[1].tolist())
        ),
        "dense": Pair(Dense(dense), oracle.dense(dense, sizes)),
        "dense by key": Pair(Dense(by_key), oracle.dense(by_key, sizes)),
    }


def of_plan(plan: Plan, sizes: tuple[int, int, int, int]) -> Tensor:
    """The matrix that a plan stands for, put together from its tiles."""
    batch, heads, queries, keys = sizes
    seen = torch.empty(sizes, dtype=torch.bool)
    for b, i, j in itertools.product(range(batch), range(0, queries, 2), range(0, keys, 3)):
        at = (slice(b, b + 1), slice(0, heads), slice(i, min(i + 2, queries)), slice(j, min(j + 3, keys)))
        seen[at] = plan.tile(*at)
    return seen


def check(pair: Pair, sizes: tuple[int, int, int, int], name: str) -> None:
    """``dense``, ``plan`` and what the plan says of itself, against the predicate."""
    wanted = oracle.table(pair.sees, sizes)
    torch.testing.assert_close(pair.mask.dense(*sizes), wanted, msg=f"dense of {name} at {sizes}")
    plan = pair.mask.plan(*sizes)
    torch.testing.assert_close(of_plan(plan, sizes), wanted, msg=f"plan of {name} at {sizes}")
    low, high = plan.spans[..., 0], plan.spans[..., 1]
    keys = sizes[3]
    assert plan.spans.shape[2] in (1, 2), f"{name}: {plan.spans.shape[2]} spans"
    empty = (low == keys) & (high == keys)
    assert (empty | ((low >= 0) & (low < high) & (high <= keys))).all(), f"{name}: spans {plan.spans.tolist()}"
    if plan.spans.shape[2] == 2:
        assert (high[..., 0] < low[..., 1]).logical_or(empty[..., 1]).all(), f"{name}: not ascending and disjoint"
    assert plan.bounds is not None
    for i in range(sizes[2]):
        first, last = plan.bounds[i if len(plan.bounds) > 1 else 0].tolist()
        outside = [j for j in range(keys) if not first <= j < last]
        assert not wanted[:, :, i, outside].any(), f"{name}: query {i} sees keys outside [{first}, {last})"
        inside = wanted[:, :, i].flatten(0, 1).any(0).nonzero().flatten().tolist() if len(plan.bounds) > 1 else []
        if plan.rest is None and inside:
            assert (first, last) == (inside[0], inside[-1] + 1), f"{name}: query {i} has bounds [{first}, {last})"
    assert not plan.everything or wanted.all(), f"{name}: says everything"
    assert not plan.is_causal or torch.equal(wanted[0, 0], torch.ones_like(wanted[0, 0]).tril()), f"{name}: says causal"
    assert plan.may_be_empty or wanted.any(-1).all(), f"{name}: says that no row is empty"


# ---------------------------------------------------------------- values


def test_masks_without_tensors_compare_by_value() -> None:
    for make in (
        lambda: Band(3, 1),
        lambda: Band(3, 1, (2, 4)),
        lambda: Prefix(4),
        causal,
        lambda: window(5) & Prefix(2),
    ):
        one, other = make(), make()
        assert one == other, f"{one} is not {other}"
        assert hash(one) == hash(other), f"{one} and {other} hash differently"
    assert Band(1, 0, [2, 3]) == Band(1, 0, (2, 3))
    distinct = [
        Band(1, 0),
        Band(0, 1),
        Band(1, 0, offset=0),
        Prefix(1),
        Prefix(2),
        causal() & Prefix(1),
        causal() | Prefix(1),
    ]
    for one, other in itertools.combinations(distinct, 2):
        assert one != other, f"{one} equals {other}"


def test_masks_with_tensors_compare_by_identity() -> None:
    ids = torch.tensor([[0, 0, 1]])
    makers: list[Callable[[], Mask]] = [
        lambda: Dense(torch.ones(3, dtype=torch.bool)),
        lambda: KeyLengths(torch.tensor([2])),
        lambda: Documents(ids),
        lambda: Band(None, 0, offset=torch.tensor([1])),
    ]
    for make in makers:
        one, other = make(), make()
        assert one == one, f"{one} is not itself"
        assert one != other, f"{one} equals another of the same values"
        assert hash(one) == hash(one)
        assert (one & Prefix(1)) == (one & Prefix(1)), "the same parts"
        assert (one & Prefix(1)) != (other & Prefix(1)), "other parts"


def test_window_and_causal() -> None:
    assert causal() == Band(None, 0)
    assert window(4) == Band(3, 0)
    with pytest.raises(
        ValueError, match=re.escape("n: window(0) would mask every key; expected at least 1 (the query's own key)")
    ):
        window(0)
    for name, make in (
        ("tensor", lambda: Dense(None)),  # pyright: ignore[reportArgumentType]
        ("q_ids", lambda: Documents(None)),  # pyright: ignore[reportArgumentType]
        ("lengths", lambda: KeyLengths("x")),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(
            TypeError, match=f"{name}: got (NoneType|str), expected a tensor, or values that torch.as_tensor converts"
        ):
            make()
    with pytest.raises(TypeError, match=re.escape("n: window(n): expected a whole number, got NoneType")):
        window(None)  # pyright: ignore[reportArgumentType]


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    two = np.int64(2)
    assert (window(two), Prefix(two)) == (window(2), Prefix(2))
    assert Band(two, two, offset=[two, 1]) == Band(2, 2, offset=(2, 1))
    assert {type(x) for x in (Prefix(two).n, Band(two).left, Band(None, two).right)} == {int}


@pytest.mark.parametrize("use", [bool, lambda mask: mask and mask, lambda mask: not mask], ids=["bool", "and", "not"])
def test_a_mask_has_no_truth_value(use: Callable[[Mask], object]) -> None:
    for mask in (causal(), Prefix(1) & causal(), Dense(torch.tensor(True))):
        with pytest.raises(
            TypeError, match=r"mask: has no truth value; combine masks with & and \|, not with `and` and `or`"
        ):
            use(mask)


def test_only_masks_combine() -> None:
    with pytest.raises(
        TypeError,
        match=r"mask: & and \| combine two masks, got Tensor; for a boolean tensor, use masks\.Dense\(tensor\)",
    ):
        causal() & torch.tensor(True)  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(
        TypeError,
        match=r"mask: & and \| combine two masks, got int",
    ):
        causal() | 1  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError, match=r"got Tensor; for a boolean tensor, use masks.Dense\(tensor\)"):
        torch.tensor(True) & causal()  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError, match="mask: ~ is not supported"):
        ~causal()


def test_lengths_and_ids_may_be_lists() -> None:
    assert KeyLengths([2, 0]).dense(2, 1, 1, 3).tolist() == [[[[True, True, False]]], [[[False, False, False]]]]
    assert Documents([[0, 1]], [[0, 1, 1]]).dense(1, 1, 2, 3)[0, 0].tolist() == [
        [True, False, False],
        [False, True, True],
    ]
    assert Dense([[True], [False]]).dense(1, 1, 2, 2)[0, 0].tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("name", list(primitives((2, 3, 5, 7))))
def test_pickle_and_deepcopy_keep_the_meaning(name: str) -> None:
    sizes = (2, 3, 5, 7)
    mask = primitives(sizes)[name].mask & Prefix(6)
    mask.plan(*sizes)
    for copied in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert "_plans" not in copied.__dict__, "plans kept for other tensors"
        torch.testing.assert_close(copied.dense(*sizes), mask.dense(*sizes))
        torch.testing.assert_close(of_plan(copied.plan(*sizes), sizes), of_plan(mask.plan(*sizes), sizes))


# ---------------------------------------------------------------- predicates and plans


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_allows_is_the_predicate(sizes: tuple[int, int, int, int]) -> None:
    for name, pair in primitives(sizes).items():
        mask = pair.mask.at(sizes[2], sizes[3])
        for b, h, i, j in itertools.product(*(sorted({0, size - 1}) for size in sizes)):
            got = mask.allows(*(torch.tensor(index) for index in (b, h, i, j)))
            assert bool(got) == pair.sees(b, h, i, j), f"{name} at {(b, h, i, j)} of {sizes}"


class OddSum(Mask):
    """A mask of one's own that differs between batch entries and heads."""

    def allows(self, b: _base.Index, h: _base.Index, i: _base.Index, j: _base.Index) -> Tensor:
        return torch.as_tensor((b + h + i + j) % 2 == 1)


def test_a_part_of_a_mask_is_that_part_of_its_matrix() -> None:
    sizes = (3, 5, 4, 7)
    masks = {name: pair.mask for name, pair in primitives(sizes).items()}
    masks |= {"own": OddSum(), "turned": causal().reverse_queries(4, 7), "both": OddSum() & masks["dense"] | Prefix(1)}
    for name, mask in masks.items():
        whole = mask.dense(*sizes)
        for entries, heads in ((range(1, 3), range(2, 5)), (range(3), range(1, 2)), (range(2, 3), range(5))):
            part = mask.part(entries, heads, sizes[:2])
            own = (len(entries), len(heads), *sizes[2:])
            expected = whole[entries.start : entries.stop, heads.start : heads.stop]
            torch.testing.assert_close(part.dense(*own), expected, msg=f"dense of {name}")
            torch.testing.assert_close(of_plan(part.plan(*own), own), expected, msg=f"plan of {name}")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_plan_of_each(sizes: tuple[int, int, int, int]) -> None:
    for name, pair in primitives(sizes).items():
        check(pair, sizes, name)


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_plan_of_two(sizes: tuple[int, int, int, int]) -> None:
    for (name, one), (other_name, other) in itertools.product(primitives(sizes).items(), repeat=2):
        check(Pair(one.mask & other.mask, oracle.both(one.sees, other.sees)), sizes, f"{name} & {other_name}")
        check(Pair(one.mask | other.mask, oracle.either(one.sees, other.sees)), sizes, f"{name} | {other_name}")


def test_plan_of_three() -> None:
    sizes = (2, 1, 5, 7)
    parts = {
        name: pair for name, pair in primitives(sizes).items() if name not in ("each", "top-left", "one row", "runs")
    }
    for (a, one), (b, two), (c, three) in itertools.combinations(parts.items(), 3):
        both, either = oracle.both(one.sees, two.sees), oracle.either(one.sees, two.sees)
        check(Pair(one.mask & two.mask | three.mask, oracle.either(both, three.sees)), sizes, f"{a} & {b} | {c}")
        check(Pair((one.mask | two.mask) & three.mask, oracle.both(either, three.sees)), sizes, f"({a} | {b}) & {c}")
        check(Pair(three.mask & (one.mask | two.mask), oracle.both(either, three.sees)), sizes, f"{c} & ({a} | {b})")


def test_two_pairs_of_spans() -> None:
    """An intersection that comes to three intervals still means the same."""
    sizes = (1, 1, 9, 17)
    one = Pair(Prefix(5) | Band(1, 0), oracle.either(oracle.prefix(5), oracle.band(1, 0, 8)))
    other = Pair(Prefix(2) | Band(6, 0), oracle.either(oracle.prefix(2), oracle.band(6, 0, 8)))
    check(Pair(one.mask & other.mask, oracle.both(one.sees, other.sees)), sizes, "two pairs")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_documents_one_behind_the_other(dtype: torch.dtype) -> None:
    """Numbered upwards they are planned in a way of their own; two tensors of equal numbers go the way of any."""
    random = torch.Generator().manual_seed(6)
    for batch, length in itertools.product((1, 3), (1, 2, 9, 40)):
        for most in (1, 2, 5, 60):
            low = 0 if dtype == torch.uint8 else -2
            ids = torch.randint(low, most, (batch, length), generator=random).sort(-1).values.to(dtype)
            sizes = (3, 2, length, length)
            packed, usual = Documents(ids).plan(*sizes), Documents(ids, ids.clone()).plan(*sizes)
            assert (packed.rest, usual.rest) == (None, None)
            assert torch.equal(packed.spans, usual.spans), f"{ids.tolist()}: {packed.spans.tolist()}"
            assert packed.everything == usual.everything
            check(Pair(Documents(ids), oracle.documents(*2 * [ids.expand(3, -1).tolist()])), sizes, f"{ids.tolist()}")


def test_documents_of_nothing_and_beside_another_default_device() -> None:
    nothing = torch.zeros(0, 2, 6, 8)
    assert (
        attention(nothing, nothing, nothing, mask=Documents(torch.zeros(0, 6, dtype=torch.long))).shape == nothing.shape
    )
    ids, q = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]]), torch.randn(2, 1, 4, 8)
    wanted = attention(q, q, q, mask=Documents(ids))
    with torch.device("meta"):
        torch.testing.assert_close(attention(q, q, q, mask=Documents(ids)), wanted, rtol=0, atol=0)


def test_prepared_calls_have_a_limit_for_the_length_of_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that changes with every call must not fill memory; a long plan is not stored at all."""
    table = prepare.PreparedCalls(most_rows=1000)
    monkeypatch.setattr(prepare, "prepared_calls", table)

    def lengths() -> list[int]:
        return [0 if call.plan is None else call.plan.spans.shape[1] for call in table.values()]

    for length in range(100, 200):
        q = torch.zeros(1, 1, length, 1)
        attention(q, q, q, mask=causal())
        assert lengths()[-1] == length
        assert sum(lengths()) == table.rows <= 1000
    before = lengths()
    q = torch.zeros(1, 1, 600, 1)
    attention(q, q, q, mask=causal())
    assert lengths() == before
    attention(q, q, q)
    assert lengths() == [*before, 0]


def test_what_plans_know_of_themselves() -> None:
    def plan(mask: Mask, queries: int = 7, keys: int = 7) -> Plan:
        return mask.plan(2, 3, queries, keys)

    assert plan(causal()).is_causal
    assert plan(Band(None, 0, offset=0)).is_causal
    assert plan(causal() & Prefix(7)).is_causal
    assert not plan(causal(), 5).is_causal
    assert not plan(window(6)).is_causal
    assert plan(window(7)).is_causal, "as wide as the matrix"
    assert plan(Prefix(7)).everything
    assert plan(Band(), 5, 7).everything
    assert plan(KeyLengths(torch.tensor([7, 9]))).everything
    assert plan(Documents(torch.zeros(2, 7, dtype=torch.long))).everything
    assert not plan(Prefix(6)).everything
    assert plan(Dense(torch.ones(7, 7, dtype=torch.bool))).full
    assert not plan(Dense(torch.ones(7, 7, dtype=torch.bool))).everything, "its values are not read"
    assert plan(causal(), 9).may_be_empty, "more queries than keys: the first rows stand before the first key"
    assert not plan(causal(), 5).may_be_empty
    assert plan(KeyLengths(torch.tensor([3, 0]))).may_be_empty
    assert plan(Documents(torch.tensor([[0, 0, 0, 1, 1, 2, 2]]))).rest is None, (
        "documents one after the other are spans"
    )
    assert plan(Documents(torch.tensor([[0, 1, 0, 1, 1, 2, 2]]))).rest is not None
    assert plan(Prefix(2) | window(3)).rest is None, "two spans"


def test_a_reach_without_end() -> None:
    far = sys.maxsize
    for mask in (Band(far, far), Band(far, None), Band(None, far), Band(far, 10**30)):
        assert mask.plan(1, 1, 5, 3).everything, f"{mask} hides something"
        assert mask.dense(1, 1, 5, 3).all(), f"{mask} hides something"
    assert window(far).plan(1, 1, 5, 5).is_causal
    torch.testing.assert_close(Band(-far, None).dense(1, 1, 5, 3), torch.zeros(1, 1, 5, 3, dtype=torch.bool))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 5), (2, 2, 0, 5), (2, 2, 3, 0), (0, 1, 0, 0)], ids=str)
def test_axes_of_size_0(sizes: tuple[int, int, int, int]) -> None:
    batch, _, queries, keys = sizes
    ids = [torch.zeros(rows, n, dtype=torch.long) for rows, n in ((1, queries), (batch, keys))]
    lengths = torch.zeros(batch, dtype=torch.long)
    for mask in (
        causal(),
        Prefix(2),
        KeyLengths(lengths),
        Documents(*ids),
        Band(0, 0, offset=lengths),
        Dense(torch.tensor(True)),
    ):
        for combined in (mask, mask & window(2), mask | Prefix(1), (mask | window(1)) & Prefix(3)):
            assert combined.dense(*sizes).shape == sizes, f"{combined}"
            assert combined.plan(*sizes).tile(*(slice(0, size) for size in sizes)).expand(sizes).shape == sizes


def test_empty_rows_of_a_band() -> None:
    """Queries before the first key and after the last see nothing."""
    seen = Band(1, 0, offset=-2).dense(1, 1, 7, 3)[0, 0]
    assert seen.any(-1).tolist() == [False, False, True, True, True, True, False]


def test_is_bottom_right_by_default_and_top_left_with_offset_0() -> None:
    assert causal().dense(1, 1, 2, 5)[0, 0].sum(-1).tolist() == [4, 5]
    assert Band(None, 0, offset=0).dense(1, 1, 2, 5)[0, 0].sum(-1).tolist() == [1, 2]
    assert Band(None, 0, offset=(0, 3)).dense(2, 1, 2, 5)[:, 0].sum(-1).tolist() == [[1, 2], [4, 5]]


def test_key_lengths_do_not_move_the_diagonal() -> None:
    seen = (causal() & KeyLengths(torch.tensor([3]))).dense(1, 1, 5, 5)[0, 0]
    assert seen.sum(-1).tolist() == [1, 2, 3, 3, 3]


# ---------------------------------------------------------------- what is kept


def test_plans_are_kept() -> None:
    lengths = KeyLengths(torch.tensor([3, 5]))
    assert lengths.plan(2, 1, 4, 7) is lengths.plan(2, 1, 4, 7), "with the mask"
    assert lengths.plan(2, 1, 4, 7) is not lengths.plan(2, 1, 4, 8)
    assert window(3).plan(2, 1, 4, 7) is window(3).plan(2, 1, 4, 7), "by value"


def test_few_plans_are_kept_with_a_mask() -> None:
    lengths = KeyLengths(torch.tensor([3]))
    for keys in range(1, 3 * _base.PLANS):
        lengths.plan(1, 1, 1, keys)
    assert len(lengths.__dict__["_plans"]) <= _base.PLANS


def test_a_change_in_place_is_noticed() -> None:
    sizes = (2, 1, 3, 7)
    lengths, starts = torch.tensor([3, 5]), torch.tensor([0, 0])
    ids, dense = torch.zeros(2, 7, dtype=torch.long), torch.ones(3, 7, dtype=torch.bool)
    changes: list[tuple[Mask, Callable[[], object]]] = [
        (KeyLengths(lengths), lambda: lengths.fill_(1)),
        (KeyLengths(lengths) & causal(), lambda: lengths[0].fill_(6)),
        (Prefix(1) | Band(0, 0, offset=starts), lambda: starts.add_(2)),
        (Documents(ids[:, :3], ids), lambda: ids[0].copy_(torch.arange(7))),
        (Dense(dense), lambda: dense[1].logical_not_()),
    ]
    for mask, change in changes:
        before = of_plan(mask.plan(*sizes), sizes)
        change()
        after = of_plan(mask.plan(*sizes), sizes)
        assert not torch.equal(before, after), f"{mask}: the change was not noticed"
        torch.testing.assert_close(after, mask.dense(*sizes))


def test_tensors_of_inference_mode_keep_no_version() -> None:
    with torch.inference_mode():
        lengths = torch.tensor([3, 5])
        mask = KeyLengths(lengths)
        assert mask.plan(2, 1, 4, 7).spans[:, 0, 0, 1].tolist() == [3, 5]
        lengths.fill_(1)
        assert mask.plan(2, 1, 4, 7).spans[:, 0, 0, 1].tolist() == [1, 1]


def test_a_change_is_noticed_beside_a_tensor_of_inference_mode() -> None:
    with torch.inference_mode():
        lengths = torch.tensor([3, 5])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    mask = KeyLengths(lengths) & Documents(ids)
    assert mask.plan(2, 1, 7, 7).spans[:, 0, 0].tolist() == [[0, 3], [0, 3]]
    ids[0, 1:] = 1
    assert mask.plan(2, 1, 7, 7).spans[:, 0, 0].tolist() == [[0, 1], [0, 1]]
    with torch.inference_mode():
        lengths.fill_(0)
    assert mask.plan(2, 1, 7, 7).may_be_empty


def test_a_plan_without_values_is_square_causal_for_no_other_offset() -> None:
    """Torch's kernels are told of nothing but ``is_causal``."""
    with FakeTensorMode():
        found = {mask: mask.plan(1, 1, 5, 5).is_causal for mask in (causal(), Band(None, 0, offset=0))}
        others = [Band(None, 0, offset=2), Band(None, 0, offset=-1), Band(None, 1), window(3), Prefix(5)]
        found |= {mask: mask.plan(1, 1, 5, 5).is_causal for mask in others}
    assert [mask for mask, is_causal in found.items() if is_causal] == [causal(), Band(None, 0, offset=0)]


def test_a_call_plans_its_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no plan can be kept."""
    planned: list[Mask] = []
    plan_of = _base.make_plan
    monkeypatch.setattr(_base, "make_plan", lambda mask, sizes: planned.append(mask) or plan_of(mask, sizes))
    with torch.inference_mode():
        mask = Documents(torch.tensor([[0, 0, 1]]))
        q = torch.randn(1, 2, 3, 4)
        attention(q, q, q, mask=mask)
    assert planned == [mask]


def test_tensors_are_listed_once_each_leaf() -> None:
    lengths, dense = torch.tensor([3]), torch.tensor(True)
    mask = (KeyLengths(lengths) & causal()) | Dense(dense)
    assert [id(x) for x in mask.tensors()] == [id(lengths), id(dense)]
    assert [type(leaf) for leaf in mask.leaves()] == [KeyLengths, Band, Dense]


def test_a_mask_of_ones_own() -> None:
    """Anything that answers ``allows`` is a mask."""

    class Even(Mask):
        def allows(self, b: object, h: object, i: object, j: Tensor) -> Tensor:
            return j % 2 == 0

    sizes = (1, 2, 3, 7)
    even = Pair(Even(), lambda b, h, i, j: j % 2 == 0)
    check(even, sizes, "even")
    check(Pair(even.mask & window(4), oracle.both(even.sees, oracle.band(3, 0, 4))), sizes, "even & window")
    check(Pair(even.mask | Prefix(2), oracle.either(even.sees, oracle.prefix(2))), sizes, "even | prefix")


def test_plans_do_not_depend_on_the_default_device() -> None:
    _base.plan_by_value.cache_clear()
    with torch.device("meta"):
        for held in (KeyLengths(torch.tensor([3], device="cpu")), Documents(torch.tensor([[3]], device="cpu"))):
            assert {x.device.type for x in held.tensors()} == {"cpu"}
        plan = window(3).plan(1, 1, 5, 5)
        square = causal().plan(1, 1, 11, 11)
    assert plan.spans.device.type == "cpu"
    assert square.is_causal
    _base.plan_by_value.cache_clear()


@pytest.mark.parametrize("offset", [2**49, 2**62, 2**63 - 9, 2**63 - 1, -(2**49), -(2**63)])
def test_a_band_at_the_end_of_int64_does_not_wrap_around(offset: int) -> None:
    """A query behind all keys sees each under a causal band and none in a window; one before all keys sees none."""
    behind = offset > 0
    for band, sees in (
        (Band(None, 0, offset=torch.tensor([offset])), behind),
        (Band(3, 0, torch.tensor(offset)), False),
    ):
        assert bool(band.dense(1, 1, 9, 5).all()) == sees
        assert bool(band.dense(1, 1, 9, 5).any()) == sees
        spans = band.plan(1, 1, 9, 5).spans
        assert ((spans[..., 1] - spans[..., 0]) == (5 if sees else 0)).all()


def test_a_tensor_before_a_mask_is_refused() -> None:
    tensor = torch.eye(5, 7).bool()
    with pytest.raises(
        TypeError,
        match=r"mask: & and \| combine two masks, got Tensor; for a boolean tensor, use masks\.Dense\(tensor\)",
    ):
        tensor & causal()
    with pytest.raises(
        TypeError,
        match=r"mask: & and \| combine two masks, got Tensor; for a boolean tensor, use masks\.Dense\(tensor\)",
    ):
        tensor | causal()


def test_reversed_twice_a_band_is_itself_and_its_copy_follows_no_write() -> None:
    offset = torch.tensor([1, 0])
    band = Band(2, 1, offset=offset)
    there = band.reverse_queries(5, 7)
    assert there is not None
    assert there.reverse_queries(5, 7) is band
    copied, before = there.copied(torch.clone), there.dense(2, 1, 5, 7)
    torch.testing.assert_close(before, band.dense(2, 1, 5, 7).flip(2))
    offset += 1
    torch.testing.assert_close(copied.dense(2, 1, 5, 7), before)
    assert not torch.equal(there.dense(2, 1, 5, 7), before)


@pytest.mark.parametrize("backend", [None, "blocked", "reference"])
def test_an_empty_batch_attends_under_every_combination(backend: str | None) -> None:
    q, ids = torch.randn(0, 2, 5, 4), torch.zeros(0, 5, dtype=torch.long)
    shown = Dense(torch.ones(0, 1, 5, 5, dtype=torch.bool))
    documents = Documents(ids)
    for mask in (
        documents | window(2) | Prefix(1),
        documents | Documents(ids.clone()) | causal(),
        shown | documents | causal(),
        (documents & (window(2) | Prefix(1))) | causal(),
    ):
        assert attention(q, q, q, mask=mask, backend=backend).shape == (0, 2, 5, 4)
        assert observe(q, q, mask=mask)[0, 0, "entropy"].count == 0
