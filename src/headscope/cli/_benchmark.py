"""Benchmark of ``MultiHeadAttention`` against ``nn.MultiheadAttention`` and plain softmax(QKᵀ)V.

Competitors are interleaved, A B C D A B C D ...: each round times every competitor once. The results are the median of
each competitor, and its ratio to headscope's median.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope._support.cpuinfo import processor
from headscope._support.files import replace_file
from headscope.module import MultiHeadAttention

SHAPES = ((2, 10, 6, 2), (1, 64, 128, 8), (32, 10, 512, 8), (1, 1024, 512, 8), (8, 512, 768, 12), (1, 4096, 512, 8))
MODES = ("inference", "forward + backward")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = "headscope"
PEERS = ("torch", "torch, need_weights", "plain")

PER_LINE = 0.5
"""Seconds for a line of the table, without a limit in all."""

ROUNDS = 6
"""Rounds at least, of which the first warms up."""

ROUND = 6.5
"""Seconds of a round for each second of headscope: torch's module, with weights, and the plain one take 1 to 2.5."""

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of each competitor in microseconds, for one shape, mode and dtype."""

    batch: int
    length: int
    embed_dim: int
    heads: int
    mode: str
    dtype: str
    rounds: int
    median_us: dict[str, float]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, length, embed_dim, heads)"""
        return (self.batch, self.length, self.embed_dim, self.heads)

    @property
    def ours_ms(self) -> float:
        """Median of headscope in milliseconds."""
        return self.median_us[OURS] / 1e3

    def ratio(self, peer: str) -> float:
        """Return how many times as fast as the peer headscope is."""
        return self.median_us[peer] / self.median_us[OURS]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: a shape, mode and dtype."""

    shape: tuple[int, int, int, int]
    mode: str
    dtype: str

    @property
    def products(self) -> int:
        """Multiplications of a forward pass: four projections, and two products of queries and keys."""
        batch, length, embed_dim, _ = self.shape
        return batch * length * embed_dim * (4 * embed_dim + 2 * length)


class Plain(nn.Module):
    """The same weights with attention in plain PyTorch: softmax(QKᵀ / √d) V."""

    def __init__(self, module: MultiHeadAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]"""
        q, k, v = self.module.project(x)
        p = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)  # [B, H, T, T]
        return self.module.out_proj((p @ v).transpose(1, 2).flatten(2))  # [B, T, E]


class Theirs(nn.Module):
    """torch's module on one input."""

    def __init__(self, module: nn.MultiheadAttention, need_weights: bool) -> None:
        super().__init__()
        self.module = module
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]"""
        return self.module(x, x, x, need_weights=self.need_weights, average_attn_weights=False)[0]


def competitors(embed_dim: int, heads: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return four modules with the same weights: headscope, torch without and with need_weights, and the plain one."""
    ours = MultiHeadAttention(embed_dim, heads, dtype=dtype)
    theirs = nn.MultiheadAttention(embed_dim, heads, batch_first=True, dtype=dtype)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv_proj.weight, "in_proj_bias": ours.qkv_proj.bias,
            "out_proj.weight": ours.out_proj.weight, "out_proj.bias": ours.out_proj.bias,
        }
    )  # fmt: skip
    return {
        OURS: ours,
        "torch": Theirs(theirs, need_weights=False),
        "torch, need_weights": Theirs(theirs, need_weights=True),
        "plain": Plain(ours),
    }


def measure(line: Line, seconds: float, most: float = math.inf) -> Timing | None:
    """Time all competitors on one shape; return None if that would take more than ``most`` seconds.

    Args:
        line: shape, mode and dtype.
        seconds: about how long; there are five timed rounds at least.
        most: a limit; headscope alone runs once to estimate whether five rounds fit.
    """
    (batch, length, embed_dim, heads), mode, dtype = line.shape, line.mode, line.dtype
    torch.manual_seed(0)
    x = torch.randn(batch, length, embed_dim, dtype=DTYPES[dtype])
    modules = competitors(embed_dim, heads, DTYPES[dtype])
    for module in modules.values():
        module.train(mode != "inference")
    runs = {name: _runner(module, x, mode) for name, module in modules.items()}
    if math.isfinite(most):
        with torch.inference_mode(mode == "inference"):
            runs[OURS]()  # the first run allocates
        started = time.perf_counter()
        with torch.inference_mode(mode == "inference"):
            runs[OURS]()
        if (time.perf_counter() - started) * ROUND * (ROUNDS + 1) > most:  # one round more, to compare the results
            return None
    _check_equal(runs, mode)
    with torch.inference_mode(mode == "inference"):
        times = _interleave(runs, seconds)
    medians = {name: statistics.median(each) * 1e6 for name, each in times.items()}
    return Timing(batch, length, embed_dim, heads, mode, dtype, len(times[OURS]), medians)


