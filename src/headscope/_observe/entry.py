"""Observe one attention call, outside the graph if it is compiled."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from headscope._attend import context
from headscope._observe.differentiable import measure_with_gradients
from headscope._observe.measure import SELF, Positions, measure_call
from headscope.masks import Mask
from headscope.stats import HeadStats, Observe


def observe_call(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: Tensor | None, what: Observe,
    positions: Positions = SELF, differentiable: tuple[str, ...] = (),
) -> HeadStats:  # fmt: skip
    """Measure the weights of a call; the arguments are those of ``headscope.observe``."""
    if context.active is not None:
        if differentiable:
            raise ValueError(
                "differentiable: expected none under context parallelism, where each rank holds a part of the keys"
            )
        return context.active.measure(q, k, v, mask, bias, sinks, scale, softcap, lse, what, positions)
    if differentiable:
        return _observe_with_gradients(
            q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, what, differentiable, positions
        )
    arguments = (q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, what, positions)
    if is_dynamo_compiling():  # a graph has no values to read
        from headscope._observe import eager  # this import loads torch's compiler

        return eager.measure(*arguments)
    return measure_call(*arguments)


def _observe_with_gradients(*arguments: Any) -> HeadStats:
    """Measure with a graph, outside the graph of a compiler; the arguments are those of ``measure_with_gradients``."""
    if is_dynamo_compiling():
        from headscope._observe import eager

        return eager.measure_with_gradients(*arguments)
    return measure_with_gradients(*arguments)
