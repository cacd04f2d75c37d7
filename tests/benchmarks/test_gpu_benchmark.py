"""benchmarks/gpu.py: a dry run of its code on the CPU. Nothing is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from support.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import gpu as driver  # pyright: ignore[reportMissingImports]

sys.path.remove(str(BENCHMARKS))


def test_a_dry_run_checks_every_case_and_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert driver.main(["--device", "cpu", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [row["case"] for row in report["checks"]] == [case.name for case in driver.cases()]
    for row in report["checks"]:
        assert set(row["errors"]) == {"out", "lse", "dq", "dk", "dv"}
        assert max(row["errors"].values()) <= 3, row
        assert row["same bits"] is True
        assert row["no wait"] == row["graph"] == "not checked"
    assert [row["observe"] for row in report["observer"]] == ["rows=256", "all rows", "map, edges"]
    assert {row["pass"] for row in report["times"]} == {"forward", "forward, backward"}
    assert not report["left_out"]
    assert "a dry run: no number here says anything of a GPU" in capsys.readouterr().out


def test_what_has_no_time_is_named() -> None:
    report = driver.run_all(driver.Bench("cpu", small=True, minutes=0))
    assert not report.checks
    assert not report.times
    assert f"check of {driver.cases()[0].name}: out of time" in report.left_out


def test_a_failure_is_a_row() -> None:
    bench = driver.Bench("cpu", small=True, minutes=1)
    row = driver.check(bench, driver.Case("wrong", torch.float32, lambda case, device: {"softcap": -1.0}))
    assert row["errors"].startswith("failed: ValueError: softcap")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        driver.main([])
    assert "torch finds no GPU; expected one, or --device cpu for a dry run" in capsys.readouterr().err
