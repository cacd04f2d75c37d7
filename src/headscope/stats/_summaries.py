"""Row quantities as numbers: of one head, and of all heads in columns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headscope.stats._layer import LayerStats, Moments, histogram_edges

__all__ = ["Column", "Summary", "names_of", "stack_columns", "summaries_of", "summarise"]


@dataclass(frozen=True)
class Summary:
    """One quantity of one head.

    Attributes:
        count: its number of rows.
        mean, M2, min, max: over these rows, each with equal weight; M2 = Σ (x - mean)²; NaN where count is 0.
        histogram: the number of rows in each bin.
        edges: of the bins: bin k holds [edge k, edge k + 1), the outer two also all values beyond.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> summary = observe(q, q)[0, 1, "chance"]
        >>> summary.count, summary.mean, summary.std
        (4, 0.25, 0.0)
    """

    count: int
    mean: float
    M2: float
    min: float
    max: float
    histogram: tuple[int, ...]
    edges: tuple[float, ...]

    @property
    def std(self) -> float:
        """sqrt(M2 / count)."""
        return math.sqrt(self.M2 / self.count) if self.count else math.nan


@dataclass(frozen=True, eq=False)
class Column:
    """One quantity of all heads: of one layer [H], of all layers [L, H] (a layer with fewer heads has count 0 there).

    Attributes:
        count: the number of rows of each.
        mean, M2, min, max: float64; NaN where count is 0.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> column = observe(q, q)["chance"]
        >>> column.count.tolist(), column.mean.tolist()
        ([[4, 4]], [[0.25, 0.25]])
    """

    count: Tensor
    mean: Tensor
    M2: Tensor
    min: Tensor
    max: Tensor

    @property
    def std(self) -> Tensor:
        """sqrt(M2 / count)."""
        return (self.M2 / self.count).sqrt()


def names_of(parts: Mapping[str, LayerStats]) -> tuple[str, ...]:
    """Return the row quantities that some layer has."""
    return tuple(dict.fromkeys(name for part in parts.values() for name in part.moments))


def summaries_of(parts: Mapping[str, LayerStats]) -> Iterator[tuple[str, int, str, Summary]]:
    """Yield layer, head, name and summary of all layers, in order."""
    for layer, part in parts.items():
        columns = {name: _on_host(moments) for name, moments in part.moments.items()}
        for head in range(part.heads):
            for name, moments in columns.items():
                yield layer, head, name, summarise(name, moments, head)


def summarise(name: str, moments: Moments, head: int) -> Summary:
    """Return the numbers of one quantity of one head."""
    mean, M2, least, most = (float(x[head]) for x in (moments.mean, moments.M2, moments.min, moments.max))
    histogram = tuple(int(n) for n in moments.histogram[head].tolist())
    return Summary(int(moments.count[head]), mean, M2, least, most, histogram, histogram_edges(name))


def stack_columns(parts: Collection[LayerStats], name: str) -> Column:
    """Return one quantity of several layers, [L, H]; count is 0 if a layer lacks the head or quantity."""
    wide = max(part.heads for part in parts)
    columns: list[Tensor] = []
    for what in (each.name for each in fields(Column)):
        rows: list[Tensor] = []
        for part in parts:
            if what == "count":
                row = torch.zeros(wide, dtype=torch.int64, device="cpu")
            else:
                row = torch.full((wide,), math.nan, dtype=torch.float64, device="cpu")
            if name in part.moments:
                row[: part.heads] = getattr(part.moments[name], what).cpu()
            rows.append(row)
        columns.append(torch.stack(rows))
    return Column(*columns)


def _on_host(moments: Moments) -> Moments:
    """Return the same on the CPU, so reading its numbers waits for a device only once."""
    return replace(moments, **{what: getattr(moments, what).cpu() for what in vars(moments)})


for _class in (Summary, Column):
    _class.__module__ = "headscope.stats"  # their public path
