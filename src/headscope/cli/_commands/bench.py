"""``headscope bench``: the module beside torch's and the plain one, interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import console, print_json
from headscope.cli._shared.mistakes import Mistake

if TYPE_CHECKING:
    from headscope.cli._benchmark import Timing

SHORT = {"forward + backward": "training"}  # modes whose name would make a line longer than 80 characters


@click.command(short_help="Time the module beside torch's and the plain one.")
@click.option("--seconds", type=float, default=0.5, show_default=True, metavar="S", help="For each line of the table.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), multiple=True, help="May be repeated.  [default: fp32, bf16]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def bench(seconds: float, dtype: tuple[str, ...], as_json: bool) -> None:
    """Time MultiHeadAttention beside nn.MultiheadAttention and plain softmax(QKᵀ)V.

    The competitors take turns, A B C D A B C D ..., on shapes from (2, 10, 6) to (1, 4096, 512), in inference and in
    training. What is shown is our median time, and how many times as fast as each of the others that is; torch's module
    stands there twice, without and with need_weights.
    """
    if not 0 < seconds <= 600:
        raise Mistake(f"--seconds: got {seconds}, expected a number above 0 and up to 600")
    with progress_line("loading torch"):
        from headscope.cli import _benchmark
    timings: list[Timing] = []
    out = console()
    if not as_json:
        out.print(
            "  ".join(visible(f"{name}: {value}") for name, value in _benchmark.machine().items()), soft_wrap=True
        )
        peers = (f"× {peer.removeprefix('torch, ')}" for peer in _benchmark.PEERS)
        out.print(_line(["(B, T, E, H)", "mode", "dtype", "ours, ms", *peers]), soft_wrap=True)
    for timing in _run(seconds, dtype):
        timings.append(timing)
        if not as_json:
            ratios = [f"{timing.ratio(peer):.2f}" for peer in _benchmark.PEERS]
            mode = SHORT.get(timing.mode, timing.mode)
            cells = [str(timing.shape), mode, timing.dtype, f"{timing.ours_ms:.3f}", *ratios]
            out.print(_line(cells), soft_wrap=True)
    if as_json:
        print_json(_benchmark.as_dict(timings))


def _run(seconds: float, dtype: tuple[str, ...]) -> Iterator[Timing]:
    """The timings one by one, with progress on stderr in between."""
    from headscope.cli import _benchmark

    rows = _benchmark.run(seconds, dtype or tuple(_benchmark.DTYPES))
    while True:
        with progress_line("measuring"):
            timing = next(rows, None)
        if timing is None:
            return
        yield timing


def _line(cells: list[str]) -> str:
    widths = (19, 11, 7, 10, 9, 16, 7)  # 79 in all
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
