"""From times to ratios, a Markdown table, and the plot of speed over length."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attention_peers.cases import DECODE, FORWARD, LENGTHS, MODULE, OPTION, SHAPES, TRAIN, Case
from attention_peers.peak import Peak
from attention_peers.peers import BASE, OURS, PEERS

PLAIN_KERNEL = "headscope, no option"  # beside the options: the same kernel on the same tensors without one
READING = "reading"  # beside decoding: who only reads as many bytes as the keys and values are


@dataclass(slots=True)
class Row:
    """One case, measured.

    Attributes:
        seconds: the times of each competitor, one for each round.
        routes: what each competitor ran.
        errors: each one's relative error against float64.
        absent: why a competitor has no times.
        dropped: routes that a peer has besides, and why they were not taken.
    """

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, dict[str, str]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Seconds; None for who was not measured."""
        times = self.seconds.get(name)
        return statistics.median(times) if times else None

    def ratio(self, name: str, base: str = BASE) -> float | None:
        """How many times as fast as the base; of medians."""
        mine, theirs = self.median(name), self.median(base)
        return None if mine is None or theirs is None else theirs / mine

    def rate(self, name: str) -> float | None:
        """FLOP/s over visible pairs."""
        mine = self.median(name)
        return None if mine is None else self.case.flops / mine

    def per_pair(self) -> float | None:
        """Our time per visible pair with the option beside the same without it; 1 = the option costs nothing."""
        plain, mine = self.median(PLAIN_KERNEL), self.median(OURS)
        if plain is None or mine is None:
            return None
        return (mine / self.case.pairs) / (plain / self.case.plain.pairs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        medians = {name: self.median(name) for name in self.seconds}
        return {
            "name": self.case.name,
            "case": self.case.as_dict(),
            "sizes": self.case.sizes,
            "rounds": max((len(times) for times in self.seconds.values()), default=0),
            "median_s": medians,
            "fastest_s": {name: min(times) for name, times in self.seconds.items() if times},
            "times_torch": {name: self.ratio(name) for name in self.seconds},
            "gflops": {name: (self.rate(name) or 0.0) / 1e9 for name in self.seconds},
            "time_per_pair_of_plain": self.per_pair(),
            "routes": self.routes,
            "errors": self.errors,
            "absent": self.absent,
            "dropped": self.dropped,
        }


@dataclass(slots=True)
class Report:
    """A run."""

    command: str
    machine: dict[str, Any]
    peak: Peak
    versions: dict[str, dict[str, str]]
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        peak = {"flops": self.peak.flops, "read_bytes_per_s": self.peak.read, "how": self.peak.how}
        rows = [row.as_dict() for row in self.rows]
        return {"command": self.command, "machine": self.machine, "peak": peak, "versions": self.versions, "rows": rows}


def machine(threads: int) -> dict[str, Any]:
    """What the times were taken on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    found = {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "system": platform.system()}
    waiting = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME") if name in os.environ}
    return found | {"python": platform.python_version()} | waiting


# ---------------------------------------------------------------- the table


def markdown(report: Report) -> str:
    """The whole page."""
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    versions = "; ".join(
        f"{PEERS[peer].title}: {', '.join(f'{name} {value}' for name, value in found.items())}"
        for peer, found in report.versions.items()
    )
    sections = [
        "# Attention, interleaved with its peers",
        f"Made by `{report.command}` on {facts}.",
        f"{versions or 'Nobody was measured'}.",
        f"Peak, measured before and after the run: {_peak(report.peak)}.",
        "Times are medians. Each × is a ratio of medians: how many times as fast as torch's SDPA, in the same rounds. "
        "A dash is explained under the tables. GFLOP/s count visible pairs only; of peak: ours. At the peak: the × of "
        "a kernel that did nothing but these products at the machine's peak, or read keys and values once; no kernel "
        "can have more, but where a backward pass keeps the weights (six products of the seven that are counted). Who "
        "only reads, in C, each thread its part of as many bytes, took its turns among the others.",
        "Shapes, (B, H, Hkv, Q, K, D): " + "; ".join(f"{name} {sizes}" for name, sizes in SHAPES.items()) + ".",
    ]
    for title, kind, table in (
        ("Forward", FORWARD, _speed), ("Forward + backward", TRAIN, _speed), ("Decoding", DECODE, _speed),
        ("Options", OPTION, _options), ("The module, inference", MODULE, _module),
    ):  # fmt: skip
        rows = [row for row in report.rows if row.case.kind == kind]
        if rows:
            sections += [f"## {title}", table(rows, report.peak)]
    sections += ["## Not measured, and why", absences(report.rows)]
    return "\n\n".join(sections) + "\n"


def _peak(peak: Peak) -> str:
    rates = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in peak.flops.items())
    read = "" if peak.read is None else f"; memory read {peak.read / 1e9:.1f} GB/s (1 GiB, each thread its part, in C)"
    return f"{rates} ({peak.how}){read}"


def _speed(rows: list[Row], peak: Peak) -> str:
    decode = rows[0].case.kind == DECODE
    peers = [name for name in PEERS if name != BASE and any(name in row.seconds or name in row.absent for row in rows)]
    head = ["", "dtype", "mask", "torch, ms", "ours, ms", *(f"× {PEERS[name].title}" for name in peers)]
    head += ["× at the peak", *(["GB/s", "of read rate"] if decode else ["GFLOP/s", "of peak"])]
    lines = []
    for row in rows:
        case, mine = row.case, row.median(OURS)
        done = case.cache_bytes if decode else case.flops
        best = peak.flops[case.dtype]
        if decode:
            reading = row.median(READING)
            best = None if reading is None else done / reading
        rate, base = None if mine is None else done / mine, row.median(BASE)
        most = None if base is None or not best else base * best / done
        lines.append(
            [case.shape, case.dtype, "causal" if case.causal else "", _ms(row.median(BASE)), _ms(mine)]
            + [_number(row.ratio(name)) for name in peers]
            + [_number(most), *_of_peak(rate, best)]
        )
    return table(head, lines)


def _options(rows: list[Row], _: Peak) -> str:
    head = ["at F", "dtype", "ours, ms", "time per visible pair, plain kernel = 1"]
    head += [f"ours × {PEERS[name].title}" for name in (BASE, "flex")]
    return table(
        head,
        [
            [row.case.option, row.case.dtype, _ms(row.median(OURS)), _number(row.per_pair())]
            + [_number(row.ratio(OURS, name)) for name in (BASE, "flex")]
            for row in rows
        ],
    )


def _module(rows: list[Row], peak: Peak) -> str:
    head = ["(B, T, E, H)", "dtype", "nn.MultiheadAttention, ms", "ours, ms", "× ours", "× plain", "GFLOP/s", "of peak"]
    lines = []
    for row in rows:
        batch, heads, _, length, _, _ = row.case.sizes
        rate, best = row.rate(OURS), peak.flops[row.case.dtype]
        lines.append(
            [str((batch, length, row.case.embed_dim, heads)), row.case.dtype]
            + [_ms(row.median(BASE)), _ms(row.median(OURS))]
            + [_number(row.ratio(name)) for name in (OURS, "plain")]
            + _of_peak(rate, best)
        )
    return table(head, lines)


def _of_peak(rate: float | None, best: float | None) -> list[str]:
    if rate is None:
        return ["—", "—"]
    return [f"{rate / 1e9:.0f}", f"{rate / best:.0%}" if best else "—"]


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    """Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def absences(rows: list[Row]) -> str:
    """Every competitor without times, by reason, with the cases it concerns."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row.absent.items():
            found.setdefault((name, why), []).append(row.case.name)
    if not found:
        return "Everything was measured."
    lines = []
    for (name, why), cases in found.items():
        where = "all cases" if len(cases) == len(rows) else _cases(cases)
        lines.append(f"- {PEERS[name].title if name in PEERS else name}: {why} ({where})")
    return "\n".join(lines)


def _cases(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _ms(seconds: float | None) -> str:
    return "—" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def line(row: Row) -> str:
    """One row for the terminal while the run goes on."""
    ratios = [
        f"{PEERS[name].title} {_number(row.ratio(name))}" for name in row.seconds if name in PEERS and name != BASE
    ]
    pair = row.per_pair()
    per_pair = [] if pair is None else [f"per pair {pair:.2f}"]
    return f"{row.case.name}: torch {_ms(row.median(BASE))} ms; × " + ", ".join(ratios + per_pair)


# ---------------------------------------------------------------- files


def write(path: Path, content: str | bytes) -> None:
    """Whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def save(report: Report, path: Path) -> None:
    """JSON, and the table beside it."""
    write(path, json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n")
    write(path.with_suffix(".md"), markdown(report))


def plot(report: Report, path: Path) -> None:
    """Speed over length, (1, 8, T, 64), forward: one panel for each dtype, without and with the causal mask."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {row.case: row for row in report.rows}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    for axis, (dtype, causal) in zip(
        axes.flat, [(dtype, causal) for dtype in ("fp32", "bf16") for causal in (False, True)], strict=True
    ):
        for color, (name, peer) in enumerate(PEERS.items()):
            cases = [Case(shape, dtype, FORWARD, causal) for shape in LENGTHS]
            known = [(case.sizes[3], rows[case].rate(name)) for case in cases if case in rows]
            points = [(length, rate / 1e9) for length, rate in known if rate is not None]
            if points:
                ours = name == OURS
                style = {"linewidth": 2.5, "zorder": 3} if ours else {"linewidth": 1.2}
                axis.plot(*zip(*points, strict=True), marker="o", color=f"C{color}", label=peer.title, **style)
        axis.axhline(report.peak.flops[dtype] / 1e9, color="0.5", linestyle="--", label="measured peak")
        axis.set_title(f"{dtype}, {'causal' if causal else 'no mask'}")
        axis.set_xscale("log", base=2)
        axis.set_xticks([SHAPES[shape][3] for shape in LENGTHS], [str(SHAPES[shape][3]) for shape in LENGTHS])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("length T of (1, 8, T, 64)")
    for axis in axes[:, 0]:
        axis.set_ylabel("GFLOP/s over visible pairs")
    known_labels = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }  # a peer may be absent from some of the panels
    figure.legend(known_labels.values(), known_labels.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Attention forward on {report.machine['cpu']}, {report.machine['threads']} threads")
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=120)
    pyplot.close(figure)
    write(path, made.getvalue())
