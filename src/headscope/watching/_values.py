"""The values of a layer that trackers receive, and their way to the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headscope.stats import LayerStats

LARGEST = "max_logit_max"
"""The name under which the largest ``max_logit`` of a head's rows is logged."""


def values_of(part: LayerStats) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield quantity, mean of each head [H] and its number of rows [H]; None: the value is a maximum."""
    for quantity, moments in part.moments.items():
        yield quantity, moments.mean, moments.count
        if quantity == "max_logit":
            yield LARGEST, moments.max, None
    for pair, (mean, count) in ({} if part.segments is None else part.segments.pairs()).items():
        yield pair, mean, count


def to_host(values: Tensor) -> tuple[Tensor, Any]:
    """Return a tensor on the host, and the event of its arrival; None: it is there. Nothing waits for the device."""
    if values.device.type == "cpu":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.device.type == "cuda")
    host.copy_(values, non_blocking=True)
    arrived = torch.Event(values.device)
    arrived.record()
    return host, arrived
