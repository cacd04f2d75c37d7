"""The module beside ``nn.MultiheadAttention`` and plain softmax(QKᵀ)V, interleaved: A B C D A B C D ...

Each round times every competitor once; what is reported is each one's median, and the ratio of its median to ours.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope._support.cpuinfo import processor
from headscope._support.files import replace_file
from headscope.module import MultiHeadAttention

SHAPES = ((32, 10, 512, 8), (2, 10, 6, 2), (1, 64, 128, 8), (1, 1024, 512, 8), (8, 512, 768, 12), (1, 4096, 512, 8))
MODES = ("inference", "forward + backward")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = "headscope"
PEERS = ("torch", "torch, need_weights", "plain")

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one shape, mode and dtype, in microseconds, by competitor."""

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
        """Our median in milliseconds."""
        return self.median_us[OURS] / 1e3

    def ratio(self, peer: str) -> float:
        """How many times as fast as the peer ours is."""
        return self.median_us[peer] / self.median_us[OURS]


class Plain(nn.Module):
    """The same module, its attention written as everybody writes it: softmax(QKᵀ / √d) V."""

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
    """Four modules with the same weights: ours, torch's without and with weights, and the plain one."""
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


def measure(shape: tuple[int, int, int, int], mode: str, dtype: str, seconds: float) -> Timing:
    """Time all competitors on one shape for about so many seconds; at least five rounds."""
    batch, length, embed_dim, heads = shape
    torch.manual_seed(0)
    x = torch.randn(batch, length, embed_dim, dtype=DTYPES[dtype])
    modules = competitors(embed_dim, heads, DTYPES[dtype])
    for module in modules.values():
        module.train(mode != "inference")
    runs = {name: _runner(module, x, mode) for name, module in modules.items()}
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
    """Competitors that compute different things are not compared."""
    with torch.inference_mode(mode == "inference"):
        outs = {name: run() for name, run in runs.items()}
    for out in outs.values():
        torch.testing.assert_close(out, outs[OURS], atol=2e-2, rtol=2e-2)


def _interleave(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    started, rounds = time.perf_counter(), 0
    while rounds < 6 or time.perf_counter() - started < seconds:
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
        rounds += 1
    return {name: each[1:] for name, each in times.items()}  # the first round warms up


def machine() -> dict[str, Any]:
    """What the timings were taken on."""
    return {
        "cpu": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run(seconds: float = 1.0, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Iterator[Timing]:
    """Every shape in every mode and dtype, one timing at a time."""
    for dtype in dtypes:
        for mode in MODES:
            for shape in SHAPES:
                yield measure(shape, mode, dtype, seconds)


def markdown(timings: list[Timing]) -> str:
    """All in one table: our median, and how many times as fast as each peer it is."""
    head = ["(B, T, E, H)", "mode", "dtype", "ours, ms", *(f"× {peer}" for peer in PEERS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for t in timings:
        cells = [str(t.shape), t.mode, t.dtype, f"{t.ours_ms:.3f}"]
        lines.append("| " + " | ".join(cells + [f"{t.ratio(peer):.2f}" for peer in PEERS]) + " |")
    return "\n".join(lines)


def as_dict(timings: list[Timing]) -> dict[str, Any]:
    """The timings and the machine, for JSON."""
    return {"machine": machine(), "timings": [asdict(t) for t in timings]}


def save(timings: list[Timing], path: Path) -> None:
    """Write the timings and the machine as JSON, whole or not at all."""
    text = json.dumps(as_dict(timings), indent=1)
    replace_file(path, f"{text}\n".encode())
