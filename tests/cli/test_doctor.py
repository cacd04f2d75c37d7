"""doctor's verdicts are those of a real call."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from headscope import attention, masks
from headscope._attend.backends import native as cpu
from headscope._attend.select import BACKENDS
from headscope._observe import native_observer
from headscope.cli._commands import commands
from headscope.cli._doctor.machine import DTYPES, TYPICAL, CallSpec, judge, machine
from headscope.cli._doctor.matrix import OPTIONS, matrix
from headscope.cli._doctor.verdict import summarise
from support.paths import DOCS

SMALL = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window of 128": {"mask": masks.window(3)},
    "softcap": {"softcap": 50.0},
    "dropout": {"dropout": 0.1},
}


@pytest.mark.parametrize("title", TYPICAL)
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_every_typical_call_has_a_backend_and_reasons(title: str, device: str) -> None:
    verdict = judge(TYPICAL[title], torch.float32, device)
    assert verdict.selected in BACKENDS
    assert verdict.selected not in verdict.refusals
    assert all(reasons and all(reasons) for reasons in verdict.refusals.values())


@pytest.mark.parametrize("title", SMALL)
def test_what_is_refused_here_is_refused_by_attention(title: str) -> None:
    q, k, v = torch.randn(3, 2, 8, 5, 64).unbind()
    verdict = judge(TYPICAL[title], torch.float32, "cpu")
    for name in [name for name in BACKENDS if name not in ("fused", "flex")]:  # of CUDA alone
        if name in verdict.refusals:
            with pytest.raises(ValueError, match=f"backend: {name} refuses this call"):
                attention(q, k, v, backend=name, **SMALL[title])
        else:
            assert attention(q, k, v, backend=name, **SMALL[title]).shape == (2, 8, 5, 64)


def test_sizes_of_any_kind_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "extension", None)  # it would take the call
    spec = CallSpec(
        batch=3, heads=6, kv_heads=2, queries=5, keys=7, head_dim=11, v_head_dim=13, causal=True, padded=True,
        bias=True, softcap=2.0, sinks=True, dropout=0.5, lse=True, grad=True,
    )  # fmt: skip
    verdict = judge(spec, torch.bfloat16, "cpu")
    assert verdict.selected == "blocked"
    assert {reason.split(":")[0] for reason in verdict.refusals["sdpa"]} >= {"lse", "softcap", "sinks", "dropout", "Dv"}


def test_the_machine_is_described() -> None:
    found = machine()
    assert found.keys() == {"versions", "machine", "torch", "native kernels"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert found["machine"]["cores"] >= 1


def test_an_extension_that_is_not_built_is_told_from_one_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "headscope._native", None)  # as where there is no such file
    assert cpu._load() == (None, "")
    monkeypatch.delitem(sys.modules, "headscope._native")
    broken = tmp_path / f"_native{EXTENSION_SUFFIXES[0]}"
    broken.write_bytes(b"\x7fELF")

    class Finder(MetaPathFinder):  # before all others, an editable install's too
        @staticmethod
        def find_spec(name: str, *_: object) -> ModuleSpec | None:
            return spec_from_file_location(name, broken) if name == "headscope._native" else None

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    extension, why = cpu._load()
    assert extension is None
    assert str(tmp_path) in why
    for name, value in (("extension", extension), ("unloadable", why)):
        monkeypatch.setattr(cpu, name, value)
    assert machine()["native kernels"] == {"target": f"built, but cannot be loaded: {why}"}
    refusals = judge(TYPICAL["plain"], torch.float32, "cpu").refusals
    assert refusals["cpu"] == [f"build: the native extension cannot be loaded: {why}"]


# ---------------------------------------------------------------- the matrix

KERNELS = DOCS / "concepts" / "kernels.md"


def test_the_matrix_has_every_option_dtype_target_and_backend() -> None:
    targets = cpu.extension.targets() if cpu.extension is not None else [None]
    columns = [("cpu", target) for target in targets] + [(name, None) for name in BACKENDS if name != "cpu"]
    got = [(cell.option, cell.dtype, cell.backend, cell.target) for cell in matrix(DTYPES, "cpu")]
    assert got == [(option, dtype, *column) for option in OPTIONS for dtype in DTYPES for column in columns]


def test_on_cuda_the_matrix_has_every_call_and_mode() -> None:
    result = CliRunner().invoke(commands, ["doctor", "--device", "cuda", "--matrix", "--json", "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)["matrix"]
    assert {(row["call"], row["mode"]) for row in rows} == {
        (call, mode) for call in ("attention", "attend") for mode in ("eager", "compile", "export")
    }
    assert {row["dtype"] for row in rows} == {"float16"}
    chosen = {(row["option"], row["call"], row["mode"]): row["chosen"] for row in rows}
    assert chosen["mask: window", "attend", "export"] == "fused: flash band"
    assert chosen["mask: causal", "attention", "compile"] == "sdpa"


def test_the_matrix_says_what_the_backends_say() -> None:
    said = {(cell.option, cell.backend): cell.reasons for cell in matrix({"float32": torch.float32}, "cpu")}
    assert said["softcap", "sdpa"] == ("softcap: scaled_dot_product_attention does not support it",)
    assert said["mask: window", "blocked"] == ()
    assert said["no option", "reference"] == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("built", [True, False])
def test_every_native_refusal_is_explained(device: str, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(cpu, "extension", None)
    named = KERNELS.read_text(encoding="utf-8").partition("## What they refuse")[2].partition("\n## ")[0]
    refused = {
        (cell.option, reason) for cell in matrix(DTYPES, device) if cell.backend == "cpu" for reason in cell.reasons
    }
    for option, reason in refused:
        assert f"- `{reason.partition(':')[0]}`:" in named, (
            f"{option}: docs/concepts/kernels.md does not explain {reason!r}"
        )
    taken = {option for option in OPTIONS if option not in {refusal[0] for refusal in refused}}
    if device == "cpu" and cpu.extension is not None:
        assert taken >= set(OPTIONS) - {"torch.compile, torch.func", "a subclass of Tensor"}


def test_every_refusal_of_the_native_observer_is_explained() -> None:
    source = inspect.getsource(native_observer)
    refusals = re.findall(r'reasons\.append\(f?"([^:"]+): ', source)
    assert len(refusals) == source.count("reasons.append("), "a reason begins with a word and a colon"
    told = KERNELS.read_text(encoding="utf-8").partition("### What the observer refuses")[2].partition("\n## ")[0]
    assert set(re.findall(r"^- `([^`]+)`:", told, re.MULTILINE)) == set(refusals)


@pytest.mark.skipif(cpu.extension is None, reason="the native extension is not installed")
def test_the_verdict_is_that_of_the_native_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(TYPICAL["plain"], torch.float32, "cpu").observer == []
    assert judge(TYPICAL["plain"], torch.float32, "cuda").observer == [
        "device: the native kernels run on the CPU, not on cuda"
    ]
    traced = judge(replace(TYPICAL["plain"], form="traced"), torch.float32, "cpu").observer
    assert [reason.partition(":")[0] for reason in traced] == ["torch.compile"]
    monkeypatch.setattr(cpu, "extension", None)
    assert judge(TYPICAL["plain"], torch.float32, "cpu").observer == ["build: the native extension is not installed"]


def test_what_the_matrix_says_of_tensors_of_a_subclass_is_so() -> None:
    class Own(torch.Tensor):
        pass

    q = torch.randn(1, 2, 5, 4).as_subclass(Own)
    reasons = {cell.reasons for cell in matrix({"float32": torch.float32}, "cpu")
               if cell.option == "a subclass of Tensor" and cell.backend == "cpu"}  # fmt: skip
    (said,) = reasons
    with pytest.raises(ValueError, match=f"backend: cpu refuses this call: .*{said[-1].partition(':')[0]}"):
        attention(q, q, q, backend="cpu")


# ---------------------------------------------------------------- the verdict


def verdict(device: str = "cpu", titles: tuple[str, ...] = tuple(TYPICAL), dtype: torch.dtype = torch.float32) -> str:
    return " ".join(summarise(device, {title: {"x": judge(TYPICAL[title], dtype, device)} for title in titles}))


@pytest.mark.skipif(cpu.extension is None, reason="the native extension is not installed")
def test_the_verdict_names_the_target_where_all_runs_natively() -> None:
    assert cpu.extension is not None
    target = cpu.extension.target()
    assert verdict() == f"All calls run natively ({target}). Nothing to do."
    assert verdict(titles=("sinks",)) == f"This call runs natively ({target}). Nothing to do."


def test_the_verdict_names_the_remedy_where_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "extension", None)
    missing = verdict()
    assert missing.startswith("No native kernels: no C++ compiler was available when headscope was built. ")
    assert re.search(r"Calls run on torch instead: sdpa \d+, blocked \d+\. To fix: install a C\+\+ compiler", missing)
    monkeypatch.setattr(cpu, "unloadable", "a.so: file too short")
    assert "they are built, but cannot be loaded (a.so: file too short)" in verdict()
    assert "To fix: install headscope again: pip install --force-reinstall" in verdict()


def test_the_verdict_counts_the_calls_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    other = verdict("cuda")
    assert other.startswith("On cuda the native kernels do not run, because they are for the CPU. Calls run on: ")
    assert sum(map(int, re.findall(r"[a-z]+ (\d+)", other.partition("run on: ")[2]))) == len(TYPICAL)
    if cpu.extension is not None:
        calls = {form: {"x": judge(replace(TYPICAL["plain"], form=form), torch.float32, "cpu")}
                 for form in ("plain", "subclass")}  # fmt: skip
        assert re.fullmatch(
            r"1 of 2 calls run natively \(\w+\); the others: \w+ 1\. The reasons .*", *summarise("cpu", calls)
        )


def test_doctor_begins_with_the_verdict() -> None:
    shown = CliRunner().invoke(commands, ["doctor", "--dtype", "float32"], env={"COLUMNS": "120"}).stdout
    assert shown.splitlines()[0] == verdict().split(" To fix")[0]
    if cpu.extension is not None:
        assert "does not run it" not in shown, "no refusals of torch where the native kernels run every call"
    alone = CliRunner().invoke(commands, ["doctor", "--sinks", "--dtype", "float32"]).stdout
    assert alone.splitlines()[0].startswith("This call runs" if cpu.extension is not None else "No native")
