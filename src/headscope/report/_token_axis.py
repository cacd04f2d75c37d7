"""Axes of tokens for matplotlib: as many labels as fit, at any size of the figure. Imported with the first plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import Formatter, Locator, MaxNLocator

__all__ = ["MOST_NAMED", "TokenFormatter", "TokenLocator", "label_axis"]

MOST_NAMED = 200
"""With more tokens than this, an axis has positions: the thirtieth token of a text says nothing alone."""

LINE = 1.4
"""The height of a label, with a gap, as a multiple of the font size."""


class TokenLocator(Locator):
    """Positions at steps of 1, 2, 5, 10, … at which labels do not overlap; computed when the axes are drawn."""

    def __init__(self, count: int, size: float) -> None:
        self.count, self.size = count, size

    def every(self) -> int:
        """Return the step between labels."""
        assert self.axis is not None
        axis: Axis = self.axis  # pyright: ignore[reportAssignmentType]
        box = axis.axes.get_window_extent()
        pixels = box.width if isinstance(axis, XAxis) else box.height
        dpi = axis.axes.get_figure(root=True).dpi  # pyright: ignore[reportOptionalMemberAccess,reportCallIssue]
        low, high = sorted(axis.get_view_interval())
        each = pixels / dpi * 72 / max(high - low, 1e-9)  # points of a token
        least = max(1.0, LINE * self.size / max(each, 1e-9))
        ten = 10 ** math.floor(math.log10(least))
        return next(math.ceil(step * ten) for step in (1, 2, 5, 10) if step * ten >= least)

    def __call__(self) -> list[int]:
        """Return the positions in sight."""
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        every = self.every()
        first = max(0, math.ceil(low / every) * every)
        return list(range(first, min(self.count, math.floor(high) + 1), every))

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Return all positions."""
        return list(range(self.count))


class TokenFormatter(Formatter):
    """The tokens at positions: alone where every one has a label, else with their positions. A dollar is a dollar."""

    def __init__(self, labels: Sequence[str], locator: TokenLocator) -> None:
        self.labels, self.locator = list(labels), locator

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a position; empty between two of them."""
        at = round(x)
        if not 0 <= at < len(self.labels) or abs(x - at) > 1e-6:
            return ""
        return self.labels[at] if self.locator.every() == 1 else f"{at} {self.labels[at]}"

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the labels of ticks, and take formulas out of their texts."""
        assert self.axis is not None
        for tick in self.axis.get_major_ticks(len(values)):  # pyright: ignore[reportAttributeAccessIssue]
            tick.label1.set_parse_math(False)
            tick.label2.set_parse_math(False)
        return super().format_ticks([*values])


def label_axis(
    ax: Axes, which: Literal["x", "y"], labels: Sequence[str] | None, count: int, size: float | str | None
) -> None:
    """Give the x or y axis of a map its tokens, or positions where there are none or too many of them."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    points = FontProperties(size=size or _size(which)).get_size_in_points()
    ax.tick_params(axis=which, labelsize=points, length=2.5)
    if labels is None or count > MOST_NAMED:
        axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))
        return
    locator = TokenLocator(count, points)
    axis.set_major_locator(locator)
    axis.set_major_formatter(TokenFormatter(labels, locator))
    if which == "x":
        ax.tick_params(axis="x", labelrotation=90)


def _size(which: Literal["x", "y"]) -> Any:
    import matplotlib as mpl

    return mpl.rcParams["xtick.labelsize" if which == "x" else "ytick.labelsize"]
