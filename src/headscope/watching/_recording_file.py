"""A Recording on disk: the file of its statistics, with its origin and options as one more entry in the header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

from headscope.stats import HeadStats, _statistics_file
from headscope.stats._header import (
    RECORDING,
    check_format,
    damage_named,
    open_bytes,
    parse_entry,
    read_header,
    read_list,
    read_value,
    read_whole,
)
from headscope.watching._about import About
from headscope.watching._monitor import Alarm
from headscope.watching._verify import Verified

VERSION = 1
_NUMBERS = ("value", "limit", "reference")  # of an alarm
_ERRORS = ("output", "statistics")  # of verified rows
_ADDED = ("verified", "other_layers")  # since version 0.2
_ABOUT: dict[str, tuple[type[Any], ...]] = {
    "model": (str,), "options": (dict,), "versions": (dict,), "kinds": (dict,), "texts": (list, NoneType),
}  # fmt: skip


def description(about: About) -> dict[str, Any]:
    """Return the origin and options of a recording, ready for JSON; an infinite error is None, with its bound."""
    entries = asdict(about)
    for errors in entries["verified"].values():
        errors |= {name: None for name in _ERRORS if errors[name] == math.inf}
    return entries


def save(
    stats: HeadStats, about: About, alarms: Iterable[Alarm], path: Path, force: bool, qk: bool, exact: bool
) -> Path:
    """See ``Recording.save``."""
    return _statistics_file.save(stats.parts, stats.origin, path, force, _entry(about, alarms), qk=qk, exact=exact)


def encode(stats: HeadStats, about: About, alarms: Iterable[Alarm]) -> bytes:
    """Return the bytes of the file of a recording, without q and k."""
    return _statistics_file.encode(stats.parts, stats.origin, "gather", _entry(about, alarms))


def _entry(about: About, alarms: Iterable[Alarm]) -> dict[str, str]:
    """Return the entry of the header."""
    entries = description(about)
    del entries["origin"]  # a separate entry, which HeadStats.load reads, too
    del entries["run_texts"]  # in a shorter form below
    added = {name: entries.pop(name) for name in _ADDED}  # earlier versions ignore entries outside of "about"
    added |= {"run_texts": _number_texts(about.run_texts)} if about.run_texts else {}
    raised = [asdict(alarm) | {name: float(getattr(alarm, name)) for name in _NUMBERS} for alarm in alarms]
    return {RECORDING: json.dumps({"version": VERSION, "about": entries, "alarms": raised, **added})}


def load(path: Path) -> tuple[HeadStats, About, tuple[Alarm, ...]]:
    """Return the parts of a recording; see ``Recording.load``.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it cannot be opened.
        ValueError: it is not a recording, has a newer format, or is damaged.
    """
    stats = HeadStats.load(path)
    header = read_header(path, RECORDING)
    if header is None:
        raise ValueError(f"{path}: holds statistics, not a recording; load it with HeadStats.load")
    return _read(path, stats, header)


def decode(name: str, content: bytes) -> tuple[HeadStats, About, tuple[Alarm, ...]]:
    """Return the same from the result of ``encode``; ``name``: what errors call it.

    Raises:
        ValueError: the bytes are damaged, or of a newer format.
    """
    file = open_bytes(name, content)
    header = parse_entry(file, RECORDING)
    if header is None:
        raise ValueError(f"{name}: does not hold a recording")
    return _read(file.path, HeadStats(*_statistics_file.decode(file)), header)


def _read(path: Path, stats: HeadStats, header: dict[str, Any]) -> tuple[HeadStats, About, tuple[Alarm, ...]]:
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
        others = _read_texts(header, "other_layers")
        runs = _read_run_texts(header)
        described = About(**about, verified=_read_verified(header), other_layers=others, run_texts=runs)
        return stats, described, _read_alarms(header)


def _number_texts(runs: tuple[tuple[str, ...], ...]) -> dict[str, Any]:
    """Return each different text once, and its number for each token of each forward pass."""
    numbers: dict[str, int] = {}
    ids = [[numbers.setdefault(text, len(numbers)) for text in run] for run in runs]
    return {"texts": [*numbers], "ids": ids}


def _read_run_texts(header: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the texts of each forward pass; older files, and those of one text, have none. Raise as ``read_value``."""
    entry = read_value({"run_texts": {}} | header, "run_texts", dict)
    if not entry:
        return ()
    texts = read_list(entry, "texts", str)
    runs: list[tuple[str, ...]] = []
    for ids in read_list(entry, "ids", list):
        if not all(type(n) is int and 0 <= n < len(texts) for n in ids):
            raise ValueError(f"run_texts: expected numbers of {len(texts)} texts")
        runs.append(tuple(texts[n] for n in ids))
    return tuple(runs)


def _read_texts(header: dict[str, Any], name: str) -> dict[str, str]:
    """Return a mapping of texts; older files have none. Raise as ``read_value``."""
    entries = read_value({name: {}} | header, name, dict)
    return {key: read_value(entries, key, str) for key in entries}


def _read_verified(header: dict[str, Any]) -> dict[str, Verified]:
    """Return the errors against float64 of each layer; older files have none.

    Raises:
        KeyError, TypeError, ValueError: a value is missing, or of another kind, or a number is NaN or negative.
    """
    verified: dict[str, Verified] = {}
    for layer, entry in read_value({"verified": {}} | header, "verified", dict).items():
        numbers: dict[str, float | None] = {}
        for name in _ERRORS:
            error, bound = (read_value(entry, each, float, NoneType) for each in (name, f"{name}_bound"))
            error = math.inf if error is None and bound is not None else error
            if error is not None and not (error >= 0 and bound is not None and 0 <= bound < math.inf):
                raise ValueError(f"verified: got {entry}, expected errors and bounds from 0")
            numbers |= {name: error, f"{name}_bound": bound}
        names = tuple(read_list(entry, "names", str))
        rows, empty = (read_whole(entry, name, 0) for name in ("rows", "empty"))
        verified[layer] = Verified(rows=rows, empty=empty, names=names, **numbers)
    return verified


def _read_alarms(header: dict[str, Any]) -> tuple[Alarm, ...]:
    """Return the alarms; older files have none.

    Raises:
        KeyError, TypeError, ValueError: one lacks a value, or has one of another kind, or a number that is NaN.
    """
    alarms: list[Alarm] = []
    for entry in read_list({"alarms": []} | header, "alarms", dict):
        layer, what = (read_value(entry, name, str) for name in ("layer", "what"))
        value, limit, reference = (read_value(entry, name, float) for name in _NUMBERS)
        if math.isnan(value) or math.isnan(limit) or math.isnan(reference):
            raise ValueError(f"alarms: got {entry}, expected numbers")
        step, head = (read_whole(entry, name, 0) for name in ("step", "head"))
        alarms.append(Alarm(step, layer, head, what, value, limit, reference))
    return tuple(alarms)


def _check_values(about: dict[str, Any]) -> None:
    """Check the values in the entries of ``about``.

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
