"""``headscope doctor``: a verdict, the machine, and which backend runs which call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import SIZE, DtypeName, console, print_json
from headscope.cli._shared.mistakes import Mistake, name_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headscope.cli._doctor.machine import CallSpec, Verdict
    from headscope.cli._doctor.matrix import Cell, Choice

    Verdicts = dict[str, dict[str, Verdict]]  # by call, then by dtype

DTYPES = ("float32", "bfloat16", "float16", "float64")

Command = TypeVar("Command", bound=Callable[..., None])

OWN_CALL = (
    click.option("--batch", type=SIZE, default=2, show_default=True, help="B, batch entries."),
    click.option("--heads", type=SIZE, default=8, show_default=True, help="H, query heads."),
    click.option("--kv-heads", type=SIZE, help="Hkv, key/value heads.  [default: as --heads]"),
    click.option("--seq", type=SIZE, default=512, show_default=True, help="Q, queries."),
    click.option("--context-seq", type=SIZE, help="K, keys.  [default: as --seq]"),
    click.option("--head-dim", type=SIZE, default=64, show_default=True, help="D, width of q and k."),
    click.option("--v-head-dim", type=SIZE, help="Dv, width of v.  [default: as --head-dim]"),
    click.option("--causal", is_flag=True, help="Mask later keys."),
    click.option("--window", type=SIZE, help="Mask all but the last N keys of each query."),
    click.option("--padded", is_flag=True, help="Mask keys beyond the length of each batch entry."),
    click.option("--bias", is_flag=True, help="Add a bias tensor to the logits."),
    click.option("--softcap", type=float, metavar="X", help="Bound the logits by X · tanh(s / X)."),
    click.option("--sinks", is_flag=True, help="Add a learned logit of each head to the softmax."),
    click.option(
        "--dropout", type=float, metavar="P", default=0.0, help="Probability of dropping a weight.  [default: 0]"
    ),
    click.option("--lse", is_flag=True, help="Return the log-sum-exp of each row."),
    click.option("--grad", is_flag=True, help="Compute gradients (training), also of bias and sinks."),
)
SHOWN = {"threads": "intra-op threads", "threads between operations": "inter-op threads"}  # --json has the longer names
NATIVE = "cpu"  # the backend of the native kernels
FIELDS = {"seq": "queries", "context_seq": "keys"}


def _own_call(command: Command) -> Command:
    for option in reversed(OWN_CALL):
        command = option(command)
    return command


@click.command(short_help="Show whether calls run natively, and what this machine has.")
@_own_call
@click.option("--dtype", type=DtypeName(DTYPES), multiple=True, help="May be repeated.  [default: float32, bfloat16]")
@click.option(
    "--device", default="cpu", metavar="TYPE", help="cpu, cuda, mps or xpu; need not be present.  [default: cpu]"
)
@click.option("--matrix", is_flag=True, help="Show every option in every dtype, for every native target and backend.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the tables.")
@click.pass_context
def doctor(
    context: click.Context, dtype: tuple[str, ...], device: str, matrix: bool, as_json: bool, **own: Any
) -> None:
    """Show which implementation runs your attention calls, and what this machine has.

    Starts with a verdict. Judges a list of typical calls, or the one call that --batch to --grad describe; no tensor of
    these sizes is allocated. --matrix judges every option separately.
    """
    if device not in ("cpu", "cuda", "mps", "xpu"):
        raise Mistake(f"--device: got {device!r}, expected cpu, cuda, mps or xpu")
    specified = [name for name in own if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if matrix:
        if specified:
            raise Mistake(
                f"--matrix: judges every option, got --{specified[0].replace('_', '-')} too; drop one of the two"
            )
        _show_matrix(dtype or DTYPES, device, as_json)
        return
    dtypes = dtype or ("float32", "bfloat16")
    with progress_line("loading torch"):
        from headscope.cli._doctor import machine as _doctor
    specs = _doctor.TYPICAL
    if specified:
        specs = {"this call": _doctor.CallSpec(**{FIELDS.get(name, name): value for name, value in own.items()})}
    if own["kv_heads"] is not None and own["heads"] % own["kv_heads"]:
        raise Mistake(f"--kv-heads: got {own['kv_heads']}, expected a divisor of --heads {own['heads']}")
    try:
        verdicts = {
            title: {name: _doctor.judge(spec, _doctor.DTYPES[name], device) for name in dtypes}
            for title, spec in specs.items()
        }
    except (TypeError, ValueError) as error:
        options = {name: f"--{name.replace('_', '-')}" for name in own}
        raise Mistake(name_options(str(error).removesuffix(", or None"), options)) from error
    if as_json:
        print_json(_as_dict(_doctor.machine(), device, specs, verdicts))
        return
    _print(_doctor.machine(), device, specs, verdicts)


def _show_matrix(dtypes: tuple[str, ...], device: str, as_json: bool) -> None:
    with progress_line("loading torch"):
        from headscope.cli._doctor import machine as _doctor
        from headscope.cli._doctor import matrix as _matrix
    try:
        _doctor.machine()  # HEADSCOPE_CPU_TARGET may name a target that this CPU does not run
    except ValueError as error:
        raise Mistake(str(error)) from error
    kinds = {name: _doctor.DTYPES[name] for name in dtypes}
    cells = _matrix.matrix(kinds, device)
    if as_json:
        entries = [
            {"option": cell.option, "dtype": cell.dtype, "backend": cell.backend, "target": cell.target,
             "takes": not cell.reasons, "reasons": list(cell.reasons)}
            for cell in cells
        ]  # fmt: skip
        if device == "cuda":
            rows = [asdict(each) for each in _matrix.choices(kinds, device)]
            print_json({"device": device, "matrix": rows, "backends": entries})
        else:
            print_json({"device": device, "matrix": entries})
        return
    if device == "cuda":
        _print_choices(_matrix.choices(kinds, device), dtypes)
    _print_matrix(cells, dtypes, device)


def _print_choices(choices: list[Choice], dtypes: tuple[str, ...]) -> None:
    """Print what runs each option, for attention and attend: once if all modes agree, else for each mode."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    words: dict[tuple[str, str], dict[str, dict[str, str]]] = {}  # of option and dtype, by call and mode
    for each in choices:
        words.setdefault((each.option, each.dtype), {}).setdefault(each.call, {})[each.mode] = each.chosen
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", width=31)
    for call in dict.fromkeys(each.call for each in choices):
        table.add_column(call, header_style="dim", width=21)
    for option in dict.fromkeys(each.option for each in choices):
        kinds: dict[tuple[str, ...], list[str]] = {}
        for dtype in dtypes:
            kinds.setdefault(tuple(map(_joined, words[option, dtype].values())), []).append(dtype)
        for columns, names in kinds.items():
            only = "" if len(kinds) == 1 else f" ({', '.join(names)})"
            table.add_row(Text(option + only), *map(Text, columns))
    out = console()
    out.print(Text("What runs each call on CUDA, in eager mode, compiled and exported", style="bold"))
    out.print()
    out.print(Padding(table, (0, 0, 0, 2)))
    out.print()


