"""Monitoring: what trackers get, which alarms are raised, and that no step waits for its device."""

from __future__ import annotations

import copy
import linecache
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headscope import Recording, observe, watch, watching
from headscope._intercept import Measured
from headscope.masks import causal
from headscope.watching import AttentionWarning, Limits
from headscope.watching._monitor import Monitor, _Step, writer


class Steered(nn.Module):
    """Causal attention in which every query looks at key 0, or at its own, as sharply as it is told."""

    def forward(self, sharp: Tensor, first: Tensor) -> Tensor:
        eye = torch.eye(9).expand(1, 2, 9, 9)
        q = torch.where(first, eye[..., :1, :], eye) * sharp
        return F.scaled_dot_product_attention(q, eye, eye, is_causal=True, scale=1.0)


class Board:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))


class Run:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, values: dict[str, float], *, commit: bool) -> None:
        assert not commit, "the loop's own row is not closed"
        self.rows.append(values)


def run(model: Steered, sharp: float, first: bool = False) -> None:
    model(torch.tensor(sharp), torch.tensor(first))


def test_trackers_get_the_values_of_each_step_under_flat_names() -> None:
    board, wandb, seen_by = Board(), Run(), list[tuple[dict[str, float], int]]()
    model = nn.ModuleDict({"a": Steered(), "b": Steered()})
    logs = [board, wandb, lambda values, step: seen_by.append((values, step))]
    with watch(model, every=2, log=logs) as seen:
        for sharp in (1.0, 2.0, 3.0):
            run(model["a"], sharp)
    assert [step for _, step in seen_by] == [0, 2], "the forward passes that were looked at"
    for (values, step), row, sharp in zip(seen_by, wandb.rows, (1.0, 3.0), strict=True):
        eye = torch.eye(9).expand(1, 2, 9, 9)
        wanted = observe(sharp * eye, eye, eye, mask=causal(), scale=1.0)
        flat = wanted.flat()
        assert values == pytest.approx(flat | {f"attn/L00/H0{head}/max_logit_max": sharp for head in (0, 1)})
        assert row == values | {"attn/step": step}
        assert [(name, value) for name, value, at in board.written if at == step] == [*values.items()]
    assert seen.alarms == ()


def test_layers_keep_their_numbers() -> None:
    """Also in passes that not all of them take part in."""
    model = nn.ModuleDict({"a": Steered(), "b": Steered()})
    found: list[set[str]] = []
    with watch(model, log=lambda values, step: found.append({name[5:8] for name in values})):
        run(model["a"], 1.0)
        run(model["b"], 1.0)
        run(model["a"], 1.0)
    assert found == [{"L00"}, {"L01"}, {"L00"}]


class Dropping(nn.ModuleDict):
    """Runs the layers that it is told, in the order that it is told; each has a largest logit of its own."""

    def __init__(self) -> None:
        super().__init__({"a": Steered(), "b": Steered(), "c": Steered()})

    def forward(self, names: str) -> None:
        for name in names:
            run(self[name], "abc".index(name))


def test_a_layer_that_is_first_seen_later_gets_the_next_number() -> None:
    """Within a step the order of the model counts, not that of the calls."""
    model, found = Dropping(), list[dict[str, float]]()
    with watch(model, log=lambda values, step: found.append(values)):
        for names in ("ca", "cab", "b"):
            model(names)
    largest = [{at[5:8]: x for at, x in values.items() if at.endswith("H00/max_logit_max")} for values in found]
    assert largest == [{"L00": 0, "L01": 2}, {"L00": 0, "L02": 1, "L01": 2}, {"L02": 1}]


@pytest.mark.timeout(60)
def test_a_log_function_may_run_the_model_which_is_recorded_and_not_logged() -> None:
    model, steps = Steered(), list[int]()

    def log(values: dict[str, float], step: int) -> None:
        steps.append(step)
        run(model, 200.0)

    with watch(model, log=log, alarms=True) as seen:
        run(model, 1.0)
        run(model, 1.0)
    assert (seen.forwards, seen.stats.parts["Steered"].runs, seen.alarms) == (4, 4, ())
    assert steps == [0, 2]


def test_what_is_no_tracker_is_refused() -> None:
    with pytest.raises(TypeError, match="log: got int, expected something with add_scalar or log, or a function"):
        watch(Steered(), log=3)
    assert callable(writer(print))


# ---------------------------------------------------------------- alarms


@pytest.mark.parametrize(
    ("steps", "limits", "wanted"),
    [
        ([(1, False), (3, False), (30, False)], Limits(max_logit=None), "entropy collapse"),
        ([(1, False), (60, False), (120, False)], Limits(entropy=None), "growing logits"),
        ([(1, True), (3, True), (5, True)], Limits(entropy=None), "rising sink"),
    ],
)
def test_alarms(steps: list[tuple[float, bool]], limits: Limits, wanted: str) -> None:
    model = Steered()

    def train() -> watching.Recording:
        with watch(model, alarms=limits) as seen:
            for sharp, first in [*steps, steps[-1]]:
                run(model, sharp, first)
        return seen

    with pytest.warns(AttentionWarning, match=f"layer Steered, head .: {wanted}"):
        seen = train()
    alarms = [alarm for alarm in seen.alarms if alarm.what == wanted]
    assert {(alarm.layer, alarm.head) for alarm in alarms} == {("Steered", 0), ("Steered", 1)}
    assert len(alarms) == 2, "once, as long as it lasts"
    assert str(alarms[0]).startswith(f"step {alarms[0].step}, layer Steered, head 0: {wanted}: ")


