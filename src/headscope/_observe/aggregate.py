"""Aggregation of one observed call to the statistics of a layer: rows pooled, batch entries summed, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._observe.exchange import EVEN, sum_nulls, to_exchange
from headscope._observe.inputs import Request, to_reductions
from headscope._observe.kept_tiles import ObservedTiles, keep_tiles
from headscope._observe.native_observer import Ready
from headscope._observe.result import Observed
from headscope._observe.scene import Scene
from headscope._observe.segment_nulls import sum_segment_nulls
from headscope.stats import HeadWeights, Observe, SegmentMass
from headscope.stats._layer import Edges, HeadMap, Kept, LayerStats, Moments, Nulls

LayerOf = Callable[[], LayerStats]
"""Returns the layer of one call, or of several."""


class Counts(NamedTuple):
    """How much a layer was observed; see ``LayerStats``."""

    runs: int
    looked_at: int
    of: int
    lengths: tuple[int, int] | None


class LazyLayer(Mapping[str, LayerStats]):
    """The layer of one call, or of several alike ones, built on first access. As a function it returns this layer.

    Attributes:
        ready: the observation; of several calls, that with the most keys; ``Ready.light`` is enough.
        what: its options.
        memory: the results, for ``Ready.observed``.
        weights: those of chosen heads, of each call.
        again: the observation, to measure further calls.
    """

    def __init__(
        self, ready: Ready, what: Observe, memory: Tensor, weights: tuple[HeadWeights, ...] = (),
        counts: Counts | None = None, again: Ready | None = None,
    ) -> None:  # fmt: skip
        self.ready = ready
        self.what = what
        self.memory = memory
        self.weights = weights
        self.again = again
        self._counts = counts
        self._layer: LayerStats | None = None

    @property
    def counts(self) -> Counts:
        """How much was observed."""
        if self._counts is None:
            self._counts = _counts(self.ready.call, self.what, self.ready)
        return self._counts

    def __call__(self) -> LayerStats:
        layer = self._layer
        if layer is None:
            ready, observed = self.ready, self.ready.observed(self.memory)
            layer = layer_stats(ready.call, self.what, ready, observed, None, nulls=ready.exchange is not None)
            if self._counts is not None or self.weights:
                layer = replace(layer, **self.counts._asdict(), weights=self.weights)
            self._layer = layer
        return layer

    def __getitem__(self, name: str) -> LayerStats:
        if name != "0":
            raise KeyError(name)
        return self()

    def __iter__(self) -> Iterator[str]:
        return iter(("0",))

    def __len__(self) -> int:
        return 1

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def layer_stats(
    call: Call, what: Observe, known: Scene | Ready, observed: Observed, tiles: ObservedTiles | None,
    *, nulls: bool = True,
) -> LayerStats:  # fmt: skip
    """Return the statistics of one call as one layer of one run; ``nulls``: with what chance gives."""
    counts = _counts(call, what, known)
    moments = observed.moments
    if moments is None:
        moments = {name: Moments.of(name, rows) for name, rows in observed.rows.items() if name != "argmax"}
    received, eligible, rows = None, None, observed.rows_counted
    if observed.received is not None and observed.eligible is not None:
        received, eligible = (_filed(x, known.first_key) for x in (observed.received, observed.eligible))
    masses, maxima = None, observed.received_max
    of_rows, of_segments = _nulls(what, known, observed) if nulls else (None, None)
    if what.segments is not None and observed.segments is not None:
        masses = SegmentMass.of(what.segments, *observed.segments, of_segments)
    if rows is None:
        assert observed.counted is not None  # one of them is present
        rows = observed.counted.sum((0, 2))
    return LayerStats(
        heads=call.heads,
        **counts._asdict(),
        rows=rows,
        broken=observed.broken,
        moments=moments,
        received=received,
        eligible=eligible,
        map=_placed_map(observed.map, known.whole_sequence.start),
        edges=_placed_edges(observed.edges, known.whole_sequence.start),
        kept=_kept_rows(what, known, observed),
        tiles={} if tiles is None else {0: tiles},
        first=what.first if what.row_stats else None,
        segments=masses,
        received_max=None if maxima is None else _filed(maxima, known.first_key, math.nan),
        nulls=of_rows,
    )


def _counts(call: Call, what: Observe, known: Scene | Ready) -> Counts:
    """Return how much one call observes."""
    looked_at = call.queries if not isinstance(what.rows, int) else min(what.rows, call.queries)
    return Counts(1, call.batch * looked_at, call.batch * call.queries, known.whole_sequence[1:])


def _nulls(what: Observe, known: Scene | Ready, observed: Observed) -> tuple[Nulls | None, Tensor | None]:
    """Return what chance gives, for rows and for segments, if rows are measured."""
    if observed.nulls is not None or not what.row_stats or not isinstance(known, Scene):
        return observed.nulls, observed.segment_nulls
    names = tuple(name for name in observed.rows if name != "argmax")
    exchange = to_exchange(to_reductions(what), known, names)
    nulls = Nulls(*sum_nulls(exchange, observed.rows))
    return nulls, None if exchange.segments is None else sum_segment_nulls(
        exchange.segments, known, observed.rows, EVEN
    )


def _placed_map(cells: HeadMap | None, start: int) -> HeadMap | None:
    """Return a map whose places count queries from the first one of the whole sequence."""
    return cells if cells is None or not start else replace(cells, places=_placed(cells.places, start))


def _placed_edges(edges: Edges | None, start: int) -> Edges | None:
    return edges if edges is None or not start else replace(edges, at=_placed(edges.at, start))


def _placed(at: Tensor, start: int) -> Tensor:
    """Return places whose last two numbers are query and key, -1 for none, with the query ``start`` rows later."""
    at = at.clone()
    at[..., -2] += torch.where(at[..., -2] >= 0, start, 0).to(at.dtype)
    return at


def _filed(columns: Tensor, first_key: int, fill: float = 0) -> Tensor:
    """Return key quantities by absolute position."""
    if first_key == 0:
        return columns
    return torch.nn.functional.pad(columns, (first_key, 0), value=fill)


def tiles_of(request: Request, known: Scene | Ready) -> ObservedTiles | None:
    """Return access to the weights, if the options retain q and k."""
    return keep_tiles(request, known) if isinstance(known, Scene) and request.what.keep_qk else None


def _kept_rows(what: Observe, known: Scene | Ready, observed: Observed) -> tuple[Kept, ...]:
    values: dict[str, Tensor] = dict(observed.rows) if what.keep_rows else {}
    if observed.top is not None:
        values |= {"top_keys": observed.top.at, "top_weights": observed.top.p}
    if not values:
        return ()
    assert observed.counted is not None  # it is, whenever rows are retained
    index = torch.tensor(list(known.rows), dtype=torch.long, device="cpu") + known.whole_sequence.start
    return (Kept(index, observed.counted, values),)
