"""benchmarks/observe.py: its cases, its checks, its arithmetic and its files. Nothing is timed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headscope
from support.forking import run_program
from support.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

from observe_parts import attention, details, generation, models, report, timing
from observe_parts.timing import Row

import observe as driver  # pyright: ignore[reportMissingImports]

sys.path.remove(str(BENCHMARKS))

MACHINE: dict[str, Any] = {"cpu": "some", "threads": 2}


def of(*rows: Row, command: str = "python benchmarks/observe.py") -> report.Report:
    return report.Report([command], dict(MACHINE), list(rows))


def test_the_cases_are_those_of_the_issue() -> None:
    names = report.every()
    assert len(names) == len(set(names)) == 6 + 8 + 4 + 6 + 2 + 4 + 8 + 6
    assert {("attention", "16384 causal"), ("memory", "32768"), ("long", "131072"), ("models", "Llama 8192")} < {*names}
    assert [case[:2] for case in driver.chosen(driver.parse([]))] == names
    some = driver.parse(["--only", "attention,models", "--cases", "1024*", "--cases", "text 128"])
    assert [name for _, name, _ in driver.chosen(some)] == ["1024", "1024 causal", "text 128"]


def test_segments_and_chosen_heads_are_measured_beside_defaults() -> None:
    row = details.measure_segments(attention.Case(32, True, heads=3), seconds=1e-9, least=1)
    assert [*row.seconds] == ["rows, received", "with 16 segments"]
    assert "| 32 causal |" in report.segments_table([row])
    row = details.measure_chosen(17, seconds=1e-9, least=1)
    assert [*row.seconds] == ["no weights", "10 heads", "all heads"]
    row.seconds = {"no weights": [1.0], "10 heads": [2.0], "all heads": [13.0]}
    assert report.chosen_table([row]).endswith("| 17 | 1000 | 2000 | 13000 | 1.20 |")


def test_a_short_call_is_measured_beside_attending() -> None:
    row = attention.measure_short(attention.Case(13, True, heads=3), seconds=1e-9, least=1)
    assert [*row.seconds] == ["attend", "rows, received"]
    assert "| 13 causal |" in report.short_table([row])


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_is_checked_and_measured(causal: bool) -> None:
    case = attention.Case(67, causal, heads=3)
    row = attention.measure(case, seconds=1e-9, least=1)
    assert [*row.seconds] == ["SDPA", "attend", "rows", "rows, received", "all", "rows=256", "observe alone"]
    assert all(len(times) == 1 for times in row.seconds.values())
    assert case.pairs == (67 * 68 // 2 if causal else 67**2)


def test_what_computes_something_else_is_not_timed() -> None:
    case = attention.Case(67, causal=False, heads=3)
    runs = attention.competitors(case)
    attention.check(case, runs)
    with pytest.raises(AssertionError, match="rows: Tensor-likes are not close"):
        attention.check(case, {**runs, "SDPA": attention.competitors(attention.Case(67, True, 3))["SDPA"]})
    half = headscope.observe(*case.tensors(), what=headscope.Observe(rows=33, map=64))
    with pytest.raises(AssertionError, match="not close"):
        attention.check_sums(case, half)


def test_a_long_text_gives_a_map() -> None:
    row = attention.measure_long(attention.Case(131, causal=True, heads=1), rounds=1)
    assert (row.kind, row.name, len(row.seconds["all"])) == ("long", "131 causal", 1)


@pytest.mark.skipif(not attention.STATUS.exists(), reason="peak memory is read from /proc, which only Linux has")
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    row = attention.measure_memory(1031, threads=1)
    assert row.figures["eager"] == 4 * 8 * 1031**2
    assert row.absent == {}
    assert 0 <= row.figures["all"] < row.figures["eager"]


def forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ARGUMENTS`` in a process that is forked from one that has imported torch."""
    _, _, module, *arguments = command
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return run_program(code, *arguments, cwd=options["cwd"], env=options["env"])


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", forked)
    row = attention.measure_memory(-1, threads=1)
    assert [*row.figures] == ["eager"]
    assert "negative dimension" in row.absent["all, causal"]


@pytest.mark.parametrize("model", models.MODELS)
def test_watching_sees_what_the_eager_weights_say(model: str) -> None:
    row = models.measure(models.Case(model, 71), seconds=1e-9, least=1)  # compares before it times
    assert tuple(row.seconds) == models.COMPETITORS


def test_what_is_watched_wrongly_is_not_timed() -> None:
    subject, other = models.text_example(67), models.text_example(67)
    with torch.no_grad():
        other.model.get_parameter("layers.2.attention.qkv_proj.weight").mul_(0.9)
        with pytest.raises(AssertionError, match="entropy: Tensor-likes are not close"):
            models.check(dataclasses.replace(subject, weights=other.weights))


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MOST_BYTES", 1e6)
    row = models.measure(models.Case(models.TEXT, 131), seconds=1e-9, least=1)
    assert {*row.absent} == {models.EAGER, models.DENSE}
    assert row.absent[models.EAGER].startswith("does not fit")
    text = report.markdown(of(row))
    assert "| text 131 |" in text
    assert text.count("does not fit: 0 GB") == 2


def test_the_eager_way_is_counted() -> None:
    assert models.text_example(67).eager_bytes(8192) == 4 * 8 * 8192**2 * (6 + 2)


def test_a_longer_text_model_is_the_same_on_a_short_text() -> None:
    example = headscope.load_example("text").model
    long = models.longer(example, 600)
    assert (long.config.context, example.config.context) == (768, 256)
    ids = torch.arange(7)[None]
    with torch.no_grad():
        torch.testing.assert_close(long(ids), example(ids), rtol=0, atol=0)
    assert models.longer(example, 256) is example


