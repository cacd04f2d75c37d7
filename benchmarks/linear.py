"""Which product is the fastest for projections here, for src/headscope/_linear/table.json.

    python benchmarks/linear.py [--seconds 0.3] [--update]

torch's, oneDNN's and our own take turns at each size, three calls each, of which the first, which finds the caches as
another left them, is not counted. What is printed is GFLOP/s by their medians, and what the table should say of this
CPU, by the number of rows: oneDNN's, which is internal to torch, where it is a tenth faster than torch's at every size;
our own where it is no more than 3 % behind the better of the two on average, since it gives attention as much back by
heads that lie together, and its error is a third of oneDNN's. In training, forward and backward together, our own in
float32 where it is a tenth faster than torch's at every size.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from headscope._attend.backends import native as cpu
from headscope._linear import layer
from headscope._support.cpuinfo import family, processor, vendor

TABLE = Path(layer.__file__).with_name(layer.TABLE)
ROWS = (4096, 1024, 512, 256, 128, 64, 32)
SIZES = ((512, 512), (512, 1536), (768, 2304))  # of x, and of y
NARROW = ((64, 64), (64, 512), (512, 64))  # as narrow as the table speaks of, "least_side"
MARGIN, BEHIND = 1.1, 0.97

Speeds = dict[str, float]


def main() -> None:
    """Measure, print, and with --update write this CPU's line of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each size")
    parser.add_argument("--update", action="store_true", help="write the table")
    asked = parser.parse_args()
    where = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    entry: dict[str, Any] = {"measured_on": where}
    if cpu.extension is not None:
        entry["target"] = cpu.extension.target()
    with torch.no_grad():
        for dtype, name in layer.DTYPES.items():
            routes: dict[str, Any] = {"torch": F.linear}
            if dtype is torch.float32 and (onednn := layer.onednn()) is not None:
                routes["onednn"] = onednn
            if cpu.extension is not None and cpu.extension.supports_linear(cpu.CODES[dtype], 2):
                routes["native"] = layer.Native(dtype)
            figures = {rows: [measured(rows, *size, dtype, routes, asked.seconds) for size in SIZES] for rows in ROWS}
            narrow = [measured(ROWS[0], *size, dtype, routes, asked.seconds) for size in NARROW]
            entry[name] = {"routes": preferred(figures), "gflops": figures, "narrow": narrow}
            print(f"{vendor()} {family()}, {name}: {preferred(figures)}")
    native = layer.native_product(torch.float32)
    if native is not None:
        routes = {"torch": F.linear, "native": native.trained}
        figures = {
            rows: [measured(rows, *size, torch.float32, routes, asked.seconds, grad=True) for size in SIZES]
            for rows in ROWS
        }
        faster = list(takewhile(lambda rows: ahead("native", figures[rows]), ROWS))
        trained = [[faster[-1], "native"]] if faster else []
        narrow = [measured(ROWS[0], *size, torch.float32, routes, asked.seconds, grad=True) for size in NARROW]
        entry["float32"] |= {"trained": trained, "trained_gflops": figures, "trained_narrow": narrow}
        print(f"{vendor()} {family()}, float32 with gradients: {trained}")
    if asked.update:
        save(entry)


def measured(
    rows: int, width: int, outs: int, dtype: torch.dtype, routes: dict[str, Any], seconds: float,
    *, grad: bool = False,
) -> Speeds:  # fmt: skip
    """GFLOP/s of each route for [rows, width] x [outs, width]ᵀ; with gradients there are three products."""
    x, bias = (torch.randn(size).to(dtype).requires_grad_(grad) for size in ((rows, width), (outs,)))
    weight, of_out = (
        nn.Parameter(torch.randn(outs, width).to(dtype), requires_grad=grad),
        torch.randn(rows, outs).to(dtype),
    )

    def run(route: layer.Product) -> None:
        out = route(x, weight, bias)
        if grad:
            torch.autograd.grad(out, (x, weight, bias), of_out)

    times: dict[str, list[float]] = {name: [] for name in routes}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["torch"]) < 6:
        for name, route in routes.items():
            run(route)
            for _ in range(2):
                start = time.perf_counter()
                run(route)
                times[name].append(time.perf_counter() - start)
    speeds: Speeds = {
        name: round((6e-9 if grad else 2e-9) * rows * width * outs / statistics.median(taken))
        for name, taken in times.items()
    }
    print(f"{dtype}, [{rows}, {width}] x [{outs}, {width}]ᵀ{', with gradients' * grad}: {speeds}", flush=True)
    return speeds


def preferred(figures: dict[int, list[Speeds]]) -> list[list[int | str]]:
    """What the table says: from so many rows on, this route; more rows first, and nothing of torch's."""
    found: list[list[int | str]] = []
    for rows in sorted(figures, reverse=True):
        best = fastest(figures[rows])
        if best == "torch":
            break
        if found and found[-1][1] == best:
            found[-1][0] = rows
        else:
            found.append([rows, best])
    return found


def fastest(sizes: list[Speeds]) -> str:
    """The route to prefer where the sizes differ in all but their rows."""
    means = {name: statistics.geometric_mean(speeds[name] for speeds in sizes) for name in sizes[0]}
    best = "torch"
    if "onednn" in means and ahead("onednn", sizes):
        best = "onednn"
    return "native" if means.get("native", 0) >= BEHIND * means[best] else best


def ahead(name: str, sizes: list[Speeds]) -> bool:
    """Whether a route is so much faster than torch's, at every size, that it is worth another one."""
    return all(speeds[name] >= MARGIN * speeds["torch"] for speeds in sizes)


def save(entry: dict[str, Any]) -> None:
    """Put this CPU's line into the table, through a temporary file."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    table["cpus"][f"{vendor()} {family()}".strip()] = entry
    with tempfile.NamedTemporaryFile("w", dir=TABLE.parent, suffix=".json", delete=False, encoding="utf-8") as file:
        file.write(re.sub(r"[\[{][^\[\]{}]*[\]}]", in_one_line, json.dumps(table, indent=1)) + "\n")
    os.replace(file.name, TABLE)


def in_one_line(innermost: re.Match[str]) -> str:
    """What holds no other list or dictionary."""
    return re.sub(r"\s+", " ", innermost[0]).replace("[ ", "[").replace(" ]", "]").replace("{ ", "{").replace(" }", "}")


if __name__ == "__main__":
    main()
