"""Alike calls of a layer as one, before their statistics are built: to build and merge each takes many times as long.

Calls are alike if they differ only in their numbers of queries and keys, such as the steps of a text that is generated.
All numbers are those of ``LayerStats.merge``, call by call, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from headscope._observe.aggregate import Counts, LayerOf, LazyLayer
from headscope._observe.native_observer import Ready, pool_results

_POOLED = {
    "received", "eligible", "received_max", "segment_sum", "segment_count", "whole", "numbers", "nulls",
    "segment_nulls",
}  # fmt: skip
"""The results, by name as in ``PLACES``, of which those of several calls follow from those of each."""


def pooled(layers: Sequence[LayerOf]) -> list[LayerOf]:
    """Return the same layers, in order, with the first ones as one if they are alike and that is possible.

    Later ones would be sums of their own, to be added to those before: they would round in another order.
    """
    first, *others = layers
    if not isinstance(first, LazyLayer) or not _can_pool(first.ready):
        return [*layers]
    alike = [first]
    for other in others:
        if not isinstance(other, LazyLayer) or other.what != first.what or not _are_alike(first.ready, other.ready):
            break
        alike.append(other)
    if len(alike) == 1:
        return [*layers]
    ready = max((each.ready for each in alike), key=lambda each: each.call.keys)
    weights = tuple(run for each in alike for run in each.weights)
    memory = pool_results(ready, [(each.ready, each.memory) for each in alike])
    return [LazyLayer(ready, first.what, memory, weights, _counts(alike)), *layers[len(alike) :]]


def _can_pool(ready: Ready) -> bool:
    """Return whether the results of several calls have the form of those of one, without the places of the largest.

    The masses of segments with first keys are sums that would round in another order.
    """
    return ready.results.keys() <= _POOLED and (ready.segments is None or not ready.segments.holders)


def _are_alike(a: Ready, b: Ready) -> bool:
    """Return whether two observations have the same results, except of how many keys."""
    if a is b:
        return True
    of_segments = a.segments is not None or b.segments is not None  # whose tokens may differ
    return not of_segments and a.form == b.form


def _counts(layers: Sequence[LazyLayer]) -> Counts:
    """Return how much all observed."""
    runs, looked_at, of, lengths = zip(*(each.counts for each in layers), strict=True)
    return Counts(sum(runs), sum(looked_at), sum(of), lengths[0] if len({*lengths}) == 1 else None)
