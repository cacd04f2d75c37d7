"""Row quantities as numbers: of one head, and of all heads in columns."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope._support.arguments import as_whole, kind
from headscope.stats._layer import LayerStats
from headscope.stats._moments import Moments
from headscope.stats._nulls import Null
from headscope.stats._quantities import histogram_edges

__all__ = ["Column", "Summary", "layer_at", "names_of", "null_of", "stack_columns", "summaries_of", "summary_of"]


@dataclass(frozen=True)
class Summary:
    """One quantity of one head.

    Attributes:
        count: its number of rows.
        mean, M2, min, max: over these rows, each with equal weight; M2 = Σ (x - mean)²; NaN where count is 0.
        histogram: the number of rows in each bin.
        edges: of the bins: bin k holds [edge k, edge k + 1), the outer two also all values beyond.
        null_mean, null_std: what chance gives, see ``Null``; NaN where it is unknown.

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
    null_mean: float = math.nan
    null_std: float = math.nan

    @property
    def std(self) -> float:
        """sqrt(M2 / count)."""
        return math.sqrt(self.M2 / self.count) if self.count else math.nan

    @property
    def z(self) -> float:
        """(mean - null_mean) / null_std; NaN where the null is unknown or its std is 0."""
        return (self.mean - self.null_mean) / self.null_std if self.null_std else math.nan


@dataclass(frozen=True, eq=False)
class Column:
    """One quantity of all heads: of one layer [H], of all layers [L, H] (a layer with fewer heads has count 0 there).

    Attributes:
        count: the number of rows of each.
        mean, M2, min, max: float64; NaN where count is 0.
        null: what chance gives, see ``Null``; None for a quantity that does not depend on which keys have the weight,
            and in files of earlier versions.

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
    null: Null | None = None

    @property
    def std(self) -> Tensor:
        """sqrt(M2 / count)."""
        return (self.M2 / self.count).sqrt()

    @property
    def z(self) -> Tensor:
        """(mean - null.mean) / null.std; NaN where there is no null, or where its std is 0, as in even rows."""
        if self.null is None:
            return torch.full_like(self.mean, math.nan)
        return ((self.mean - self.null.mean) / self.null.std).masked_fill(self.null.std == 0, math.nan)

    def layer(self, n: int) -> Column:
        """Return the column of one layer, [H]."""
        null = None if self.null is None else Null(self.null.mean[n], self.null.std[n])
        return Column(self.count[n], self.mean[n], self.M2[n], self.min[n], self.max[n], null)


def names_of(parts: Mapping[str, LayerStats]) -> tuple[str, ...]:
    """Return the row quantities that some layer has."""
    return tuple(dict.fromkeys(name for part in parts.values() for name in part.moments))


def summaries_of(parts: Mapping[str, LayerStats]) -> Iterator[tuple[str, int, str, Summary]]:
    """Yield layer, head, name and summary of all layers, in order."""
    for layer, part in parts.items():
        columns = {name: (_on_host(moments), _null_on_host(part, name)) for name, moments in part.moments.items()}
        for head in range(part.heads):
            for name, (moments, null) in columns.items():
                yield layer, head, name, summarise(name, moments, null, head)


def summary_of(part: LayerStats, name: str, head: int) -> Summary:
    """Return the numbers of one quantity of one head of a layer."""
    return summarise(name, part.moments[name], null_of(part, name), head)


def summarise(name: str, moments: Moments, null: Null | None, head: int) -> Summary:
    """Return the numbers of one quantity of one head."""
    chance = () if null is None else (float(null.mean[head]), float(null.std[head]))
    mean, M2, least, most = (float(x[head]) for x in (moments.mean, moments.M2, moments.min, moments.max))
    histogram = tuple(int(n) for n in moments.histogram[head].tolist())
    return Summary(int(moments.count[head]), mean, M2, least, most, histogram, histogram_edges(name), *chance)


def stack_columns(parts: Collection[LayerStats], name: str) -> Column:
    """Return one quantity of several layers, [L, H]; count is 0 if a layer lacks the head or quantity."""
    wide = max(part.heads for part in parts)
    columns: list[Tensor] = []
    for what in ("count", "mean", "M2", "min", "max"):
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
    count, mean, M2, least, most = columns
    return Column(count, mean, M2, least, most, _stack_nulls(parts, name, wide))


def null_of(part: LayerStats, name: str) -> Null | None:
    """Return the null of a quantity of a layer, [H]; None if it is unknown."""
    if part.nulls is None or name not in part.moments:
        return None
    return part.nulls.of(name, part.moments[name].count)


def _stack_nulls(parts: Collection[LayerStats], name: str, wide: int) -> Null | None:
    """Return the nulls of several layers, [L, H]; NaN where one is unknown, None where all are."""
    nulls = [null_of(part, name) for part in parts]
    if all(each is None for each in nulls):
        return None
    stacked = torch.full((2, len(nulls), wide), math.nan, dtype=torch.float64, device="cpu")
    for n, each in enumerate(nulls):
        if each is not None:
            stacked[0, n, : len(each.mean)] = each.mean.cpu()
            stacked[1, n, : len(each.std)] = each.std.cpu()
    return Null(*stacked)


def _null_on_host(part: LayerStats, name: str) -> Null | None:
    null = null_of(part, name)
    return null and Null(null.mean.cpu(), null.std.cpu())


def _on_host(moments: Moments) -> Moments:
    """Return the same on the CPU, so reading its numbers waits for a device only once."""
    return replace(moments, **{what: getattr(moments, what).cpu() for what in vars(moments)})


def layer_at(at: object, layers: Sequence[str], names: Sequence[str]) -> str:
    """Return the name of a layer from its name or number; ``names``: of the quantities, for errors.

    Raises:
        KeyError, IndexError: there is no such layer.
        TypeError: it is neither a name nor a number.
    """
    if isinstance(at, str):
        if at in layers:
            return at
        known = ", ".join((*names, *layers)) or "nothing"
        raise KeyError(f"{at}: is neither a quantity nor a layer; expected one of {known}{_option_needed(at)}")
    number = as_whole(at)
    if number is None:
        raise TypeError(f"layer: got {kind(at)}, expected a number or a name")
    if not -len(layers) <= number < len(layers):
        raise IndexError(f"layer: got {number}, expected one of {len(layers)} layers: {', '.join(layers) or 'none'}")
    return layers[number]


def _option_needed(name: str) -> str:
    """Return what measures a quantity that is absent."""
    if name.startswith("segments"):
        return "; the weight between segments is in stats[layer].segments[query_segment, key_segment]"
    if found := re.fullmatch(r"(?:window|streaming)_(\d+(?:\.\d+)?)", name):
        return f"; it needs the option windows=({found[1]},)"
    return f"; it needs {_NEEDED[name]}" if name in _NEEDED else ""


_NEEDED = {
    **dict.fromkeys(("duplicate", "induction"), "the option tokens="),
    **dict.fromkeys(("recall", "recall_kl", "largest_selected"), "the option selected="),
    "second_weight": 'the option extra=("second_weight",)',
    "value_norm": "the values v of the call",
}
"""What a quantity needs that is not always measured."""


for _class in (Summary, Column):
    _class.__module__ = "headscope.stats"  # their public path