def _joined(by_mode: dict[str, str]) -> str:
    """Return what runs a call, and the modes that differ from eager mode."""
    usual = by_mode["eager"]
    return "; ".join([usual, *(f"{mode}: {chosen}" for mode, chosen in by_mode.items() if chosen != usual)])


def _print_matrix(cells: list[Cell], dtypes: tuple[str, ...], device: str) -> None:
    """Print a row for each option, or for dtypes that differ; a column for each backend with all its targets."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    runs_here = {cell.backend for cell in cells if not cell.reasons}  # a backend for other devices has no column
    numbers: dict[str, int] = {}  # of the reasons
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for cell in (each for each in cells if each.backend in runs_here):
        notes = sorted(numbers.setdefault(f"{cell.backend}: {why}", len(numbers) + 1) for why in cell.reasons)
        word = f"no ({', '.join(map(str, notes))})" if notes else "yes"
        columns.setdefault(cell.backend, {})[cell.option, cell.dtype] = word
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", width=29)
    for backend, words in columns.items():
        # all targets are compiled from the same source, so they support the same options
        targets = dict.fromkeys(cell.target for cell in cells if cell.backend == backend and cell.target is not None)
        title = f"{backend}: {', '.join(targets)}" if targets else backend
        table.add_column(title, header_style="dim", width=min(12, max(map(len, (title, *words.values())))))
    for option in dict.fromkeys(cell.option for cell in cells):
        kinds: dict[tuple[str, ...], list[str]] = {}
        for dtype in dtypes:
            kinds.setdefault(tuple(words[option, dtype] for words in columns.values()), []).append(dtype)
        for words, names in kinds.items():
            only = "" if len(kinds) == 1 else f" ({', '.join(names)})"
            table.add_row(Text(option + only), *(Text(word) for word in words))
    out = console()
    out.print(Text(f"Which backend supports which option (device: {device}; {', '.join(dtypes)})", style="bold"))
    out.print()
    out.print(Padding(table, (0, 0, 0, 2)))
    out.print()
    for reason, number in numbers.items():
        out.print(Padding(Text(f"({number}) {reason}", style="dim"), (0, 0, 0, 2)))


def _as_dict(
    machine: dict[str, dict[str, Any]], device: str, specs: dict[str, CallSpec], verdicts: Verdicts
) -> dict[str, Any]:
    calls = [
        {
            "call": title,
            "sizes_and_options": asdict(specs[title]),
            "dtypes": {name: asdict(verdict) for name, verdict in row.items()},
        }
        for title, row in verdicts.items()
    ]
    return {**machine, "device": device, "calls": calls}


def _print(machine: dict[str, dict[str, Any]], device: str, specs: dict[str, CallSpec], verdicts: Verdicts) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from headscope.cli._doctor.verdict import summarise

    out = console()
    single = len(specs) == 1
    for line in summarise(device, verdicts):
        out.print(Text(visible(line), style="bold"))
    out.print()
    for section, properties in ({} if single else machine).items():
        table = Table.grid(padding=(0, 2))
        for name, value in properties.items():
            table.add_row(Text(f"  {SHOWN.get(name, name)}"), Text(visible(_word(value))))
        out.print(Text(section, style="bold"))
        out.print(table)
        out.print()
    title = f"Backend that runs {'this call' if single else 'each call'} (device: {device})"
    out.print(Text(title, style="bold"))
    sizes = _describe(next(iter(specs.values())))
    out.print(Padding(Text(sizes if single else f"{sizes}, unless a line specifies otherwise"), (0, 0, 0, 2)))
    out.print()
    for line in _calls(verdicts, single):
        out.print(line)
    out.print()
    out.print(Text(_observing(verdicts)))
    if not single:
        out.print()
        out.print(
            Text("To judge your own call: headscope doctor --seq 4096 --causal (all options: headscope doctor --help)")
        )


def _calls(verdicts: Verdicts, single: bool) -> Iterator[RenderableType]:
    """Yield a line for each call with its backend in each dtype; below it, why backends of higher preference refuse it.

    In a list of calls, the refusals are shown only where the native kernels do not run the call, and not that the
    kernels are missing, which the verdict states once.
    """
    from rich.padding import Padding
    from rich.text import Text

    first = 2 + max(len(title) for title in verdicts)
    names = next(iter(verdicts.values()))
    yield Text("  " + " " * first + "".join(f"{name:<10}" for name in names).rstrip(), style="dim")
    for title, row in verdicts.items():
        yield Text("  " + f"{title:<{first}}" + "".join(f"{verdict.selected:<10}" for verdict in row.values()).rstrip())
        reasons: dict[str, list[str]] = {}
        for name, verdict in row.items():
            for backend, why in verdict.refusals.items() if single or verdict.selected != NATIVE else ():
                for reason in why if single else [reason for reason in why if not reason.startswith("build:")]:
                    reasons.setdefault(f"{backend} does not run it: {reason}", []).append(name)
        for reason, where in reasons.items():
            only = "" if len(where) == len(row) else f" ({', '.join(where)})"
            yield Padding(Text(reason + only, style="dim"), (0, 0, 0, 6))


def _observing(verdicts: Verdicts) -> str:
    """Return which observer supports these calls; ``Observe`` options can still require the portable one."""
    every = (reason for row in verdicts.values() for verdict in row.values() for reason in verdict.observer)
    reasons = "; ".join(dict.fromkeys(every))
    return f"observe runs in Python ({reasons})" if reasons else "observe runs natively."


def _describe(spec: CallSpec) -> str:
    """Return the sizes of a call and the options that are on."""
    keys = spec.queries if spec.keys is None else spec.keys
    kv_heads = spec.heads if spec.kv_heads is None else spec.kv_heads
    v_head_dim = spec.head_dim if spec.v_head_dim is None else spec.v_head_dim
    heads = f"B {spec.batch}, H {spec.heads}, Hkv {kv_heads}"
    sizes = f"{heads}, Q {spec.queries}, K {keys}, D {spec.head_dim}, Dv {v_head_dim}"
    options = {
        name: getattr(spec, name)
        for name in ("causal", "window", "padded", "bias", "softcap", "sinks", "dropout", "lse", "grad")
        if getattr(spec, name)
    }
    return ", ".join([sizes, *(name if value is True else f"{name} {value}" for name, value in options.items())])


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)
