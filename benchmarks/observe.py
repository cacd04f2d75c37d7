"""What observing and watching cost, interleaved with their peers: python benchmarks/observe.py

    python benchmarks/observe.py                                  # the full run; writes observe.json and observe.md
    python benchmarks/observe.py --only attention --cases '1024*' --seconds 1
    python benchmarks/observe.py --only models --add observe.json  # again these rows of a file, the others stay

The kinds of cases: `attention`, one call beside torch's SDPA and our own attending; `short`, what statistics add to a
call of few tokens; `segments`, what segments add; `memory`, the peak of such a call in a fresh process; `long`, 131,072
tokens on one head; `chosen heads`, the weights of ten of 144 heads beside those of all; `models`, whole models
unwatched, watched, with eager weights; `generation`, the same in steps of one token. A run of some cases writes a file
only where --out or --add says.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from observe_parts import attention, details, generation, models, report
from observe_parts.report import Report
from observe_parts.timing import Row

from headscope.cli import _benchmark

HERE = Path(__file__).parent
KINDS = (
    attention.TIME, attention.SHORT, details.SEGMENTS, attention.MEMORY, attention.LONG, details.CHOSEN, models.KIND,
    generation.KIND,
)  # fmt: skip

Measure = Callable[[], Row]


def every(asked: argparse.Namespace) -> Iterator[tuple[str, str, Measure]]:
    """Kind and name of each case, and how it is measured."""
    for case in attention.cases(attention.LENGTHS):
        yield attention.TIME, case.name, partial(attention.measure, case, asked.seconds, asked.rounds)
    for case in attention.cases(attention.SHORT_LENGTHS):
        yield attention.SHORT, case.name, partial(attention.measure_short, case, asked.seconds, asked.rounds)
    for case in details.cases():
        yield details.SEGMENTS, case.name, partial(details.measure_segments, case, asked.seconds, asked.rounds)
    for length in attention.MEMORY_LENGTHS:
        yield attention.MEMORY, str(length), partial(attention.measure_memory, length, asked.threads)
    for case in attention.cases((attention.LONG_LENGTH,), heads=1):
        yield attention.LONG, case.name, partial(attention.measure_long, case)
    for length in details.CHOSEN_LENGTHS:
        yield details.CHOSEN, str(length), partial(details.measure_chosen, length, asked.seconds, asked.rounds)
    for case in models.cases():
        yield models.KIND, case.name, partial(models.measure, case, asked.seconds, asked.rounds)
    for case in generation.cases():
        yield generation.KIND, case.name, partial(generation.measure, case, asked.seconds, asked.rounds)


def chosen(asked: argparse.Namespace) -> list[tuple[str, str, Measure]]:
    """Those that were asked for."""
    return [
        (kind, name, measure)
        for kind, name, measure in every(asked)
        if kind in asked.only and any(fnmatch.fnmatchcase(name, pattern) for pattern in asked.cases or ["*"])
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of rounds for each case")
    parser.add_argument("--rounds", type=int, default=5, help="at least, however long they take")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="by default all cores")
    parser.add_argument("--only", metavar="KIND,...", help=f"some of: {', '.join(KINDS)}")
    parser.add_argument("--cases", action="append", metavar="PATTERN", help="by name, with * and ?; may be repeated")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, help="FILE.json; the tables go beside it")
    where.add_argument("--add", type=Path, help="FILE.json that is there: replace the rows that are measured now")
    asked = parser.parse_args(arguments)
    asked.full = asked.only is None and asked.cases is None
    asked.only = KINDS if asked.only is None else asked.only.split(",")
    for each in asked.only:
        if each not in KINDS:
            parser.error(f"--only: got {each!r}, expected some of: {', '.join(KINDS)}")
    if not 0 < asked.seconds <= 600:
        parser.error(f"--seconds: got {asked.seconds}, expected a number above 0 and up to 600")
    for name in ("rounds", "threads"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name}: got {getattr(asked, name)}, expected at least 1")
    if not chosen(asked):
        parser.error(
            f"--cases: no case matches {', '.join(asked.cases or ())}; they are called '1024 causal', 'text 128', ..."
        )
    if asked.add is not None and not asked.add.is_file():
        parser.error(f"--add: there is no file {asked.add}")
    return asked


def run(asked: argparse.Namespace, command: str) -> tuple[Report, bool]:
    """All cases that were asked for, and whether it came to the end; Ctrl-C ends it with what there is."""
    torch.set_num_threads(asked.threads)
    made = Report([command], _benchmark.machine())
    try:
        for kind, name, measure in chosen(asked):
            print(kind, name, file=sys.stderr, flush=True)
            made.rows.append(measure())
    except KeyboardInterrupt:
        return made, False
    return made, True


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0; 2 for a mistake on the command line; 130 when interrupted."""
    asked = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    made, whole = run(asked, shlex.join(["python", "benchmarks/observe.py", *given]))
    print(report.markdown(made))
    if not whole:
        print("interrupted: no file was written", file=sys.stderr)
        return 130
    out = asked.out or asked.add or (HERE / "observe.json" if asked.full else None)
    if asked.add is not None:
        try:
            made = report.load(asked.add).add(made)
        except ValueError as mistake:
            print(mistake, file=sys.stderr)
            return 2
    if out is not None:
        report.save(made, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
