"""headscope.attention beside its peers, interleaved: python benchmarks/attention.py

    python benchmarks/attention.py --setup               # once: make the peers' environments
    python benchmarks/attention.py                       # the full run; writes JSON, table and plot
    python benchmarks/attention.py --only decode --seconds 0.5
    python benchmarks/attention.py --peers headscope,torch --cases 'C fp32*' --out some.json

Every peer runs each case in a process of its own, in an environment of its own; in each round each does the case once,
the others halted. A filtered run writes files only where --out says.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attention_peers import cases, peak, peers, report
from attention_peers.cases import DECODE, OPTION, Case
from attention_peers.peers import BASE, OURS, PEERS
from attention_peers.report import PLAIN_KERNEL, READING, Report, Row
from attention_peers.workers import AbsentError, Worker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
PLOT = HERE.parent / "docs" / "images" / "speed.png"
TURN_S = 0.01  # a turn repeats a shorter case this long: the first call after a halt is not the usual one
LONG_S = 0.1  # longer cases are called once in a turn
MOST_CALLS = 1000

Competitor = tuple[str, str, Case]  # name in the row, peer, case


class Workers:
    """One process for each peer, begun when it is first needed, and again after ``clear`` or when it has died."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.versions: dict[str, dict[str, str]] = {}
        self._running: dict[str, Worker] = {}
        self._never: dict[str, str] = {}
        self._reading: peak.Reading | None = None

    def taking_turns(self, name: str) -> Worker | peak.Reading:
        """The peer's process, or who only reads.

        Raises:
            AbsentError: it cannot be started.
        """
        if name != READING:
            return self.get(name)
        self._reading = self._reading or peak.Reading(self.threads)
        return self._reading

    def get(self, name: str) -> Worker:
        """The peer's process.

        Raises:
            AbsentError: it cannot be started.
        """
        if name in self._never:
            raise AbsentError(self._never[name])
        found = self._running.get(name)
        if found is not None and found.alive:
            return found
        if found is not None:
            self._running.pop(name).close()
        peer = PEERS[name]
        why = peers.missing(peer)
        if why is None:
            try:
                self._running[name] = Worker(peer, self.threads)
                self.versions[name] = self._running[name].versions
                return self._running[name]
            except AbsentError as failure:
                why = str(failure)
        self._never[name] = why
        raise AbsentError(why)

    def clear(self) -> None:
        """End all: memory is for the next case, and what the last one left in a heap must not show in its times."""
        for worker in self._running.values():
            worker.close()
        self._running.clear()
        if self._reading is not None:
            self._reading.clear()


def competitors(case: Case, names: Sequence[str]) -> list[Competitor]:
    """Who runs a case; an option also beside our own kernel without it, decoding beside who only reads."""
    found: list[Competitor] = [(name, name, case) for name in names]
    if case.kind == DECODE:
        found.insert(1, (READING, READING, case))
    if case.kind == OPTION and OURS in names:
        found.insert(1, (PLAIN_KERNEL, OURS, case.plain))
    return found


def measure(case: Case, names: Sequence[str], workers: Workers, seconds: float, least: int) -> Row:
    """Prepare a case everywhere, then time it in rounds, A B C A B C, for about so many seconds, and least rounds."""
    workers.clear()
    row = Row(case)
    calls: dict[Competitor, int] = {}
    for competitor in competitors(case, names):
        name, peer, prepared = competitor
        try:
            answer = workers.taking_turns(peer).prepare(prepared)
        except AbsentError as why:
            row.absent[name] = str(why)
            continue
        row.routes[name], row.errors[name] = answer["route"], answer["error"]
        if answer["dropped"]:
            row.dropped[name] = answer["dropped"]
        calls[competitor] = turn(answer["seconds"])
        row.seconds[name] = []
    until = time.monotonic() + seconds
    rounds = 0
    while calls and (rounds < least or time.monotonic() < until):
        for competitor in list(calls):
            name, peer, prepared = competitor
            try:
                row.seconds[name].append(workers.taking_turns(peer).run(prepared, calls[competitor]))
            except AbsentError as why:
                row.absent[name] = str(why)
                del calls[competitor], row.seconds[name]
        rounds += 1
    workers.clear()
    return row


def turn(seconds: float) -> int:
    """How many calls make one turn of a case that takes so long."""
    if seconds > LONG_S:
        return 1
    return min(MOST_CALLS, max(2, math.ceil(TURN_S / seconds)))


