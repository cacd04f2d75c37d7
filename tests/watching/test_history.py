"""The history of a training: what it holds, how it is continued, thinned, written and read."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headscope
from headscope import History, MultiHeadAttention, Observe, Recording, watch
from headscope.watching import AttentionWarning, Limits, WatchError, WatchWarning
from headscope.watching import _history as history_module
from headscope.watching import _history_table as table_module
from headscope.watching._history_table import HistoryTable
from support.forking import run_program


class Sharp(nn.Module):
    """Causal attention of each token to itself, as sharp as it is called with."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, sharp: float) -> Tensor:
        eye = torch.eye(7).expand(1, self.heads, 7, 7)
        return F.scaled_dot_product_attention(eye * sharp, eye, eye, is_causal=True, scale=1.0)


class Two(nn.Module):
    """Two layers of unlike heads; the second one may be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Sharp(3), Sharp(2)

    def forward(self, sharp: float, both: bool = True) -> None:
        self.a(sharp)
        if both:
            self.b(2 * sharp)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.safetensors"


@pytest.fixture(autouse=True)
def no_alarm_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        yield


def record(history: History, sharps: list[float], model: nn.Module | None = None, **options: Any) -> Recording:
    model = Sharp() if model is None else model
    with watch(model, log=history, **options) as recording:
        for sharp in sharps:
            model(sharp)
    return recording


# ---------------------------------------------------------------- what it holds


def test_values_are_those_of_a_function_to_the_bit(path: Path) -> None:
    torch.manual_seed(0)
    model = MultiHeadAttention(14, 7)
    logged: dict[int, dict[str, float]] = {}
    history = History(path)
    with watch(model, log=[lambda values, step: logged.update({step: values}), history], every=3, alarms=True):
        for _ in range(11):
            model(torch.randn(3, 13, 14))
    loaded = History.load(path)
    assert loaded.steps == history.steps == tuple(logged) == (0, 3, 6, 9)
    assert loaded.names == history.names
    count = 0
    for row, values in enumerate(logged.values()):
        for name, value in values.items():
            _, layer, head, quantity = name.split("/", 3)
            for each in (history, loaded):
                stored = each[int(layer[1:]), int(head[1:]), quantity][row]
                assert stored.numpy().tobytes() == np.float32(value).tobytes(), name
            count += 1
    assert count == 4 * 7 * len(loaded.names), "no value is missing"


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_defaults_of_torch_change_no_value(default: torch.dtype | str, tmp_path: Path) -> None:
    model = MultiHeadAttention(14, 2)
    xs = [torch.randn(3, 13, 14) for _ in range(3)]

    def values_of(name: str) -> dict[str, Tensor]:
        history = History(tmp_path / name)
        with watch(model, log=history):
            for x in xs:
                model(x)
        loaded = History.load(tmp_path / name)
        assert all(each[name].dtype == torch.float32 for each in (history, loaded) for name in loaded.names)
        assert all(torch.equal(*(x[name].nan_to_num(-1.0) for x in (history, loaded))) for name in loaded.names)
        return {name: loaded[name].nan_to_num(-1.0) for name in loaded.names}

    expected = values_of("usual")
    usual = torch.get_default_dtype()
    try:
        if isinstance(default, str):
            with torch.device(default):
                got = values_of("other")
        else:
            torch.set_default_dtype(default)
            got = values_of("other")
    finally:
        torch.set_default_dtype(usual)
    assert [*got] == [*expected]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_layers_of_unlike_heads_and_dropped_layers_are_nan(path: Path) -> None:
    model, history = Two(), History(path)
    with watch(model, log=history):
        model(1.0, both=False)
        model(2.0)
        model(3.0, both=False)
    entropy = History.load(path)["entropy"]
    assert (entropy.dtype, entropy.shape) == (torch.float32, (3, 2, 3))
    missing = torch.zeros(3, 2, 3, dtype=torch.bool)
    missing[:, 1] = True
    missing[1, 1, :2] = False
    assert entropy.isnan().equal(missing)
    assert (history.layers, history.heads) == (("a", "b"), {"a": 3, "b": 2})
    torch.testing.assert_close(history["b", 1, "max_logit_max"], torch.tensor([math.nan, 4, math.nan]), equal_nan=True)
    with pytest.raises(KeyError, match=r"quantity: got 'entropie', expected one of lse, "):
        history["entropie"]
    with pytest.raises(KeyError, match=r"layer: got 'c', expected a number below 2 or one of a, b"):
        history["c", 0, "entropy"]
    with pytest.raises(KeyError, match=r"head: got 2, expected 0 to 1"):
        history["b", 2, "entropy"]


def test_alarms_origin_and_limits_are_stored(path: Path) -> None:
    recording = record(History(path), [1, 3, 30], alarms=Limits(max_logit=20, sink=None), every=1)
    loaded = History.load(path)
    assert loaded.alarms == recording.alarms
    assert {each.what for each in loaded.alarms} == {"entropy collapse", "growing logits"}
    assert loaded.limits == Limits(max_logit=20, sink=None)
    assert (loaded.about.model, loaded.about.kinds, loaded.about.forwards, loaded.about.ran) == (
        "Sharp", {"Sharp": "self"}, 3, 3,
    )  # fmt: skip
    assert loaded.about.options["every"] == 1
    assert repr(loaded) == f"History({path}: Sharp, 3 steps, 1 layer, 2 heads, 4 alarms)"


def test_an_alarm_that_is_an_error_is_in_the_file(path: Path) -> None:
    """It ends the training at the step that matters."""
    history, model = History(path), Sharp()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttentionWarning)
        with pytest.raises(AttentionWarning):
            record(history, [1, 200, 1], model, alarms=True)
    loaded = History.load(path)
    assert loaded.steps == (0, 1)
    assert [each.step for each in loaded.alarms] == [1]
    assert loaded["max_logit_max"][1].tolist() == [[200, 200]]


def test_dict(path: Path) -> None:
    history = History(path)
    record(history, [1, math.inf, 400], Two())
    content = json.loads(json.dumps(history.to_dict(), allow_nan=False))
    assert content["steps"] == [0, 1, 2]
    assert content["layers"]["b"]["values"]["max_logit_max"] == [[2, 2], [None, None], [800, 800]]
    assert content["about"]["model"] == "Two"


def test_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub, because pandas is not a dependency."""
    history = History(path)
    record(history, [1, 400], Two())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas: pandas is not installed; pip install pandas, or use to_dict"):
        history.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    columns = history.to_pandas()
    assert [*columns] == ["step", "layer", "head", *history.names]
    assert {len(column) for column in columns.values()} == {2 * (3 + 2)}
    line = next(
        n
        for n, at in enumerate(zip(columns["step"], columns["layer"], columns["head"], strict=True))
        if at == (1, "b", 1)
    )
    assert columns["max_logit_max"][line] == 800


