"""Modules whose heads several processes share, and attention of DTensors, compared with one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.forking import run_program, run_ranks
from support.paths import PROGRAMS

CLOSE = 2e-6  # float32, in parts of the largest number of a tensor where that is above 1
OPTIONS = {
    *("plain", "no bias", "three projections", "4 kv heads", "2 kv heads", "1 kv heads", "widths", "kdim, vdim"),
    *("context", "scale, softcap", "sinks", "rotary", "positions", "ALiBi", "T5", "qk_norm rms", "qk_norm layer"),
    *("qk_norm rms_all", "qk_norm rms, 2 kv heads", "qk_norm layer, 2 kv heads", "qk_norm rms_all, 2 kv heads"),
    *("gate", "bias_kv, 8 kv heads", "bias_kv, 2 kv heads", "bias_kv, 1 kv heads", "causal", "mask of heads"),
    *("a mask of one's own", "lengths", "documents", "bias of heads", "bias of all heads", "weights"),
    *(
        "dropout, not training",
        "all options",
        "plan",
        "plan, q alone",
        "plan, DTensors between projections",
        "plan, all options",
    ),
}
REFUSED = {
    "heads": "ValueError: mesh: has {world} ranks, which do not divide the 7 heads of MultiHeadAttention; expected a",
    "kv heads": "of which key/value heads serve 4 together; expected a number of ranks that divides the 3 key/value",
    "two axes": 'ValueError: mesh: has 2 axes, [1, {world}], expected one; pass one of its axes: mesh["heads"]',
    "a group": "TypeError: mesh: got ProcessGroup, expected a torch.distributed.device_mesh.DeviceMesh",
    "no attention": "ValueError: module: expected a MultiHeadAttention, or a model that contains some; got Linear",
    "reproducible": "ValueError: reproducible: expected False where the heads are split over ranks",
    "twice": "ValueError: module: MultiHeadAttention has DTensors as parameters; expected one that is not split",
    "tied": "ValueError: module: 0.out_proj.weight is the same parameter as 1.out_proj.weight; expected its own",
    "hooks": "ValueError: qkv_proj: has hooks, which three projections would not keep; unpack the module first",
    "disagreement": "ranks differ in MultiHeadAttention; rank 1 has (24, 8, softcap=2.0), rank 0 (24, 8, softcap=1.0)",
    "other layers": "ValueError: module: ranks differ; rank 1 has attention at ['layer 1'], rank 0 at ['layer 0']",
    "pruned": "ValueError: module: is split over ranks; expected a whole one",
    "traced": "ValueError: module: is split over ranks; expected a whole one",
    "exported": "ValueError: module: is split over ranks; expected a whole one",
    "mask of this rank's heads": "ValueError: mask: axis 0 (H) is {heads}, expected 8 or 1",
    "bias of this rank's heads": "ValueError: bias: axis 0 (H) is {heads}, expected 8 or 1: the bias of all heads",
    "packed plan": "to split heads over ranks, call unpack() first, then ColwiseParallel() for q_proj, k_proj and",
    "plan without out_proj": "ValueError: out_proj: expected the columns of this rank's heads; split it as well",
    "plan within heads": "which is not a multiple of 3, the width of a head; expected whole heads on each rank",
}
TENSORS_REFUSED = {
    "q on its sequence": "ValueError: q: is sharded on axis 2 (Q)",
    "k on its sequence": "ValueError: k: is sharded on axis 2 (K)",
    "v on its width": "ValueError: v: is sharded on axis 3 (Dv)",
    "heads that do not divide": "ValueError: q: its 3 heads are sharded over {world} ranks; expected a divisor",
    "ordinary sinks": "TypeError: sinks: is an ordinary tensor, q, k and v are DTensors; expected a DTensor",
    "ordinary keys": "TypeError: k: is an ordinary tensor, q is a DTensor; expected q, k and v all as DTensors",
    "a mask of DTensors": "TypeError: mask (Dense): is a DTensor; expected an ordinary tensor, whole on each rank",
    "operator: sequence": "RuntimeError: q: is sharded on axis 2 (Q)",
}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each rank of a world reports; see tensor_parallel_ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    program = PROGRAMS / "tensor_parallel_ranks.py"
    return [json.loads(out) for out in run_ranks(program, str(request.param), str(folder), world=request.param)]


def differing(found: dict[str, Any]) -> dict[str, Any]:
    """Return the cases that are not close."""
    return {name: value for name, value in found.items() if not isinstance(value, float) or not value <= CLOSE}


def test_every_option_of_a_split_module_gives_the_output_and_gradients_of_one_process(ranks: Ranks) -> None:
    for found in ranks:
        assert set(found["modules"]) == OPTIONS
        assert differing(found["modules"]) == {}


@pytest.mark.parametrize("kind", ["packed", "grouped", "three"])
def test_the_state_of_all_ranks_is_that_of_one_process(ranks: Ranks, kind: str) -> None:
    for found in ranks:
        assert [found["uses"][f"{verb} {kind}"] for verb in ("written", "loaded", "set")] == ["same"] * 3


def test_a_sharded_checkpoint_loads_in_one_process_and_on_all_ranks(ranks: Ranks) -> None:
    for found in ranks:
        assert (found["uses"]["checkpoint"], found["uses"]["state of a model"]) == ("same", "same")


def test_training_with_clipped_gradients_gives_the_parameters_and_moments_of_one_process(ranks: Ranks) -> None:
    for found in ranks:
        assert differing({"trained": found["uses"]["trained"]}) == {}


def test_parameters_may_also_be_sharded_over_the_data(ranks: Ranks) -> None:
    for found in ranks:
        assert differing({name: found["uses"][name] for name in found["uses"] if name == "sharded data"}) == {}
        assert ("sharded data" in found["uses"]) == (len(ranks) == 4)


def test_ranks_drop_different_weights_and_their_generators_remain_alike(ranks: Ranks) -> None:
    for found in ranks:
        alike, alike_in_training, numbers = found["uses"]["dropout"]
        assert alike
        assert not alike_in_training
        assert numbers == 1


@pytest.mark.parametrize("use", ["growing cache", "static cache", "nested", "sequences", "without batch", "ablated"])
def test_a_split_module_is_called_as_a_whole_one(ranks: Ranks, use: str) -> None:
    for found in ranks:
        assert differing({use: found["uses"][use]}) == {}


@pytest.mark.parametrize("use", ["watched", "watched, by plan"])
def test_the_recording_of_a_rank_states_its_heads_and_holds_their_statistics(ranks: Ranks, use: str) -> None:
    heads = 8 // len(ranks)
    for rank, found in enumerate(ranks):
        seen = found["uses"][use]
        assert seen["parts"] == [f"heads {rank * heads} to {(rank + 1) * heads - 1} of 8"]
        assert seen["layers"] == ["layers.0", "layers.1"]
        assert seen["whole"] == []
        assert differing({use: seen["difference"]}) == {}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_use_is_refused_by_name_on_every_rank(ranks: Ranks, case: str) -> None:
    world = len(ranks)
    for found in ranks:
        assert REFUSED[case].format(world=world, heads=8 // world) in found["uses"]["refused"][case]


def test_dtensors_attend_as_ordinary_tensors_by_batch_and_by_heads(ranks: Ranks) -> None:
    for found in ranks:
        assert set(differing(found["tensors"])) == set(TENSORS_REFUSED)


@pytest.mark.parametrize("case", TENSORS_REFUSED)
def test_a_part_of_a_sequence_or_head_is_refused_by_name(ranks: Ranks, case: str) -> None:
    for found in ranks:
        assert found["tensors"][case].startswith(TENSORS_REFUSED[case].format(world=len(ranks)))


def test_nothing_of_dtensor_is_loaded_before_a_module_is_split() -> None:
    program = "import sys, torch, headscope; headscope.parallel.tensor_parallel; "
    program += "headscope.MultiHeadAttention(8, 2).unpack()(torch.ones(1, 2, 8)); "
    done = run_program(program + "print([n for n in sys.modules if n.startswith('torch.distributed.tensor')])")
    assert done.stdout.strip() == "[]", done.stderr