def _runner(module: nn.Module, x: Tensor, mode: str) -> Run:
    if mode == "inference":
        return lambda: module(x)
    leaf = x.clone().requires_grad_()
    grad = torch.ones_like(x)

    def forward_backward() -> Tensor:
        out = module(leaf)
        out.backward(grad)
        return out

    return forward_backward


def _check_equal(runs: dict[str, Run], mode: str) -> None:
    """Check that all competitors compute the same."""
    with torch.inference_mode(mode == "inference"):
        outs = {name: run() for name, run in runs.items()}
    for out in outs.values():
        torch.testing.assert_close(out, outs[OURS], atol=2e-2, rtol=2e-2)


def _interleave(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    started, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - started < seconds:
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
        rounds += 1
    return {name: each[1:] for name, each in times.items()}  # the first round warms up


def machine() -> dict[str, Any]:
    """Return the machine and the versions that the timings depend on."""
    return {
        "cpu": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def lines(dtypes: tuple[str, ...]) -> list[Line]:
    """Return every shape in every mode and dtype, in the order of the table."""
    return [Line(shape, mode, dtype) for dtype in dtypes for mode in MODES for shape in SHAPES]


def run(every: list[Line], seconds: float | None = None) -> Iterator[Timing | None]:
    """Yield the timing of each line.

    Args:
        every: the lines.
        seconds: a limit for all lines together; None is ``PER_LINE`` seconds for each and no limit. A line for which
            the time does not suffice yields None: five rounds at (1, 4096, 512) in training alone take half a minute.
    """
    if seconds is not None:
        for mode, dtype in dict.fromkeys((line.mode, line.dtype) for line in every):
            measure(Line((1, 2, 8, 2), mode, dtype), 0.0)  # the first calls start threads and autograd
    deadline = math.inf if seconds is None else time.perf_counter() + seconds
    slow: dict[tuple[str, str], int] = {}  # products of the smallest line that was too slow, by dtype and mode
    for number, line in enumerate(every):
        kind = (line.dtype, line.mode)
        left = deadline - time.perf_counter()
        share = PER_LINE if seconds is None else left / (len(every) - number)
        fits = left > 0 and line.products < slow.get(kind, sys.maxsize)
        timing = measure(line, share, left) if fits else None
        if timing is None:
            slow[kind] = min(line.products, slow.get(kind, sys.maxsize))
        yield timing


def markdown(timings: list[Timing]) -> str:
    """Return all timings in one table: headscope's median, and how many times as fast as each peer it is."""
    head = ["(B, T, E, H)", "mode", "dtype", "headscope, ms", *(f"× {peer}" for peer in PEERS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for t in timings:
        cells = [str(t.shape), t.mode, t.dtype, f"{t.ours_ms:.3f}"]
        lines.append("| " + " | ".join(cells + [f"{t.ratio(peer):.2f}" for peer in PEERS]) + " |")
    return "\n".join(lines)


def as_dict(timings: list[Timing], skipped: Sequence[Line] = ()) -> dict[str, Any]:
    """Return the timings, the lines without one, and the machine as JSON."""
    return {
        "machine": machine(),
        "timings": [asdict(t) for t in timings],
        "skipped": [asdict(line) for line in skipped],
    }


def save(timings: list[Timing], path: Path) -> None:
    """Write the timings and the machine as JSON, atomically."""
    text = json.dumps(as_dict(timings), indent=1)
    replace_file(path, f"{text}\n".encode())
