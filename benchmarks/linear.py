"""Which of torch's two routes multiplies faster here, for src/headscope/linear_table.json.

    python benchmarks/linear.py [--seconds 1] [--update]

The routes take turns; what is printed is GFLOP/s by their medians, and what the table should say of this CPU: oneDNN
where it is at least a tenth faster in every size, else F.linear.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from headscope import _linear

TABLE = Path(_linear.__file__).with_name(_linear.TABLE)
SIZES = ((320, 512, 1536), (320, 512, 512), (1024, 512, 1536), (1024, 512, 512), (4096, 768, 2304), (4096, 512, 512))
MARGIN = 1.1


def main() -> None:
    """Measure, print, and with --update write this vendor's line of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size")
    parser.add_argument("--update", action="store_true", help="write the table")
    asked = parser.parse_args()
    product = _linear.onednn()
    if product is None:
        raise SystemExit("this torch has no oneDNN product to compare with")
    rows: list[dict[str, float | list[int]]] = []
    with torch.inference_mode():
        for size in SIZES:
            rows.append(measured(size, product, asked.seconds))
            print(rows[-1], flush=True)
    ratios = [float(row["onednn"]) / float(row["torch"]) for row in rows]  # pyright: ignore[reportArgumentType]
    chosen = "onednn" if min(ratios) >= MARGIN else "torch"
    print(f"{_linear.vendor()}: {chosen}; oneDNN against F.linear {min(ratios):.2f} to {max(ratios):.2f}")
    if asked.update:
        save(chosen, statistics.median(ratios), rows)


def measured(size: tuple[int, int, int], product: object, seconds: float) -> dict[str, float | list[int]]:
    """GFLOP/s of both routes for [rows, width] x [out, width]ᵀ."""
    rows, width, out = size
    x, weight, bias = torch.randn(rows, width), torch.randn(out, width), torch.randn(out)
    routes = {"torch": F.linear, "onednn": product}
    times: dict[str, list[float]] = {name: [] for name in routes}
    for route in routes.values():
        route(x, weight, bias)  # pyright: ignore[reportCallIssue]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["torch"]) < 5:
        for name, route in routes.items():
            start = time.perf_counter()
            route(x, weight, bias)  # pyright: ignore[reportCallIssue]
            times[name].append(time.perf_counter() - start)
    work = 2e-9 * rows * width * out
    return {"size": list(size), **{name: round(work / statistics.median(taken), 1) for name, taken in times.items()}}


def save(chosen: str, ratio: float, rows: list[dict[str, float | list[int]]]) -> None:
    """Put this vendor's line into the table, through a temporary file."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    where = f"{torch.get_num_threads()} threads, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    table["vendors"][_linear.vendor()] = {
        "route": chosen,
        "measured_on": where,
        "ratio": round(ratio, 2),
        "gflops": rows,
    }
    with tempfile.NamedTemporaryFile("w", dir=TABLE.parent, suffix=".json", delete=False, encoding="utf-8") as file:
        json.dump(table, file, indent=2)
        file.write("\n")
    os.replace(file.name, TABLE)


if __name__ == "__main__":
    main()
