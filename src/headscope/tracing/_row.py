"""The rows of a trace, and the writer that collects them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscope.tracing._explanations import EXPLANATIONS
from headscope.tracing._invariants import Check, to_float64
from headscope.tracing._setup import Setting

CORNER = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One step of a forward pass.

    Attributes:
        step: its name, such as "scores"; unique in a trace.
        stage: its number of six: 1 input, 2 projections, 3 split, norms and rotation, 4 attention, 5
            concatenation and gate, 6 output.
        equation: the computation, in letters.
        code: lines of PyTorch that compute it; the lines of all rows, in order, are a program.
        axes: the letter and the size of each axis of the result, in order; joined axes are written "H·D".
        shape: the sizes only.
        dtype: the dtype of the result, such as "float32".
        elements: the number of elements of the result.
        bytes: their memory if all are stored.
        corner: the first 4 x 4 values of the last two axes (of the first batch entry and head); None without values.
        invariant: a property that the result must have and, where there are values, the measured outcome.
        held: whether the result has it; None without values.
        why: why the step exists.
        mistake: the common mistake at this step.
        note: a peculiarity of this module or input, such as an unusual scale; or None.

    Examples:
        >>> from headscope import trace
        >>> row = trace(seq=10, dim=512, heads=8).row("scores")
        >>> row.stage, row.axes, row.bytes
        (4, {'B': 1, 'H': 8, 'Q': 10, 'K': 10}, 3200)
    """

    step: str
    stage: int
    equation: str
    code: str
    axes: dict[str, int]
    shape: list[int]
    dtype: str
    elements: int
    bytes: int
    corner: list[list[float]] | None
    invariant: str
    held: bool | None
    why: str
    mistake: str
    note: str | None = None


@dataclass
class RowWriter:
    """The collector of the rows of a trace."""

    setting: Setting
    rows: list[Row] = field(default_factory=list[Row])

    def add(
        self, stage: int, step: str, value: Tensor | None, axes: Iterable[tuple[str, int]], dtype: torch.dtype, *,
        equation: str, code: Iterable[str], check: Check, note: str | None = None,
    ) -> None:  # fmt: skip
        """Add one step; ``value`` may be a sample, or None without values."""
        named = [(letter, size) for letter, size in axes if letter != "B" or self.setting.batched]
        shape = [size for _, size in named]
        elements = math.prod(shape)
        explanation = EXPLANATIONS[step]
        self.rows.append(
            Row(
                step=step,
                stage=stage,
                equation=equation,
                code="\n".join(code),
                axes=dict(named),
                shape=shape,
                dtype=str(dtype).removeprefix("torch."),
                elements=elements,
                bytes=elements * dtype.itemsize,
                corner=corner(value) if value is not None and self.setting.values else None,
                invariant=check.text,
                held=check.held,
                why=explanation.why,
                mistake=explanation.mistake,
                note=note,
            )
        )


def corner(value: Tensor) -> list[list[float]]:
    """Return the first values of the last two axes, at index 0 of all other axes."""
    if not value.numel():
        return []
    return to_float64(value[(0,) * (value.ndim - 2)][:CORNER, :CORNER]).tolist()


Row.__module__ = "headscope.tracing"  # its public path
