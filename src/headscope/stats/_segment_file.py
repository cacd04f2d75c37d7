"""The weight between segments in a file of statistics."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import Tensor

from headscope.stats._header import read_list, read_value, read_whole, read_wholes
from headscope.stats._segment_mass import SegmentMass
from headscope.stats._segments import Segments

__all__ = ["LATER", "read_segments", "segment_entry", "segment_tensors"]

LATER: dict[str, Any] = {"segment_spans": [], "segment_images": [], "segment_first": False, "segment_nulls": False}
"""What older files lack."""
_ROUNDING = 1e-6  # of the variance of one row


def segment_tensors(mass: SegmentMass | None, under: str) -> dict[str, Tensor]:
    """Return the tensors to store."""
    if mass is None:
        return {}
    tensors = {"sum": mass.sum, "count": mass.count, "first": mass.first_sum, "nulls": mass.null_sums}
    return {f"{under}/segments/{name}": each for name, each in tensors.items() if each is not None}


def segment_entry(mass: SegmentMass | None) -> dict[str, Any]:
    """Return the names and places of the segments, for the header."""
    if mass is None:
        return {"segments": None}
    spans, images = ([list(each) for each in several] for several in (mass.spans, mass.images))
    return {
        "segments": list(mass.names),
        "segment_spans": spans,
        "segment_images": images,
        "segment_first": mass.first_sum is not None,
        "segment_nulls": mass.null_sums is not None,
    }


def read_segments(entry: dict[str, Any], read: Callable[..., Tensor], rows: int) -> dict[str, Any]:
    """Read the mass of segments and the largest weight of each key; ``rows``: the most counted rows of a head."""
    parts: dict[str, Any] = {}
    if read_value(entry, "segments", list, NoneType) is not None:
        names, size = Segments(read_list(entry, "segments", str), []).names, len(entry["segments"])
        total = read("segments/sum", "H", size, size, within=(0, None))
        count, spans = read("segments/count", "H", size, within=(0, rows + 1)), _read_spans(entry, size)
        has_first = read_value(entry, "segment_first", bool)
        first = read("segments/first", "H", size, size, within=(0, None)) if has_first else None
        has_nulls = read_value(entry, "segment_nulls", bool)
        least = -_ROUNDING * rows  # of files that were written before shares were computed to the bit
        nulls = read("segments/nulls", 2, "H", size, size, within=(least, None)).clamp_min(0) if has_nulls else None
        parts["segments"] = SegmentMass(names, total, count, spans, _read_images(entry), first, nulls)
    if read_value(entry, "received_max", bool):
        parts["received_max"] = read("received_max", "H", "K", within=(0, None))
    return parts


def _read_spans(entry: dict[str, Any], size: int) -> tuple[tuple[int, int, int], ...]:
    """Read the keys of the segments, which are in order."""
    spans = [read_wholes({"segment_spans": span}, "segment_spans") for span in read_list(entry, "segment_spans", list)]
    end = 0
    for span in spans:
        if len(span) != 3 or span[0] >= size or not end <= span[1] < span[2]:
            raise ValueError(f"segment_spans: got {list(span)}, expected a segment below {size}, its start and its end")
        end = span[2]
    return tuple((n, start, stop) for n, start, stop in spans)


def _read_images(entry: dict[str, Any]) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """Read where the patches of images are."""
    images: list[tuple[str, int, tuple[int, ...]]] = []
    for image in read_list(entry, "segment_images", list):
        if len(image) != 3:
            raise ValueError(
                f"segment_images: got {len(image)} values, expected a name, columns and the starts of rows"
            )
        fields: dict[str, Any] = {"name": image[0], "columns": image[1], "rows": image[2]}
        rows = read_wholes(fields, "rows")
        images.append((read_value(fields, "name", str), read_whole(fields, "columns", 1), rows))
    return tuple(images)
