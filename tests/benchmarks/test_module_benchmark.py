"""The benchmark: what it compares is equal, and what it reports follows from what it measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from headscope.cli import _benchmark
from headscope.cli._commands import commands

SMALL = (2, 5, 6, 3)


def timing(**medians: float) -> _benchmark.Timing:
    return _benchmark.Timing(*SMALL, "inference", "fp32", 5, {_benchmark.OURS: 2000.0, **medians})


@pytest.mark.parametrize("mode", _benchmark.MODES)
def test_every_competitor_is_timed(mode: str) -> None:
    measured = _benchmark.measure(_benchmark.Line(SMALL, mode, "fp32"), seconds=0.0)
    assert measured is not None
    assert set(measured.median_us) == {_benchmark.OURS, *_benchmark.PEERS}
    assert measured.rounds == 5
    assert min(measured.median_us.values()) > 0


def test_the_competitors_compute_the_same() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    outs = [module(x) for module in _benchmark.competitors(6, 3, torch.float64).values()]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_a_competitor_that_computes_something_else_is_not_compared() -> None:
    runs: dict[str, _benchmark.Run] = {_benchmark.OURS: lambda: torch.zeros(3), "torch": lambda: torch.ones(3)}
    with pytest.raises(AssertionError, match="not close"):
        _benchmark._check_equal(runs, "inference")


def test_ratio_and_table() -> None:
    row = timing(**dict.fromkeys(_benchmark.PEERS, 5000.0))
    assert row.ratio("torch") == 2.5
    assert _benchmark.markdown([row]).splitlines()[-1] == (
        "| (2, 5, 6, 3) | inference | fp32 | 2.000 | 2.50 | 2.50 | 2.50 |"
    )


def test_saved_whole(tmp_path: Path) -> None:
    _benchmark.save([timing()], tmp_path / "out.json")
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["timings"][0]["median_us"] == {_benchmark.OURS: 2000.0}
    assert saved["machine"]["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_saved_for_others_to_read_and_nothing_left_behind(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    _benchmark.save([timing()], tmp_path / "out.json")
    assert (tmp_path / "out.json").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with pytest.raises(OSError, match="folder"):
        _benchmark.save([timing()], tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.json", "plain"]


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_benchmark, "SHAPES", (SMALL,))
    monkeypatch.setattr(_benchmark, "PER_LINE", 0.001)
    shown = CliRunner().invoke(commands, ["bench", "--dtype", "fp32"])
    assert shown.exit_code == 0, shown.output
    assert [line.split("  ")[0] for line in shown.stdout.splitlines() if line.startswith("(2")] == ["(2, 5, 6, 3)"] * 2
    found = json.loads(CliRunner().invoke(commands, ["bench", "--dtype", "fp32", "--json"]).stdout)
    assert [row["mode"] for row in found["timings"]] == list(_benchmark.MODES)


def test_no_line_of_the_table_is_longer_than_80_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(every: list[_benchmark.Line], *_: object) -> Iterator[_benchmark.Timing]:
        medians = {_benchmark.OURS: 9_999_999.0, **dict.fromkeys(_benchmark.PEERS, 5e8)}
        for line in every:
            yield _benchmark.Timing(*line.shape, line.mode, line.dtype, 5, medians)

    monkeypatch.setattr(_benchmark, "run", run)
    for columns in ("80", "40"):  # a line is one line, also where the terminal is narrower
        shown = CliRunner().invoke(commands, ["bench"], env={"COLUMNS": columns})
        head, *rows = shown.stdout.splitlines()[1:]
        assert head.split() == [
            "(B,",
            "T,",
            "E,",
            "H)",
            "mode",
            "dtype",
            "headscope,",
            "ms",
            *"×torch ×need_weights ×plain".replace("×", "× ").split(),
        ]
        assert len(rows) == len(_benchmark.SHAPES) * len(_benchmark.MODES) * len(_benchmark.DTYPES)
        assert all(row.endswith("50.00") for row in rows)
        assert max(map(len, [head, *rows])) <= 80


def test_seconds_out_of_range() -> None:
    refused = CliRunner().invoke(commands, ["bench", "--seconds", "0"])
    assert refused.exit_code == 2
    assert "--seconds: got 0.0, expected a number above 0 and up to 3600" in refused.stderr


def test_a_line_that_does_not_fit_is_not_measured() -> None:
    assert _benchmark.measure(_benchmark.Line((1, 1024, 64, 2), "inference", "fp32"), 0.0, most=1e-3) is None


def test_seconds_limit_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    middle, large = (1, 512, 8, 2), (1, 1 << 20, 8, 2)
    measured: list[tuple[int, ...]] = []

    def measure(line: _benchmark.Line, seconds: float, most: float = math.inf) -> _benchmark.Timing | None:
        measured.append(line.shape)
        assert seconds <= most <= 600 or most == math.inf
        names: list[str] = [_benchmark.OURS, *_benchmark.PEERS]
        medians = dict.fromkeys(names, 1.0)
        return None if line.shape == middle else _benchmark.Timing(*line.shape, line.mode, line.dtype, 5, medians)

    monkeypatch.setattr(_benchmark, "SHAPES", (SMALL, middle, large))
    monkeypatch.setattr(_benchmark, "measure", measure)
    shown = CliRunner().invoke(commands, ["bench", "--seconds", "600", "--dtype", "fp32", "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert [row["length"] for row in found["timings"]] == [5, 5]
    assert [line["shape"] for line in found["skipped"]] == [list(middle), list(large)] * 2
    assert large not in measured, "what is larger than a line that does not fit is not tried"
    note = (
        "headscope bench: skipped 4 of 6 lines, which do not fit in --seconds 600; without --seconds all are measured\n"
    )
    assert note in shown.stderr
    measured.clear()
    shown = CliRunner().invoke(commands, ["bench", "--seconds", "1e-9", "--dtype", "fp32"])
    assert "skipped 6 of 6 lines" in shown.stderr
    assert set(measured) == {(1, 2, 8, 2)}, "the first calls warm up"
