"""What a recording states of its model and heads, and that merge and compare refuse what does not belong together."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import headscope
from headscope import HeadStats, Recording, watch
from headscope.comparing import compare
from headscope.report.viewer import render_recording
from headscope.stats import merge
from headscope.watching import Origin, Part
from support.forking import run_ranks
from support.paths import DATA, PROGRAMS
from support.programs.sharded_recordings import SIZE, Model, shard_by_hand
from support.recording_files import without_checksums

OLD = DATA / "recording_v1.safetensors"
"""Written before recordings stated their origin."""


def recorded(model: nn.Module, size: int = SIZE) -> Recording:
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 5, size))
    return seen


def configured(**config: Any) -> Model:
    model = Model().eval()
    model.config = SimpleNamespace(**{"num_attention_heads": 4, "hidden_size": SIZE, **config})
    return model


class Other(Model):
    """Another model, with layers of the same names and sizes."""


# ---------------------------------------------------------------- what a recording states


def test_a_recording_states_its_model_and_survives_saving(tmp_path: Path) -> None:
    seen = recorded(configured())
    path = seen.save(tmp_path / "seen.safetensors")
    origin = seen.about.origin
    assert origin is not None
    assert (origin.model, len(origin.config), list(origin.layers)) == ("Model", 16, ["attention"])
    assert origin.layers["attention"].widths == (6, 6)
    assert seen.about.part == {}
    assert Recording.load(path).about == seen.about
    assert HeadStats.load(path).origin == origin
    assert HeadStats.load(seen.stats.save(tmp_path / "stats.safetensors")).origin == origin
    assert seen.stats[0].origin == origin
    assert seen.stats.to("cpu").origin == origin
    assert seen.to_dict()["about"]["origin"]["model"] == "Model"
    assert copy.deepcopy(seen).about == seen.about


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "tuned", "torch_dtype": "bfloat16", "dtype": "float16"},
        {"_attn_implementation": "eager", "attn_implementation": "sdpa", "transformers_version": "5.0"},
        {
            "vocab_size": 3,
            "id2label": {0: "a"},
            "num_labels": 7,
            "architectures": ["Other"],
            "hidden_dropout_prob": 0.1,
        },
        {"max_position_embeddings": 9, "rope_theta": 1e6, "image_size": 7, "use_cache": False, "pad_token_id": 3},
    ],
)
def test_what_may_differ_between_checkpoints_is_not_in_the_digest(change: dict[str, Any]) -> None:
    one, other = recorded(configured()), recorded(configured(**change))
    assert one.about.origin == other.about.origin
    compare(one, other)


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 3}, {"hidden_size": 99}, {"model_type": "x"}, {"text_config": SimpleNamespace(n_head=3)}],
)
def test_another_structure_is_in_the_digest(change: dict[str, Any]) -> None:
    one, other = recorded(configured()), recorded(configured(**change))
    with pytest.raises(ValueError, match=r"merge: different models; expected Model \(configuration \w+\), got Model"):
        one.stats.merge(other.stats)
    with pytest.raises(
        ValueError, match=r"after: has a different architecture from before; expected Model .*, got Model "
    ):
        compare(one, other)


def test_a_configuration_that_changes_between_watches_is_read_again() -> None:
    model = configured(depths=[2, 2])
    digests = [recorded(model).about.origin.config]  # pyright: ignore[reportOptionalMemberAccess]
    for change in (lambda: model.config.depths.append(1), lambda: setattr(model.config, "hidden_size", 99)):
        change()
        digests.append(recorded(model).about.origin.config)  # pyright: ignore[reportOptionalMemberAccess]
    assert len({*digests}) == 3
    model.config.hidden_size = SIZE
    del model.config.depths[-1]
    assert recorded(model).about.origin == recorded(configured(depths=[2, 2])).about.origin


def test_a_model_of_transformers_is_the_same_under_other_dtypes_and_attention_functions() -> None:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 3}
    config = transformers.BertConfig(**sizes, vocab_size=11, max_position_embeddings=9)
    sizes |= {"num_labels": 5}
    longer = transformers.BertConfig(**sizes, vocab_size=17, max_position_embeddings=19)
    seen: list[Recording] = []
    for model in (
        transformers.BertForMaskedLM._from_config(config, attn_implementation="sdpa"),
        transformers.BertForMaskedLM._from_config(config, attn_implementation="eager").bfloat16(),
        transformers.BertForSequenceClassification(longer),
    ):
        with torch.no_grad(), watch(model.eval()) as recording:
            model(torch.arange(7)[None])
        seen.append(recording)
    assert seen[0].about.part == {}
    assert seen[0].stats.merge(seen[1].stats).origin == seen[0].about.origin
    assert compare(seen[0], seen[2]).only_after == (), "a classifier tuned from it is compared"
    with pytest.raises(ValueError, match=r"merge: different models; expected BertForMaskedLM .*BertForSequenceClassif"):
        seen[0].stats.merge(seen[2].stats)


def test_a_model_of_transformers_is_the_same_in_memory_and_loaded_from_its_file(tmp_path: Path) -> None:
    """``model_type`` is an attribute of the class until a file has given it to the configuration."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    seen: list[Recording] = []
    for each in (model, transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()):
        with torch.no_grad(), watch(each) as recording:
            each(torch.arange(7)[None])
        seen.append(recording)
    assert seen[0].about.origin == seen[1].about.origin
    assert compare(*seen).moved == ()


