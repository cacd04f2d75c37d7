"""The weight between the segments of a sequence; and quantities of keys, merged by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

import torch
from torch import Tensor

from headscope.stats._nulls import Null
from headscope.stats._part import Part
from headscope.stats._segment_sources import ImageRows
from headscope.stats._segments import Segments

__all__ = ["SegmentMass", "spans_of"]

Span = tuple[int, int, int]
"""A segment, its first key, and the first key after it."""


@dataclass(frozen=True, eq=False)
class SegmentMass(Part):
    """The weight that flows between the segments of a sequence: row = the query's segment, column = the key's.

    ``mass[query, key]`` is the mean of one pair of names, [H]. Weight on keys without a segment is in no column.

    Attributes:
        names: of the segments, S of them.
        sum: the sum of the weights, float64 [H, S, S].
        count: the number of counted rows whose query is in each segment, int64 [H, S].
        spans: (segment, start, stop) of the keys, in order: segment n has the keys from start up to stop. Empty where
            batch entries or calls differ.
        images: of each image in the prompt its name, columns of patches, and the first key of each row of patches.
        first_sum: the part of ``sum`` on the first keys, those of the row quantity ``first``; None if it is unknown,
            see ``first``.
        null_sums: the sums of what chance gives, and of its variance, over the counted rows, [2, H, S, S]; None without
            row quantities, in files of earlier versions, and where a weight of 0 may be that of a masked key.

    Examples:
        >>> import torch
        >>> from headscope import Observe, Segments, observe
        >>> q = torch.zeros(1, 1, 4, 8)  # equal logits: even rows
        >>> observe(q, q, what=Observe(segments=Segments(["a", "b"], [0, 1, 1, 1]))).segments.mean
        tensor([[[0.2500, 0.7500],
                 [0.2500, 0.7500]]], dtype=torch.float64)
    """

    names: tuple[str, ...]
    sum: Tensor
    count: Tensor
    spans: tuple[Span, ...] = ()
    images: tuple[ImageRows, ...] = ()
    first_sum: Tensor | None = None
    null_sums: Tensor | None = None

    @staticmethod
    def of(
        segments: Segments, total: Tensor, count: Tensor, first: Tensor, null_sums: Tensor | None = None
    ) -> SegmentMass:
        """Return the mass of one call from its sums and counts; without ids of queries, with the places of the keys."""
        spans = spans_of(segments.ids) if segments.query_ids is None else ()
        return SegmentMass(segments.names, total, count, spans, segments.images if spans else (), first, null_sums)

    @property
    def mean(self) -> Tensor:
        """The mean over counted rows of the weight on a segment, [H, S, S]; NaN for a segment without such rows."""
        return self.sum / self.count[..., None]

    @property
    def first(self) -> Tensor:
        """The part of ``mean`` on the first keys, [H, S, S]: the attention sink, in the segment that holds it.

        Raises:
            ValueError: it is unknown, as in files of earlier versions, and where a weight of 0 may be a masked one.
        """
        if self.first_sum is None:
            raise ValueError(
                "segments: the weight on the first keys is unknown, because the file is of an earlier version, or a "
                "weight of 0 may be that of a masked key; observe again, or mask the scores before the softmax"
            )
        return self.first_sum / self.count[..., None]

    def without_first(self) -> Tensor:
        """Return ``mean`` without the weight on the first keys, [H, S, S].

        It is still the share of all the weight of a row: the other keys are not scaled up to a sum of 1.

        Raises:
            ValueError: see ``first``.

        Examples:
            >>> import torch
            >>> from headscope import Observe, Segments, observe
            >>> q, k = torch.ones(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)
            >>> k[:, :, 0] = 1.0  # each row has most of its weight on the first key
            >>> mass = observe(q, k, what=Observe(segments=Segments(["a", "b"], [0, 0, 1, 1]))).segments
            >>> mass["b", "a"].round(decimals=2).tolist(), mass.without_first()[:, 1, 0].round(decimals=2).tolist()
            ([0.89], [0.05])
        """
        return (self.mean - self.first).clamp_min(0)

    @property
    def null(self) -> Null | None:
        """What chance gives, [H, S, S] each: the mean if the keys of rows are exchanged, and its standard deviation.

        The mean is the share of the visible keys that are in the segment. None if it is unknown, see ``null_sums``.
        """
        if self.null_sums is None:
            return None
        total, variance = self.null_sums
        return Null(total / self.count[..., None], variance.sqrt() / self.count[..., None])

    @property
    def z(self) -> Tensor:
        """(mean - null.mean) / null.std, [H, S, S]; NaN where the null is unknown, or where its std is 0.

        Examples:
            >>> import torch
            >>> from headscope import Observe, Segments, observe
            >>> q = 40 * torch.eye(8)[None, None]  # each row attends to its own key
            >>> mass = observe(q, q, what=Observe(segments=Segments(["a", "b"], [0, 0, 0, 0, 0, 0, 1, 1]))).segments
            >>> mass.null.mean[0].tolist(), [round(z, 2) for z in mass.z[0, 0].tolist()]
            ([[0.75, 0.25], [0.75, 0.25]], [1.41, -1.41])
        """
        null = self.null
        if null is None:
            return torch.full_like(self.mean, math.nan)
        return ((self.mean - null.mean) / null.std).masked_fill(null.std == 0, math.nan)

    def index(self, query: str, key: str) -> tuple[slice, int, int]:
        """Return the index of a pair of segments in ``mean``, ``first``, ``null.mean``, ``null.std`` and ``z``.

        Raises:
            KeyError: a name is not that of a segment.

        Examples:
            >>> import torch
            >>> from headscope import Observe, Segments, observe
            >>> q = 40 * torch.eye(8)[None, None]  # each row attends to its own key
            >>> mass = observe(q, q, what=Observe(segments=Segments(["a", "b"], [0, 0, 0, 0, 0, 0, 1, 1]))).segments
            >>> round(mass.z[mass.index("b", "a")].item(), 2)
            -2.45
        """
        for name in (query, key):
            if name not in self.names:
                raise KeyError(f"{name}: is not a segment; expected two of {', '.join(self.names)}")
        return slice(None), self.names.index(query), self.names.index(key)

    def __getitem__(self, pair: tuple[str, str]) -> Tensor:
        if not isinstance(cast("object", pair), tuple) or len(pair) != 2:
            raise KeyError(f"{pair}: expected two names, of the query's segment and of the key's")
        return self.mean[self.index(*pair)]

    @staticmethod
    def merged(several: Sequence[SegmentMass]) -> SegmentMass:
        """Return the mass of the rows of all.

        Raises:
            ValueError: different names.
        """
        first = several[0]
        if other := next((each for each in several if each.names != first.names), None):
            raise ValueError(
                f"segments: cannot merge {', '.join(first.names)} with {', '.join(other.names)}; expected the same "
                "names in the same order"
            )
        total, count, on_first, nulls = first.sum, first.count, first.first_sum, first.null_sums
        for each in several[1:]:
            total, count = total + each.sum, count + each.count
            on_first = None if on_first is None or each.first_sum is None else on_first + each.first_sum
            nulls = None if nulls is None or each.null_sums is None else nulls + each.null_sums
        alike = all((each.spans, each.images) == (first.spans, first.images) for each in several)
        places = (first.spans, first.images) if alike else ((), ())
        return SegmentMass(first.names, total, count, *places, on_first, nulls)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return ``segments/query/key`` -> mean and count of a pair, [H] both, for tables and trackers."""
        return self._named(self.mean, "", [True] * len(self.names))

    def pairs_without_first(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return ``segments/query/key/without_first`` -> mean and count, for the segments of keys with a first key."""
        if self.first_sum is None:
            return {}
        holders: list[bool] = (self.first_sum > 0).any(0).any(0).tolist()
        return self._named(self.without_first(), "/without_first", holders)

    def _named(self, mean: Tensor, end: str, chosen: list[bool]) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            f"segments/{query}/{key}{end}": (mean[:, a, b], self.count[:, a])
            for (a, query), (b, key) in product(enumerate(self.names), repeat=2)
            if chosen[b]
        }

    def without_rows(self) -> SegmentMass:
        """Return the mass of no rows, with the same segments."""
        nothing = torch.zeros_like(self.sum)
        count, nulls = torch.zeros_like(self.count), torch.stack([nothing, nothing])
        return replace(self, sum=nothing, count=count, first_sum=nothing, null_sums=nulls)


def spans_of(ids: Tensor) -> tuple[Span, ...]:
    """Return the spans of the ids of keys, [K] or [B, K]; () where the batch entries differ.

    Examples:
        >>> import torch
        >>> from headscope.stats._segment_mass import spans_of
        >>> spans_of(torch.tensor([0, 0, -1, 1, 0]))
        ((0, 0, 2), (1, 3, 4), (0, 4, 5))
        >>> spans_of(torch.empty(0, dtype=torch.long))
        ()
    """
    if ids.ndim == 2:
        if len(ids) == 0 or bool((ids != ids[:1]).any()):
            return ()
        ids = ids[0]
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops]  # and the end of the last span
    return tuple(span for span in zip(values.tolist(), starts, stops, strict=False) if span[0] >= 0)


def longer_sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of both by position, the shorter extended by zeros."""
    if a is None or b is None:
        return None
    a, b = _equally_long(a, b, 0.0)
    return a + b


def longer_maximum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the maximum of both by position, the shorter extended by NaN, which is no number."""
    if a is None or b is None:
        return None
    return torch.fmax(*_equally_long(a, b, math.nan))


def _equally_long(a: Tensor, b: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    keys = max(a.shape[-1], b.shape[-1])
    a, b = (torch.nn.functional.pad(x, (0, keys - x.shape[-1]), value=fill) for x in (a, b))
    return a, b


SegmentMass.__module__ = "headscope.stats"  # its public path
