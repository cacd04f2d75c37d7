"""The moments of row quantities: counts, means, squared deviations, extremes and histograms, with an exact merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._support.device_constants import numbers
from headscope.stats._part import Part, wide
from headscope.stats._quantities import MAY_BE_INFINITE, histogram_edges


@dataclass(frozen=True, eq=False)
class Moments(Part):
    """One row quantity of every head.

    Attributes:
        count: the number of rows, int64 [H].
        mean, M2: mean and sum of squared deviations from it, [H]; std = sqrt(M2 / count).
        min, max: [H].
        histogram: int64 [H, bins], see ``histogram_edges``.
    """

    count: Tensor
    mean: Tensor
    M2: Tensor
    min: Tensor
    max: Tensor
    histogram: Tensor

    @staticmethod
    def of(name: str, rows: Tensor) -> Moments:
        """Return the moments of a row quantity [B, H, R] in which NaN marks rows that do not have it.

        Infinite values of ``recall_kl`` are left out, too: there nothing of a row is selected.
        """
        flat = rows.to(wide(rows.device)).movedim(1, 0).flatten(1)  # [H, B * R]
        defined = flat.isfinite() if name in MAY_BE_INFINITE else ~flat.isnan()
        count = defined.sum(-1)
        values = torch.where(defined, flat, 0.0).contiguous()
        mean = values.sum(-1) / count  # 0 / 0 = NaN: no row has it
        away = torch.where(defined, flat - mean[:, None], 0.0)
        none = count == 0
        M2 = away.square().sum(-1).masked_fill(none, math.nan)
        edges = histogram_edges(name)
        bins = torch.bucketize(values, numbers(edges[1:-1], flat.dtype, flat.device), right=True)
        histogram = count.new_zeros(len(count), len(edges) - 1).scatter_add_(1, bins, defined.long())
        if flat.shape[1] == 0:
            return Moments(count, mean, M2, mean, mean, histogram)
        least = torch.where(defined, flat, math.inf).amin(-1).masked_fill(none, math.nan)
        most = torch.where(defined, flat, -math.inf).amax(-1).masked_fill(none, math.nan)
        return Moments(count, mean, M2, least, most, histogram)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the rows of both (Chan, Golub and LeVeque 1983, equation 2.1)."""
        count = self.count + other.count
        share = other.count.to(self.mean.dtype) / count  # NaN if neither has a row
        apart = other.mean - self.mean
        mean = _either(self, other, "mean", self.mean + apart * share)
        M2 = _either(self, other, "M2", self.M2 + other.M2 + apart.square() * self.count * share)
        least = torch.fmin(self.min, other.min)  # NaN only if both are
        return Moments(count, mean, M2, least, torch.fmax(self.max, other.max), self.histogram + other.histogram)


class Packed(NamedTuple):
    """Moments of N names and H heads in two tensors.

    Attributes:
        whole: count [N, H], then the histogram [N, H, bins]; int64, flat.
        numbers: mean, M2, min and max [4, N, H].
    """

    whole: Tensor
    numbers: Tensor

    @staticmethod
    def empty(names: int, heads: int, bins: int) -> Packed:
        """Return empty moments."""
        whole = torch.empty(names * heads * (1 + bins), dtype=torch.int64, device="cpu")
        return Packed(whole, torch.empty(4, names, heads, dtype=torch.float64, device="cpu"))

    def moments(self) -> Moments:
        """Return views of them."""
        _, names, heads = self.numbers.shape
        count, histogram = self.whole[: names * heads], self.whole[names * heads :]
        mean, M2, least, largest = self.numbers.unbind()
        return Moments(count.view(names, heads), mean, M2, least, largest, histogram.view(names, heads, -1))


class MomentsTable(Part, Mapping[str, Moments]):
    """Row quantities by name, with numbers in one tensor: storing and merging all costs as much as one.

    Args:
        names: of the quantities.
        together: the fields of ``Moments``, with an axis of names before each: [N, H], and [N, H, bins] padded with 0;
            or the same as ``Packed``, which is unpacked on first access.
    """

    def __init__(self, names: tuple[str, ...], together: Moments | Packed) -> None:
        self.names = names
        self._together = together

    @property
    def together(self) -> Moments:
        """The fields of ``Moments``, of all names."""
        if isinstance(self._together, Packed):
            self._together = self._together.moments()
        return self._together

    def __getitem__(self, name: str) -> Moments:
        if name not in self.names:
            raise KeyError(name)
        n = self.names.index(name)
        all_ = self.together
        bins = len(histogram_edges(name)) - 1
        numbers = (all_.count[n], all_.mean[n], all_.M2[n], all_.min[n], all_.max[n])
        return Moments(*numbers, all_.histogram[n, :, :bins])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def merged(ours: Mapping[str, Moments], theirs: Mapping[str, Moments]) -> Mapping[str, Moments]:
    """Return the moments by name of the rows of both."""
    if isinstance(ours, MomentsTable) and isinstance(theirs, MomentsTable) and ours.names == theirs.names:
        return MomentsTable(ours.names, ours.together.merge(theirs.together))
    both = dict(ours)
    for name, moments in theirs.items():
        both[name] = both[name].merge(moments) if name in both else moments
    return both


def _either(a: Moments, b: Moments, what: str, both: Tensor) -> Tensor:
    """Return the value of both together, or of one if the other does not have a row."""
    of_a, of_b = getattr(a, what), getattr(b, what)
    return torch.where(b.count == 0, of_a, torch.where(a.count == 0, of_b, both))
