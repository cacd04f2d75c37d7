"""The weight between the segments of a layer, and what an even spread over the visible keys would give."""

from __future__ import annotations

import base64
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headscope.report._texts import visible
from headscope.report._viewer.packing import standing
from headscope.stats import CLEAR_Z, SegmentMass

__all__ = ["even_shares", "segment_facts"]


class _Bins(Protocol):
    @property
    def count(self) -> Tensor: ...
    @property
    def bins(self) -> int: ...


class Observed(Protocol):
    """What an observed layer has."""

    @property
    def heads(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, int] | None: ...
    @property
    def map(self) -> _Bins | None: ...
    @property
    def segments(self) -> SegmentMass | None: ...


UNITS = 65_534
NONE = 65_535


def segment_facts(part: Observed) -> dict[str, Any] | None:
    """Return what the page shows of the segments of a layer; None if it has none."""
    mass = part.segments
    if mass is None:
        return None
    null = mass.null
    even = even_shares(part, mass) if null is None else null.mean.cpu().double().numpy()
    holders: list[int] = []
    if mass.first_sum is not None:
        holders = (mass.first_sum > 0).any(0).any(0).nonzero()[:, 0].tolist()
    return {
        "names": [visible(name, limit=60, blanks=False) for name in mass.names],
        "mean": _coded(mass.mean.numpy()),
        "rows": mass.count.tolist(),
        "spans": [list(span) for span in mass.spans],
        "images": [
            {"name": visible(name, limit=60, blanks=False), "columns": columns, "rows": list(rows)}
            for name, columns, rows in mass.images
        ],
        "even": None if even is None else _coded(even),
        "evenExact": null is not None
        or (part.lengths is not None and part.map is not None and max(part.lengths) <= part.map.bins),
        "clear": None if null is None else _flags((mass.z.abs() >= CLEAR_Z).cpu().numpy()),
        "withoutFirst": None if mass.first_sum is None else _coded(mass.without_first().cpu().double().numpy()),
        "holders": holders,
    }


def even_shares(part: Observed, mass: SegmentMass) -> NDArray[np.float64] | None:
    """Return the share of each segment if each row spread its weight evenly over its visible keys, [H, S, S].

    The visible pairs are those that the bins of the map count. Where a bin holds several queries or keys, they count as
    spread evenly over the bin. NaN for a segment without rows; None where the map or the keys of segments are unknown.
    """
    if part.map is None or part.lengths is None or not mass.spans:
        return None
    queries, keys = part.lengths
    rows, columns = standing(part.map.bins, part.lengths)
    counts = part.map.count.cpu().double().numpy()[np.ix_(np.arange(part.heads), rows, columns)]
    of_keys = np.zeros((keys, len(mass.names)))
    for n, start, stop in mass.spans:
        of_keys[start : min(stop, keys), n] = 1
    in_columns = _pooled(of_keys, len(columns))  # of the keys of each bin, the share in each segment
    in_rows = _pooled(of_keys[keys - queries :], len(rows)) if queries <= keys else np.zeros((len(rows), 0))
    if not in_rows.size:
        return None
    total = counts.sum(-1, keepdims=True)  # [H, rows, 1]
    shares = np.divide(counts @ in_columns, total, out=np.zeros((*total.shape[:2], len(mass.names))), where=total > 0)
    sizes = np.diff(np.arange(len(rows) + 1) * queries // len(rows))
    weight = in_rows[None] * (total > 0) * sizes[:, None]  # [H, rows, S]: how many queries of each segment
    of_segment = np.einsum("hra,hrb->hab", weight, shares)
    many = weight.sum(1)[..., None]
    return np.divide(of_segment, many, out=np.full_like(of_segment, np.nan), where=many > 0)


def _pooled(values: NDArray[np.float64], bins: int) -> NDArray[np.float64]:
    """Return the mean over the positions of each bin, [bins, S]."""
    length = len(values)
    starts = np.arange(bins) * length // bins
    return np.add.reduceat(values, starts, axis=0) / np.diff(np.append(starts, length))[:, None]


def _flags(values: NDArray[np.bool_]) -> str:
    """Return one byte for each value, 0 or 1."""
    return base64.b64encode(values.astype(np.uint8).tobytes()).decode("ascii")


def _coded(shares: NDArray[np.float64]) -> str:
    """Return shares in 16 bits: units of 1 / 65,534, and 65,535 for none."""
    codes = np.nan_to_num(np.round(shares.clip(0, 1) * UNITS), nan=NONE).astype("<u2")
    return base64.b64encode(codes.tobytes()).decode("ascii")
