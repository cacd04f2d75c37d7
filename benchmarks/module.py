"""The module compared with torch's and the plain one: python benchmarks/module.py [--seconds 1.5] [--torch-kernels]

Writes JSON, and the same as one Markdown table beside it; both of the last full run are committed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headscope._attend.backends import native
from headscope.cli import _benchmark

HERE = Path(__file__).parent


def main() -> None:
    """Time every shape, mode and dtype; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each row of the table")
    parser.add_argument(
        "--torch-kernels", action="store_true", help="without the native kernels, as without a compiler"
    )
    parser.add_argument("--out", type=Path, help="by default module.json, or module_torch_kernels.json")
    asked = parser.parse_args()
    if asked.torch_kernels:
        native.extension = None
    out: Path = asked.out or HERE / ("module_torch_kernels.json" if asked.torch_kernels else "module.json")
    timings: list[_benchmark.Timing] = []
    for line in _benchmark.lines(tuple(_benchmark.DTYPES)):
        timing = _benchmark.measure(line, asked.seconds)
        assert timing is not None, "only a limit of time leaves a line out"
        timings.append(timing)
        print(_benchmark.markdown([timing]).splitlines()[-1], file=sys.stderr, flush=True)
    _benchmark.save(timings, out)
    table = _benchmark.markdown(timings)
    machine = ", ".join(f"{name} {value}" for name, value in _benchmark.machine().items())
    command = "python benchmarks/module.py" + (" --torch-kernels" if asked.torch_kernels else "")
    out.with_suffix(".md").write_text(
        f"# The module, interleaved with its peers\n\nMade by `{command}` on {machine}. Each × is a ratio of medians: "
        f"how many times as fast as that peer headscope is.\n\n{table}\n"
    )
    print(table)


if __name__ == "__main__":
    main()
