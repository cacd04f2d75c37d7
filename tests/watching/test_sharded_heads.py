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

Results = list[dict[str, dict[str, float | str]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of two processes prints."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    return [json.loads(text) for text in run_ranks(PROGRAMS / "sharded_heads.py", "2", str(store))]


@pytest.mark.parametrize("kind", ["tensors", "unconfigured", "data"])
@pytest.mark.parametrize("action", NUMBERED)
def test_a_number_means_the_same_head_in_every_process(kind: str, action: str, ranks: Results) -> None:
    for rank in ranks:
        difference = rank[kind][action]
        assert isinstance(difference, float), difference
        assert difference < 1e-4


@pytest.mark.parametrize("kind", ["tensors", "unconfigured", "data"])
def test_a_head_beyond_those_of_the_whole_model_is_refused(kind: str, ranks: Results) -> None:
    for rank in ranks:
        assert rank[kind]["ablate 4"] == (
            "WatchError: ablate: layer attention has no head 4, wanted numbers from 0 to 3"
        )


@pytest.mark.parametrize("kind", ["tensors", "unconfigured"])
def test_gradients_of_shared_heads_are_refused(kind: str, ranks: Results) -> None:
    for number, rank in enumerate(ranks):
        assert rank[kind]["gradient"] == (
            f"WatchError: head_importance: layer attention holds heads {2 * number} to {2 * number + 1} of 4, the "
            'others are in other processes, which no gradient of this one reaches; use method="ablation", or run the '
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
