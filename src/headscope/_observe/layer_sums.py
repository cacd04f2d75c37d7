"""The sums of one attention layer over the calls of a step, in memory that an operator adds to.

Compiled code cannot build a ``HeadStats``: it has tensors only. So the statistics of the rows lie in two tensors of
fixed sizes, and ``headscope::observe_into`` adds each call to them. Nothing else of an observation has a size that does
not depend on the call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from headscope._observe.inputs import Kind
from headscope.masks import Mask, as_mask
from headscope.stats import Observe, histogram_edges, quantity_names
from headscope.stats._layer import LayerStats, Moments, wide

ACTIVE, RUNS, CROSS, LOOKED_AT, OF, WIDTH, V_WIDTH, COUNTERS = range(8)
"""The places of the numbers on the host: whether the step is looked at, 0 or 1; its calls, and how many of them were
cross-attention; its observed rows, and all; the head widths of the last call.
"""

_OF_SELF = ("positions", "line")  # requirements that cross-attention does not meet
NAME = "_headscope_sums"
"""The attribute of a module that attends, while its calls are added to sums."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of the sums in one tensor of ``wide`` numbers.

    The order is: counted rows and broken rows [2, H], the counts [N, H], the histograms [N, H, bins], and mean, M2,
    minimum and maximum [4, N, H].
    """

    names: tuple[str, ...]
    heads: int
    bins: int

    @staticmethod
    def of(windows: Sequence[float], heads: int) -> Layout:
        """Return the layout of all quantities of self-attention; cross-attention does not have some of them."""
        names = tuple(quantity_names(["weights", "values", *_OF_SELF], windows))
        return Layout(names, heads, max(len(histogram_edges(name)) for name in names) - 1)

    @property
    def whole(self) -> int:
        """The number of those that count."""
        return self.heads * (2 + len(self.names) * (1 + self.bins))

    @property
    def size(self) -> int:
        """The number of all."""
        return self.whole + 4 * len(self.names) * self.heads

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


class StepOfLayer(NamedTuple):
    """The statistics of one layer in a step, its kind, and the head widths of q and k, and of v."""

    part: LayerStats
    kind: Kind
    widths: tuple[int, int]


class LayerSums:
    """The sums of one layer, and the options of its observation.

    A layer adds its calls while the number ``counters[ACTIVE]`` is not 0. The operator reads that number when it runs:
    so a graph serves all steps, and another step costs the call of the operator.

    Args:
        name: of the layer, for errors.
        heads: the number of query heads.
        kind: "self" or "cross", if the caller specifies it; None: by the calls.
        what: ``rows``, ``windows`` and ``first`` count.
        device: of q.

    Attributes:
        counters: int64 [7] on the host: ACTIVE, RUNS and so on.
        sums: as ``Layout`` describes.
    """

    def __init__(self, name: str, heads: int, kind: Kind | None, what: Observe, device: torch.device) -> None:
        self.name = name
        self.kind = kind
        self.rows = what.rows if isinstance(what.rows, int) else 0
        self.first = what.first
        self.windows = [float(w) for w in what.windows]
        self.heads = heads
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device="cpu")
        self.layout = Layout.of(self.windows, heads)
        self.sums = torch.zeros(self.layout.size, dtype=wide(device), device=device)
        self.layout.clear(self.sums)

    def begin(self) -> None:
        """Start a step that is looked at."""
        self.counters.zero_()
        self.layout.clear(self.sums)
        self.counters[ACTIVE] = 1

    def stop(self) -> None:
        """End a step without a result."""
        self.counters.zero_()

    def end(self) -> StepOfLayer | None:
        """End it, and return its statistics; None: the layer did not run.

        Raises:
            ValueError: it was self-attention in some calls, and cross-attention in others.
        """
        _, runs, cross, looked_at, of, *widths = self.counters.tolist()
        self.counters.zero_()
        if not runs:
            return None
        if cross not in (0, runs):
            raise ValueError(
                f"layer {self.name}: attended to its own input in {runs - cross} calls of one step and to another one "
                f'in {cross}, expected one kind; give kinds={{"{self.name}": "self" or "cross"}}'
            )
        layout, kind = self.layout, "cross" if cross else "self"
        all_ = layout.moments(self.sums)
        having = ["weights", "values", *(() if cross else _OF_SELF)]
        moments: dict[str, Moments] = {}
        for name in quantity_names(having, self.windows):
            n, bins = layout.names.index(name), len(histogram_edges(name)) - 1
            numbers = (all_.count[n], all_.mean[n], all_.M2[n], all_.min[n], all_.max[n])
            moments[name] = Moments(*numbers, all_.histogram[n, :, :bins])
        rows, broken = layout.rows(self.sums).to(torch.int64)
        part = LayerStats(self.heads, runs, looked_at, of, rows, broken, moments, first=self.first)
        return StepOfLayer(part, kind, (widths[0], widths[1]))

    def add(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        scale: float | None, softcap: float | None, *, cross: bool,
    ) -> None:  # fmt: skip
        """Add an attention call, with arguments as for ``headscope.attention``, if the step is looked at.

        ``cross``: whether it attends to another sequence, unless the caller of the watch has specified the kind.
        """
        if not is_compiling() and not int(self.counters[ACTIVE]):
            return
        mask = as_mask(mask)
        codes: list[int] = []
        parts: list[Tensor] = []
        if mask is not None:
            batch = math.prod(q.shape[:-3])
            mask.encode((batch, q.shape[-3], q.shape[-2], k.shape[-2]), q.device, codes, parts)
        tensors: Any = [None if x is None else x.detach() for x in (q, k, v, bias, sinks)]
        numbers = (q.shape[-1] ** -0.5 if scale is None else scale, softcap or 0.0)
        cross = cross if self.kind is None else self.kind == "cross"
        options = (cross, self.rows, self.first, self.windows, self.name)
        torch.ops.headscope.observe_into(*tensors, codes, parts, *numbers, *options, self.counters, self.sums)
