"""All that headscope promises on a GPU, in ten minutes: python benchmarks/gpu.py [--json FILE] [--device cpu]

Checks come first: errors against float64, ten runs to the bit, no wait for the device, capture in a CUDA graph.
Then times: ``attention`` and ``attend`` compared with the fastest of torch's kernels, and the portable observer
compared with attending, with their peak memory. Times are medians of interleaved calls. A table in Markdown goes to
stdout.

``--device cpu`` runs the same code on small inputs, without what requires CUDA: a test that the file works. No GPU was
available when it was written, so the first run on one is also its first full test.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import headscope
from headscope import Observe, attend, attention, masks, observe
from headscope._attend.backends import fused
from headscope._attend.prepare import prepare

MINUTES = 10
ROUNDS, RUNS = 15, 10
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One attention: sizes, dtype, and what makes its options on a device."""

    name: str
    dtype: torch.dtype
    options: Callable[[Case, torch.device], Options] = lambda case, device: {}
    batch: int = 2
    heads: int = 16
    kv_heads: int = 16
    length: int = 1024
    head_dim: int = 64

    def inputs(self, device: torch.device, grad: bool = False, length: int | None = None) -> tuple[Tensor, ...]:
        """Return q, k and v."""
        draw = torch.Generator().manual_seed(0)
        sizes = [
            (self.batch, n, length or self.length, self.head_dim) for n in (self.heads, self.kv_heads, self.kv_heads)
        ]
        return tuple(torch.randn(s, generator=draw).to(device, self.dtype).requires_grad_(grad) for s in sizes)


