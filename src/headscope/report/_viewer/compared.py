"""A second recording on a page, and what a page holds so that its script can compare it with another recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.comparing import Comparison, compare
from headscope.report.observed_model import ObservedModel

__all__ = ["MOST_NUMBERS", "Numbers", "compared", "distances", "origin_of", "progressions"]

MOST_NUMBERS = 2**17
"""The most numbers of all progressions of a page; layers that come later have none."""

INFINITE = -1.0  # JSON has no infinity, and no distance is negative


class Numbers:
    """Lists of whole numbers, each different one once: the counts of maps and of received weight.

    Attributes:
        lists: each as ``progressions``.
    """

    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self._places: dict[bytes, int] = {}
        self._size = 0

    def add(self, values: NDArray[Any]) -> list[int] | None:
        """Return which of the lists those of each head are, values [H, ...]; None where the page has no room."""
        flat = values.reshape(len(values), -1).astype(np.int64)
        if len(flat) and (flat == flat[:1]).all():
            which = self._place(flat[0])
            return None if which is None else [which] * len(flat)
        places = [self._place(each) for each in flat]
        known = [each for each in places if each is not None]
        return known if len(known) == len(places) else None

    def _place(self, values: NDArray[Any]) -> int | None:
        key = values.tobytes()
        if key not in self._places:
            if self._size > MOST_NUMBERS:
                return None
            self.lists.append(progressions(values))
            self._size += len(self.lists[-1])
            self._places[key] = len(self.lists) - 1
        return self._places[key]


def progressions(values: NDArray[Any]) -> list[int]:
    """Return whole numbers as runs with even steps: of each run its first number, its step and its length."""
    runs: list[int] = []
    steps = np.diff(values)
    ends = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(values) - 1]  # the last number of each run
    start, at = 0, 0
    while start < len(values):
        while ends[at] < start + 1 and at < len(ends) - 1:
            at += 1
        last = max(start, ends[at])
        runs += [int(values[start]), int(steps[start]) if last > start else 0, last - start + 1]
        start = last + 1
    return runs


def origin_of(recording: ObservedModel) -> dict[str, Any] | None:
    """Return the origin of a recording, ready for JSON; None if it does not state one."""
    origin = recording.stats.origin
    if origin is None or not origin.model:
        return None
    layers: dict[str, Any] = {}
    for name, layer in origin.layers.items():
        part = layer.part
        heads = None if part is None else [part.of, None if part.heads is None else [*part.heads], part.holder]
        layers[name] = [*layer.widths, heads]
    return {"model": origin.model, "config": origin.config, "layers": layers}


def compared(recording: ObservedModel, against: ObservedModel) -> Comparison:
    """Return the comparison of a recording with a later one.

    Raises:
        TypeError: ``against`` is not a recording.
        ValueError: they are of different models, of different heads, or have no layer in common.
    """
    if not hasattr(against, "stats") or not hasattr(against, "about"):
        raise TypeError(f"against: got {type(against).__name__}, expected a recording")
    try:
        comparison = compare(recording, against)
    except ValueError as error:
        message = str(error).removeprefix("after: ").replace(" from before;", " from the recording;")
        raise ValueError(f"against: {message}") from error
    if not comparison.heads:
        names = ", ".join(next(iter(each.stats.parts), "none") for each in (recording, against))
        raise ValueError(f"against: expected a recording with the same layers, got none in common (the first: {names})")
    return comparison


def distances(comparison: Comparison, layers: Sequence[str]) -> list[dict[str, list[float | None]] | None]:
    """Return the distances between maps and between received weight of each head; None for layers of one side."""
    heads: dict[str, dict[str, list[float | None]]] = {}
    for head in comparison.heads:
        columns = heads.setdefault(head.layer, {"map": [], "received": []})
        for name, value in (("map", head.map), ("received", head.received)):
            columns[name].append(
                value if value is None else INFINITE if value == float("inf") else float(f"{value:.7g}")
            )
    return [heads.get(name) for name in layers]
