"""A watch of several ranks logs the values of all their rows together, once, under the names of the bare model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.forking import run_ranks
from support.paths import PROGRAMS

Results = list[dict[str, Any]]
LAYERS = ["layers.0.attention", "layers.1.attention"]
WRAPPERS = ["ddp", "ddp, segments", "fsdp", "checkpoints", "group", "device"]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank prints; see watch_ranks.py."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    arguments = f"{world}", f"{folder / 'store'}", f"{folder}"
    return [json.loads(text) for text in run_ranks(PROGRAMS / "watch_ranks.py", *arguments, world=world)]


@pytest.mark.parametrize("model", WRAPPERS)
def test_the_first_rank_logs_what_one_process_logs_of_all_rows(model: str, ranks: Results) -> None:
    first = ranks[0][model]
    assert first["steps"] == [0, 1, 2]
    assert first["names"] is True
    assert first["apart"] < 1e-12


@pytest.mark.parametrize("model", WRAPPERS)
def test_the_other_ranks_do_not_log(model: str, ranks: Results) -> None:
    assert [rank[model]["steps"] for rank in ranks[1:]] == [[]] * (len(ranks) - 1)


@pytest.mark.parametrize("model", WRAPPERS)
def test_layers_have_the_names_of_the_bare_model(model: str, ranks: Results) -> None:
    for rank in ranks:
        assert rank[model]["layers"] == LAYERS
        assert rank[model]["model"] == "Stack"


def test_a_sharded_model_that_attends_itself_has_the_name_of_its_own_class(ranks: Results) -> None:
    name = "MultiHeadAttention"
    assert [rank["root"] for rank in ranks] == [[[name], name, f"{name} (without a configuration)"]] * len(ranks)


@pytest.mark.parametrize("model", WRAPPERS)
def test_each_rank_records_every_pass_once(model: str, ranks: Results) -> None:
    assert [rank[model]["forwards"] for rank in ranks] == [3] * len(ranks)


def test_a_watched_step_is_one_all_reduce_and_the_others_are_none(ranks: Results) -> None:
    for rank in ranks:
        assert rank["every"]["calls"] == [1, 0, 1, 0]
    assert ranks[0]["every"]["steps"] == [0, 2]
    assert ranks[0]["every"]["apart"] < 1e-12


def test_a_history_holds_the_values_of_all_ranks(ranks: Results) -> None:
    for rank in ranks:
        assert rank["history"] == [[0, 1, 2], True]


def test_alarms_are_raised_on_the_first_rank_whichever_rank_has_the_rows(ranks: Results) -> None:
    what, warned = ranks[0]["alarms"]
    assert "growing logits" in what
    assert warned is True
    assert [rank["alarms"] for rank in ranks[1:]] == [[[], False]] * (len(ranks) - 1)


def test_without_a_group_each_process_logs_its_own(ranks: Results) -> None:
    assert [rank["alone"] for rank in ranks] == [1] * len(ranks)


def test_recordings_of_all_ranks_are_gathered_as_those_of_one_process_are_merged(ranks: Results) -> None:
    world = len(ranks)
    rows = sum(1 + n % 2 for n in range(world)) * 7 * 2
    for rank in ranks:
        found = rank["gathered"]
        assert found["rows"] == [rows, rows]
        assert found["same"] is True
        assert found["about"] == [2 * world, 2 * world, 2 * world], "forward passes, and a verified row of each"
        assert found["file"] == 2 * world


def test_recordings_of_heads_are_joined_to_that_of_the_whole_model(ranks: Results) -> None:
    names, apart = ranks[0]["heads"]["joined"]
    assert names is True
    assert apart < 1e-12
    assert [rank["heads"]["joined part"] for rank in ranks] == [[{}, 3]] + [None] * (len(ranks) - 1)


def test_recordings_with_other_options_are_refused(ranks: Results) -> None:
    held = f"4 on rank 0 and 3 on rank {len(ranks) - 1}"
    expected = f"ValueError: gather: the ranks disagree on rows; expected the same on all, got {held}"
    assert {rank["recordings, option rows"] for rank in ranks} == {expected}


def test_a_rank_that_has_recorded_nothing_is_named(ranks: Results) -> None:
    *others, own = (rank["recordings, nothing recorded"] for rank in ranks)
    assert own.startswith("WatchError: watch: nothing recorded yet")
    assert {text.partition(" failed: ")[0] for text in others} == {f"ValueError: gather: rank {len(ranks) - 1}"}


def test_layers_that_one_rank_runs_later_are_logged_from_that_step_on(ranks: Results) -> None:
    assert ranks[0]["other layers"] == [[0, True, True], [1, True, True], [2, True, True]]


def test_ranks_that_share_the_heads_log_all_of_them_under_their_numbers(ranks: Results) -> None:
    first, world = ranks[0]["heads"], len(ranks)
    assert (first["steps"], first["names"]) == ([0, 1, 2], True)
    assert first["apart"] < 1e-12
    step = 4 // world
    parts = [f"heads {n * step} to {n * step + step - 1} of 4" for n in range(world)]
    assert [rank["heads"]["part"] for rank in ranks] == parts


def test_heads_and_data_that_ranks_share_at_once_are_logged_and_gathered(ranks: Results) -> None:
    if len(ranks) == 2:
        assert [rank["crossed"] for rank in ranks] == [None, None], "two ranks share one of both"
        return
    first, *others = (rank["crossed"] for rank in ranks)
    assert (first["steps"], first["names"]) == ([0], True)
    assert first["apart"] < 1e-12
    assert first["gathered"] < 1e-12
    assert [rank["gathered"] for rank in others] == [None] * 3
    for rank in (first, *others):
        assert "ranks 0 and 2 both hold head 0; expected each head on one rank" in rank["twice"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(("option", "first", "last"), [("rows", 4, 3), ("every", 1, 2), ("map", 2, 4)])
def test_ranks_that_disagree_on_an_option_are_named_when_the_watch_opens(
    option: str, first: int, last: int, ranks: Results
) -> None:
    held = f"{first} on rank 0 and {last} on rank {len(ranks) - 1}"
    expected = f"ValueError: watch: the ranks disagree on {option}; expected the same on all, got {held}"
    assert {rank[f"option {option}"] for rank in ranks} == {expected}


def test_a_pass_of_one_rank_in_another_mode_is_an_error_on_all(ranks: Results) -> None:
    expected = (
        "WatchError: watch: the ranks are in different forward passes, pass 2 (evaluation mode) on rank 0 and pass 2 "
        "(training mode) on rank 1; expected the same passes on every rank."
    )
    for rank in ranks:
        assert rank["passes in other modes"].startswith(expected)


def test_a_rank_that_runs_more_passes_names_the_one_that_has_ended(ranks: Results) -> None:
    first, *others = (rank["more passes"] for rank in ranks)
    assert first.startswith("WatchError: watch: rank ")
    assert "has ended its watch, and rank 0 is in pass 3 (training mode)" in first
    assert others == [None] * (len(ranks) - 1)


def test_the_next_watch_does_not_meet_sums_that_were_left(ranks: Results) -> None:
    assert [rank["after more passes"] for rank in ranks] == [True] * len(ranks)


def test_a_log_that_cannot_be_opened_is_an_error_on_all(ranks: Results) -> None:
    own, *others = (rank["file"] for rank in ranks)
    assert own.startswith("WatchError: log: the history ")
    assert {*others} == {f"ValueError: watch: rank 0 failed: {own.removeprefix('WatchError: ')}"}


def test_a_rank_that_does_not_open_the_watch_is_named(ranks: Results) -> None:
    for rank in ranks[:-1]:
        assert rank["silent"].startswith(f"RankError: watch: rank {len(ranks) - 1} did not answer within 1 s;")
        assert "pass log= or alarms= on every rank" in rank["silent"]


def test_what_is_not_a_group_is_refused(ranks: Results) -> None:
    for rank in ranks:
        assert rank["group of a kind"] == (
            "TypeError: group: got str, expected a torch.distributed.ProcessGroup or None"
        )
