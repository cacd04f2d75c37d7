"""What one pass over the weights returns, in the portable form and in the native one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from headscope._observe.edges import Candidates
from headscope.stats._layer import Edges, HeadMap, Moments


class Observed(NamedTuple):
    """What one pass over the weights leaves behind; R counts the rows of ``Scene``.

    Attributes:
        rows: name -> [B, H, R], NaN where a row does not count or has no such quantity; argmax is int64, there -1.
            Where moments are known, only if rows are to be kept.
        counted: which rows count, boolean [B, H, R]; None where their number is known and they are not to be kept.
        broken: how many of each head are left out because they are not finite, int64 [H].
        received, eligible: over the batch, float64 and int64 [H, K], or None.
        map, edges: see there; or None.
        top: keys, int64, and weights of each row's largest, [B, H, R, k] both, or None.
        moments: of the rows, where they are known already.
        rows_counted: how many rows of each head count, int64 [H], where that is known already.
    """

    rows: dict[str, Tensor]
    counted: Tensor | None
    broken: Tensor
    received: Tensor | None
    eligible: Tensor | None
    map: HeadMap | None
    edges: Edges | None
    top: Candidates | None
    moments: Mapping[str, Moments] | None = None
    rows_counted: Tensor | None = None