# ---------------------------------------------------------------- what is refused


def test_recordings_of_one_model_merge_in_every_form() -> None:
    model = configured()
    one, other = recorded(model), recorded(model)
    for merged in (one.stats.merge(other.stats), merge(one.stats, other.stats), HeadStats({}).merge(one.stats)):
        assert merged.origin == one.about.origin
    again = Recording(one.stats.merge(other.stats), replace(one.about, origin=None))
    assert again.about.origin == one.about.origin


def test_two_models_with_layers_of_one_name_do_not_merge() -> None:
    one, other = recorded(Model(configured=False)), recorded(Other(configured=False))
    message = r"merge: different models; expected Model \(without a configuration\), got Other \(without a .*named"
    with pytest.raises(ValueError, match=message):
        one.stats.merge(other.stats)
    with pytest.raises(
        ValueError, match=r"after: has a different architecture from before; expected Model .*, got Other"
    ):
        one.compare(other)
    both = one.stats.named("one").merge(other.stats.named("other"))
    assert (both.layers, both.origin) == (("one", "other"), None), "under names of their own they are put side by side"


def test_heads_of_other_width_are_refused() -> None:
    one, other = (recorded(headscope.MultiHeadAttention(size, 3), size) for size in (12, 24))
    with pytest.raises(ValueError, match=r"heads of different width; expected 4 \(q, k\) and 4 \(v\), got 8 \(q, k\)"):
        one.stats.merge(other.stats)
    with pytest.raises(
        ValueError, match=r"has heads of a different width from before; expected 4 \(q, k\).*, got 8 \(q, k\)"
    ):
        compare(one, other)


def test_other_numbers_of_heads_are_not_compared_by_number() -> None:
    module = headscope.MultiHeadAttention(12, 3)
    whole = recorded(module, 12)
    pruned = recorded(module.prune_heads([0]), 12)
    with pytest.raises(
        ValueError, match=r"after: layer \w+ has different heads from before; expected 3 heads, got 2 heads"
    ):
        compare(whole, pruned)


def test_other_layers_of_one_model_are_compared_and_merged() -> None:
    model = nn.ModuleDict({"a": headscope.MultiHeadAttention(12, 3), "b": headscope.MultiHeadAttention(12, 3)})
    x, seen = torch.randn(1, 5, 12), {}
    for layer in "ab":
        with torch.no_grad(), watch(model, layers=layer) as seen[layer]:
            for module in model.values():
                module(x)
    assert seen["a"].stats.merge(seen["b"].stats).layers == ("a", "b")
    assert compare(seen["a"], seen["b"]).only_before == ("layer a",)


# ---------------------------------------------------------------- parts


