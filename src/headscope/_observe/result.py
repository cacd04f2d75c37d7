"""The result of one pass over the weights, in the portable form and in the native one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from headscope._observe.edges import Candidates
from headscope.stats._layer import Edges, HeadMap, Moments, Nulls


class Observed(NamedTuple):
    """The result of one pass over the weights; R counts the rows of ``Scene``.

    Attributes:
        rows: name -> [B, H, R], NaN where a row does not count or does not have the quantity; argmax is int64, there
            -1. If moments are known, only if the options retain rows.
        counted: which rows count, boolean [B, H, R]; None if their number is known and the options do not retain them.
        broken: the number of rows of each head excluded because they are not finite, int64 [H].
        received, eligible: over the batch, float64 and int64 [H, K], or None.
        map, edges: see there; or None.
        top: keys, int64, and weights of each row's largest, [B, H, R, k] both, or None.
        moments: of the rows, if they are known already.
        rows_counted: the number of counted rows of each head, int64 [H], if known already.
        segments: sum, float64 [H, S, S], and count, int64 [H, S], of the segments, and the part of the sum on the first
            keys, [H, S, S]; or None.
        received_max: the largest weight of each key, [H, K], NaN where no counted row has one, or None.
        nulls: what chance gives for the rows, if known already.
        segment_nulls: what it gives for the sums of segments, [2, H, S, S], if known already.
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
    segments: tuple[Tensor, Tensor, Tensor] | None = None
    received_max: Tensor | None = None
    nulls: Nulls | None = None
    segment_nulls: Tensor | None = None
