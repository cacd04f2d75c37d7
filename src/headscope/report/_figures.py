"""The content of a sheet, from which its page and plots are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headscope.report._texts import visible
from headscope.report.fixed_keys import FIXED_KEY
from headscope.stats import Match

__all__ = ["Look", "Numbers", "SheetFigures"]

Numbers = list[float | None]
"""One value per head; None if no row of the head has it."""

Look = tuple[str, float]
"""A region of an image, and the attention on it as a multiple of chance."""


@dataclass(frozen=True, eq=False)
class SheetFigures:
    """The content of a sheet: one forward pass, measured.

    Layers, heads and tokens are counted from 0, as in code. Statistics are per head, over the rows of this input.

    Attributes:
        title: what was run, one line.
        kind: "text", or "image" where the tokens are patches of a grid.
        tokens: the text of each token, or the place of each patch.
        weights: for each layer the weights, float32 [H, T, T]: row = query, column = key.
        seen: for each layer the visible pairs, boolean [H, T, T], True = attend; None = all.
        statistics: for each layer name -> one mean per head.
        rows: for each layer name -> the number of rows of each mean.
        patterns: for each layer the best-matching pattern of each head, with its score, or None.
        also: for each layer the second pattern of each head that has one beyond chance, or None.
        trace: the steps of the forward pass, as ``Trace.to_dict()`` gives its rows.
        trace_title: the heading of the trace.
        footer: model, input, options, rows, versions: label -> text.
        notes: what a reader must know about this input, such as that it was cut.
        image: the image of the patches, uint8 [h, w] or [h, w, 3].
        grid: rows and columns of patches.
        regions: for each layer region -> one ratio per head; 1 = chance.
        looks: for each layer the region that each head attends to most, with its ratio.
        region_maps: region -> the share of each patch that belongs to it, 0 to 1, if it is the same for all queries.
        opens_on: the layer and head that the page opens first; None = the most striking one.
        tiles: for each layer access to its weights from q and k, or None; the page explains weights of up to 8 heads.
    """

    title: str
    kind: Literal["text", "image"]
    tokens: Sequence[str]
    weights: Sequence[NDArray[np.float32]]
    seen: Sequence[NDArray[np.bool_] | None]
    statistics: Sequence[Mapping[str, Numbers]]
    rows: Sequence[Mapping[str, list[int]]]
    patterns: Sequence[Sequence[Match | None]]
    also: Sequence[Sequence[Match | None]] = ()
    trace: Sequence[Mapping[str, Any]] = ()
    trace_title: str = ""
    footer: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: Sequence[str] = ()
    image: NDArray[np.uint8] | None = None
    grid: tuple[int, int] | None = None
    regions: Sequence[Mapping[str, Numbers]] = ()
    looks: Sequence[Sequence[Look | None]] = ()
    region_maps: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    opens_on: tuple[int, int] | None = None
    tiles: Sequence[Any] = ()

    @property
    def named_looks(self) -> Sequence[Sequence[Look | None]]:
        """``looks``, with None for a head with most of its weight on one patch: only that patch is in the region."""
        if not self.looks:
            return self.looks
        return [
            [
                None if match is not None and match.pattern == FIXED_KEY else look
                for look, match in zip(*each, strict=True)
            ]
            for each in zip(self.looks, self.patterns, strict=True)
        ]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.weights)

    @property
    def heads(self) -> int:
        """The number of heads of the widest layer."""
        return max(len(weights) for weights in self.weights)

    @property
    def labels(self) -> list[str]:
        """The tokens as the page shows them, see ``visible``."""
        return [visible(token) for token in self.tokens]
