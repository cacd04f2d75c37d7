"""Heads that retain their mass in a window and on the first keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope._analysis.answers import Basis, Decision, HasStats, share, stats_of
from headscope._support.arguments import number
from headscope.stats import HeadStats, histogram_edges

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.stats._layer import LayerStats, Moments

__all__ = ["StreamingHead", "StreamingHeads", "streaming_heads"]


@dataclass(frozen=True)
class StreamingHead:
    """The mass that one head retains in a window and on the first keys.

    Attributes:
        layer, head: the head.
        window: the smallest sufficient observed distance, in positions; None = none suffices.
        kept: the share of its mass within ``window``, or within the largest observed one if none suffices.
        rows_kept: the share of its rows that retain at least ``StreamingHeads.keep``; None if the histogram of twenty
            bins does not determine it.
        sees: the largest number of visible keys of a row.
        rows: the number of rows.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> from headscope.decisions import streaming_heads
        >>> q = 40 * torch.eye(8)[None, None]  # each row attends to its own key
        >>> head = streaming_heads(observe(q, q, what=Observe(windows=(1, 4)))).heads[0]
        >>> head.window, round(head.kept, 3), head.sees
        (1.0, 1.0, 8)
    """

    layer: str
    head: int
    window: float | None
    kept: float
    rows_kept: float | None
    sees: int
    rows: int


@dataclass(frozen=True)
class StreamingHeads(Decision):
    """Heads for which a cache of a window and the first keys suffices; see ``streaming_heads``.

    Attributes:
        keep: the share of the mass to retain.
        windows: the distances that were observed.
        heads: every head, in the order of the model.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> from headscope.decisions import streaming_heads
        >>> q = 40 * torch.eye(8)[None, None]  # each row attends to its own key
        >>> answer = streaming_heads(observe(q, q, what=Observe(windows=(1, 4))))
        >>> answer.keep, answer.windows, len(answer.streaming)
        (0.95, (1.0, 4.0), 1)
    """

    keep: float
    windows: tuple[float, ...]
    heads: tuple[StreamingHead, ...]

    @property
    def streaming(self) -> tuple[StreamingHead, ...]:
        """The heads for which some window suffices."""
        return tuple(head for head in self.heads if head.window is not None)

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head", "window", "kept", f"rows ≥ {self.keep:.0%}", "sees", "rows")

    def cells(self) -> list[tuple[str, ...]]:
        """Return the lines, heads with the smallest windows first."""
        last = math.inf
        order = sorted(self.heads, key=lambda each: last if each.window is None else each.window)
        return [
            (
                each.layer,
                str(each.head),
                "none" if each.window is None else f"{each.window:g}",
                share(each.kept),
                share(math.nan if each.rows_kept is None else each.rows_kept),
                f"{each.sees:,}",
                f"{each.rows:,}",
            )
            for each in order
        ]

    def caption(self) -> str:
        """Return the caption of the table."""
        text = f"{len(self.streaming)} of {len(self.heads)} heads retain {self.keep:.0%} of their mass in a window."
        return f"{text} {super().caption()}"


def streaming_heads(stats: HeadStats | HasStats, keep: float = 0.95) -> StreamingHeads:
    """Return which heads retain their mass in a window plus the first keys, so a cache of those suffices.

    The result lists for each head the smallest observed window w with mean ``streaming_w`` / mean ``mass`` >= keep. A
    window that holds all visible keys of every row of the head, except the first key, is not informative and is
    skipped.

    Args:
        stats: with ``Observe(windows=...)``; ``Observe.first`` is the number of first keys.
        keep: the share of the mass, above 0 and below 1. The share of rows is exact where this is a multiple of 0.05,
            an edge of the histogram; between edges it is that of the next edge above.

    Raises:
        TypeError: keep is not a number.
        ValueError: keep is out of range, or no window was observed.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> from headscope.decisions import streaming_heads
        >>> q = 40 * torch.stack([torch.eye(8), torch.zeros(8, 8)])[None]
        >>> answer = streaming_heads(observe(q, q, what=Observe(windows=(1, 4))))
        >>> [head.window for head in answer.heads]
        [1.0, None]
    """
    if not 0 < number("keep", keep) < 1:
        raise ValueError(f"keep: got {keep}, expected a share above 0 and below 1")
    observed = stats_of(stats)
    parts = {layer: part for layer, part in observed.parts.items() if _windows(part)}
    if not parts:
        raise ValueError("streaming_heads: no window was observed; observe with Observe(windows=(64, 256))")
    heads = [each for layer, part in parts.items() for each in _streaming(layer, part, keep)]
    windows = tuple(sorted({w for part in parts.values() for w in _windows(part)}))
    names = tuple(f"streaming_{w:g}" for w in windows)
    basis = Basis.of_layers(parts.values(), names, [head.rows for head in heads])
    caveat = "Measured on this input: on a longer or another text a head may need keys that it does not need here."
    if wide := [w for w in windows if all(_holds_all(part, w).all() for part in parts.values() if w in _windows(part))]:
        caveat += (
            f" No row has more visible keys than a window of {', '.join(f'{w:g}' for w in wide)}, so these "
            "windows are not informative."
        )
    if missing := [layer for layer in observed.layers if layer not in parts]:
        caveat += f" Excluded, because no window was observed: {', '.join(missing)}."
    return StreamingHeads(basis, caveat, keep, windows, tuple(heads))


def _windows(part: LayerStats) -> list[float]:
    """The observed distances, ascending."""
    return sorted(float(name.removeprefix("streaming_")) for name in part.moments if name.startswith("streaming_"))


def _streaming(layer: str, part: LayerStats, keep: float) -> Iterator[StreamingHead]:
    mass, most = part.moments["mass"].mean, _most_keys(part)
    for head in range(part.heads):
        sees = int(most[head])
        window, mass_kept, rows_kept, rows = None, math.nan, None, 0
        for w in _windows(part):
            moments = part.moments[f"streaming_{w:g}"]
            mass_kept = float(moments.mean[head] / mass[head])
            rows_kept, rows = _rows_above(keep, moments, head), int(moments.count[head])
            if _holds_all(part, w)[head]:
                break
            if mass_kept >= keep:
                window = w
                break
        yield StreamingHead(layer, head, window, mass_kept, rows_kept, sees, rows)


def _most_keys(part: LayerStats) -> Tensor:
    """Return the largest number of visible keys of a row, for each head."""
    return (1 / part.moments["chance"].min).nan_to_num(0.0).round().long()


def _holds_all(part: LayerStats, w: float) -> Tensor:
    """Return whether a window with the first key holds all visible keys of every row, for each head.

    A row with w + 2 visible keys includes the first key, or another one beyond the window: then some mass is missing,
    or the first key is not visible to all rows.
    """
    most, ratio = _most_keys(part), part.moments[f"streaming_{w:g}"].mean / part.moments["mass"].mean
    with_first = (w == most - 2) & (ratio >= 1 - 1e-6)
    if part.eligible is not None:
        with_first &= part.eligible[:, 0] == part.moments["mass"].count
    return (w >= most - 1) | with_first


def _rows_above(least: float, moments: Moments, head: int) -> float | None:
    """Return the share of rows with at least this, or at least the next edge of the histogram."""
    edges = histogram_edges("streaming")
    first = next((at for at, edge in enumerate(edges) if edge >= least - 1e-9), len(edges))
    counts = moments.histogram[head]
    rows = int(moments.count[head])
    return float(counts[first:].sum()) / rows if rows and first < len(counts) else None


for _class in (StreamingHead, StreamingHeads):
    _class.__module__ = "headscope.decisions"  # their public path
