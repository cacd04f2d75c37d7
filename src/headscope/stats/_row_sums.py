"""The moments of row quantities in one tensor of a fixed size, for an operator that adds to it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope.stats._layer import LayerStats
from headscope.stats._moments import Moments
from headscope.stats._part import wide
from headscope.stats._quantities import histogram_edges, quantity_names

_OF_SELF = ("positions", "line")  # requirements that cross-attention does not meet


@dataclass(frozen=True, slots=True)
class RowSums:
    """The places of the moments of one layer in a tensor.

    The order is: counted rows and broken rows [2, H], the counts [N, H], the histograms [N, H, bins], and mean, M2,
    minimum and maximum [4, N, H].
    """

    names: tuple[str, ...]
    windows: tuple[float, ...]
    heads: int
    bins: int

    @staticmethod
    def of(windows: Sequence[float], heads: int) -> RowSums:
        """Return the layout of all quantities of self-attention; cross-attention does not have some of them."""
        names = tuple(quantity_names(["weights", "values", *_OF_SELF], windows))
        return RowSums(names, tuple(windows), heads, max(len(histogram_edges(name)) for name in names) - 1)

    @property
    def whole(self) -> int:
        """The number of those that count."""
        return self.heads * (2 + len(self.names) * (1 + self.bins))

    @property
    def size(self) -> int:
        """The number of all."""
        return self.whole + 4 * len(self.names) * self.heads

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor without rows."""
        sums = torch.empty(self.size, dtype=wide(device), device=device)
        self.clear(sums)
        return sums

    def clear(self, sums: Tensor) -> None:
        """Remove all rows."""
        sums[: self.whole] = 0.0
        sums[self.whole :] = math.nan

    def rows(self, sums: Tensor) -> Tensor:
        """Return the counted and the broken rows of each head, [2, H], a view."""
        return sums[: 2 * self.heads].view(2, self.heads)

    def moments(self, sums: Tensor) -> Moments:
        """Return the moments of all quantities, [N, H] and [N, H, bins], new tensors."""
        shape = len(self.names), self.heads
        counts = sums[2 * self.heads : self.whole].to(torch.int64)
        count, histogram = counts.split([math.prod(shape), math.prod(shape) * self.bins])
        mean, M2, least, most = sums[self.whole :].clone().view(4, *shape).unbind()
        return Moments(count.view(shape), mean, M2, least, most, histogram.view(*shape, self.bins))

    def add(self, sums: Tensor, part: LayerStats) -> None:
        """Add the rows of one call."""
        added = self.moments(sums).merge(self._together(part.moments, sums))
        counts = [self.rows(sums) + torch.stack([part.rows, part.broken]), added.count, added.histogram]
        numbers = [added.mean, added.M2, added.min, added.max]
        sums.copy_(torch.cat([x.flatten().to(sums.dtype) for x in (*counts, *numbers)]))

    def _together(self, moments: Mapping[str, Moments], like: Tensor) -> Moments:
        """Return moments by name as one; those that a call does not have count no row."""
        parts: list[Moments] = []
        for name in self.names:
            each = moments.get(name)
            if each is None:
                none = like.new_full((self.heads,), math.nan)
                zero = torch.zeros(self.heads, dtype=torch.int64, device=like.device)
                each = Moments(zero, none, none, none, none, zero[:, None])
            parts.append(each)
        return Moments(
            count=torch.stack([each.count for each in parts]),
            mean=torch.stack([each.mean for each in parts]),
            M2=torch.stack([each.M2 for each in parts]),
            min=torch.stack([each.min for each in parts]),
            max=torch.stack([each.max for each in parts]),
            histogram=torch.stack([F.pad(each.histogram, (0, self.bins - each.histogram.shape[1])) for each in parts]),
        )

    def layer(self, sums: Tensor, *, cross: bool, runs: int, looked_at: int, of: int, first: int) -> LayerStats:
        """Return the statistics of a layer, with the quantities of its kind."""
        together = self.moments(sums)
        absent: Collection[str] = quantity_names(_OF_SELF, self.windows) if cross else ()
        moments: dict[str, Moments] = {}
        for n, name in enumerate(self.names):
            if name not in absent:
                numbers = (together.count[n], together.mean[n], together.M2[n], together.min[n], together.max[n])
                moments[name] = Moments(*numbers, together.histogram[n, :, : len(histogram_edges(name)) - 1])
        rows, broken = self.rows(sums).to(torch.int64)
        return LayerStats(self.heads, runs, looked_at, of, rows, broken, moments, first=first)
