"""What moved between two observations: that it is found, judged in its own unit, and that nothing is left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from headscope import HeadStats, Observe, Segments, observe
from headscope.comparing import Comparison, Thresholds, compare
from headscope.masks import causal

T = 31
WHAT = Observe(map=8, windows=(3,))


def tensors(heads: int = 3, t: int = T, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, t, 11, generator=random) for _ in range(3))
    return q, k, v


def stats_of(*given: Tensor, what: Observe = WHAT, layer: str = "0") -> HeadStats:
    return observe(*given, mask=causal(), what=what).named(layer)


def shown(comparison: Comparison) -> str:
    printer = Console(width=200)
    with printer.capture() as captured:
        printer.print(comparison)
    return captured.get()


def test_the_same_twice_has_not_moved() -> None:
    same = compare(stats_of(*tensors()), stats_of(*tensors()))
    assert (same.moved, same.only_before, same.only_after, same.notes, same.differs) == ((), (), (), (), False)
    assert {change.change for head in same.heads for change in head.changes if not math.isnan(change.change)} == {0.0}
    assert [(head.map, head.received) for head in same.heads] == [(0.0, 0.0)] * 3
    assert "0 of 3 heads moved. The largest change is lse" in same.caption()
    assert repr(same) == "Comparison(0 of 3 heads moved)"


def test_only_the_head_that_changed_moves_and_by_how_much() -> None:
    q, k, v = tensors()
    sharp = torch.cat([q[:, :1], 4 * q[:, 1:2], q[:, 2:]], 1)
    found = compare(stats_of(q, k, v), stats_of(sharp, k, v))
    assert [head.head for head in found.moved] == [1]
    old, new = (stats_of(x, k, v)[0, 1, "entropy"] for x in (q, sharp))
    change = next(each for each in found.moved[0].changes if each.name == "entropy")
    assert change.change == pytest.approx(new.mean - old.mean)
    assert change.std == pytest.approx(math.sqrt((old.M2 + new.M2) / (2 * T)))
    assert change.error == pytest.approx(math.sqrt(old.std**2 / T + new.std**2 / T))
    assert change.size == pytest.approx(abs(new.mean - old.mean) / 0.25)
    assert change.rows == (T, T)
    assert change.moved
    assert {"entropy", "max_weight", "map"} <= set(found.moved[0].moved)
    sizes = [float(line[-1]) for line in found.cells()]
    assert sizes == sorted(sizes, reverse=True)
    text = shown(found)
    assert "1 of 3 heads moved." in text
    assert "max_logit" in text
    back = compare(stats_of(sharp, k, v), stats_of(q, k, v))
    assert next(each for each in back.moved[0].changes if each.name == "entropy").change == -change.change


def test_maps_and_received_are_total_variation() -> None:
    eye = torch.eye(8)[None, None] * 60
    near, far = observe(eye, eye, what=Observe(map=4)), observe(eye.flip(2), eye, what=Observe(map=4))
    (head,) = compare(near, far).heads
    assert head.map == pytest.approx(1)
    assert head.received == pytest.approx(0, abs=1e-6), "each key still receives one row"
    assert "map" in head.moved
    assert "received" not in head.moved
    first = observe(eye[:, :, :1].expand(-1, -1, 8, -1), eye, what=Observe(map=4))
    assert compare(near, first).heads[0].received == pytest.approx(7 / 8)
    assert [line[2:6] for line in compare(near, first).cells() if line[2] == "received"] == [
        ("received", "", "", "0.88")
    ]


def test_a_change_has_to_stand_out_from_the_rows_spread() -> None:
    q, k, v = tensors(1)
    one, other = stats_of(q, k, v, what=Observe(rows=5)), stats_of(1.4 * q, k, v, what=Observe(rows=5))
    change = next(each for each in compare(one, other).heads[0].changes if each.name == "max_weight")
    assert change.size > 1
    assert abs(change.change) < 3 * change.error
    assert not change.moved
    strict = compare(one, other, Thresholds(errors=0)).heads[0]
    assert "max_weight" in strict.moved


def test_a_change_that_equals_its_threshold_counts() -> None:
    q, k, v = tensors(1)
    old, new = stats_of(q, k, v), stats_of(3 * q, k, v)
    head = compare(old, new).heads[0]
    entropy = next(each for each in head.changes if each.name == "entropy")
    assert head.map is not None
    assert head.received is not None
    limits = Thresholds(entropy=abs(entropy.change), errors=0, map=head.map, received=head.received)
    equal = compare(old, new, limits).heads[0]
    assert {"entropy", "map", "received"} <= set(equal.moved)
    assert next(each for each in equal.changes if each.name == "entropy").size == 1


def test_ratios_are_judged_as_ratios() -> None:
    q, k, v = tensors(1)
    found = compare(stats_of(q, k, v), stats_of(q, k, 2 * v)).heads[0]
    assert [each.name for each in found.changes if each.moved] == ["value_norm"]
    norm = next(each for each in found.changes if each.name == "value_norm")
    assert norm.size == pytest.approx(math.log(2) / math.log(1.25), rel=1e-4)
    zero = compare(stats_of(q, k, 0 * v), stats_of(q, k, v)).heads[0]
    assert next(each for each in zero.changes if each.name == "value_norm").size == math.inf
    assert json.loads(json.dumps(compare(stats_of(q, k, 0 * v), stats_of(q, k, v)).to_dict(), allow_nan=False))


def test_what_only_one_of_them_has_is_listed() -> None:
    q, k, v = tensors()
    old = stats_of(q, k, v, layer="a").merge(stats_of(q, k, v, layer="b")).merge(stats_of(q, k, v, layer="c"))
    new = stats_of(q[:, :2], k[:, :2], v[:, :2], layer="a").merge(
        stats_of(q, k, what=Observe(received=False), layer="b")
    )
    new = new.merge(stats_of(q, k, v, layer="d"))
    found = compare(old, new)
    gone = ("window_3", "streaming_3", "value_norm", "map", "received")
    assert found.only_before == ("head 2 of a", *(f"{name} of b" for name in gone), "layer c")
    assert found.only_after == ("layer d",)
    assert (found.moved, found.differs) == ((), True)
    assert [head.map for head in found.heads] == [0.0, 0.0, None, None, None]
    assert "Only before: head 2 of a, window_3 of b" in found.caption()
    assert "and 1 more. Only after: layer d." in found.caption()


def test_sums_over_other_numbers_of_first_keys_are_not_compared() -> None:
    q, k, v = tensors()
    one, four = (stats_of(q, k, v, what=Observe(map=8, windows=(3,), first=n)) for n in (1, 4))
    found = compare(one, four)
    assert found.notes == ("Different first keys: 1 before, 4 after",)
    assert not {"first", "streaming_3"} & {change.name for head in found.heads for change in head.changes}
    assert not found.differs
    assert {"first", "streaming_3"} <= {change.name for change in compare(four, four).heads[0].changes}


def test_statistics_that_do_not_say_their_first_keys_are_compared() -> None:
    """Files of older versions do not hold how many keys ``first`` sums over."""
    known = stats_of(*tensors())
    unknown = HeadStats({layer: replace(part, first=None) for layer, part in known.parts.items()})
    for before, after in ((known, unknown), (unknown, known)):
        changes = compare(before, after).heads[0].changes
        assert {"first", "streaming_3"} <= {change.name for change in changes}


def test_other_rows_and_lengths_are_noted() -> None:
    q, k, v = tensors()
    old = stats_of(q, k, v)
    short = compare(old, stats_of(*tensors(t=17), what=Observe(map=5, windows=(3,))))
    assert short.notes == (
        "Different rows looked at: 31 before, 17 after",
        "Different keys: 31 before, 17 after",
        "Different bins of the map: 8 before, 5 after",
    )
    assert short.heads[0].map is None
    assert short.heads[0].received is not None
    sample = compare(old, stats_of(q, k, v, what=Observe(map=8, windows=(3,), rows=10)))
    assert sample.notes[-2:] == (
        "Only after is a sample of the rows",
        "Maps and received are not compared where different shares of the rows were observed",
    )
    assert {(head.map, head.received) for head in sample.heads} == {(None, None)}
    again = compare(*(stats_of(q, k, v, what=Observe(map=8, windows=(3,), rows=10)) for _ in range(2)))
    assert (again.notes, again.heads[0].map, again.heads[0].received) == ((), 0.0, 0.0)
    twice = compare(old, old.merge(old))
    assert twice.notes == ("Different forwards: 1 before, 2 after", "Different rows looked at: 31 before, 62 after")
    assert not twice.differs
    unmasked = compare(old, observe(q, k, v, what=WHAT))
    assert unmasked.notes == (
        "The rows may have different numbers of visible keys: different masks or lengths",
        "No row before has next",
    )
    ahead = next(each for each in unmasked.heads[0].changes if each.name == "next")
    assert (ahead.rows, ahead.moved) == ((0, T - 1), False)


def test_broken_rows_are_a_move() -> None:
    q, k, v = tensors()
    bad = q.clone()
    bad[0, 2, 5] = math.nan
    found = compare(stats_of(q, k, v), stats_of(bad, k, v))
    assert [(head.head, head.broken, head.moved) for head in found.moved] == [(2, (0, 1), ("broken",))]
    assert found.cells() == [("0", "2", "broken rows", "0", "1", "+1", "", "")]
    dead = compare(stats_of(q, k, v), stats_of(q * math.nan, k, v)).heads[0]
    assert (dead.map, dead.received) == (None, None)
    assert dead.moved == ("broken",)
    assert "No row after has lse" in compare(stats_of(q, k, v), stats_of(q * math.nan, k, v)).notes[0]


def test_it_is_handed_on() -> None:
    q, k, v = tensors(1)
    said: Any = json.loads(json.dumps(compare(stats_of(q, k, v), stats_of(3 * q, k, v)).to_dict(), allow_nan=False))
    assert (said["differs"], said["moved"]) == (True, 1)
    assert said["thresholds"]["share"] == 0.05
    assert said["before"]["sampled"] is False
    names = [change["name"] for change in said["heads"][0]["changes"]]
    assert "entropy" in names
    assert "chance" not in names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ratio": 1.0}, r"ratio: got 1.0, expected above 1"),
        ({"errors": -1.0}, r"errors: got -1.0, expected at least 0"),
        ({"map": 0.0}, r"map: got 0.0, expected above 0"),
        ({"entropy": math.nan}, r"entropy: got nan, expected above 0"),
    ],
)
def test_thresholds_are_checked(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thresholds(**given)


@pytest.mark.parametrize("given", ["a", None, True])
def test_thresholds_are_numbers(given: Any) -> None:
    with pytest.raises(TypeError, match=rf"share: got {type(given).__name__}, expected a number"):
        Thresholds(share=given)


def test_it_takes_statistics_alone() -> None:
    stats = stats_of(*tensors())
    with pytest.raises(TypeError, match=r"before: got int, expected HeadStats or a recording"):
        compare(3, stats)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"after: got NoneType, expected HeadStats or a recording"):
        compare(stats, None)  # pyright: ignore[reportArgumentType]


def test_float32_is_compared_with_float64() -> None:
    stats = stats_of(*tensors())
    part = stats.parts["0"]
    chance = part.moments["chance"]
    single = replace(chance, mean=chance.mean.float())  # as on a device without float64
    other = HeadStats({"0": replace(part, moments={**part.moments, "chance": single})})
    assert not compare(stats, other).differs


@pytest.mark.parametrize("side", [0, 1, 2])
@pytest.mark.parametrize(("what", "number"), [("mean", math.nan), ("mean", math.inf), ("M2", math.nan)])
def test_a_number_that_is_not_finite_has_moved(side: int, what: str, number: float) -> None:
    stats = stats_of(*tensors())
    part = stats.parts["0"]
    bad = getattr(part.moments["entropy"], what).clone()
    bad[1] = number
    moments = {**part.moments, "entropy": replace(part.moments["entropy"], **{what: bad})}
    spoilt = HeadStats({"0": replace(part, moments=moments)})
    others = {0: (spoilt, stats), 1: (stats, spoilt), 2: (spoilt, spoilt)}
    comparison = compare(*others[side])
    if what == "M2":  # equal means are equal, whatever their spread
        assert not comparison.differs
        return
    assert [(head.head, head.moved) for head in comparison.moved] == [(1, ("entropy",))]
    assert comparison.differs
    assert "1 of 3 heads moved" in shown(comparison)
    json.dumps(comparison.to_dict(), allow_nan=False)


@pytest.mark.parametrize("part", ["map", "received"])
def test_weights_that_are_not_finite_have_moved(part: str) -> None:
    stats = stats_of(*tensors())
    layer = stats.parts["0"]
    assert layer.map is not None
    assert layer.received is not None
    sums = {"map": layer.map.sum, "received": layer.received}[part].clone()
    sums[2, 0] = math.nan
    spoilt = replace(layer, map=replace(layer.map, sum=sums)) if part == "map" else replace(layer, received=sums)
    comparison = compare(stats, HeadStats({"0": spoilt}))
    assert [(head.head, head.moved) for head in comparison.moved] == [(2, (part,))]
    assert "1 of 3 heads moved" in shown(comparison)
    json.dumps(comparison.to_dict(), allow_nan=False)


def test_maps_of_two_lengths_are_compared_only_where_each_bin_has_tokens() -> None:
    """A text with fewer tokens than bins leaves some bins empty, and which ones depends on its length."""
    long, longer = (stats_of(*tensors(t=t)) for t in (17, 23))
    assert all(head.map is not None for head in compare(long, longer).heads)
    short, shorter = (stats_of(*tensors(t=t)) for t in (7, 5))
    for found in (compare(short, shorter), compare(short, long)):
        assert {head.map for head in found.heads} == {None}
        assert (
            "Maps are not compared where the lengths differ and a text is shorter than the map has bins" in found.notes
        )
    assert {head.map for head in compare(short, short).heads} == {0.0}


def halves(first: int, second: int, keys: int = 1) -> HeadStats:
    ids = [first] * (T // 2) + [second] * (T - T // 2)
    return stats_of(*tensors(), what=Observe(first=keys, segments=Segments(["a", "b", "c"], ids)))


def test_segments_that_one_side_only_has_rows_of_are_named() -> None:
    found = compare(halves(0, 1), halves(1, 1))
    assert found.notes == ("No row after is in a",)
    assert compare(halves(2, 2), halves(0, 1)).notes == ("No row before is in a, b", "No row after is in c")
    assert compare(halves(0, 1), halves(0, 1)).notes == ()


def test_segments_without_other_first_keys_are_not_compared() -> None:
    found = compare(halves(0, 1), halves(0, 1, keys=4))
    names = {change.name for change in found.heads[0].changes}
    assert "segments/b/a" in names
    assert not any(name.endswith("without_first") for name in names)
    assert not found.differs
    assert found.notes == ("Different first keys: 1 before, 4 after",)
    one = compare(halves(0, 1), halves(0, 1)).heads[0].changes
    assert any(change.name.endswith("without_first") for change in one)


def test_other_thresholds_are_refused() -> None:
    wrong: Any = {"share": 0.02}
    with pytest.raises(TypeError, match="thresholds: got dict, expected Thresholds"):
        compare(halves(0, 1), halves(0, 1), wrong)
