"""``headscope trace``: every step of multi-head attention, from sizes alone, with values, or of a class of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._check.processes import ask_child
from headscope.cli._shared.console import INDEX, SIZE, console, print_json, say
from headscope.cli._shared.mistakes import Mistake, name_options
from headscope.cli._shared.observation import FORCE
from headscope.cli._shared.pages import write_page

if TYPE_CHECKING:
    from headscope.tracing import Trace

ARGUMENTS = {"num_heads": "--heads", "kv_heads": "--kv-heads", "head_dim": "--head-dim"}  # of the module
MOST_BYTES = 2 << 30  # of all steps together, with --values


@click.command(short_help="Show every step of multi-head attention, with shapes.")
@click.argument("target", metavar="[FILE.py:NAME]", required=False)
@click.option("--args", "arguments", metavar="ARGS", help='Arguments that build the class of a file: --args "512, 8".')
@click.option("--layer", type=INDEX, default=0, show_default=True, help="Which attention of a class, as they run.")
@click.option("--timeout", type=SIZE, default=60, show_default=True, help="Seconds after which a file is stopped.")
@click.option("--batch", type=SIZE, default=32, show_default=True, help="B, sequences.")
@click.option("--seq", type=SIZE, default=10, show_default=True, help="Q, tokens in each.")
@click.option("--dim", type=SIZE, default=512, show_default=True, help="E, width of the model.")
@click.option("--heads", type=SIZE, default=8, show_default=True, help="H, heads; a divisor of --dim.")
@click.option("--kv-heads", type=SIZE, help="Hkv, key/value heads, a divisor of --heads.  [default: as --heads]")
@click.option("--head-dim", type=SIZE, help="D, width of a head.  [default: --dim / --heads]")
@click.option("--context-seq", type=SIZE, help="K, tokens of another sequence to attend to (cross-attention).")
@click.option("--causal", is_flag=True, help="Mask later tokens.")
@click.option("--values", is_flag=True, help="Compute the steps with random weights; show values and check them.")
@click.option("--explain", is_flag=True, help="Explain why each step exists, and the common mistake in it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--html", metavar="PATH", help="Write a page instead of the table.")
@click.option("--force", is_flag=True, help=FORCE)
@click.pass_context
def trace(
    context: click.Context,
    target: str | None,
    arguments: str | None,
    layer: int,
    timeout: int,
    batch: int,
    seq: int,
    dim: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    context_seq: int | None,
    causal: bool,
    values: bool,
    explain: bool,
    as_json: bool,
    html: str | None,
    force: bool,
) -> None:
    """Show every step of a multi-head attention layer, with equation, code and shape.

    By default only shapes are computed and no tensor is allocated, so any size is instant. --values computes the steps.

    FILE.py:NAME shows the steps of your own class instead, with its own lines of code, for a random input [2, 10, E] or
    that of --batch, --seq and --dim. The file runs in a separate process with a time limit and without network access
    from Python. This is not a sandbox: trace only code that you trust.
    """
    if as_json and html is not None:
        raise Mistake("--json: got --html too, expected one of the two")
    if target is not None:
        steps = _trace_file(target, arguments, layer, timeout, _specified_sizes(context, target))
        _show(steps, explain=explain, as_json=as_json, html=html, force=force)
        return
    _check_without_file(arguments, layer)
    with progress_line("loading torch"):
        from headscope import tracing
    _check_sizes(batch, seq, max(dim, heads * (head_dim or 1)), heads, context_seq)
    try:
        steps = tracing.trace(
            batch=batch, seq=seq, dim=dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, context_seq=context_seq,
            causal=causal,
        )  # fmt: skip
        if values:
            with progress_line("computing"):
                steps = _compute(steps, batch, seq, context_seq, causal)
    except (TypeError, ValueError) as error:
        raise Mistake(name_options(str(error), ARGUMENTS)) from error
    _show(steps, explain=explain, as_json=as_json, html=html, force=force)


def _check_without_file(arguments: str | None, layer: int) -> None:
    """Raise unless the options of a file are at their defaults."""
    if arguments is not None or layer:
        option = f"--layer: got {layer}" if arguments is None else f"--args: got {arguments}"
        raise Mistake(f"{option} without FILE.py:NAME, expected both")


def _show(steps: Trace, *, explain: bool, as_json: bool, html: str | None, force: bool) -> None:
    """Print the steps, or write their page."""
    if as_json:
        print_json(steps.to_dict())
    elif html is not None:
        print(visible(write_page(html, _page(steps), force)))
    else:
        console().print(steps.table(explain=explain))


def _specified_sizes(context: click.Context, target: str) -> dict[str, int]:
    """Return the sizes of the input that the command line has.

    Raises:
        Mistake: it has an option that is for a trace of sizes.
    """
    others = ("heads", "kv_heads", "head_dim", "context_seq", "causal", "values")
    for name in others:
        if _is_specified(context, name):
            option = "--" + name.replace("_", "-")
            raise Mistake(f"{option}: is for a trace of sizes; {target} has its own, which --args sets")
    return {name: context.params[name] for name in ("batch", "seq", "dim") if _is_specified(context, name)}


def _is_specified(context: click.Context, name: str) -> bool:
    """Return whether an option was given."""
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _trace_file(target: str, arguments: str | None, layer: int, timeout: int, sizes: dict[str, int]) -> Trace:
    """Return the steps of a class, a module or a function of a file, which runs in a process of its own.

    Raises:
        Mistake: the file, its class or its call failed.
    """
    from headscope.cli._check.targets import is_one_file, list_submissions

    if not is_one_file([target]):
        raise Mistake(f"{target}: is a directory, expected a Python file")
    submission = list_submissions([target], None, {"args": arguments})[0]
    say(f"headscope trace: running {visible(str(submission.path))} in a separate process")
    request = submission.conventions.to_request(submission.path, submission.name, timeout)
    request |= {"trace": sizes, "layer": layer}
    with progress_line("tracing"):
        answer = ask_child(request, timeout)
    if "mistake" in answer:
        raise Mistake(visible(name_options(str(answer["mistake"]), {"layer": "--layer"})))
    from headscope.cli._shared.traces import parse_trace

    return parse_trace(answer["trace"])


def _check_sizes(batch: int, seq: int, dim: int, heads: int, context_seq: int | None) -> None:
    """Check the sizes.

    Raises:
        Mistake: a tensor would have more elements than torch can count the bytes of.
    """
    keys = seq if context_seq is None else context_seq
    largest = max(batch * heads * seq * keys, batch * max(seq, keys) * dim, 3 * dim * dim)
    if largest >= 2**60:
        raise Mistake(f"sizes: a tensor would have {largest:.0e} elements, expected fewer than {2**60:.0e}")


def _compute(sizes: Trace, batch: int, seq: int, context_seq: int | None, causal: bool) -> Trace:
    """Return the same steps with values, for weights and inputs drawn from a fixed seed.

    Raises:
        Mistake: the values would take too much memory.
    """
    import torch

    from headscope import MultiHeadAttention, tracing

    total = sum(row.bytes for row in sizes.rows)
    if total > MOST_BYTES:
        raise Mistake(
            f"--values: the steps take {total:,} bytes, expected at most {MOST_BYTES:,}; shapes alone take none"
        )
    options = sizes.module
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed seeds every device
        arguments = {name: options[name] for name in ("embed_dim", "num_heads", "kv_heads", "head_dim")}
        module = MultiHeadAttention(**arguments).eval()
        x = torch.randn(batch, seq, options["embed_dim"])
        context = None if context_seq is None else torch.randn(batch, context_seq, options["kdim"])
    return tracing.trace(module, x, context, causal=causal)


def _page(steps: Trace) -> str:
    """Return the steps as a page, with the ``MARKER`` by which headscope recognises its own pages."""
    from html import escape

    from headscope.report.page import MARKER

    return (
        f"<!doctype html>\n{MARKER}\n"
        '<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>:root { color-scheme: light dark } body { font-family: system-ui, sans-serif; margin: 2em }</style>"
        f"<title>{escape(steps.title)}</title></head>\n<body>{steps._repr_html_()}</body></html>\n"
    )