def test_it_is_public_and_loaded_late() -> None:
    assert headscope.History is History
    assert History.__module__ == "headscope.watching"


# ---------------------------------------------------------------- several watches and runs


def test_watches_continue_one_history(path: Path) -> None:
    history, model = History(path), Sharp()
    record(history, [1, 3], model)
    recording = record(history, [4, 50, 60], model, every=2, alarms=True)
    assert history.steps == (0, 1, 2, 4)
    assert history.starts == (0, 2)
    assert [each.step for each in recording.alarms] == [2, 2]
    assert [each.step for each in history.alarms] == [4, 4], "numbers of this history"
    assert (history.about.ran, history.about.forwards) == (5, 4)
    record(History(path, resume=True), [5], model)
    loaded = History.load(path)
    assert (loaded.steps, loaded.starts) == ((0, 1, 2, 4, 5), (0, 2, 5))
    assert loaded["max_logit_max"][:, 0, 0].tolist() == pytest.approx([1, 3, 4, 60, 5])
    assert loaded.alarms == history.alarms
    assert (loaded.about.ran, loaded.about.forwards) == (6, 5)


def test_resume_begins_a_file_that_is_not_there(path: Path) -> None:
    record(History(path, resume=True), [1])
    assert History.load(path).steps == (0,)


def test_an_existing_file_stays_unless_forced(path: Path) -> None:
    record(History(path), [1, 2])
    with pytest.raises(FileExistsError, match=r"run.safetensors: holds the history of an earlier run; .*resume=True"):
        History(path)
    other = path.with_name("notes.txt")
    other.write_text("notes")
    with pytest.raises(FileExistsError, match=r"notes.txt: exists and is not a history of headscope; .*force=True"):
        History(other)
    with pytest.raises(ValueError, match=r"notes.txt: is not a training history that headscope.History wrote"):
        History(other, resume=True)
    statistics = Recording.save(record(History(path, force=True), [1]), path.with_name("seen.safetensors"))
    with pytest.raises(FileExistsError, match=r"seen.safetensors: exists and is not a history"):
        History(statistics)
    with pytest.raises(ValueError, match="force: got True with resume=True, expected one of the two"):
        History(path, resume=True, force=True)
    with pytest.raises(FileNotFoundError, match=r"the folder .*missing does not exist"):
        History(path.parent / "missing" / "run.safetensors")
    with pytest.raises(FileExistsError, match="is a directory, expected the name of a file"):
        History(path.parent, force=True)
    record(History(path, force=True), [3])
    assert History.load(path)["max_logit_max"].tolist() == [[[3, 3]]]