def shard(rank: int, world: int = 2) -> Model:
    model = configured()
    shard_by_hand(model.attention, rank, world)
    return model


def test_fewer_heads_than_the_configuration_states_are_a_part() -> None:
    model = shard(0)
    model.attention.register_module("o", nn.Identity())
    one, again, other = recorded(model), recorded(model), recorded(shard(0))
    (part,) = one.about.part.values()
    assert (part.of, part.heads, part.holder[:7]) == (4, None, "module ")
    assert one.stats.merge(again.stats).origin == one.about.origin, "one module object holds the same heads"
    message = r"layer attention: different parts of its heads, or unknown ones; expected an unknown part of 4 heads"
    with pytest.raises(ValueError, match=message):
        one.stats.merge(other.stats)
    with pytest.raises(
        ValueError, match=r"after: layer attention has different heads from before; expected an unknown"
    ):
        compare(one, recorded(configured()))
    assert compare(one, other).notes[-1].startswith("Which heads either side holds is unknown in 1 layers, attention")


@pytest.mark.parametrize("config", [{"num_heads": [2, 4]}, {"num_attention_heads": 3}, {"decoder_attention_heads": 2}])
def test_a_layer_that_is_meant_to_have_few_heads_is_whole(config: dict[str, Any]) -> None:
    model = shard(0)
    model.attention.register_module("o", nn.Identity())
    model.config = SimpleNamespace(**{"num_attention_heads": 4, **config})
    assert recorded(model).about.part == {}


