"""benchmarks/attention.py: its cases, its arithmetic, and that who is missing is named. Nothing is timed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import attention as driver  # pyright: ignore[reportMissingImports]
from attention_peers import cases, exact, peak, peers, report, workers
from attention_peers.cases import Case

sys.path.remove(str(BENCHMARKS))

PEAK = peak.Peak({"fp32": 200e9, "bf16": 400e9}, 10e9, "made up")


def row(case: Case, **seconds: list[float]) -> report.Row:
    return report.Row(case, seconds)


def whole(*rows: report.Row) -> report.Report:
    return report.Report("python benchmarks/attention.py", {"cpu": "some", "threads": 2}, PEAK, {}, list(rows))


def test_the_cases_are_those_of_the_issue() -> None:
    names = [case.name for case in cases.every()]
    assert len(names) == len(set(names)) == 62
    for shape in "CDEFG":
        for dtype in cases.DTYPES:
            for kind in (cases.FORWARD, cases.TRAIN):
                assert {f"{shape} {dtype} {kind}", f"{shape} {dtype} causal {kind}"} <= set(names)
    assert {f"F bf16 {option} option" for option in cases.OPTIONS} <= set(names)
    assert {"A fp32 forward", "B bf16 forward", "H fp32 decode", "H32k bf16 decode", "M fp32 module"} <= set(names)
    assert [Case(**case.as_dict()) for case in cases.every()] == list(cases.every())


@pytest.mark.parametrize("case", [Case("C", "fp32", causal=True), Case("C", "fp32"), Case("H", "fp32", cases.DECODE)])
def test_visible_pairs_are_counted_as_the_check_sees_them(case: Case) -> None:
    batch, heads, _, queries, _, _ = case.sizes
    assert case.pairs == batch * heads * int(exact.visible(case, np.arange(queries)).sum())


@pytest.mark.parametrize("option", ["window", "documents", "bias"])
def test_visible_pairs_of_an_option(option: str) -> None:
    case = Case("F", "fp32", cases.OPTION, option=option)
    seen = exact.visible(case, np.arange(0, 8192, 512)).sum(-1)
    if option == "window":
        assert seen.tolist() == [1, 513] + [1024] * 14
        assert case.pairs == 8 * (1024 * 1025 // 2 + (8192 - 1024) * 1024)
    else:
        width = 1024 if option == "documents" else 8192
        assert seen.tolist() == [width] * 16
        assert case.pairs == 8 * 8192 * width


def test_work_is_counted() -> None:
    assert Case("C", "fp32").flops == 4 * 8 * 512 * 512 * 64
    assert Case("C", "fp32", cases.TRAIN).flops == 14 * 8 * 512 * 512 * 64
    assert Case("M", "fp32", cases.MODULE).flops == 4 * 8 * 1024 * 1024 * 64 + 8 * 1024 * 512 * 512
    assert Case("H", "bf16", cases.DECODE).cache_bytes == 2 * 8 * 4096 * 128 * 2


def test_bf16_is_torchs() -> None:
    x = np.random.default_rng(0).standard_normal(1009).astype(np.float32)
    rounded = exact.of_bf16(exact.bits_of_bf16(x))
    torch.testing.assert_close(torch.from_numpy(rounded), torch.from_numpy(x).bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_the_check_is_right_forward_and_backward(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setitem(cases.SHAPES, "C", (2, 6, 2, 7, 7, 5))
    case = Case("C", "fp32", cases.TRAIN, causal)
    arrays = exact.inputs(case)
    q, k, v, dout = (torch.from_numpy(arrays[name]).double().requires_grad_() for name in ("q", "k", "v", "dout"))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    theirs = exact.Result(*(x.detach().numpy() for x in (out, *grads)))
    assert exact.error(theirs, exact.exact(case, arrays)) < 1e-12


def test_what_computes_something_else_is_seen() -> None:
    wanted = exact.Result(np.ones((1, 1, 3, 2)), rows=np.array([0, 2, 4]))
    right = np.ones((1, 1, 5, 2))
    assert exact.error(exact.Result(right), wanted) == 0
    assert exact.error(exact.Result(right * 1.1), wanted) == pytest.approx(0.1)
    assert exact.error(exact.Result(right * math.nan), wanted) == math.inf
    with pytest.raises(ValueError, match=r"out: got shape \[1, 1, 3, 3\], expected \[1, 1, 3, 2\]"):
        exact.error(exact.Result(np.ones((1, 1, 5, 3))), wanted)
    with pytest.raises(ValueError, match="dq: missing"):
        exact.error(exact.Result(right), exact.Result(wanted.out, dq=wanted.out, rows=wanted.rows))


def test_ratios_are_of_medians() -> None:
    found = row(Case("C", "fp32"), torch=[4.0, 6.0, 100.0], headscope=[2.0, 3.0, 1.0], flex=[])
    assert found.ratio("headscope") == 3.0
    assert found.ratio("torch") == 1.0
    assert found.ratio("flex") is None
    assert found.ratio("headscope", "zentorch") is None
    assert found.rate("headscope") == Case("C", "fp32").flops / 2


def test_an_option_is_compared_pair_by_pair() -> None:
    case = Case("F", "fp32", cases.OPTION, option="documents")  # an eighth of the pairs
    assert row(case, headscope=[0.2]).per_pair() is None
    assert report.Row(case, {"headscope": [0.2], report.PLAIN_KERNEL: [0.8]}).per_pair() == pytest.approx(2.0)


def test_the_table() -> None:
    case = Case("C", "fp32", causal=True)
    found = row(case, torch=[4e-3], headscope=[1e-3], openvino=[2e-3])
    found.absent["flex"] = "its environment is not there"
    decode = row(Case("H", "fp32", cases.DECODE), torch=[4e-2], headscope=[1e-2], reading=[4e-3])
    text = report.markdown(whole(found, decode))
    assert "| C | fp32 | causal | 4 | 1 | 4.00 | — | 2.00 | 2.97 | 269 | 134% |" in text
    assert "| H | fp32 |  | 40 | 10 | 4.00 | 10.00 | 3 | 40% |" in text
    assert "- flex: its environment is not there (C fp32 causal forward)" in text
    assert "## Options" not in text


def test_without_torch_there_are_no_ratios() -> None:
    text = report.markdown(whole(row(Case("C", "fp32"), headscope=[1e-3])))
    assert "| C | fp32 |  | — | 1 | — | — | 537 | 268% |" in text


def test_peak_is_the_larger_and_bf16_at_least_fp32() -> None:
    found = peak.combine({"fp32": 3e9, "bf16": 0.0, "read": 5e9}, {"fp32": 4e9, "bf16": 1e9})
    assert (found.flops, found.read) == ({"fp32": 4e9, "bf16": 4e9}, 5e9)
    assert found.how == "the largest of: C probe fp32 3 GFLOP/s; best torch.mm fp32 4 GFLOP/s, bf16 1 GFLOP/s"
    assert "neither" in peak.combine({}, {}).how


def test_decoding_is_put_beside_reading() -> None:
    case = Case("H", "bf16", cases.DECODE)
    assert [name for name, _, _ in driver.competitors(case, ["headscope", "torch"])] == [
        "headscope",
        report.READING,
        "torch",
    ]
    found = driver.measure(case, [], driver.Workers(1), seconds=0.0, least=2)
    assert [(name, len(times)) for name, times in found.seconds.items()] == [(report.READING, 2)]
    assert case.cache_bytes / min(found.seconds[report.READING]) < 1e12, "bytes/s: they have been read"


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    assert peers.missing(peers.PEERS["headscope"]) is None
    for name in ("torch", "plain", "flex", "zentorch", "onnxruntime", "openvino"):
        assert "its environment is not there" in str(peers.missing(peers.PEERS[name]))
    found = driver.measure(Case("C", "fp32"), ["torch", "openvino"], driver.Workers(1), seconds=0.0, least=1)
    assert set(found.absent) == {"torch", "openvino"}
    assert "--setup openvino" in found.absent["openvino"]
    assert found.seconds == {}


def test_an_environment_of_other_versions_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    (tmp_path / "openvino" / "bin").mkdir(parents=True)
    (tmp_path / "openvino" / "bin" / "python").touch()
    (tmp_path / "openvino" / peers.INSTALLED).write_text("openvino==1\n")
    assert "other versions" in str(peers.missing(peers.PEERS["openvino"]))
    (tmp_path / "openvino" / peers.INSTALLED).write_text((peers.REQUIREMENTS / "openvino.txt").read_text())
    assert peers.missing(peers.PEERS["openvino"]) is None


def test_every_environment_is_pinned() -> None:
    for name in peers.environments():
        lines = (peers.REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert pins
        assert all("==" in line for line in pins), name


def test_a_worker_answers_refuses_and_ends() -> None:
    worker = workers.Worker(peers.PEERS["headscope"], 1)
    case = Case("B", "fp32")
    try:
        assert worker.versions["torch"] == torch.__version__
        with pytest.raises(workers.AbsentError, match="begun anew"):
            worker.run(case, 1)
        answer = worker.prepare(case)
        assert answer["error"] < exact.LIMITS["fp32"]
        assert worker.run(case, 2) > 0
        with pytest.raises(workers.AbsentError, match="do: got 'nothing'"):
            worker.ask({"do": "nothing"})
    finally:
        worker.close()
    assert not worker.alive


def test_files_are_written_whole(tmp_path: Path) -> None:
    found = whole(row(Case("C", "fp32"), torch=[4e-3], headscope=[1e-3]))
    report.save(found, tmp_path / "some.json")
    saved = json.loads((tmp_path / "some.json").read_text())
    assert saved["rows"][0]["times_torch"] == {"torch": 1.0, "headscope": 4.0}
    assert (tmp_path / "some.md").read_text() == report.markdown(found)
    report.plot(found, tmp_path / "some.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.json", "some.md", "some.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "headscope,nobody"], "--peers: got 'nobody', expected some of: headscope, torch"),
        (["--only", "sideways"], "--only: got 'sideways'"),
        (["--cases", "Z*"], r"--cases: no case matches Z\*"),
    ],
)
def test_mistakes_end_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        driver.choose(driver.parse(arguments))


def test_filters(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--list", "--only", "decode", "--cases", "* bf16 *"]) == 0
    assert capsys.readouterr().out.splitlines() == ["H bf16 decode", "H32k bf16 decode"]


def test_short_cases_are_repeated_in_a_turn() -> None:
    assert [driver.turn(seconds) for seconds in (1e-9, 1e-3, 0.09, 0.2)] == [1000, 10, 2, 1]
