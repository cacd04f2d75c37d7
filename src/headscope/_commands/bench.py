"""``headscope bench``: the module beside torch's and the plain one, interleaved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headscope._commands.screen import Mistake, busy, console, print_json

if TYPE_CHECKING:
    from headscope._bench import Timing


@click.command()
@click.option("--seconds", type=float, default=0.5, show_default=True, metavar="S", help="For each line of the table.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), multiple=True, help="May be repeated.  [default: fp32, bf16]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def bench(seconds: float, dtype: tuple[str, ...], as_json: bool) -> None:
    """Time MultiHeadAttention beside nn.MultiheadAttention and plain softmax(QKᵀ)V.

    The competitors take turns, A B C D A B C D ..., on shapes from (2, 10, 6) to (1, 4096, 512), in inference and in
    training. What is shown is our median time, and how many times as fast as each of the others that is.
    """
    if not 0 < seconds <= 600:
        raise Mistake(f"--seconds: got {seconds}, wanted a number above 0 and up to 600")
    with busy("loading torch"):
        from headscope import _bench
    timings: list[Timing] = []
    out = console()
    if not as_json:
        out.print("  ".join(f"{name}: {value}" for name, value in _bench.machine().items()), soft_wrap=True)
        out.print(_line(["(B, T, E, H)", "mode", "dtype", "ours", *(f"× {peer}" for peer in _bench.PEERS)]))
    for timing in _run(seconds, dtype):
        timings.append(timing)
        if not as_json:
            ratios = [f"{timing.ratio(peer):.2f}" for peer in _bench.PEERS]
            out.print(_line([str(timing.shape), timing.mode, timing.dtype, f"{timing.ours_ms:.3f} ms", *ratios]))
    if as_json:
        print_json(_bench.as_dict(timings))


def _run(seconds: float, dtype: tuple[str, ...]) -> Any:
    """The timings one by one, with progress on stderr in between."""
    from headscope import _bench

    rows = _bench.run(seconds, dtype or tuple(_bench.DTYPES))
    while True:
        with busy("measuring"):
            timing = next(rows, None)
        if timing is None:
            return
        yield timing


def _line(cells: list[str]) -> str:
    widths = (20, 20, 7, 12, 9, 23, 8)
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
