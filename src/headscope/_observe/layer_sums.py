"""The sums of one attention layer over the calls of a step, in memory that an operator adds to.

Compiled code cannot build a ``HeadStats``: it has tensors only. So the statistics of the rows lie in two tensors of
fixed sizes, and ``headscope::observe_into`` adds each call to them. Nothing else of an observation has a size that does
not depend on the call.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from headscope._observe.inputs import Kind
from headscope.masks import Mask, as_mask
from headscope.stats import LayerStats, Observe, RowSums

ACTIVE, RUNS, CROSS, LOOKED_AT, OF, WIDTH, V_WIDTH, COUNTERS = range(8)
"""The places of the numbers on the host: whether the step is looked at, 0 or 1; its calls, and how many of them were
cross-attention; its observed rows, and all; the head widths of the last call.
"""

NAME = "_headscope_sums"
"""The attribute of a module that attends, while its calls are added to sums."""


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
        sums: as ``RowSums`` describes.
    """

    def __init__(self, name: str, heads: int, kind: Kind | None, what: Observe, device: torch.device) -> None:
        self.name = name
        self.kind = kind
        self.rows = what.rows if isinstance(what.rows, int) else 0
        self.first = what.first
        self.windows = [float(w) for w in what.windows]
        self.heads = heads
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device="cpu")
        self.layout = RowSums.of(self.windows, heads)
        self.sums = self.layout.empty(device)

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
        counted = {"runs": runs, "looked_at": looked_at, "of": of}
        part = self.layout.layer(self.sums, cross=cross > 0, first=self.first, **counted)
        kind = "cross" if cross else "self"
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