def test_ratios_are_of_medians() -> None:
    row = Row("attention", "1024", {"SDPA": [4.0, 6.0, 100.0], "all": [2.0, 3.0, 1.0], "rows": []})
    assert row.ratio("all", "SDPA") == pytest.approx(1 / 3)
    assert row.ratio("rows", "SDPA") is None
    assert Row.of(json.loads(json.dumps(row.as_dict()))) == row


def test_short_calls_are_repeated_in_a_turn() -> None:
    assert [timing.turn(seconds) for seconds in (1e-9, 1e-3, 0.09, 0.2)] == [1000, 10, 2, 1]


def test_competitors_take_turns() -> None:
    said: list[str] = []
    times = timing.interleave({name: lambda name=name: said.append(name) for name in "ab"}, 1e-9, 2)
    rounds = "".join(said).lstrip("a").lstrip("b")  # the turns of the first round, and what warmed up, come before
    assert len(rounds) > 0
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2}


def test_of_a_call_in_parts_the_time_is_that_of_one() -> None:
    times = timing.interleave({"one": lambda: time.sleep(0.02), "four": lambda: time.sleep(0.02)}, 1e-9, 2, {"four": 4})
    assert min(times["one"]) >= 0.02
    assert 0.005 <= min(times["four"]) < 0.02


def test_opening_a_watch_is_shared_by_short_passes_only() -> None:
    _, absent = models.competitors(models.text_example(8), models.SHORT + 1)
    assert absent == dict.fromkeys(models.PASSES, "as one pass")
    assert {*models.PASSES} < {*models.COMPETITORS}


def test_the_tables() -> None:
    names = ("SDPA", "attend", "rows", "rows, received", "all", "rows=256", "observe alone")
    one = Row("attention", "1024", {name: [1e-3 * n] for n, name in enumerate(names, 1)})
    memory = Row("memory", "1024", figures={"eager": 2e9, "all": 3e6}, absent={"all, causal": "no Linux"})
    long = Row("long", "131072", {"all": [31.25]})
    text = report.markdown(of(one, memory, long))
    assert "| 1024 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |" in text
    assert "| 1024 | 2.00 | 3.00 | 4.00 | 5.00 | 6.00 | 7.00 |" in text
    assert "| 1024 | 1.50 | 2.00 | 2.50 | 3.00 | 3.50 |" in text
    assert "| 1024 | 3.0 | no Linux | 2,000 |" in text
    assert "| 131072 | 31.2 |" in text
    assert "Watching a model" not in text


def test_files_are_added_to(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    report.save(of(Row("models", "text 128"), Row("attention", "1024", {"SDPA": [1.0]})), path)
    later = of(
        Row("attention", "1024", {"SDPA": [2.0]}), Row("memory", "1024", figures={"eager": 1.0}), command="again"
    )
    both = report.load(path).add(later)
    assert [(row.kind, row.name) for row in both.rows] == [
        ("attention", "1024"),
        ("memory", "1024"),
        ("models", "text 128"),
    ]
    assert both.rows[0].seconds == {"SDPA": [2.0]}
    assert both.commands == ["python benchmarks/observe.py", "again"]
    assert "Made by `python benchmarks/observe.py`, then `again`" in report.markdown(both)
    report.save(both, path)
    assert path.with_suffix(".md").read_text() == report.markdown(report.load(path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["some.json", "some.md"]
    with pytest.raises(ValueError, match="--add: the file is of another machine: cpu some, threads 2"):
        both.add(report.Report([], {"cpu": "another"}))


def test_a_run_of_some_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LENGTHS", (61,))
    out = tmp_path / "some.json"
    few = ["--only", "attention", "--seconds", "1e-9", "--rounds", "1", "--threads", "1"]
    threads = torch.get_num_threads()
    try:
        assert driver.main([*few, "--out", str(out)]) == 0
        assert driver.main([*few, "--add", str(out)]) == 0
        assert [row.name for row in report.load(out).rows] == ["61", "61 causal"]
        out.write_text(out.read_text().replace('"python": "', '"python": "another '))
        capsys.readouterr()
        assert driver.main([*few, "--add", str(out)]) == 2
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr()
    assert "another machine" in shown.err
    assert "| 61 causal |" in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "sideways"],
            "--only: got 'sideways', expected some of: attention, short, segments, memory, long, chosen heads, models",
        ),
        (["--cases", "GPT*"], "--cases: no case matches GPT*; they are called '1024 causal', 'text 128', ..."),
        (["--seconds", "0"], "--seconds: got 0.0, expected a number above 0 and up to 600"),
        (["--rounds", "0"], "--rounds: got 0, expected at least 1"),
        (["--add", "nothing.json"], "--add: there is no file nothing.json"),
    ],
)
def test_mistakes_end_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        driver.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("case", [("Llama", 33), ("Llama, 4 padded texts", 33), ("Whisper", 24)])
def test_generation_is_compared_with_eager_weights_before_it_is_timed(
    case: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "STEPS", 3)
    row = generation.measure(generation.Case(*case), seconds=1e-9, least=1)
    assert tuple(row.seconds) == generation.COMPETITORS
    table = report.generation_table([row])
    assert table.splitlines()[-1].startswith(f"| {case[0]} {case[1]} | ")


def test_another_head_is_not_taken_for_the_one_that_is_watched() -> None:
    subject = generation.llama(9)
    torch.nn.init.zeros_(subject.eager.model.layers[2].self_attn.q_proj.weight)
    with torch.no_grad(), pytest.raises(AssertionError, match=r"model\.layers\.2"):
        generation.check(subject)
