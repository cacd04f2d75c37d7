"""Heads of a model that several processes share have the numbers that they have in the whole model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from headscope import ablate
from support.forking import run_ranks
from support.paths import PROGRAMS
from support.programs.sharded_recordings import SIZE, Model, shard_by_hand

NUMBERED = ["ablate 0", "ablate 1", "ablate 3", "ablate 1 and 2", "ablate all", "ablation"]

SHARED = ["tensors", "unconfigured", "grouped", "siblings", "siblings, packed"]
GATHERED = ["gathered", "siblings, gathered"]  # each process attends with all heads
DATA = ["data", "data, unconfigured", "data by projection", "siblings, data", "siblings, data by projection"]

Results = list[dict[str, dict[str, float | str]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of two processes prints."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    return [json.loads(text) for text in run_ranks(PROGRAMS / "sharded_heads.py", "2", str(store))]


@pytest.mark.parametrize("kind", [*SHARED, *GATHERED, *DATA])
@pytest.mark.parametrize("action", NUMBERED)
def test_a_number_means_the_same_head_in_every_process(kind: str, action: str, ranks: Results) -> None:
    for rank in ranks:
        difference = rank[kind][action]
        assert isinstance(difference, float), difference
        assert difference < 1e-4


@pytest.mark.parametrize("kind", [*SHARED, *GATHERED, *DATA])
def test_a_head_beyond_those_of_the_whole_model_is_refused(kind: str, ranks: Results) -> None:
    for rank in ranks:
        assert rank[kind]["ablate 4"] == (
            "WatchError: ablate: layer attention has no head 4, expected numbers from 0 to 3"
        )


@pytest.mark.parametrize("kind", SHARED)
def test_a_recording_states_the_heads_of_its_process(kind: str, ranks: Results) -> None:
    assert [rank[kind]["part"] for rank in ranks] == ["heads 0 to 1 of 4", "heads 2 to 3 of 4"]


@pytest.mark.parametrize("kind", [*GATHERED, *DATA])
def test_a_process_that_attends_with_all_heads_has_no_part(kind: str, ranks: Results) -> None:
    for rank in ranks:
        assert rank[kind]["part"] == "None"
        difference = rank[kind]["gradient"]
        assert isinstance(difference, float), difference
        assert difference < 1e-3


def test_rows_that_fit_both_a_share_and_all_heads_are_refused(ranks: Results) -> None:
    shards = "12 of 24 rows of q.weight, 6 of 12 rows of k.weight, 6 of 12 rows of v.weight"
    for rank in ranks:
        for text in rank["siblings, grouped"].values():
            assert str(text).startswith(
                "WatchError: model: layer attention is sharded, and its parameters do not show whether"
            )
            assert f"got both, for 2 heads, {shards};" in str(text)
            assert str(text).endswith("how many heads the whole layer has as num_attention_heads of model.config")


@pytest.mark.parametrize("kind", SHARED)
def test_gradients_of_shared_heads_are_refused(kind: str, ranks: Results) -> None:
    for number, rank in enumerate(ranks):
        assert rank[kind]["gradient"] == (
            f"WatchError: head_importance: layer attention holds heads {2 * number} to {2 * number + 1} of 4; the "
            "other heads are in other processes, which gradients of this one do not reach; "
            'use method="ablation", or run the '
            "whole model in one process"
        )


@pytest.mark.parametrize("kind", ["by_hand", "ambiguous"])
def test_unknown_parts_are_refused(kind: str, ranks: Results) -> None:
    for number, rank in enumerate(ranks):
        holder = f"(held by process {number} of 2)"
        for action in {*NUMBERED, "gradient", "ablate 4"} - {"ablate all"}:
            text = rank[kind][action]
            assert isinstance(text, str)
            assert text.startswith(f"WatchError: heads: layer attention holds an unknown part of 4 heads {holder}, ")
            assert "num_attention_heads" in text
        assert rank[kind]["ablate all"] == pytest.approx(0, abs=1e-5), "every head is meant, wherever it is"


def test_a_layer_of_one_process_has_numbers_of_its_own() -> None:
    model = Model().eval()
    model.config = SimpleNamespace(num_attention_heads=4)
    shard_by_hand(model.attention, 0, 2)  # as pruned
    x = torch.randn(1, 5, SIZE)
    with torch.no_grad(), ablate(model, {"attention": [0, 1]}):
        assert model(x).abs().max() == 0


# ---------------------------------------------------------------- uneven shards


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of three processes that share five heads prints."""
    store = tmp_path_factory.mktemp("uneven") / "store"
    return [json.loads(text) for text in run_ranks(PROGRAMS / "uneven_heads.py", "3", str(store), world=3)]


@pytest.mark.parametrize("kind", ["chunks", "chunks, configured"])
def test_heads_in_uneven_chunks_are_numbered(kind: str, uneven: Results) -> None:
    assert [rank[kind]["part"] for rank in uneven] == [f"heads {held} of 5" for held in ("0 to 1", "2 to 3", "4 to 4")]
    for rank in uneven:
        assert [rank[kind][f"ablate {head}"] for head in range(5)] == pytest.approx([0] * 5, abs=1e-5)


@pytest.mark.parametrize("kind", ["chosen", "chosen, configured"])
def test_shards_that_are_no_chunks_are_an_unknown_part(kind: str, uneven: Results) -> None:
    for number, rank in enumerate(uneven[:2]):  # the last one holds what a chunk would be
        part = f"an unknown part of 5 heads (held by process {number} of 3)"
        assert rank[kind]["part"] == part
        for head in range(5):
            assert str(rank[kind][f"ablate {head}"]).startswith(f"WatchError: heads: layer attention holds {part}, ")


def test_parameters_that_do_not_show_the_heads_are_refused(uneven: Results) -> None:
    shards = "4 of 10 rows of q, 4 of 10 rows of k, 4 of 10 rows of v, 4 of 10 columns of o, 3 of 7 rows of gate"
    for rank in uneven:
        for text in rank["another parameter"].values():
            assert str(text).startswith("WatchError: model: layer attention is sharded, and its parameters do not show")
            assert str(text).endswith("how many heads the whole layer has as num_attention_heads of model.config")
    assert f"got, for 2 heads, {shards};" in str(uneven[0]["another parameter"]["part"])
    assert [rank["another parameter, configured"]["part"] for rank in uneven] == [
        f"an unknown part of 5 heads (held by process {number} of 3)" for number in range(3)
    ]


# ---------------------------------------------------------------- heads and data


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of four processes prints, where two share the heads and two the data."""
    store = tmp_path_factory.mktemp("crossed") / "store"
    return [json.loads(text) for text in run_ranks(PROGRAMS / "sharded_heads.py", "4", str(store), world=4)]


@pytest.mark.parametrize("data", ["by layer", "by projection"])
@pytest.mark.parametrize("kind", ["one module", "siblings", "packed"])
def test_heads_beside_sharded_data_are_numbered(kind: str, data: str, crossed: list[dict[str, str]]) -> None:
    parts = [rank[f"{kind}, {data}"] for rank in crossed]
    assert parts == 2 * ["heads 0 to 1 of 4", "heads 2 to 3 of 4"]


@pytest.mark.parametrize("data", ["by layer", "by projection"])
@pytest.mark.parametrize("kind", ["gathered", "mlp", "mlp that fits", "data alone"])
def test_all_heads_beside_sharded_data_are_whole(kind: str, data: str, crossed: list[dict[str, str]]) -> None:
    assert [rank[f"{kind}, {data}"] for rank in crossed] == 4 * ["None"]