def test_a_warning_names_the_line_that_called_the_model() -> None:
    model = Steered()
    with watch(model, alarms=Limits(max_logit=5)):
        run(model, 1.0)
        with pytest.warns(AttentionWarning) as caught:
            run(model, 8.0)
    assert {each.filename for each in caught} == {__file__}
    called = {linecache.getline(each.filename, each.lineno).strip() for each in caught}
    assert called == {"model(torch.tensor(sharp), torch.tensor(first))"}


def test_alarms_are_saved_loaded_and_copied(tmp_path: Path) -> None:
    model = Steered()
    with watch(model, alarms=Limits(max_logit=5)) as seen:
        run(model, 1.0)
        with pytest.warns(AttentionWarning):
            run(model, 8.0)
    assert {alarm.what for alarm in seen.alarms} >= {"growing logits"}
    path = seen.save(tmp_path / "seen.safetensors")
    assert (
        Recording.load(path).alarms
        == seen.alarms
        == copy.deepcopy(seen).alarms
        == pickle.loads(pickle.dumps(seen)).alarms
    )
    assert Recording.load(Recording.load(path).save(tmp_path / "again.safetensors")).alarms == seen.alarms


def test_an_alarm_is_raised_again_after_it_has_gone_back() -> None:
    monitor = Monitor([], Limits())
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for step, value in enumerate([0.1, 0.5, 0.6, 0.1, 0.5]):
            monitor._look(Limits(), step, ("a", 0, "first"), value)
    assert [alarm.step for alarm in monitor.alarms] == [1, 4]


@pytest.mark.parametrize(
    ("quantity", "values", "steps"),
    [
        ("first", [0.25, 0.5, 0.34, 0.5, 0.3, 0.5], [1, 5]),  # 0.34 is less than 0.1 above the minimum, and above 0.3
        ("normalized_entropy", [0.15, 0.07, 0.08, 0.07, 0.1, 0.07], [1, 5]),
        ("max_logit_max", [60.0, 130.0, 110.0, 130.0, 100.0, 130.0], [1, 5]),
    ],
)
def test_a_value_that_stays_beyond_its_limit_raises_no_second_alarm(
    quantity: str, values: list[float], steps: list[int]
) -> None:
    monitor = Monitor([], Limits())
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for step, value in enumerate(values):
            monitor._look(Limits(), step, ("a", 0, quantity), value)
    assert [alarm.step for alarm in monitor.alarms] == steps


def test_what_was_so_from_the_start_is_no_alarm() -> None:
    """A trained model has sinks and sharp heads: what counts is that they come about."""
    model = Steered()
    with watch(model, alarms=True) as seen:
        for _ in range(3):
            run(model, 150.0, first=True)
    assert seen.alarms == ()


@pytest.mark.parametrize("limits", [{"entropy": 0.0}, {"sink": 1.0}, {"max_logit": -1.0}])
def test_limits_are_checked(limits: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limits))}: got .*, expected a number above 0"):
        Limits(**limits)


# ---------------------------------------------------------------- no step waits


class Event:
    """That of a device, which says when a copy has arrived."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_values_are_handed_on_in_order_once_they_have_arrived() -> None:
    found: list[int] = []
    monitor = Monitor([lambda values, step: found.append(step)], None)
    events = [Event(), Event(), Event()]
    for number, event in enumerate(events):
        monitor._waiting.append(_Step(number, [("a", 0, "entropy")], [1], torch.ones(1), event))
    events[1].done = True
    monitor.step(3, {})
    assert found == [], "the first has not arrived"
    events[0].done = True
    monitor.step(3, {})
    assert found == [0, 1]
    monitor.finish()
    assert found == [0, 1, 2]


class Reads(TorchDispatchMode):
    """Counts what would wait for a device: numbers that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_of_a_step_reads_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside observing, which test_observe looks after: calls are taken, merged and kept without a look at them."""
    eye = torch.eye(9).expand(1, 2, 9, 9)
    part = next(iter(observe(eye, eye, eye).parts.values()))
    measured: Callable[..., Any] = lambda *_: Measured(lambda: part)  # noqa: E731
    monkeypatch.setattr("headscope.watching._verify.measure", measured)
    monkeypatch.setattr("headscope.watching._recording.PENDING", 2)
    model = Steered()
    sharp, first = torch.tensor(1.0), torch.tensor(False)
    with watch(model) as seen, Reads() as reads:
        for _ in range(5):
            model(sharp, first)
    assert reads.found == []
    assert seen.stats.parts["Steered"].runs == 5