def _packed(case: Case, device: torch.device) -> Options:
    ends = torch.tensor([0, case.length // 4, case.length // 2, case.length], device=device)
    return {"mask": masks.Documents.from_cu_seqlens(ends) & masks.causal()}


def _lengths(case: Case, device: torch.device) -> Options:
    return {"mask": masks.causal() & masks.KeyLengths(torch.tensor([case.length, case.length // 3], device=device))}


def _sinks(case: Case, device: torch.device) -> Options:
    return {"mask": masks.causal(), "sinks": torch.ones(case.heads, device=device)}


def cases() -> list[Case]:
    """Return the checked calls: each option once in half precision, some in float32."""
    half, single = torch.bfloat16, torch.float32

    def causal(case: Case, device: torch.device) -> Options:
        return {"mask": masks.causal()}

    return [
        Case("no mask", half),
        Case("causal", half, causal),
        Case("causal, float32", single, causal),
        Case("causal, float16", torch.float16, causal),
        Case("causal, grouped heads", half, causal, kv_heads=4),
        Case("causal, D 60", half, causal, head_dim=60),
        Case("window", half, lambda case, device: {"mask": masks.window(case.length // 4)}),
        Case("window, float32", single, lambda case, device: {"mask": masks.window(case.length // 4)}),
        Case("causal & lengths", half, _lengths),
        Case("packed documents", half, _packed, batch=1),
        Case("packed documents, float32", single, _packed, batch=1),
        Case("sinks", half, _sinks),
        Case("softcap", half, lambda case, device: {"mask": masks.causal(), "softcap": 20.0}),
        Case("prefix or window", half, lambda case, device: {"mask": masks.Prefix(4) | masks.window(case.length // 4)}),
    ]  # fmt: skip


@dataclass
class Report:
    """The results, one dict a row."""

    machine: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)
    observer: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Bench:
    """A device, and the time that is left."""

    def __init__(self, device: str, small: bool, minutes: float) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.small = small
        self.end = time.monotonic() + 60 * minutes
        self.report = Report(machine(self.device))

    def has_time(self, what: str) -> bool:
        """Return whether time is left; else note what is left out."""
        if time.monotonic() < self.end:
            return True
        self.report.left_out.append(f"{what}: out of time")
        return False

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the time of one call."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def medians(self, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median time of each call; they are interleaved."""
        rounds = 2 if self.small else ROUNDS
        for run in runs.values():
            for _ in range(1 if self.small else 3):
                run()
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                found[name].append(self.seconds(run))
        return {name: statistics.median(each) for name, each in found.items()}

    def peak(self, run: Callable[[], object]) -> int | None:
        """Return the most bytes that a call allocates, results included; None on a CPU."""
        if not self.cuda:
            return None
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def machine(device: torch.device) -> dict[str, Any]:
    """Return the versions, and the GPU or the processor."""
    versions = {"headscope": headscope.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return {**versions, "device": f"{device.type} (a dry run: no number here says anything of a GPU)"}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {
        **versions, "device": torch.cuda.get_device_name(), "capability": capability,
        "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(),
    }  # fmt: skip


# ---------------------------------------------------------------- checks


def check(bench: Bench, case: Case) -> dict[str, Any]:
    """Return what holds of one call of ``attend``; a failure is a row, not an end."""
    row: dict[str, Any] = {"case": case.name}
    length = 64 if bench.small else 256
    small = Case(
        case.name, case.dtype, case.options, case.batch, 4, 4 * case.kv_heads // case.heads, length, case.head_dim
    )
    options = small.options(small, bench.device)
    steps: dict[str, Callable[[], object]] = {
        "kernel": lambda: kernel_of(small.inputs(bench.device), options),
        "errors": lambda: errors(small, bench.device, options),
        "same bits": lambda: same_bits(small.inputs(bench.device), options),
        "no wait": lambda: without_waiting(bench, small.inputs(bench.device), options),
        "graph": lambda: captured(bench, small.inputs(bench.device), options),
    }
    for name, step in steps.items():
        try:
            row[name] = step()
        except Exception as error:  # the next check may work
            row[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return row


def kernel_of(inputs: tuple[Tensor, ...], options: Options) -> str:
    """Return the backend of ``attend``, and the kernel if it is a fused one."""
    given: Options = {"mask": None, "sinks": None, "softcap": None, **options}
    q, k, v = inputs
    prepared = prepare(q, k, v, given["mask"], None, given["sinks"], None, given["softcap"], 0.0, True, None)
    return f"fused: {fused.choose(prepared.call)}" if prepared.backend is fused else prepared.backend.name


def errors(case: Case, device: torch.device, options: Options) -> dict[str, float]:
    """Return the errors of out, lse and gradients over those of plain torch in the same dtype, against float64."""

    def results(backend: str | None, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in case.inputs(device)]
        given = {name: x.to(dtype) if name == "sinks" and dtype == torch.float64 else x for name, x in options.items()}
        out, lse, _ = attend(*leaves, backend=backend, **given)
        weight = torch.linspace(-1, 1, out.numel(), device=device, dtype=torch.float64).view(out.shape)
        loss = (out * weight.to(out.dtype)).sum() + lse[lse != -torch.inf].sin().sum().to(out.dtype)
        return [x.detach().double() for x in (out, lse, *torch.autograd.grad(loss, leaves))]

    exact, plain, found = (
        results("reference", torch.float64),
        results("reference", case.dtype),
        results(None, case.dtype),
    )
    ratios: dict[str, float] = {}
    for name, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), found, plain, exact, strict=True):
        there = z.isfinite()
        mine, theirs = ((each - z)[there].abs().max() for each in (x, y))
        floor = 8 * torch.finfo(torch.float32).eps * z[there].abs().max()
        ratios[name] = round(float(mine / torch.maximum(theirs, floor)), 2)
    return ratios


def same_bits(inputs: tuple[Tensor, ...], options: Options) -> bool:
    """Return whether ten runs give the same bits."""
    first = attend(*inputs, **options)[:2]
    return all(
        all(torch.equal(x, y) for x, y in zip(first, attend(*inputs, **options)[:2], strict=True))
        for _ in range(RUNS - 1)
    )


@contextmanager
def _no_waiting(bench: Bench) -> Iterator[None]:
    if not bench.cuda:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def without_waiting(bench: Bench, inputs: tuple[Tensor, ...], options: Options) -> str:
    """Return "yes" if neither attending nor observing waits for the device, once warm; torch raises if one does."""

    def run() -> None:
        result = attend(*inputs, **options)
        given = {name: x for name, x in options.items() if name in ("mask", "sinks", "softcap")}
        observe(*inputs, lse=result.lse, what=Observe(rows=16), **given)

    run()
    bench.wait()
    with _no_waiting(bench):
        run()
    return "yes" if bench.cuda else "not checked"


def captured(bench: Bench, inputs: tuple[Tensor, ...], options: Options) -> str:
    """Return "yes" if a CUDA graph of ``attend`` gives the same bits when it is replayed."""
    eager = attend(*inputs, **options)[:2]
    if not bench.cuda:
        return "not checked"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = attend(*inputs, **options)[:2]
    graph.replay()
    torch.cuda.synchronize()
    return "yes" if all(torch.equal(x, y) for x, y in zip(eager, inside, strict=True)) else "other bits"


# ---------------------------------------------------------------- times


def blind(bench: Bench, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """Return the calls of torch's kernels that run here, by name."""

    def call(backend: SDPBackend | None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        return run

    found: dict[str, Callable[[], Tensor]] = {}
    for name, backend in KERNELS.items() if bench.cuda else {"torch": None}.items():
        run = call(backend)
        try:
            run()
        except RuntimeError:  # this GPU, or these sizes, have no such kernel
            continue
        found[name] = run
    return found


def _with_gradients(run: Callable[[], Any], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    def train() -> object:
        result = run()
        out = result if isinstance(result, Tensor) else result[0]
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return train


def measure(bench: Bench, case: Case, trained: bool) -> dict[str, Any]:
    """Return the times of ``attention`` and ``attend`` over that of the fastest blind kernel."""
    length = 128 if bench.small else case.length
    inputs = case.inputs(bench.device, grad=trained, length=length)
    options = case.options(case, bench.device)
    runs: dict[str, Callable[[], Any]] = {
        **blind(bench, *inputs, causal=bool(options)),
        "attention": lambda: attention(*inputs, **options),
        "attend": lambda: attend(*inputs, **options),
    }
    if trained:
        runs = {name: _with_gradients(run, inputs) for name, run in runs.items()}
    peaks = {name: bench.peak(runs[name]) for name in ("attention", "attend")}
    found = bench.medians(runs)
    peers = {name: seconds for name, seconds in found.items() if name not in peaks}
    best = min(peers, key=lambda name: peers[name])
    return {
        "case": case.name, "T": length, "pass": "forward, backward" if trained else "forward", "blind": best,
        "blind ms": 1e3 * peers[best], **{f"{name} / blind": found[name] / peers[best] for name in peaks},
        **{f"{name} peak MiB": None if peak is None else peak / 2**20 for name, peak in peaks.items()},
    }  # fmt: skip


def measure_observer(bench: Bench, length: int, what: Observe, name: str) -> dict[str, Any]:
    """Return the time of attending and observing over that of attending alone."""
    heads, kv_heads = (4, 4) if bench.small else (32, 8)
    case = Case("causal", torch.bfloat16, batch=1, heads=heads, kv_heads=kv_heads, head_dim=128)
    inputs = case.inputs(bench.device, length=length)
    mask = masks.causal()

    def both() -> object:
        return attend(*inputs, mask=mask, observe=what)

    with torch.no_grad():
        found = bench.medians({"attend": lambda: attend(*inputs, mask=mask), "observed": both})
        peak = bench.peak(both)
    return {
        "observe": name, "T": length, "attend ms": 1e3 * found["attend"],
        "observed / attend": found["observed"] / found["attend"],
        "peak MiB": None if peak is None else peak / 2**20,
    }  # fmt: skip


# ---------------------------------------------------------------- all


def run_all(bench: Bench) -> Report:
    """Run every section, as far as the time reaches."""
    for case in cases():
        if bench.has_time(f"check of {case.name}"):
            bench.report.checks.append(check(bench, case))
    half = torch.bfloat16
    timed = [
        Case(name, half, options, batch, heads, kv_heads, length, 128)
        for batch, heads, kv_heads, length in ((4, 32, 32, 2048), (1, 32, 8, 8192), (1, 32, 32, 16384))
        for name, options in (
            ("no mask", lambda case, device: {}), ("causal", lambda case, device: {"mask": masks.causal()})
        )
    ]  # fmt: skip
    for case in timed[:2] if bench.small else timed:
        for trained in (False, True):
            if bench.has_time(f"times of {case.name}, T {case.length}"):
                _row(bench.report.times, case.name, lambda case=case, trained=trained: measure(bench, case, trained))
    observed = {"rows=256": Observe(rows=256), "all rows": Observe(), "map, edges": Observe(map=32, edges=10)}
    length = 128 if bench.small else 8192
    for name, what in observed.items():
        if bench.has_time(f"observer: {name}"):
            _row(bench.report.observer, name, lambda what=what, name=name: measure_observer(bench, length, what, name))
    return bench.report


def _row(rows: list[dict[str, Any]], name: str, make: Callable[[], dict[str, Any]]) -> None:
    try:
        rows.append(make())
    except Exception as error:  # the next measurement may work
        rows.append({"case": name, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"})


def markdown(report: Report) -> str:
    """Return the report as tables."""
    lines = ["# headscope on a GPU", "", *(f"- {name}: {value}" for name, value in report.machine.items()), ""]
    for title, rows in (("Checks", report.checks), ("Times", report.times), ("Observer", report.observer)):
        columns = list(dict.fromkeys(name for row in rows for name in row))
        if columns:
            lines += [f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [f"| {' | '.join(_word(row.get(name, '')) for name in columns)} |" for row in rows]
            lines.append("")
    return "\n".join([*lines, *(f"- left out: {each}" for each in report.left_out)])


def _word(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run on small inputs")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="what has not begun by then is left out")
    parser.add_argument("--json", type=Path, help="write the report here too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch finds no GPU; expected one, or --device cpu for a dry run")
    report = run_all(Bench(options.device, options.device == "cpu", options.minutes))
    sys.stdout.write(markdown(report) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    failed = any("failed" in str(row) for rows in (report.checks, report.times, report.observer) for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
