"""Trace: the steps of one forward pass as a value."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from torch import Tensor

from headscope.tracing._html import render_html
from headscope.tracing._row import Row
from headscope.tracing._terminal import TraceTable


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The steps of one forward pass. Print it, end a notebook cell with it, or convert it to JSON.

    Attributes:
        title: the traced call, in one line.
        rows: the steps, in order.
        output: the module's own output, to the bit; None for a trace of sizes only.
        module: the sizes and options of the module.
        setup: the lines of code that come before those of the rows.
        missing: of a module that is not headscope's, the steps without a row, each with the reason.
        program: of such a module, its own lines that compute the steps; None for headscope's.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, trace
        >>> steps = trace(MultiHeadAttention(8, 2), torch.randn(1, 4, 8))
        >>> steps.held, len(steps.rows), steps.output.shape
        (True, 12, torch.Size([1, 4, 8]))
    """

    title: str
    rows: list[Row]
    output: Tensor | None
    module: dict[str, Any]
    setup: str
    missing: dict[str, str] = field(default_factory=dict[str, str])
    program: str | None = None

    @property
    def held(self) -> bool | None:
        """Whether no invariant failed; None without values to check. Rows that could not be checked do not count."""
        return None if self.output is None else not self.failed

    @property
    def failed(self) -> list[Row]:
        """The rows whose invariant did not hold."""
        return [row for row in self.rows if row.held is False]

    @property
    def summary(self) -> str:
        """The number of invariants that held, or why none was checked, in one line."""
        if self.held is None:
            return "○ sizes only, nothing was computed; to check the invariants, pass a module and an input"
        more = f"\n{self._missing_steps}" if self.missing else ""
        if self.failed:
            names = ", ".join(row.step for row in self.failed)
            return f"✗ {len(self.failed)} of {len(self.rows)} invariants failed: {names}{more}"
        if self.program is not None and (unusual := [row.step for row in self.rows if _is_unusual(row)]):
            more = f"\n! unusual: {', '.join(unusual)}; headscope check says what to do about it{more}"
        unchecked = [row.step for row in self.rows if row.held is None]
        number = f"{len(self.rows) - len(unchecked)} of {len(self.rows)}" if unchecked else f"all {len(self.rows)}"
        more = f"\n○ not checked: {', '.join(unchecked)}{more}" if unchecked else more
        return f"✓ {number} invariants hold; the values are compared with the same steps in float64{more}"

    @property
    def _missing_steps(self) -> str:
        """The steps without a row, in one line: those with one reason together."""
        reasons: dict[str, list[str]] = {}
        for step, reason in self.missing.items():
            reasons.setdefault(reason, []).append(step)
        return "without a row: " + "; ".join(f"{', '.join(steps)} ({reason})" for reason, steps in reasons.items())

    @property
    def code(self) -> str:
        """The code of all rows as one program that computes ``out``, with its requirements at the top.

        Of a module that is not headscope's: its own lines, in the order of the steps, each with its file and number.
        """
        if self.program is not None:
            return self.program
        lines = [self.setup]
        for row in self.rows:
            axes = ", ".join(row.axes)
            lines.append(f"{row.code}  # [{axes}]" if row.stage > 1 else row.code)
        return "\n".join(lines) + "\n"

    def row(self, step: str) -> Row:
        """Return the row of one step, by name, such as "scores".

        Raises:
            KeyError: no step has this name; the message lists the steps.
        """
        for row in self.rows:
            if row.step == step:
                return row
        raise KeyError(f"step: got {step!r}, expected one of {', '.join(row.step for row in self.rows)}")

    def table(self, *, explain: bool = False) -> RenderableType:
        """Return the steps as a table for ``rich.print``, which fits the width and encoding of the console.

        Args:
            explain: also explain why each step exists, and its common mistake.
        """
        return TraceTable(self, explain=explain)

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as plain lists, numbers and strings; NaN and infinity are "NaN", "Infinity", "-Infinity"."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            if row["corner"] is not None:
                row["corner"] = [[_encode_number(value) for value in line] for line in row["corner"]]
        head = {"kind": "headscope-trace", "version": 1, "title": self.title, "module": self.module}
        own = {} if self.program is None else {"missing": self.missing, "code": self.program}
        return {**head, "held": self.held, **own, "rows": rows}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON that strict parsers accept."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=indent)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=80, color_system=None, legacy_windows=False)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __repr__(self) -> str:
        held = "sizes only" if self.output is None else f"{sum(row.held is True for row in self.rows)} invariants held"
        failed = f", failed at {', '.join(row.step for row in self.failed)}" if self.failed else ""
        return f"<Trace of {self.title}: {len(self.rows)} steps, {held}{failed}>"

    def _repr_html_(self) -> str:
        return render_html(self)


def _is_unusual(row: Row) -> bool:
    return row.note is not None and row.note.startswith("unusual")


def _encode_number(value: float) -> float | str:
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


Trace.__module__ = "headscope.tracing"  # its public path
