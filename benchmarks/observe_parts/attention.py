"""Observing one attention call, (1, 8, T, 64) in fp32: its time beside SDPA and beside attending, and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import headscope
from headscope import Observe
from headscope.functional import Attended
from headscope.masks import Mask, causal
from observe_parts.timing import Row, Run, interleave, same

TIME, SHORT, MEMORY, LONG = "attention", "short", "memory", "long"
LENGTHS = (1024, 4096, 16384)
SHORT_LENGTHS = (16, 32, 64, 128)
MEMORY_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
LONG_LENGTH = 131072
HEADS, WIDTH = 8, 64
ALL = Observe(map=64, edges=32)
SDPA, ATTEND, AFTER = "SDPA", "attend", "observe alone"
DEFAULTS = "rows, received"
WATCHED = {
    "rows": Observe(received=False),
    DEFAULTS: Observe(),
    "all": ALL,
    "rows=256": Observe(rows=256),
}
"""``attend`` with these; their order is that of the table."""

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Case:
    """One call."""

    length: int
    causal: bool
    heads: int = HEADS

    @property
    def name(self) -> str:
        return f"{self.length}{' causal' if self.causal else ''}"

    @property
    def mask(self) -> Mask | None:
        return causal() if self.causal else None

    @property
    def pairs(self) -> int:
        """That may be seen, by one head."""
        return self.length * (self.length + 1) // 2 if self.causal else self.length**2

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v."""
        random = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, self.heads, self.length, WIDTH, generator=random)
        return q, k, v


def cases(lengths: tuple[int, ...], heads: int = HEADS) -> Iterator[Case]:
    """Each length without and with a causal mask."""
    for length in lengths:
        yield Case(length, False, heads)
        yield Case(length, True, heads)


def competitors(case: Case) -> dict[str, Run]:
    """Who takes part."""
    q, k, v = case.tensors()
    mask = case.mask
    lse = headscope.attend(q, k, v, mask=mask).lse
    runs: dict[str, Run] = {
        SDPA: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal),
        ATTEND: lambda: headscope.attend(q, k, v, mask=mask),
    }
    for name, what in WATCHED.items():
        runs[name] = lambda what=what: headscope.attend(q, k, v, mask=mask, observe=what)
    runs[AFTER] = lambda: headscope.observe(q, k, v, lse=lse, mask=mask, what=ALL)
    return runs


def measure(case: Case, seconds: float, least: int) -> Row:
    """Time one case; what computes something else is not timed."""
    with torch.no_grad():
        runs = competitors(case)
        check(case, runs)
        return Row(TIME, case.name, interleave(runs, seconds, least))


def measure_short(case: Case, seconds: float, least: int) -> Row:
    """Time a short call with default statistics beside attending; what computes something else is not timed."""
    with torch.no_grad():
        runs = competitors(case)
        check(case, runs)
        return Row(SHORT, case.name, interleave({name: runs[name] for name in (ATTEND, DEFAULTS)}, seconds, least))


def check(case: Case, runs: dict[str, Run]) -> None:
    """That all attend to the same, and that the weights of every row and every pair were counted.

    Raises:
        AssertionError: they do not.
    """
    out = runs[SDPA]()
    assert isinstance(out, Tensor)
    for name in WATCHED:
        attended = runs[name]()
        assert isinstance(attended, Attended)
        same(name, attended.out, out, 1e-4, 1e-4)
        assert attended.stats is not None
        if name == "all":
            check_sums(case, attended.stats)


def check_sums(case: Case, stats: headscope.HeadStats) -> None:
    """All rows sum to one, and the map holds every pair.

    Raises:
        AssertionError: they do not.
    """
    rows = torch.full((case.heads,), float(case.length), dtype=torch.float64)
    same("received", stats.received.sum(-1), rows, 0, 1e-5)
    same("map", stats.map.sum.sum((1, 2)), rows, 0, 1e-5)
    same("pairs of the map", stats.map.count.sum((1, 2)), torch.full((case.heads,), case.pairs), 0, 0)


# ---------------------------------------------------------------- memory


def measure_memory(length: int, threads: int) -> Row:
    """Peak memory of attend and all statistics beyond inputs and outputs, without and with a causal mask.

    Each in a fresh process: see ``peak_memory``.
    """
    row = Row(MEMORY, str(length), figures={"eager": 4.0 * HEADS * length**2})
    for name in ("all", "all, causal"):
        command = [sys.executable, "-m", "observe_parts.attention", str(length), name, str(threads)]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], env=os.environ, capture_output=True, text=True)
        if done.returncode == 0:
            row.figures[name] = float(done.stdout)
        else:
            row.absent[name] = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return row


def peak_memory(case: Case) -> int:
    """By how many bytes the resident memory of this process rises at most during the call, less its outputs.

    The inputs are there before, and a small call has loaded what a first call loads. The system keeps the highest value
    (VmHWM of /proc/self/status), which is set back just before. Outputs are out and lse; the statistics that are
    returned count as extra.

    Raises:
        OSError: not a Linux, or its counter cannot be set back.
    """
    small = Case(256, case.causal, case.heads)
    headscope.attend(*small.tensors(), mask=small.mask, observe=ALL)
    q, k, v = case.tensors()
    Path("/proc/self/clear_refs").write_text("5")  # the highest value from here on
    before = _resident("VmRSS")
    attended = headscope.attend(q, k, v, mask=case.mask, observe=ALL)
    after = _resident("VmHWM")
    return after - before - sum(x.numel() * x.element_size() for x in attended[:2])


def _resident(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


# ---------------------------------------------------------------- a long text


def measure_long(case: Case, rounds: int = 3) -> Row:
    """Attend with all statistics on one head; the map that comes out is checked."""
    row = Row(LONG, case.name, {"all": []})
    q, k, v = case.tensors()
    with torch.no_grad():
        for _ in range(rounds):
            begun = time.perf_counter()
            stats = headscope.attend(q, k, v, mask=case.mask, observe=ALL).stats
            row.seconds["all"].append(time.perf_counter() - begun)
            assert stats is not None
            check_sums(case, stats)
    return row


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    with torch.no_grad():
        print(peak_memory(Case(int(sys.argv[1]), causal=sys.argv[2].endswith("causal"))))
