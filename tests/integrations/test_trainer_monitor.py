"""TrainerMonitor: a training of transformers, and its callbacks as the trainer calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import History, MultiHeadAttention, masks, watch
from headscope.stats import Observe
from headscope.watching import WatchError, register_transformers

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.trainer_callback")

from transformers.integrations.integration_utils import DVCLiveCallback  # noqa: E402
from transformers.trainer_callback import (  # noqa: E402
    CallbackHandler,
    DefaultFlowCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from headscope.integrations import TrainerMonitor  # noqa: E402


class Tracker(DVCLiveCallback):
    """A reporter of transformers that stores what it gets."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        self.logged.setdefault(state.global_step, {}).update(logs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class Console(TrainerCallback):
    """A callback of the user's that expects a loss in each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        raise AssertionError(logs["loss"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MultiHeadAttention(16, 2), MultiHeadAttention(16, 2)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x, mask=masks.causal())
        return x


def train(
    model: nn.Module, monitor: Any, steps: int, *, step: Callable[[int], None] | None = None, process_zero: bool = True,
    start: int = 0, micro: int = 1, compiled: bool = False,
) -> Tracker:  # fmt: skip
    """Call the callbacks in the order of the Trainer."""
    tracker = Tracker()
    handler = CallbackHandler([DefaultFlowCallback(), tracker, Console(), monitor], model, None, None, None)
    state = TrainerState(is_world_process_zero=process_zero, global_step=start, max_steps=start + steps)
    args, control = SimpleNamespace(torch_compile=compiled), TrainerControl()
    x = torch.randn(2, 12, 16)
    handler.on_train_begin(args, state, control)
    for _ in range(steps):
        handler.callbacks[-1].on_step_begin(args, state, control, model=model)
        for _ in range(micro):
            model(x).square().mean().backward()
        if step is not None:
            step(state.global_step + 1)
        state.global_step += 1
        handler.callbacks[-1].on_step_end(args, state, control, model=model)
        with torch.no_grad():
            model(x[:1])  # an evaluation
    handler.on_train_end(args, state, control)
    return tracker


def test_the_first_step_and_each_multiple_reach_the_trackers_of_the_trainer() -> None:
    monitor = TrainerMonitor(every=4, rows=5)
    tracker = train(Model(), monitor, 9)
    assert sorted(tracker.logged) == [1, 4, 8]
    names = [f"attn/L{layer:02d}/H{head:02d}/{name}" for layer in range(2) for head in range(2)
             for name in ("max_logit_max", "entropy", "normalized_entropy", "first")]  # fmt: skip
    assert sorted(tracker.logged[4]) == sorted([*names, "attn/alarms"])
    assert monitor.recording is not None
    assert monitor.recording.forwards == 3
    assert monitor.recording.stats.parts["layers.0"].looked_at == 3 * 2 * 5


def test_values_are_those_of_watch_in_that_step() -> None:
    torch.manual_seed(3)
    model, x = Model(), torch.randn(2, 12, 16)
    with watch(model, rows=7, what=Observe(received=False)) as expected:
        model(x)
    torch.manual_seed(3)
    again = Model()
    monitor = TrainerMonitor(rows=7, quantities=None)
    tracker = train(again, monitor, 1)
    flat = {name: value for name, value in tracker.logged[1].items() if name != "attn/alarms"}
    values: dict[str, float] = {}
    with watch(again, rows=7, what=Observe(received=False), log=lambda each, step: values.update(each)):
        again(x)
    assert set(flat) == set(values)
    assert flat == values
    assert expected.stats.names == monitor.recording.stats.names


def test_a_resumed_training_looks_at_its_first_step_and_keeps_the_numbers() -> None:
    assert sorted(train(Model(), TrainerMonitor(every=10), 11, start=95).logged) == [96, 100]


def test_all_passes_of_a_step_are_pooled_and_the_evaluation_is_not() -> None:
    monitor = TrainerMonitor(every=2, rows=None)
    train(Model(), monitor, 2, micro=3)
    part = monitor.recording.stats.parts["layers.1"]
    assert (part.runs, part.of) == (6, 6 * 2 * 12)


def test_a_step_that_is_not_looked_at_runs_the_original_code() -> None:
    def check(number: int) -> None:
        watched = nn.Module.__call__ is not original or type(model).__call__ is not original
        assert watched == (number in (1, 5))

    model, original = Model(), nn.Module.__call__
    train(model, TrainerMonitor(every=5), 6, step=check)
    assert type(model).__call__ is original


def test_an_alarm_is_logged_once_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    def spoil(number: int) -> None:
        if number == 5:
            with torch.no_grad():
                model.layers[1].qkv_proj.weight.mul_(60)

    texts: list[str] = []
    monkeypatch.setattr(logging.getLogger("headscope"), "handlers", [Handler()])
    model = Model()
    tracker = train(model, TrainerMonitor(every=2), 10, step=spoil)
    alarms = {step: values["attn/alarms"] for step, values in tracker.logged.items() if values["attn/alarms"]}
    assert list(alarms) == [6]
    assert len(texts) == alarms[6] > 0
    assert all("step 6, layer layers.1" in text for text in texts)


def test_only_the_first_process_looks() -> None:
    monitor = TrainerMonitor()
    assert train(Model(), monitor, 3, process_zero=False).logged == {}
    assert monitor.recording is None


def test_a_training_after_one_that_failed_starts_anew(tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise KeyError

    original = nn.Module.__call__
    monitor = TrainerMonitor(every=2, log=History(tmp_path / "run.safetensors"))
    with pytest.raises(KeyError):
        train(Model(), monitor, 4, step=fail)
    assert MultiHeadAttention.__call__ is not original
    assert sorted(train(Model(), monitor, 4).logged) == [1, 2, 4]
    assert monitor.recording.forwards == 3
    assert MultiHeadAttention.__call__ is original
    with pytest.raises(KeyError):
        train(Model(), monitor, 4, step=fail)
    monitor.close()
    assert MultiHeadAttention.__call__ is original


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads it of the first layer's output
def test_a_compiled_model_is_watched_through_the_operator() -> None:
    torch._dynamo.reset()
    model = Model()
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
    tracker = train(model, TrainerMonitor(every=2, rows=5), 4)
    assert sorted(tracker.logged) == [1, 2, 4]
    assert model.layers[0]._headscope_sums is None
    with pytest.raises(WatchError, match="do not use headscope's attention"):
        train(nn.MultiheadAttention(8, 2), TrainerMonitor(), 1, compiled=True)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"every": 0}, "every"), ({"quantities": "entropy"}, "quantities"), ({"compiled": 1}, "compiled"),
     ({"what": Observe(rows=3)}, "rows")],
)  # fmt: skip
def test_wrong_arguments_are_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{error}: "):
        TrainerMonitor(**options)


def test_a_call_by_other_code_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected the Trainer of transformers"):
        TrainerMonitor().on_train_begin(None, TrainerState(), TrainerControl(), model=Model())


@pytest.mark.parametrize("torch_compile", [False, True])
def test_the_trainer_writes_curves_of_a_small_llama(tmp_path: Path, torch_compile: bool) -> None:
    pytest.importorskip("accelerate", reason="the Trainer of transformers requires accelerate")
    register_transformers()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="headscope",
    )  # fmt: skip
    ids = torch.randint(0, 64, (24, 10))
    tracker = Tracker()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        torch_compile=torch_compile, torch_compile_backend="eager" if torch_compile else None,
    )  # fmt: skip
    monitor = TrainerMonitor(every=3, rows=4)
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config), args=arguments, callbacks=[tracker, monitor],
        train_dataset=[{"input_ids": each, "labels": each} for each in ids],
    )  # fmt: skip
    trainer.train()
    assert sorted(tracker.logged) == [1, 3, 6]
    assert {"loss", "attn/L00/H01/entropy"} <= set(tracker.logged[3])
    assert monitor.recording.layers == ("model.layers.0.self_attn",)
    assert monitor.recording.stats.parts["model.layers.0.self_attn"].looked_at == 3 * 2 * 2 * 4