def test_arguments(path: Path) -> None:
    for arguments, error in (
        ({"seconds": -1}, r"seconds: got -1, expected a finite number from 0"),
        ({"seconds": math.nan}, r"seconds: got nan"),
        ({"most_steps": 1}, r"most_steps: got 1"),
    ):
        with pytest.raises(ValueError, match=error):
            History(path, **arguments)
    with pytest.raises(TypeError, match="resume: got int, expected True or False"):
        History(path, resume=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="path: got int, expected the name of a file"):
        History(3)  # pyright: ignore[reportArgumentType]


def test_a_history_is_of_one_model_and_one_watch(path: Path) -> None:
    history = History(path)
    record(history, [1])
    with pytest.raises(WatchError, match=r"is of the model Sharp, got Two; write another file"):
        record(history, [1], Two())
    with pytest.raises(WatchError, match=r"layer Sharp: has 2 heads in the history, got 3; write another file"):
        record(history, [1], Sharp(3))
    model = Sharp()
    with watch(model, log=history):
        model(1.0)
        with pytest.raises(WatchError, match="is in use by another watch"):
            record(history, [1])
    with pytest.raises(WatchError, match=r"was loaded to look at; History\(path, resume=True\) continues it"):
        record(History.load(path), [1])
    with pytest.raises(ValueError, match="save: the history was loaded to look at"):
        History.load(path).save()
    record(history, [2])
    assert history.about.ran == 4, "the refused pass of three heads ran"


# ---------------------------------------------------------------- thinning


def test_a_full_history_stores_every_second_step_and_all_alarms(path: Path) -> None:
    history = History(path, most_steps=7)
    sharps = [float(n + 1) for n in range(40)]
    sharps[21] = 150.0
    record(history, sharps, alarms=Limits(entropy=None))
    assert history.observed == 40
    assert history.steps == (0, 8, 16, 24, 32, 39), "the last step is there"
    assert history["max_logit_max"][:, 0, 0].tolist() == [sharps[step] for step in history.steps]
    assert {each.step for each in history.alarms} == {21}, "its step is not stored, the alarm is"
    again = History(path, resume=True, most_steps=7)
    record(again, [1.0, 2.0])
    assert History.load(path).steps == (0, 8, 16, 24, 32, 40, 41)


@pytest.mark.parametrize("most", [2, 3, 5, 8])
def test_thinning_keeps_first_last_and_even_steps(most: int) -> None:
    table = HistoryTable(most)
    for step in range(101):
        table.add(step, [("a", "x", 1)], torch.tensor([float(step)]))
        assert len(table.steps) <= most
        assert (table.steps[0], table.steps[-1]) == (0, step)
        assert all(row == n * table.stride for n, row in enumerate(table.steps[:-1]))
        assert table.values[:, 0].tolist() == table.steps


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MOST_BYTES", 4 * 11 * 9)
    table = HistoryTable(2000)
    for step in range(97):
        table.add(step, [("a", "x", 11)], torch.full((11,), float(step)))
        assert table.values.shape[0] <= 9
    table.add(97, [("a", "x", 11), ("a", "y", 11)], torch.ones(22))
    assert table.values.shape[0] <= 4, "more quantities, fewer steps"
    assert table.values[0].isnan().tolist() == [False] * 11 + [True] * 11


# ---------------------------------------------------------------- when it is written


def test_it_is_written_after_the_first_step_and_then_from_time_to_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(history_module.time, "monotonic", lambda: clock[0])
    history, model = History(path, seconds=60), Sharp()
    with watch(model, log=history):
        model(1.0)
        assert History.load(path).steps == (0,)
        model(1.0)
        assert History.load(path).steps == (0,)
        clock[0] += 60
        model(1.0)
        assert History.load(path).steps == (0, 1, 2)
        assert History.load(path).about.ran == 3
        assert History.load(path).about.kinds == {"Sharp": "self"}
        model(1.0)
    assert History.load(path).steps == (0, 1, 2, 3)
    assert [each.name for each in path.parent.iterdir()] == [path.name], "no temporary file stays"


