"""The selected keys of a watched call, if a function selects them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from headscope._intercept import InterceptedCall
from headscope.masks import Mask
from headscope.stats import Observe


def with_layer(what: Observe, layer: str, call: InterceptedCall) -> Observe:
    """Return the options with a function that selects the keys of this layer.

    Raises:
        ValueError: q and k of the call are unknown.
    """
    policy = what.selected
    if not callable(policy):
        return what
    if call.is_written:
        raise ValueError(
            "selected: its function takes q and k, and the scores of this module are not their scaled product; "
            "expected indices or a mask, or other layers (layers=)"
        )

    def select_keys(_: str, q: Tensor, k: Tensor) -> Tensor | Mask:
        return policy(layer, q, k)

    return replace(what, selected=select_keys)
