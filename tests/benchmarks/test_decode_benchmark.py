"""benchmarks/decode.py: its competitors compute the same, its arithmetic, its files. Nothing is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import decode  # pyright: ignore[reportMissingImports]

sys.path.remove(str(BENCHMARKS))


def test_every_cache_takes_every_step_and_a_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "made.json"
    assert decode.main(["--context", "5", "--tokens", "3", "--threads", "1", "--out", str(out)]) == 0
    made: Any = json.loads(out.read_text(encoding="utf-8"))
    names = ["static", "growing", "rolling", "HF static", "HF dynamic", "read once"]
    assert [row["dtype"] for row in made["rows"]] == ["fp32", "bf16"]
    for row in made["rows"]:
        assert [*row["seconds"]] == names
        assert all(len(times) == 3 for times in row["seconds"].values())
    text = out.with_suffix(".md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert "3 tokens after 5" in text
    assert "--context 5" in text


def test_ratios_are_of_medians_and_of_sums() -> None:
    times = {name: [1.0, 1.0, 4.0] for name in ("static", "HF static", "HF dynamic")}
    times["HF dynamic"] = [10.0, 8.0, 12.0]
    found = decode.judged(times, "bf16")
    assert found["ratio"] == {"HF dynamic": 0.1, "HF static": 1.0}
    assert found["total_ratio"] == {"HF dynamic": 0.2, "HF static": 1.0}
    assert found["target"] == 0.1


def test_a_wrong_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    right = decode.competitors

    def wrong(context: int, tokens: int, dtype: Any) -> Any:
        made = right(context, tokens, dtype)
        return {**made, "growing": lambda *given: made["growing"](*given) + 1}

    monkeypatch.setattr(decode, "competitors", wrong)
    with pytest.raises(AssertionError, match="growing differs"):
        decode.measure(5, 1, "fp32")


def test_mistakes_on_the_command_line_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in ((["--tokens", "0"], "--tokens: got 0"), (["--dtypes", "fp8"], "--dtypes: got 'fp8'")):
        with pytest.raises(SystemExit) as stopped:
            decode.parse(arguments)
        assert stopped.value.code == 2
        assert says in capsys.readouterr().err
    assert decode.parse([]).full
    assert not decode.parse(["--context", "512"]).full
