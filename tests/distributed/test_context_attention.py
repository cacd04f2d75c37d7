"""Attention over a sequence of which each rank holds a part, against one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headscope.parallel import Places
from support.forking import run_ranks
from support.paths import PROGRAMS

WORLDS = {2: 21, 4: 38}  # ranks: length of the sequence


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks report; see context_attention_ranks.py."""
    store, world = tmp_path_factory.mktemp("ranks") / "store", request.param
    program = PROGRAMS / "context_attention_ranks.py"
    return [json.loads(out) for out in run_ranks(program, str(world), str(store), str(WORLDS[world]), world=world)]


def too_large(found: dict[str, dict[str, float]], names: set[str] | None, bound: float) -> dict[str, float]:
    """Return the errors above a bound; ``names``: only of these results."""
    return {
        f"{case}: {name}": error
        for case, errors in found.items()
        for name, error in errors.items()
        if (names is None or name in names) and not error <= bound
    }


def test_every_mask_and_option_agrees_with_one_process_in_all_three_ways(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]["errors"]) > 60
    assert too_large(ranks[0]["errors"], None, 2e-6) == {}


def test_gathered_keys_and_exchanged_heads_give_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    other = (
        "bias, ",
        "bias of rows, ",
        "blocked, ",
        "dropout, blocked, ",
    )  # a bias that has rows, and torch's products
    errors = {
        case: found
        for case, found in ranks[0]["errors"].items()
        if (", gather, " in case and not case.startswith(other))
        or (", heads, " in case and len(ranks) == 2 and not case.startswith("dropout, blocked"))
    }  # 4 ranks have 2 key/value heads twice: other heads are computed together
    assert len(errors) > 20
    assert too_large(errors, {"out", "lse"}, 0.0) == {}


def test_modules_agree_with_one_process_within_the_context(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]["modules"]) == 24
    assert too_large(ranks[0]["modules"], None, 2e-6) == {}


def test_a_watch_of_each_rank_merges_to_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    errors = [found["statistics"] for found in ranks[0]["modules"].values()]
    assert len(errors) == 24
    assert max(errors) <= 2e-6  # of float32 rows; sums and counts are compared exactly


def test_heads_and_the_sequence_may_be_split_at_once(ranks: list[dict[str, Any]]) -> None:
    for found in ranks if len(ranks) == 4 else ():
        assert {name: error for name, error in found["both"].items() if not error <= 2e-6} == {}


@pytest.mark.parametrize("argument", ["dropout", "softcap", "mask", "how", "sinks"])
def test_an_argument_that_differs_between_ranks_is_named_on_each(ranks: list[dict[str, Any]], argument: str) -> None:
    for rank, found in enumerate(ranks):
        text = found["raised"][argument]
        assert text.startswith(f"ValueError: {argument}: rank 0 has ")
        assert "rank 1 has " in text
        assert f"(this is rank {rank})" in text


def test_documents_with_other_ids_differ(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["raised"]["documents"].startswith("ValueError: mask: rank 0 has Documents(")


def test_the_wrong_argument_of_one_rank_reaches_all_of_them(ranks: list[dict[str, Any]]) -> None:
    found = [each["raised"]["length on one rank"] for each in ranks]
    assert found[0].startswith("ValueError: rank 1 did not call context_attention, because its arguments are wrong")
    assert found[1].startswith("ValueError: q: axis 2 is ")


@pytest.mark.parametrize("call", ["x on one rank", "need_weights on one rank"])
def test_what_a_module_refuses_on_one_rank_reaches_all_of_them(ranks: list[dict[str, Any]], call: str) -> None:
    found = [each["raised"][call] for each in ranks]
    assert found[0].startswith("ValueError: rank 1 did not call context_attention, because its arguments are wrong")
    assert found[1].startswith(f"ValueError: {call.split()[0]}: ")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("length", "q: axis 2 is "),
        ("mask of the rows", "mask: axis 0 (Q) is "),
        ("heads", 'how: "heads" gives each rank a part of the heads, but '),
        ("selected", "observe: got selected=, whose rows are those of the whole sequence"),
        ("second derivative", "attention: this backend does not support second derivatives"),
        ("on no rank", "places: position 2 on no rank"),
        ("on two ranks", "places: positions 0 to 3 on more than one rank"),
        ("cache", "cache: expected None under context parallelism"),
        ("context", "context: expected None under context parallelism"),
        ("need_weights", "need_weights: expected False under context parallelism"),
        ("nested", "x: is a nested tensor"),
        ("traced", "context parallelism: within torch.compile or torch.export"),
        ("cross", "observe: got positions"),
    ],
)
def test_what_context_parallelism_does_not_support_raises(ranks: list[dict[str, Any]], call: str, text: str) -> None:
    for found in ranks:
        assert found["raised"][call].partition(": ")[2].startswith(text)


def test_after_the_context_attention_is_of_this_process_again(ranks: list[dict[str, Any]]) -> None:
    assert {found["raised"]["after"] for found in ranks} == {"returned"}


def test_a_rank_that_ends_is_an_error_of_the_others(ranks: list[dict[str, Any]]) -> None:
    for found in ranks[:-1]:
        assert found["a rank ended"].startswith(f"RankError: context parallelism: rank {len(ranks) - 1} ended")


def test_places_without_a_group_are_those_of_one_process() -> None:
    places = Places.head_tail(5)
    assert places.runs == (slice(0, 5),)
    assert str(places) == "rank 0: 0 to 4"
