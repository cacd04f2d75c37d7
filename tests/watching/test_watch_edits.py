"""watch, ablate and head_importance: attention layers that are replaced or added while they are open."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.utils.parametrizations import weight_norm

from headscope import ablate, head_importance, watch
from headscope.watching import Recording, WatchError
from support.watched_small import Attention


class Mixer(Attention):
    """Attends, and neither its class nor its path contains the word."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(15, 15), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Deep(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def replace_attention(model: Any) -> None:
    model.layers[0].self_attn = copy.deepcopy(model.layers[0].self_attn)


def replace_blocks(model: Any) -> None:
    model.layers[0], model.layers[1] = copy.deepcopy(model.layers[0]), copy.deepcopy(model.layers[1])


def append(model: Any) -> None:
    model.layers.append(copy.deepcopy(model.layers[0]))


def swap(model: Any) -> None:
    model.layers[0], model.layers[2] = model.layers[2], model.layers[0]


def remove_first(model: Any) -> None:
    del model.layers[0]


EDITS: dict[Callable[[Any], None], str] = {
    replace_attention: r"layers\.0\.self_attn \(Attention\);",
    replace_blocks: r"layers\.0\.self_attn \(Attention\), layers\.1\.self_attn \(Attention\);",
    append: r"layers\.3\.self_attn \(Attention\);",
    swap: r"layers\.0\.self_attn \(Attention\), layers\.2\.self_attn \(Attention\);",
    remove_first: r"layers\.0\.self_attn \(Attention\), layers\.1\.self_attn \(Attention\);",
}


def run(opened: Any, *steps: Callable[[], object]) -> None:
    """Take these steps within the block."""
    with opened:
        for step in steps:
            step()


def by_name(name: str, module: nn.Module) -> bool:
    """A choice by a function."""
    return "self_attn" in name


def rows_of(recording: Recording) -> dict[str, int]:
    """Return how many rows each layer's first head has."""
    return {name: int(part.rows[0]) for name, part in recording.stats.parts.items()}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 7, 15)


@pytest.mark.parametrize("layers", [None, "layers.*", "*.self_attn", by_name])
@pytest.mark.parametrize("edit", EDITS)
def test_a_forward_pass_after_an_edit_names_the_layers(edit: Callable[[Any], None], layers: Any, x: Tensor) -> None:
    model = Deep()
    with pytest.raises(WatchError, match="after the model was registered: " + EDITS[edit]) as caught:
        run(watch(model, layers=layers), lambda: model(x), lambda: edit(model), lambda: model(x))
    assert any(entry.name == "begin" for entry in caught.traceback)


def test_an_edit_between_the_call_of_watch_and_its_block_is_noticed(x: Tensor) -> None:
    model = Deep()
    watcher = watch(model)
    replace_attention(model)
    with pytest.raises(WatchError, match=r"layers\.0\.self_attn"):
        run(watcher, lambda: model(x))


def test_the_recording_before_the_edit_stays_usable(x: Tensor) -> None:
    model = Deep()
    with watch(model) as expected:
        model(x)
    watcher = watch(model)
    with pytest.raises(WatchError, match="open a new block"):
        run(watcher, lambda: model(x), lambda: append(model))
    assert rows_of(watcher.recording) == rows_of(expected)


def test_an_edit_does_not_mask_an_exception(x: Tensor) -> None:
    model = Deep()
    with pytest.raises(ZeroDivisionError):
        run(watch(model), lambda: model(x), lambda: append(model), lambda: 1 // 0)


def replace_mixer(model: Any) -> None:
    model.layers[0] = Mixer()


def append_mixer(model: Any) -> None:
    model.layers.append(Mixer())


@pytest.mark.parametrize("edit", [replace_mixer, append_mixer])
@pytest.mark.parametrize("first", [True, False])
def test_layers_without_a_telling_name_are_known_by_their_calls(
    edit: Callable[[Any], None], first: bool, x: Tensor
) -> None:
    model = Deep(Mixer)
    before = [lambda: model(x)] if first else []
    with pytest.raises(WatchError, match=r"layers\.[03] \(Mixer\)"):
        run(watch(model, layers="layers.*"), *before, lambda: edit(model), lambda: model(x))


@pytest.mark.parametrize("edit", [replace_attention, replace_blocks, swap])
def test_an_ablated_layer_that_is_replaced_is_an_error(edit: Callable[[Any], None], x: Tensor) -> None:
    model = Deep()
    message = r"heads: attention layers were replaced or added .*layers\.0\.self_attn"
    for after in ([], [lambda: model(x)]):
        with pytest.raises(WatchError, match=message):
            run(ablate(model, {"layers.0.self_attn": "all"}), lambda: model(x), lambda: edit(model), *after)


@pytest.mark.parametrize("method", ["gradient", "ablation"])
def test_a_loss_that_replaces_a_layer_is_an_error(method: Any, x: Tensor) -> None:
    def loss(model: Any) -> Tensor:
        out = model(x).square().mean()
        replace_attention(model)
        return out

    with pytest.raises(WatchError, match=r"layers\.0\.self_attn"):
        head_importance(Deep(), loss, method=method)


def test_layers_that_are_not_chosen_may_be_replaced(x: Tensor) -> None:
    model = Deep()
    with watch(model, layers="layers.1") as recording, ablate(model, {"layers.2": 0}):
        model(x)
        replace_attention(model)
        model(x)
    assert rows_of(recording) == {"layers.1.self_attn": 28}


def checkpoints(module: nn.Module) -> bool:
    return isinstance(module, (Layer, Attention))


def checkpointed(model: Any) -> None:
    apply_activation_checkpointing(model, check_fn=checkpoints)


def normed(model: Any) -> None:
    for layer in model.layers:
        weight_norm(layer.self_attn.qkv)


def other_mlp(model: Any) -> None:
    model.layers[0].mlp = nn.Sequential(nn.Linear(15, 15))
    model.layers[1].adapter = nn.Sequential(nn.Linear(15, 15))
    model.layers[1].self_attn.out = nn.Sequential(nn.Linear(15, 15))


def without_last(model: Any) -> None:
    del model.layers[2]


@pytest.mark.parametrize(("edit", "layers"), [(checkpointed, 3), (normed, 3), (other_mlp, 3), (without_last, 2)])
def test_wrappers_and_other_modules_are_no_edit_of_attention(
    edit: Callable[[Any], None], layers: int, x: Tensor
) -> None:
    model = Deep()
    with watch(model) as recording, ablate(model, {"layers.0": 0}):
        model(x)
        edit(model)
        for _ in range(2):
            model(x).sum().backward()
    expected = {f"layers.{n}.self_attn": 42 if n < layers else 14 for n in range(3)}
    assert rows_of(recording) == expected


def test_a_watch_around_one_that_raises_ends_its_pass(x: Tensor) -> None:
    model = Deep()
    inner = watch(model, layers="layers.1*")

    def replace_a_layer() -> None:
        model.layers[1] = Deep().layers[1]

    with (
        warnings.catch_warnings(action="error"),
        watch(model, layers="layers.0*") as seen,
        pytest.raises(WatchError, match="were replaced or added"),
    ):
        run(inner, lambda: model(x), replace_a_layer, lambda: model(x))
    assert seen.about.ran == 2