def test_writing_takes_a_small_part_of_the_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, writes = [0.0], list[float]()

    def slow(*arguments: Any) -> None:
        writes.append(clock[0])
        clock[0] += 10  # it takes ten seconds

    monkeypatch.setattr(history_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(history_module, "save_history", slow)
    history, model = History(path, seconds=60), Sharp()
    with watch(model, log=history):
        for _ in range(30):
            model(1.0)
            clock[0] += 20
    assert writes[:2] == [0, 210], "20 times as long as the last write"


def test_an_exception_in_the_training_does_not_lose_its_history(path: Path) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        record(History(path), [1, 2, None])  # pyright: ignore[reportArgumentType]
    assert History.load(path).steps == (0, 1)


def test_a_killed_process_leaves_a_readable_file(path: Path) -> None:
    code = f"""
import os, torch
from headscope import History, MultiHeadAttention, watch
model = MultiHeadAttention(14, 7)
with watch(model, log=History({str(path)!r}, seconds=0)):
    for step in range(10_000):
        model(torch.randn(1, 5, 14))
        if step == 300:
            os.kill(os.getpid(), 9)
"""
    assert run_program(code, timeout=120).returncode != 0
    steps = History.load(path).steps
    assert steps == tuple(range(len(steps)))
    assert 2 <= len(steps) <= 301
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_full_disk_is_an_error_at_once_and_later_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(history_module.time, "monotonic", lambda: 0.0)  # writing takes no time
    history, model = History(path, seconds=0), Sharp()
    with watch(model, log=history):
        model(1.0)
        with monkeypatch.context() as patched:
            patched.setattr(history_module, "save_history", refuse)
            with pytest.warns(WatchWarning, match="log: the history could not be written: .*No space left"):
                model(2.0)
        model(3.0)
    assert History.load(path).steps == (0, 1, 2), "nothing is lost once there is room"
    other = History(path.with_name("other.safetensors"))
    monkeypatch.setattr(history_module, "save_history", refuse)
    with pytest.warns(WatchWarning, match="could not be written"), pytest.raises(OSError, match="No space left"):
        record(other, [1])
    assert other.steps == (0,)


def test_a_watch_without_a_step_writes_nothing(path: Path) -> None:
    model, history = Sharp(), History(path)
    with pytest.raises(WatchError, match="was not called"), watch(model, log=history):
        pass
    assert not path.exists()
    assert repr(history).endswith("no step yet)")
    with pytest.raises(ValueError, match="history: has no step yet"):
        history.save_html(path.with_suffix(".html"))


# ---------------------------------------------------------------- damaged files


def test_damaged_and_foreign_files_are_one_clear_error(path: Path) -> None:
    record(History(path), [1, 3, 30], alarms=True)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])

    def error_of(changed: bytes) -> str:
        path.write_bytes(changed)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            History.load(path)
        assert str(caught.value).startswith(f"{path}: ")
        return str(caught.value).removeprefix(f"{path}: ")

    def with_entry(**entry: Any) -> bytes:
        """Return the file with another entry, whose checksums are right."""
        metadata = dict(header["__metadata__"])
        metadata["headscope.history"] = json.dumps(json.loads(metadata["headscope.history"]) | entry)
        changed = json.loads(metadata["headscope.history"])
        changed.pop("checksums")
        metadata["headscope.history"] = json.dumps(changed)
        metadata.pop("headscope.checksums")
        text = json.dumps(header | {"__metadata__": metadata}).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    for end in (3, 100, length, len(content) - 1):
        assert error_of(content[:end]) in (
            "is truncated; its end is missing",
            "is not a training history that headscope.History wrote",
        )
    changed = bytearray(content)
    changed[-50] ^= 1
    assert "was changed or damaged since it was saved" in error_of(bytes(changed))
    assert error_of(with_entry(version=9)) == "format 9, this version of headscope reads up to 1"
    assert error_of(with_entry(observed=7)).startswith("is damaged: observed: got 7 with a stride of 1")
    assert error_of(with_entry(layers=[])).startswith("is damaged: ")
    assert error_of(with_entry(columns=[[0, "x", -3]])).startswith("is damaged: heads: got -3")
    assert error_of(with_entry(limits={"entropy": 3.0, "max_logit": None, "sink": None})).startswith("is damaged: ")
    assert error_of(with_entry(what=[])).startswith("is damaged: alarms")
    about = json.loads(header["__metadata__"]["headscope.history"])["about"]
    assert error_of(with_entry(about=about | {"kinds": {"Sharp": 3}})).startswith("is damaged: Sharp: got int")
    assert error_of(with_entry(about=about | {"colour": 3})).startswith("is damaged: ")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"holds the history of a training; load it with headscope.History.load"):
        Recording.load(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        History.load(path.with_name("none"))


def test_a_pipe_is_not_opened(path: Path) -> None:
    os.mkfifo(path)
    assert not History.is_history(path)
    with pytest.raises(ValueError, match="is not a regular file"):
        History.load(path)


def test_segments_have_curves_too(path: Path) -> None:
    segments = headscope.Segments(["one", "two"], [0, 0, 0, 1, 1, 1, 1])
    history = History(path)
    record(history, [1, 2], what=Observe(segments=segments))
    assert "segments/two/one" in history.names
    assert torch.isfinite(history["segments/two/one"]).all()
