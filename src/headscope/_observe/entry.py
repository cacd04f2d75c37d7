"""Observe one attention call, outside the graph if it is compiled."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from headscope._observe.measure import SELF, Positions, measure
from headscope.masks import Mask
from headscope.stats import HeadStats, Observe


def observe_call(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: Tensor | None, what: Observe,
    positions: Positions = SELF,
) -> HeadStats:  # fmt: skip
    """Measure the weights of a call; the arguments are those of ``headscope.observe``."""
    arguments = (q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, what, positions)
    if is_dynamo_compiling():  # a graph has no values to read
        from headscope._observe import eager  # this import loads torch's compiler

        return eager.measure(*arguments)
    return measure(*arguments)
