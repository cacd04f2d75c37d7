"""The rows of a training's history: one for each step, thinned where there would be too many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headscope.stats import StoredHistory

MOST_BYTES = 256 * 2**20
"""The most bytes of a history's values."""

Name = tuple[str, str, int]
"""Layer, quantity, and number of heads."""


class HistoryTable:
    """The values of all heads, quantities and steps.

    Row n has the observed step n * stride. If the table is full, every other row is removed and the stride is doubled.
    The last observed step always has a row, which the next step replaces if its number is not a multiple of the stride.

    Attributes:
        steps: the step of each row.
        observed: the number of observed steps.
        stride: see above.
    """

    def __init__(self, most_rows: int, stored: StoredHistory | None = None) -> None:
        self._most_rows = most_rows
        self._columns: dict[tuple[str, str], tuple[int, int]] = {}  # layer and quantity -> start, number of heads
        self._heads: dict[str, int] = {}
        self._last_names: list[Name] = []  # of the last step, and where its values go
        self._last_places = torch.empty(0, dtype=torch.int64, device="cpu")
        self.steps: list[int] = []
        self.observed, self.stride = 0, 1
        self._buffer = torch.empty(0, 0, dtype=torch.float32, device="cpu")
        if stored is not None:
            self._add_columns(stored.columns)
            self.steps, self._buffer = list(stored.steps), stored.values
            self.observed, self.stride = stored.observed, stored.stride

    @property
    def columns(self) -> tuple[Name, ...]:
        """The columns, in the order of their values."""
        return tuple((layer, quantity, heads) for (layer, quantity), (_, heads) in self._columns.items())

    @property
    def heads(self) -> dict[str, int]:
        """Layer -> its number of heads, in the order in which the layers were first observed."""
        return dict(self._heads)

    @property
    def names(self) -> tuple[str, ...]:
        """The quantities that some layer has."""
        return tuple(dict.fromkeys(quantity for _, quantity in self._columns))

    @property
    def values(self) -> Tensor:
        """All values, float32 [steps, values of all columns]; NaN where a step has none."""
        return self._buffer[: len(self.steps)]

    def column(self, layer: str, quantity: str) -> Tensor | None:
        """Return a quantity of a layer, [steps, heads]; None if the layer does not have it."""
        if (layer, quantity) not in self._columns:
            return None
        start, heads = self._columns[layer, quantity]
        return self.values[:, start : start + heads]

    def add(self, step: int, names: Sequence[Name], values: Tensor) -> None:
        """Add a step.

        Args:
            step: its number.
            names: the columns of the values.
            values: one number for each head of each column.

        Raises:
            ValueError: a layer has other heads than in earlier steps.
        """
        if list(names) != self._last_names:
            self._add_columns(names)
            self._last_names = list(names)
            places = [self._columns[layer, name][0] + head for layer, name, heads in names for head in range(heads)]
            self._last_places = torch.tensor(places, dtype=torch.int64, device="cpu")
        if self._has_tail:
            self.steps.pop()
        row = len(self.steps)
        self._grow(row + 1)
        self._buffer[row].fill_(math.nan)
        self._buffer[row, self._last_places] = values.to(torch.float32)
        self.steps.append(step)
        self.observed += 1
        while len(self.steps) > max(2, min(self._most_rows, MOST_BYTES // max(1, 4 * self._buffer.shape[1]))):
            self._thin()

    @property
    def _has_tail(self) -> bool:
        """Whether the last row is of a step that is not a multiple of the stride."""
        return self.observed > 0 and (self.observed - 1) % self.stride > 0

    def _thin(self) -> None:
        rows = len(self.steps) - self._has_tail
        self.stride *= 2
        stay = [*range(0, rows, 2)]
        if stay[-1] != len(self.steps) - 1:
            stay.append(len(self.steps) - 1)
        self._buffer[: len(stay)] = self._buffer[stay]
        self.steps = [self.steps[row] for row in stay]

    def _grow(self, rows: int) -> None:
        if rows > len(self._buffer):
            most = max(rows, min(2 * rows, self._most_rows + 1))
            more = self._buffer.new_empty(most - len(self._buffer), self._buffer.shape[1])
            self._buffer = torch.cat([self._buffer, more])

    def _add_columns(self, names: Sequence[Name]) -> None:
        for layer, _, heads in names:
            if self._heads.get(layer, heads) != heads:
                raise ValueError(f"layer {layer}: has {self._heads[layer]} heads in the history, got {heads}")
        width = self._buffer.shape[1]
        end = width
        for layer, quantity, heads in names:
            self._heads.setdefault(layer, heads)
            if (layer, quantity) not in self._columns:
                self._columns[layer, quantity] = (end, heads)
                end += heads
        if end > width:
            more = self._buffer.new_full((len(self._buffer), end - width), math.nan)
            self._buffer = torch.cat([self._buffer, more], 1)
