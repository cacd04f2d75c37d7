"""The rows of a trace from the tape of a module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscope.tracing._invariants import Check
from headscope.tracing._row import CORNER, Row
from headscope.tracing._written.arrangement import Arrangement, Coordinate, coordinates_of, place_twin
from headscope.tracing._written.axes import is_same, name_axes, unique
from headscope.tracing._written.explanations import explain_step
from headscope.tracing._written.lines import Line
from headscope.tracing._written.origins import Field, Mixing, Origins
from headscope.tracing._written.tape import Event

NO_STEP = "not a step of its own in this code"
PAIRS = {Coordinate.BATCH: "B", Coordinate.HEAD: "H", Coordinate.TIME: "Q", Coordinate.KEY: "K"}


@dataclass(frozen=True, eq=False)
class Result:
    """The tensor of a row: the ids of its numbers, and the letter and size of each axis."""

    ids: Tensor
    axes: list[tuple[str, int]]


@dataclass
class Writer:
    """The collector of the rows of one attention.

    Attributes:
        origins: what the numbers of the tape are.
        attention: the attention, arranged by heads.
        twins: further products of its weights, each after the product that is shown.
        rows: those so far.
        missing: steps that were not found, each with the reason.
        lines: those of their code.
        coordinates: where each number belongs, [6, ids].
    """

    origins: Origins
    attention: Arrangement
    twins: tuple[tuple[Mixing, Mixing], ...] = ()
    rows: list[Row] = field(default_factory=list[Row])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    lines: list[Line] = field(default_factory=list[Line])

    def __post_init__(self) -> None:
        self.coordinates = coordinates_of(self.origins, self.attention)
        for first, later in self.twins:
            place_twin(self.coordinates, first, later)
            place = "" if later.event.line is None else f" at {later.event.line.place}"
            self.missing["head outputs 2"] = f"a further product of the weights{place} is combined with the first"

    @property
    def own(self) -> set[int]:
        """The numbers of the events of its products with values."""
        return {m.event.index for m in (*self.attention.mixings, *(later for _, later in self.twins))}

    @property
    def value_letter(self) -> str:
        """The letter of the width of values: D where it is that of queries."""
        return "D" if self.attention.v.shape[-1] == self.attention.q.shape[-1] else "Dv"

    @property
    def head_letter(self) -> str:
        """The letter of heads: N for the products of code whose batch entries and heads could not be told apart."""
        is_known = self.attention.is_sound or (len(self.attention.p) > 1 and not self._shares_parts())
        return "H" if is_known else "N"

    def _shares_parts(self) -> bool:
        """Return whether several products of a batch entry have the same part of the values: blocks, or positions."""
        parts = self.origins.of(Field.FEATURE, self.attention.v[0]).amin(-1)  # [N, K]
        own = [set(row) - {-1} for row in parts.tolist()]
        return all(len(each) == 1 for each in own) and len(set.union(*own)) < len(own)

    @property
    def pairs(self) -> dict[Coordinate, str]:
        """The letters of scores and weights."""
        return {**PAIRS, Coordinate.HEAD: self.head_letter}

    @property
    def is_loop(self) -> bool:
        """Whether the code computes heads, or batch entries, one by one."""
        return len(self.attention.mixings) > 1

    def describe_loop(self) -> str:
        """Return what the code computes one by one."""
        first = self.attention.mixings[0].out
        queries = "the queries" if first.shape[1] == 1 else "parts of the queries"
        names = {Coordinate.BATCH: "the batch entries", Coordinate.HEAD: "the heads", Coordinate.TIME: queries}
        sizes = dict(zip(names, self.attention.out.shape, strict=False))
        parts = [
            name
            for coordinate, name in names.items()
            if len(self.coordinates[coordinate][first].unique()) < sizes[coordinate]
        ]
        return " and ".join(parts) or "its products"

    def add(
        self, stage: int, step: str, result: Result, dtype: torch.dtype, *, equation: str, events: Iterable[Event],
        check: Check, notes: Iterable[str] = (), code: str | None = None,
    ) -> None:  # fmt: skip
        """Add one step."""
        shape = [size for _, size in result.axes]
        elements, explanation = math.prod(shape), explain_step(step)
        names = [row.step for row in self.rows]
        if step in names:
            step = next(f"{step} {n}" for n in range(2, 100) if f"{step} {n}" not in names)
        events = list(events)
        inside = {event.inside for event in events if event.inside}
        notes = [*notes, *(f"inside {name}: computed again by its definition" for name in inside)]
        self.rows.append(
            Row(
                step=step, stage=stage, equation=equation, code=self._code(events) if code is None else code,
                axes=dict(result.axes), shape=shape, dtype=str(dtype).removeprefix("torch."), elements=elements,
                bytes=elements * dtype.itemsize, corner=self._corner(result.ids), invariant=check.text,
                held=check.held, why=explanation.why, mistake=explanation.mistake, note="; ".join(notes) or None,
            )
        )  # fmt: skip

    def _code(self, events: Sequence[Event]) -> str:
        """Return the lines of code of operations, each with its place."""
        lines: list[Line] = []
        for event in sorted(events, key=lambda event: event.index):
            if event.line is not None and event.line.text and event.line not in lines:
                lines.append(event.line)
        if not lines:
            place = next((event.line.place for event in events if event.line is not None), None)
            return "# inside torch" if place is None else f"# {place}, whose text is not available"
        self.lines += lines
        return "\n".join([f"# {join_places(lines)}", *(line.text for line in lines)])

    def _corner(self, ids: Tensor) -> list[list[float]]:
        if not ids.numel():
            return []
        ids = ids[(0,) * max(0, ids.ndim - 2)]
        ids = ids if ids.ndim == 2 else ids[None] if ids.ndim == 1 else ids[None, None]
        return self.origins.tape.values(ids[:CORNER, :CORNER]).tolist()

    def result_of(
        self, events: Sequence[Event], ids: Tensor, letters: dict[Coordinate, str], usual: Sequence[str]
    ) -> tuple[Result, torch.dtype]:
        """Return the code's own tensor that holds these numbers, or the numbers in the usual order."""
        event = events[-1]
        own: list[Tensor] = []
        projected = any(each.event.call == event.call for each in self.origins.projections.values())
        if not self.is_loop and not (
            projected and event.call and event.index == self.attention.mixings[-1].event.index
        ):
            later = self.origins.tape.events[event.index :]
            own = [out for each in later if each.call == event.call for out in each.outs if is_same(out, ids.unique())]
        if self.is_loop or not own:
            return Result(ids, [*zip(unique(list(usual)), ids.shape, strict=True)]), event.values.dtype
        return Result(own[-1], name_axes(self.coordinates, own[-1], letters, usual)), event.values.dtype


def join_places(lines: Sequence[Line]) -> str:
    """Return the places of lines: "homework.py:18, 21"."""
    numbers: dict[str, list[str]] = {}
    for line in lines:
        name, _, number = line.place.rpartition(":")
        numbers.setdefault(name, []).append(number)
    return "; ".join(f"{name}:{', '.join(each)}" for name, each in numbers.items())


def unusual(text: str, finding: str) -> str:
    """Return a note on a departure from the textbook, with the name of the finding of ``check``."""
    return f"unusual: {text} (check: {finding})"