def peaks(workers: Workers, names: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """What the C probe and torch.mm reach now."""
    products: dict[str, float] = {}
    if BASE in names:
        try:
            products = workers.get(BASE).ask({"do": "products"})
        except AbsentError as why:
            print(f"peak: torch.mm not measured: {why}", file=sys.stderr)
    return peak.probe(workers.threads), products


def better(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """The larger of each rate: other work on the machine only takes away."""
    return {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in first | second}


@contextmanager
def progress(total: int) -> Generator[Progress, None, None]:
    """On standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        shown.add_task("starting", total=total)
        yield shown


def run(chosen: list[Case], names: list[str], asked: argparse.Namespace, command: str) -> tuple[Report, bool]:
    """All cases; and whether it came to the end. Ctrl-C or SIGTERM end it with what there is."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        workers = Workers(asked.threads)
        stack.callback(workers.clear)
        shown = stack.enter_context(progress(len(chosen)))
        made = Report(command, report.machine(asked.threads), peak.combine({}, {}), workers.versions)
        bar = shown.task_ids[0]
        whole = True
        probed: dict[str, float] = {}
        products: dict[str, float] = {}
        try:
            shown.update(bar, description="peak")
            probed, products = peaks(workers, names)
            for case in chosen:
                shown.update(bar, description=case.name)
                row = measure(case, names, workers, asked.seconds, asked.rounds)
                made.rows.append(row)
                shown.console.print(report.line(row), highlight=False, soft_wrap=True)
                shown.advance(bar)
            shown.update(bar, description="peak")
            again, products_again = peaks(workers, names)
            probed, products = better(probed, again), better(products, products_again)
        except KeyboardInterrupt:
            whole = False
            for number in (signal.SIGINT, signal.SIGTERM):  # once is enough: the processes are yet to be ended
                signal.signal(number, signal.SIG_IGN)
        made.peak = peak.combine(probed, products)
    return made, whole


def choose(asked: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """The cases and peers that were asked for.

    Raises:
        ValueError: there are none of that name.
    """
    names = list(PEERS) if asked.peers is None else asked.peers.split(",")
    kinds = list(cases.KINDS) if asked.only is None else asked.only.split(",")
    for option, given, known in (("--peers", names, list(PEERS)), ("--only", kinds, list(cases.KINDS))):
        for each in given:
            if each not in known:
                raise ValueError(f"{option}: got {each!r}, expected some of: {', '.join(known)}")
    patterns = asked.cases or ["*"]
    chosen = [
        case
        for case in cases.every()
        if case.kind in kinds and any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)
    ]
    if not chosen:
        every = ", ".join(f"{case.name!r}" for case in list(cases.every())[:3])
        raise ValueError(f"--cases: no case matches {', '.join(patterns)}; they are called {every}, ... (--list)")
    return chosen, names


def setup(wanted: list[str]) -> int:
    """Make environments; the exit code."""
    failed = 0
    for name in wanted or peers.environments():
        print(f"{name}: {peers.REQUIREMENTS / f'{name}.txt'} -> {peers.ENVIRONMENTS / name}", file=sys.stderr)
        try:
            peers.make(name)
        except subprocess.CalledProcessError as failure:
            print(f"{name}: not made: {Path(failure.cmd[0]).name} ended with {failure.returncode}", file=sys.stderr)
            failed = 1
    return failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", nargs="*", metavar="NAME", choices=peers.environments(),
                        help="make these environments (all, without a name) and end")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=4.0, help="of rounds for each case")
    parser.add_argument("--rounds", type=int, default=5, help="at least, however long they take")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every peer; by default all cores")
    parser.add_argument("--only", metavar="KIND,...", help=f"some of: {', '.join(cases.KINDS)}")
    parser.add_argument("--cases", action="append", metavar="PATTERN", help="by name, with * and ?; may be repeated")
    parser.add_argument("--peers", metavar="PEER,...", help=f"some of: {', '.join(PEERS)}")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--out", type=Path, help="FILE.json; the table goes beside it")
    parser.add_argument("--plot", type=Path, help="FILE.png")
    asked = parser.parse_args(arguments)
    if not 0 < asked.seconds <= 600:
        parser.error(f"--seconds: got {asked.seconds}, expected a number above 0 and up to 600")
    for name in ("rounds", "threads"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name}: got {getattr(asked, name)}, expected at least 1")
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0; 2 for a mistake on the command line; 130 when interrupted."""
    asked = parse(arguments)
    if asked.setup is not None:
        return setup(asked.setup)
    try:
        chosen, names = choose(asked)
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(case.name for case in chosen))
        return 0
    given = sys.argv[1:] if arguments is None else arguments
    made, whole = run(chosen, names, asked, shlex.join(["python", "benchmarks/attention.py", *given]))
    print(report.markdown(made))
    if not whole:
        print("interrupted: no file was written", file=sys.stderr)
        return 130
    full = asked.only is None and asked.cases is None and asked.peers is None
    out = asked.out or (HERE / "attention.json" if full else None)
    picture = asked.plot or (PLOT if full and asked.out is None else None)
    if out is not None:
        report.save(made, out)
    if picture is not None:
        report.plot(made, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
