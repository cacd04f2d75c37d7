"""Alike calls of a layer as one, before their statistics are built: to build and merge each takes many times as long.

All numbers are those of ``LayerStats.merge``, call by call, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headscope._observe.aggregate import LayerOf, LazyLayer
from headscope._observe.native_observer import Ready, pool_moments

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
        if not isinstance(other, LazyLayer) or (other.ready, other.what) != (first.ready, first.what):
            break
        alike.append(other)
    if len(alike) == 1:
        return [*layers]
    memory = _pool(first.ready, [each.memory for each in alike])
    weights = tuple(run for each in alike for run in each.weights)
    runs = sum(each.runs for each in alike)
    return [LazyLayer(first.ready, first.what, memory, weights, runs), *layers[len(alike) :]]


def _can_pool(ready: Ready) -> bool:
    """Return whether the results of several calls have the form of those of one, without the places of the largest.

    The masses of segments with first keys are sums that would round in another order.
    """
    return ready.results.keys() <= _POOLED and (ready.segments is None or not ready.segments.holders)


def _pool(ready: Ready, memories: Sequence[Tensor]) -> Tensor:
    """Return the memory of the results of several calls together."""
    together, several = torch.empty_like(memories[0]), torch.stack([*memories])
    each = {name: part.of_each(several) for name, part in ready.results.items()}
    for name, runs in each.items():
        into = ready.results[name].of(together)
        if name == "received_max":
            torch.amax(runs, 0, out=into)
        elif name == "numbers":
            pool_moments(each["whole"], runs, into)
        elif runs.dtype == torch.int64:
            torch.sum(runs, 0, out=into)
        else:
            first, *others = runs.unbind()
            into.copy_(first)
            for other in others:
                into.add_(other)
    return together
