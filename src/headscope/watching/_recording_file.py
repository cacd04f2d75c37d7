"""A Recording on disk: the file of its statistics, with what it is of as one more entry in the header."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

from headscope.stats import HeadStats, _statistics_file
from headscope.stats._header import (
    RECORDING,
    check_format,
    damage_named,
    read_header,
    read_list,
    read_value,
    read_whole,
)
from headscope.watching._about import About

VERSION = 1
_ABOUT: dict[str, tuple[type[Any], ...]] = {
    "model": (str,), "options": (dict,), "versions": (dict,), "kinds": (dict,), "texts": (list, NoneType),
}  # fmt: skip


def description(about: About) -> dict[str, Any]:
    """Return what a recording is of, ready for JSON."""
    return asdict(about)


def save(stats: HeadStats, about: About, path: Path, force: bool, qk: bool) -> Path:
    """See ``Recording.save``."""
    entries = description(about)
    del entries["origin"]  # an entry of its own, which HeadStats.load reads, too
    header = {RECORDING: json.dumps({"version": VERSION, "about": entries})}
    return _statistics_file.save(stats.parts, stats.origin, path, force, header, qk=qk)


def load(path: Path) -> tuple[HeadStats, About]:
    """Return the parts of a recording; see ``Recording.load``.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened.
        ValueError: it is no recording, or one of a newer format, or damaged.
    """
    stats = HeadStats.load(path)
    header = read_header(path, RECORDING)
    if header is None:
        raise ValueError(f"{path}: holds statistics, but is no recording; HeadStats.load reads it")
    check_format(path, header, VERSION)
    with damage_named(path):
        if not stats.parts:
            raise TypeError("layers: got none")
        about: dict[str, Any] = read_value(header, "about", dict)
        for name, kinds in _ABOUT.items():
            read_value(about, name, *kinds)
        _check_values(about)
        for name in ("forwards", "ran"):
            read_whole(about, name, 0)
        if about["texts"] is not None:
            about["texts"] = tuple(read_list(about, "texts", str))
        return stats, About(**about)


def _check_values(about: dict[str, Any]) -> None:
    """Check what stands within the entries of ``about``.

    Raises:
        TypeError, ValueError: a value of another kind, or a number that is not finite.
    """
    for layer, kind in about["kinds"].items():
        if kind not in ("self", "cross"):
            raise ValueError(f'kinds: layer {layer} is {kind!r}, expected "self" or "cross"')
    for name in about["versions"]:
        read_value(about["versions"], name, str)
    waiting = [*about["options"].values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"options: got {value}, expected finite numbers")
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
