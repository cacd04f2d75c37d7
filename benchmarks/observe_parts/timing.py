"""Rounds of competitors, A B C A B C, and what is kept of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], object]

TURN_S = 0.01  # a shorter one is repeated this long in its turn
LONG_S = 0.1  # a longer one is called once


@dataclass(slots=True)
class Row:
    """What was measured of one case.

    Attributes:
        kind, name: which case; together they are unique.
        seconds: the times of each competitor, one for each round.
        figures: numbers that are no times, by name; memory in bytes.
        absent: why a competitor has no times.
    """

    kind: str
    name: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Seconds; None for what was not measured."""
        times = self.seconds.get(name)
        return statistics.median(times) if times else None

    def ratio(self, name: str, base: str) -> float | None:
        """How many times as long as the base it takes; of medians."""
        mine, other = self.median(name), self.median(base)
        return None if mine is None or other is None else mine / other

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "median_s": {name: self.median(name) for name in self.seconds}}

    @staticmethod
    def of(saved: dict[str, Any]) -> Row:
        """What ``as_dict`` gave."""
        return Row(**{name: saved[name] for name in ("kind", "name", "seconds", "figures", "absent")})


def interleave(
    runs: dict[str, Run], seconds: float, least: int, parts: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Seconds of one call each, in rounds, for about so many seconds and at least so many rounds.

    Args:
        runs: the competitors, by name.
        seconds, least: of all rounds together, and how many rounds.
        parts: of how many equal parts a call consists, of which the time is that of one; by default 1.
    """
    parts = parts or {}
    calls: dict[str, int] = {}
    for name, run in runs.items():
        first = _time(run, 1)  # not counted: it warms up
        calls[name] = 1 if first > LONG_S else turn(_time(run, 1))
    times: dict[str, list[float]] = {name: [] for name in runs}
    started, rounds = time.perf_counter(), 0
    while rounds < least or time.perf_counter() - started < seconds:
        for name, run in runs.items():
            times[name].append(_time(run, calls[name]) / parts.get(name, 1))
        rounds += 1
    return times


def same(what: str, found: Tensor, wanted: Tensor, atol: float, rtol: float) -> None:
    """What computes something else is not timed.

    Raises:
        AssertionError: it does; the message names it.
    """
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}")


def turn(seconds: float) -> int:
    """How many calls make one turn of what takes so long."""
    return 1 if seconds > LONG_S else min(1000, max(2, math.ceil(TURN_S / seconds)))


def _time(run: Run, calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begun) / calls
