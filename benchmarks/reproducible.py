"""What reproducible=True costs, and how far it is from the default: python benchmarks/reproducible.py [--seconds 3]

Calls alternate between the two modules, with two threads. Times are medians; a table in Markdown goes to stdout.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headscope import MultiHeadAttention, attention
from headscope.masks import causal

SIZES = ((32, 10, 512, 8), (1, 64, 128, 8), (8, 512, 768, 12), (1, 1, 512, 8))  # B, T, E, H
DTYPES = (torch.float32, torch.bfloat16)


def modules(width: int, heads: int, dtype: torch.dtype) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """The default and the reproducible module, with the same weights."""
    torch.manual_seed(0)
    default = MultiHeadAttention(width, heads, dtype=dtype)
    reproducible = MultiHeadAttention(width, heads, dtype=dtype, reproducible=True)
    reproducible.load_state_dict(default.state_dict())
    return default, reproducible


def run(module: MultiHeadAttention, x: Tensor, mask: Any, trained: bool) -> Callable[[], None]:
    """A call of a module, or a call and its gradients."""

    def forward() -> None:
        with torch.no_grad():
            module(x, mask=mask)

    def train() -> None:
        module(x, mask=mask).sum().backward()

    return train if trained else forward


def medians(calls: list[Callable[[], None]], seconds: float) -> list[float]:
    """The median time of each, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 10:
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            mine.append(time.perf_counter() - start)
    return [statistics.median(mine) for mine in times]


def print_costs(seconds: float) -> None:
    print("| B, T, E, H | dtype | mask | forward, µs | reproducible | training, µs | reproducible |")
    print("|---|---|---|---|---|---|---|")
    for batch, length, width, heads in SIZES:
        for dtype in DTYPES:
            for mask in (None, causal()):
                both = modules(width, heads, dtype)
                x = torch.randn(batch, length, width, dtype=dtype)
                cells = [f"{batch}, {length}, {width}, {heads}", str(dtype).removeprefix("torch.")]
                cells.append("none" if mask is None else "causal")
                for trained in (False, True):
                    y = x.clone().requires_grad_(trained)
                    usual, other = medians([run(module, y, mask, trained) for module in both], seconds)
                    cells += [f"{usual * 1e6:,.0f}", f"× {other / usual:.2f}"]
                print("| " + " | ".join(cells) + " |", flush=True)


def print_differences() -> None:
    """How far decoding, and prefill in chunks, are from attending all at once; relative to the largest output."""
    print("\n| dtype | mask | decoding, default | chunks of 64, default | both, reproducible |")
    print("|---|---|---|---|---|")
    for dtype in (*DTYPES, torch.float64):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, heads, 1000, 64).to(dtype) for heads in (8, 2, 2))
        cells = [str(dtype).removeprefix("torch."), "causal"]
        far = {(step, name): difference(q, k, v, step, name) for step in (1, 64) for name in (None, "reproducible")}
        largest = max(far[1, "reproducible"], far[64, "reproducible"])
        cells += [f"{far[1, None]:.1e}", f"{far[64, None]:.1e}", f"{largest:g}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def difference(q: Tensor, k: Tensor, v: Tensor, step: int, backend: str | None) -> float:
    length = q.shape[2]
    whole = attention(q, k, v, mask=causal(), backend=backend)
    parts = [
        attention(q[:, :, at : at + step], k[:, :, : at + step], v[:, :, : at + step], mask=causal(), backend=backend)
        for at in range(0, length, step)
    ]
    return float((torch.cat(parts, 2) - whole).abs().max() / whole.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each pair of calls")
    torch.set_num_threads(2)
    asked = parser.parse_args()
    print_costs(asked.seconds)
    print_differences()


if __name__ == "__main__":
    main()
