"""``headscope bench``: headscope's module against torch's and a plain one, interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import DtypeName, console, print_json, say
from headscope.cli._shared.mistakes import Mistake

if TYPE_CHECKING:
    from headscope.cli._benchmark import Line, Timing

SHORT = {"forward + backward": "training"}  # modes whose name would make a line longer than 80 characters


@click.command(short_help="Time the module against torch's and a plain one.")
@click.option(
    "--seconds",
    type=float,
    metavar="S",
    help="Time limit in all; lines that do not fit are skipped.  [default: none, 0.5 s a line]",
)
@click.option(
    "--dtype", type=DtypeName(["fp32", "bf16"]), multiple=True, help="May be repeated.  [default: fp32, bf16]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def bench(seconds: float | None, dtype: tuple[str, ...], as_json: bool) -> None:
    """Time MultiHeadAttention against nn.MultiheadAttention and plain softmax(QKᵀ)V.

    The competitors take turns, A B C D A B C D ..., at least five times each, in inference and in training. Shapes
    range from (2, 10, 6) to (1, 4096, 512). The table shows headscope's median time, and how many times as fast it is
    as torch's module, torch's module with need_weights, and the plain one.
    """
    if seconds is not None and not 0 < seconds <= 3600:
        raise Mistake(f"--seconds: got {seconds}, expected a number above 0 and up to 3600")
    with progress_line("loading torch"):
        from headscope.cli import _benchmark
    timings: list[Timing] = []
    skipped: list[Line] = []
    out = console()
    if not as_json:
        out.print(
            "  ".join(visible(f"{name}: {value}") for name, value in _benchmark.machine().items()), soft_wrap=True
        )
        peers = (f"× {peer.removeprefix('torch, ')}" for peer in _benchmark.PEERS)
        out.print(_line(["(B, T, E, H)", "mode", "dtype", "headscope, ms", *peers]), soft_wrap=True)
    for line, timing in _run(_benchmark.lines(dtype or tuple(_benchmark.DTYPES)), seconds):
        if timing is None:
            skipped.append(line)
            continue
        timings.append(timing)
        if not as_json:
            ratios = [f"{timing.ratio(peer):.2f}" for peer in _benchmark.PEERS]
            mode = SHORT.get(timing.mode, timing.mode)
            cells = [str(timing.shape), mode, timing.dtype, f"{timing.ours_ms:.3f}", *ratios]
            out.print(_line(cells), soft_wrap=True)
    if as_json:
        print_json(_benchmark.as_dict(timings, skipped))
    if skipped:
        count = len(skipped) + len(timings)
        say(
            f"headscope bench: skipped {len(skipped)} of {count} lines, which do not fit in --seconds {seconds:g}; "
            "without --seconds all are measured"
        )


def _run(lines: list[Line], seconds: float | None) -> Iterator[tuple[Line, Timing | None]]:
    """Yield the lines and their timings one by one, with progress on stderr while one is measured."""
    from headscope.cli import _benchmark

    timings = _benchmark.run(lines, seconds)
    for number, line in enumerate(lines):
        mode = SHORT.get(line.mode, line.mode)
        with progress_line(f"line {number + 1} of {len(lines)}: {line.shape} {mode} {line.dtype}"):
            timing = next(timings)
        yield line, timing


def _line(cells: list[str]) -> str:
    widths = (18, 10, 6, 14, 8, 16, 7)  # 79 in all
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
