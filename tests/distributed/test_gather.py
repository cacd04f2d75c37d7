"""Statistics are gathered over ranks: over rows to the bit as ``merge``, over heads and layers to the bit as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from headscope import Observe, observe
from support.forking import run_ranks
from support.paths import PROGRAMS

Results = list[dict[str, dict[str, Any]]]
WORLDS = [2, 4]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank prints; see gather_ranks.py."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    script, world = PROGRAMS / "gather_ranks.py", request.param
    return [json.loads(text) for text in run_ranks(script, f"{world}", f"{store}", world=world)]


def found(ranks: Results, kind: str, case: str) -> list[Any]:
    return [rank[kind][case] for rank in ranks]


def refused(ranks: Results, case: str) -> str:
    """The error that every rank raises."""
    texts = found(ranks, "refusals", case)
    assert {*texts} == {texts[0]}, texts
    assert texts[0].startswith("ValueError: gather: "), texts[0]
    return texts[0].removeprefix("ValueError: gather: ")


# ---------------------------------------------------------------- rows


def test_rows_of_all_ranks_are_those_of_merge_on_the_first_rank(ranks: Results) -> None:
    assert found(ranks, "gathers", "rows") == ["equal, part None"] + ["None"] * (len(ranks) - 1)


def test_rows_can_be_gathered_on_another_rank(ranks: Results) -> None:
    assert found(ranks, "gathers", "rows, on the last") == ["None"] * (len(ranks) - 1) + ["equal, part None"]


def test_rows_can_be_gathered_on_all_ranks(ranks: Results) -> None:
    assert {*found(ranks, "gathers", "rows, on all")} == {"equal, part None"}


def test_the_rank_that_receives_is_counted_within_the_group(ranks: Results) -> None:
    *outside, first, second = found(ranks, "gathers", "rows, in a pair")
    assert {*outside} <= {"outside"}
    assert (first, second) == ("equal, part None", "None")


def test_counts_and_extremes_are_those_of_one_process_and_sums_are_to_rounding(ranks: Results) -> None:
    for each in found(ranks, "gathers", "rows, of one process"):
        assert each["exact"] is True
        assert each["apart"] < 1e-12


def test_rows_of_one_part_of_the_heads_stay_that_part(ranks: Results) -> None:
    expected = "equal, part {'0': Part(of=4, heads=(0, 2), holder='')}"
    assert {*found(ranks, "gathers", "heads, rows of a part")} == {expected}


# ---------------------------------------------------------------- heads and layers


def test_parts_of_the_heads_are_joined_to_the_whole_layer(ranks: Results) -> None:
    assert found(ranks, "gathers", "heads")[0] == "equal, part {}"


def test_heads_are_joined_in_their_order_whatever_that_of_the_ranks(ranks: Results) -> None:
    assert {*found(ranks, "gathers", "heads, from the last")} == {"equal, part {}"}


def test_a_layer_that_every_rank_holds_whole_is_taken_once(ranks: Results) -> None:
    assert {*found(ranks, "gathers", "heads, on each")} == {"equal, part {}"}


def test_layers_are_joined_in_the_order_of_the_ranks(ranks: Results) -> None:
    names = tuple(f"h.{n}" for n in range(len(ranks)))
    for each in found(ranks, "gathers", "layers"):
        assert each == [f"equal, part {{}}, {names}"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("option", "first", "last"),
    [
        ("map", "4", "8"), ("edges", "0", "2"), ("received", "True", "False"), ("first", "1", "2"),
        ("weights", "[[0]]", "[[1]]"), ("axis", "rows", "heads"), ("to", "0", "1"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_on_an_option_are_named_with_it(option: str, first: str, last: str, ranks: Results) -> None:
    text = refused(ranks, option if option in ("axis", "to") else f"option {option}")
    layer = "" if option in ("axis", "to") else "layer 0: "
    assert text.startswith(f"{layer}the ranks disagree on {option}; expected the same on all, got ")
    if option == "weights":
        assert "on rank 0 only" in text
        assert f"on rank {len(ranks) - 1} only" in text
    else:
        assert text.endswith(f" got {first} on rank 0 and {last} on rank {len(ranks) - 1}")


@pytest.mark.parametrize(
    ("case", "option", "first", "last"),
    [("windows", "row_stats", "streaming_2, window_2", "streaming_3, window_3"), ("segments", "segments", "b", "c")],
)
def test_lists_that_differ_are_named_by_what_differs(
    case: str, option: str, first: str, last: str, ranks: Results
) -> None:
    text = refused(ranks, f"option {case}")
    assert text.startswith(f"layer 0: the ranks disagree on {option}; ")
    assert text.endswith(f"got {first} on rank 0 only and {last} on rank {len(ranks) - 1} only")


def test_retained_rows_of_one_rank_only_are_refused(ranks: Results) -> None:
    text = refused(ranks, "option keep_rows")
    assert text.startswith("layer 0: the ranks disagree on keep_rows; ")
    assert text.endswith(f"on rank {len(ranks) - 1} only")


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("axis unknown", 'ValueError: axis: got \'keys\', expected "rows", "heads" or "layers"'),
        ("to unknown", "ValueError: to: got {world}, expected a rank of the group, from 0 to {last}, or None"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(case: str, error: str, ranks: Results) -> None:
    last = len(ranks) - 1
    *others, own = found(ranks, "refusals", case)
    expected = error.format(world=len(ranks), last=last)
    assert own == expected
    assert {*others} == {f"ValueError: gather: rank {last} failed: {expected.removeprefix('ValueError: ')}"}


def test_statistics_that_cannot_be_sent_are_an_error_on_all(ranks: Results) -> None:
    *others, own = found(ranks, "refusals", "damaged")
    assert own.startswith("AttributeError: ")
    assert {text.partition(" failed: ")[0] for text in others} == {f"ValueError: gather: rank {len(ranks) - 1}"}


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("to of a kind", "TypeError: to: got str, expected the number of a rank or None"),
        ("group", "TypeError: group: got str, expected a torch.distributed.ProcessGroup or None"),
    ],
)
def test_arguments_of_another_kind_are_refused(case: str, error: str, ranks: Results) -> None:
    assert {*found(ranks, "refusals", case)} == {error}


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("missing layer", ["rank {last} has no layer a, which rank 0 has", 'axis="layers"']),
        ("number of heads", ["disagree on heads", "4 heads on rank 0 and 2 heads on rank {last}", 'axis="heads"']),
        ("parts as rows", ["disagree on heads", "heads 0 to", 'axis="heads"']),
        ("models", ["disagree on model", "None on rank 0 and Model (without a configuration) on rank {last}"]),
        ("heads unknown", ["layer 0: does not state which heads each rank holds", 'axis="rows"']),
        ("heads twice", ["ranks 0 and 1 both hold head 0", "gather the heads in each group"]),
        ("heads missing", ["no rank holds heads 4 to 4 of 5"]),
        ("heads of other totals", ["disagree on the number of heads", "4 on rank 0 and 5 on rank {last}"]),
        ("heads of other rows", ["disagree on its runs, rows and lengths"]),
        ("one whole", ["rank {last} holds all heads; expected a known part"]),
        ("layer twice", ["ranks 0 and 1 both have layer 0", "stats.named"]),
        ("layer in part", ["of layer 0; expected whole layers", 'axis="heads"']),
    ],
)
def test_what_does_not_belong_together_is_refused_on_every_rank(case: str, parts: list[str], ranks: Results) -> None:
    text = refused(ranks, case)
    for part in parts:
        assert part.format(last=len(ranks) - 1) in text


# ---------------------------------------------------------------- ranks that end


def test_a_rank_that_ends_while_it_sends_is_named(ranks: Results) -> None:
    for rank in ranks[:-1]:
        assert rank["ends"]["while it sends"].startswith(
            f"RankError: gather: rank {len(ranks) - 1} ended, failed or did not take part while"
        )


def test_a_rank_that_does_not_answer_is_named_within_the_timeout(ranks: Results) -> None:
    for rank in ranks[:-1]:
        assert rank["ends"]["before"].startswith(f"RankError: gather: rank {len(ranks) - 1} did not answer within")
        assert rank["ends"]["seconds"] < 30, "the timeout of the group is at most 1.5 s"


def test_without_torch_distributed_a_process_gathers_its_own() -> None:
    q = torch.randn(1, 2, 5, 8)
    stats = observe(q, q, what=Observe(map=2, keep_qk=True))
    alone = stats.gather(to=None)
    assert alone is not None
    assert alone.to_dict() == stats.to_dict()
    with pytest.raises(ValueError, match="tile: q and k were not retained"):
        alone.tile(0, 1, 0, 1)
    with pytest.raises(ValueError, match="to: got 1, expected a rank of the group, from 0 to 0, or None"):
        stats.gather(to=1)
