"""What a sheet holds; the pages and plots of a sheet are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headscope.report._texts import visible
from headscope.stats import Match

__all__ = ["Look", "Numbers", "SheetFigures"]

Numbers = list[float | None]
"""One figure a head; None where no row of the head has it."""

Look = tuple[str, float]
"""A region of an image and how many times the attention falls on it that chance would give."""


@dataclass(frozen=True, eq=False)
class SheetFigures:
    """What a sheet holds: one forward pass, measured.

    Layers, heads and tokens are counted from 0, as in code. Statistics are per head, over the rows of this input.

    Attributes:
        title: what was run, one line.
        kind: "text", or "image" where the tokens are patches of a grid.
        tokens: the text of each token, or the place of each patch.
        weights: for each layer the weights, float32 [H, T, T]: row = query (it looks), column = key (it is looked at).
        seen: for each layer what each query of each head may see, boolean [H, T, T]; None = everything.
        statistics: for each layer name -> one mean a head.
        rows: for each layer name -> on how many rows each mean stands.
        patterns: for each layer the pattern that each head matches best, with its score, or None.
        trace: the steps of the forward pass, as ``Trace.to_dict()`` gives its rows.
        trace_title: what the trace is of.
        footer: model, input, options, rows, versions: label -> text.
        notes: what a reader has to know of this input, such as that it was cut.
        image: what the patches are of, uint8 [h, w] or [h, w, 3].
        grid: rows and columns of patches.
        regions: for each layer region -> one ratio a head; 1 is what chance gives.
        looks: for each layer the region that each head looks at most, with its ratio.
        region_maps: region -> how far each patch belongs to it, 0 to 1, where it is the same for all queries.
    """

    title: str
    kind: Literal["text", "image"]
    tokens: Sequence[str]
    weights: Sequence[NDArray[np.float32]]
    seen: Sequence[NDArray[np.bool_] | None]
    statistics: Sequence[Mapping[str, Numbers]]
    rows: Sequence[Mapping[str, list[int]]]
    patterns: Sequence[Sequence[Match | None]]
    trace: Sequence[Mapping[str, Any]] = ()
    trace_title: str = ""
    footer: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: Sequence[str] = ()
    image: NDArray[np.uint8] | None = None
    grid: tuple[int, int] | None = None
    regions: Sequence[Mapping[str, Numbers]] = ()
    looks: Sequence[Sequence[Look | None]] = ()
    region_maps: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.weights)

    @property
    def heads(self) -> int:
        """How many heads the widest layer has."""
        return max(len(weights) for weights in self.weights)

    @property
    def labels(self) -> list[str]:
        """The tokens as they are shown: see ``visible``."""
        return [visible(token) for token in self.tokens]