def test_a_part_that_the_user_states_is_kept(tmp_path: Path) -> None:
    seen = recorded(configured())
    assert seen.about.origin is not None
    sides: list[HeadStats] = []
    for heads in ((0, 4), (4, 8), (4, 8)):
        layer = replace(seen.about.origin.layers["attention"], part=Part(8, heads))
        about = replace(seen.about, origin=replace(seen.about.origin, layers={"attention": layer}))
        path = Recording(replace(seen.stats, origin=None), about).save(tmp_path / "part.safetensors")
        sides.append(Recording.load(path).stats)
        assert f"heads {heads[0]} to {heads[1] - 1} of 8 in attention" in render_recording(Recording.load(path))
    with pytest.raises(ValueError, match=r"expected heads 0 to 3 of 8, got heads 4 to 7 of 8; merge recordings of one"):
        sides[0].merge(sides[1])
    assert sides[1].merge(sides[2]).origin == sides[1].origin


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], Recording]:
    """The recordings of two processes that share a model, by the kind of sharding, rank and input."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(PROGRAMS / "sharded_recordings.py", "2", str(folder / "store"), str(folder))
    return lambda kind, rank, text: Recording.load(folder / f"{kind}_{rank}_{text}.safetensors")


@pytest.mark.parametrize("kind", ["tensors", "unconfigured"])
def test_a_rank_of_tensor_parallelism_states_its_heads(kind: str, ranks: Callable[..., Recording]) -> None:
    first, second = ranks(kind, 0, 0), ranks(kind, 1, 0)
    assert first.about.part == {"attention": Part(4, (0, 2))}
    assert second.about.part == {"attention": Part(4, (2, 4))}
    assert second.stats.merge(ranks(kind, 1, 1).stats)["attention", 0, "entropy"].count == 10
    with pytest.raises(ValueError, match=r"layer attention: .*; expected heads 0 to 1 of 4, got heads 2 to 3 of 4"):
        first.stats.merge(second.stats)
    with pytest.raises(
        ValueError, match=r"after: layer attention .* expected heads 0 to 1 of 4, got heads 2 to 3 of 4"
    ):
        compare(first, second)


def test_ranks_that_hold_plain_tensors_are_told_apart(ranks: Callable[..., Recording]) -> None:
    first, second = ranks("by_hand", 0, 0), ranks("by_hand", 1, 0)
    assert first.about.part == {"attention": Part(4, None, "process 0 of 2")}
    first.stats.merge(ranks("by_hand", 0, 1).stats)
    with pytest.raises(ValueError, match=r"held by process 0 of 2\), got an unknown part .*process 1 of 2"):
        first.stats.merge(second.stats)
    with pytest.raises(ValueError, match="has different heads from before"):
        compare(first, second)


def test_ranks_of_data_parallelism_merge(ranks: Callable[..., Recording]) -> None:
    first, second = ranks("data", 0, 0), ranks("data", 1, 0)
    assert first.about.part == {}
    assert first.stats.merge(second.stats).origin == first.about.origin
    assert first.about.origin == recorded(Model().eval()).about.origin, "fully_shard changes the class, not the model"


# ---------------------------------------------------------------- recordings of earlier versions


def test_a_recording_of_an_earlier_version_loads_and_merges_with_a_warning(tmp_path: Path) -> None:
    old = Recording.load(OLD)
    new_stats = headscope.observe(*torch.randn(2, 1, 3, 5, 4)).named("MultiHeadAttention")
    assert old.about.part == {}
    with pytest.warns(UserWarning, match=r"2 of 2 do not state their model and heads.*stats\.named"):
        both = old.stats.merge(HeadStats.load(OLD))
    assert both[0, 0, "entropy"].count == 10
    again = Recording(both, old.about).save(tmp_path / "both.safetensors")
    assert HeadStats.load(both.save(tmp_path / "stats.safetensors")).origin == Origin("")
    new = recorded(headscope.MultiHeadAttention(12, 3), 12).stats.named("a")
    new = HeadStats(new.parts, recorded(configured()).about.origin)
    with pytest.warns(UserWarning, match="1 of 2 do not state"):
        assert Recording.load(again).stats.merge(new).layers == ("MultiHeadAttention", "a")
    assert both.named("a").merge(both.named("a")).layers == ("a",), "without a warning, as it was asked for"
    assert new_stats.merge(new_stats).origin is None


def test_a_comparison_with_a_recording_of_an_earlier_version_says_so() -> None:
    found = compare(Recording.load(OLD), recorded(headscope.MultiHeadAttention(12, 3), 12))
    assert found.notes[-1].startswith("Before does not state its model and heads")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format 2, this version of headscope reads up to 1"),
        ({"model": None}, "is damaged: model: got NoneType"),
        ({"config": 3}, "is damaged: config: got int"),
        ({"layers": {"b": {}}}, "is damaged: layers: got b, expected names of the layers"),
        ({"layers": {"attention": {"widths": [3]}}}, "is damaged: widths: got 1 numbers, expected 2"),
        ({"layers": {"attention": {"widths": [3, 3], "part": {"of": 4, "heads": [2, 2], "holder": ""}}}}, "heads: got"),
        ({"layers": {"attention": {"widths": [3, 3], "part": {"of": 4, "heads": [0, 5], "holder": ""}}}}, "heads: got"),
        ({"layers": {"attention": {"widths": [3, 3]}}}, "is damaged: it lacks 'part'"),
    ],
)
def test_a_damaged_origin_is_told_as_such(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = recorded(configured()).save(tmp_path / "seen.safetensors")
    with safe_open(path, framework="pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        entries = without_checksums(file.metadata())
    entries["headscope.origin"] = json.dumps(json.loads(entries["headscope.origin"]) | change)
    save_file(held, path, entries)
    with pytest.raises(ValueError, match=rf"seen.safetensors: .*{message}"):
        HeadStats.load(path)


def test_an_origin_is_shown_as_a_sentence() -> None:
    assert str(Origin("Model")) == "Model (without a configuration)"
    assert str(Part(8, (4, 8))) == "heads 4 to 7 of 8"


class PerLayerConfig:
    """As transformers has it for models whose layers differ: an attribute of the layers raises."""

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("'num_attention_heads' is a per-layer attribute and may vary across layers")


class Heterogeneous(nn.Module):
    config = PerLayerConfig()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_configuration_without_one_number_of_heads_is_no_error() -> None:
    model = Heterogeneous()
    with watch(model) as seen:
        model(torch.randn(1, 2, 5, 3))
    assert seen.layers == ("Heterogeneous",)
