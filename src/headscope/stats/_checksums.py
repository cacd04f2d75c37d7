"""Checksums in a file of statistics: of the bytes of each tensor, and of the rest of its header.

They are an entry of the header. Earlier versions ignore it; a file that an earlier version wrote has none, and is read
without such checks. This module compares the header; ``TensorFile`` of ``_tensor_reader.py`` compares each tensor when
it reads it, and names one that was changed since it was saved.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from headscope._support.hashing import bytes_of
from headscope.stats._header import (
    CHECKSUMS,
    STATISTICS,
    check_format,
    damage_named,
    parse_entry,
    read_value,
    read_whole,
    read_wholes,
)
from headscope.stats._tensor_reader import DTYPES, TensorFile

_VERSION = 1
_LARGEST = 2**32 - 1
_PREFIX = STATISTICS.partition(".")[0] + "."  # of the entries that headscope writes; other programs may add others
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def store_checksums(tensors: Mapping[str, Tensor], entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entry of the header that holds the checksums of contiguous tensors and of the other entries."""
    names = sorted(tensors)
    checksums = [zlib.crc32(bytes_of(tensors[name])) for name in names]
    kinds = [(_DTYPE_NAMES[tensors[name].dtype], tensors[name].shape) for name in names]
    description = _description_checksum(names, kinds, checksums, entries)
    return {CHECKSUMS: json.dumps({"version": _VERSION, "description": description, "tensors": checksums})}


def read_checksums(file: TensorFile, header: Mapping[str, Any]) -> None:
    """Check the header of a file, and let the file check each tensor that is read.

    Args:
        file: without checksums, it does not change.
        header: its statistics; they state whether it has checksums, so a lost entry is detected.

    Raises:
        ValueError: a checksum differs, or all are missing.
    """
    entry = parse_entry(file, CHECKSUMS)
    if entry is None and "checksums" not in header:
        return
    if entry is not None:
        check_format(file.path, entry, _VERSION)
    with damage_named(file.path):
        if entry is None:
            raise KeyError(CHECKSUMS)
        names, checksums = sorted(file.entries), read_wholes(entry, "tensors", _LARGEST)
        kinds = [(file.entries[name].dtype, file.entries[name].shape) for name in names]
        expected = read_whole(entry, "description", 0, _LARGEST)
        if (
            not read_value(header, "checksums", bool)
            or len(checksums) != len(names)
            or _description_checksum(names, kinds, checksums, file.metadata) != expected
        ):
            raise ValueError("its header was changed or damaged since it was saved")
    file.checksums = dict(zip(names, checksums, strict=True))


def _description_checksum(
    names: Sequence[str],
    kinds: Sequence[tuple[str, Sequence[int]]],
    checksums: Sequence[int],
    entries: Mapping[str, str],
) -> int:
    """Return the checksum of all but the bytes of tensors, as canonical JSON."""
    tensors = [
        (name, dtype, [*shape], checksum)
        for name, (dtype, shape), checksum in zip(names, kinds, checksums, strict=True)
    ]
    ours = sorted((name, text) for name, text in entries.items() if name.startswith(_PREFIX) and name != CHECKSUMS)
    return zlib.crc32(json.dumps([ours, tensors]).encode())
