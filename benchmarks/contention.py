"""Attention while other processes keep the cores busy: python benchmarks/contention.py

    python benchmarks/contention.py                  # the full run; writes contention.json and contention.md
    python benchmarks/contention.py --cases A,C --busy 2 --calls 400

headscope and torch call in turns, in one process, with the same threads. The other processes only count. A call that
waits for a thread whose core serves another process takes a scheduler slice longer. The median and the 95th percentile
show it; the fastest call does not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from attention_peers.cases import SHAPES
from torch.nn.functional import scaled_dot_product_attention

import headscope
from headscope.cli import _benchmark

HERE = Path(__file__).parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP_CALLS = 5
CALLS, LONG_CALLS = 1000, 200  # the 95th percentile of few short calls is a matter of a single scheduler slice
LONG = 2048  # queries
PAUSE_S = 0.0005  # between calls, as a model's other layers would take: the scheduler then owes neither peer anything


def count_for_ever() -> None:
    """Keep one core busy."""
    n = 0
    while True:
        n += 1


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """So many processes that compete for the cores."""
    processes = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def times_in_turns(peers: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
    """Seconds of each call of each peer; who calls first alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(WARM_UP_CALLS + calls):
        names = list(peers) if turn % 2 else list(peers)[::-1]
        for name in names:
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            peers[name]()
            if turn >= WARM_UP_CALLS:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(shape: str, dtype: str, busy: int, calls: int) -> dict[str, object]:
    """One row of the table: milliseconds at the median and at the 95th percentile, and their ratios."""
    batch, heads, kv_heads, queries, keys, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, n, length, width, generator=generator).to(DTYPES[dtype])
        for n, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    )
    peers: dict[str, Callable[[], object]] = {
        "headscope": lambda: headscope.attention(q, k, v),
        "torch": lambda: scaled_dot_product_attention(q, k, v),
    }
    with torch.inference_mode(), busy_processes(busy):
        seconds = times_in_turns(peers, calls)
    row: dict[str, object] = {"shape": shape, "sizes": SHAPES[shape], "dtype": dtype, "busy": busy, "calls": calls}
    for name, place in (("p50", 49), ("p95", 94)):
        ours, theirs = (1000 * statistics.quantiles(seconds[peer], n=100)[place] for peer in ("headscope", "torch"))
        row |= {f"{name}_ms": ours, f"torch_{name}_ms": theirs, f"{name}_ratio": ours / theirs}
    return row


def markdown(rows: list[dict[str, object]]) -> str:
    """The rows as a table."""
    lines = [
        "| case | dtype | busy processes | p50, ms | torch | ratio | p95, ms | torch | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = " | ".join(
            f"{row[f'{p}_ms']:.3g} | {row[f'torch_{p}_ms']:.3g} | {row[f'{p}_ratio']:.2f}" for p in ("p50", "p95")
        )
        lines.append(f"| {row['shape']} {row['sizes']} | {row['dtype']} | {row['busy']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Run every case; progress on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="A,C,D,E", help="shapes of benchmarks/attention.py")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes")
    parser.add_argument(
        "--calls",
        type=int,
        help=f"of each peer in each case; default: {CALLS}, or {LONG_CALLS} of {LONG} queries and more",
    )
    parser.add_argument("--out", type=Path, help="by default contention.json, of a full run only")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for busy in map(int, options.busy.split(",")):
        for shape in options.cases.split(","):
            for dtype in options.dtypes.split(","):
                calls = options.calls or (LONG_CALLS if SHAPES[shape][3] >= LONG else CALLS)
                rows.append(measure(shape, dtype, busy, calls))
                print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    full = len(sys.argv) == 1
    out = options.out or (HERE / "contention.json" if full else None)
    machine = {**_benchmark.machine(), "cores": os.cpu_count()}
    if out is not None:
        out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        where = ", ".join(f"{name} {value}" for name, value in machine.items())
        out.with_suffix(".md").write_text(
            f"# Attention on busy cores\n\nMade by `python benchmarks/contention.py` on {where}.\n"
            f"headscope and torch called in turns. A ratio below 1: headscope was faster.\n\n{markdown(rows)}\n"
        )
    print(markdown(rows))


if __name__ == "__main__":
    main()
