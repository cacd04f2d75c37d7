"""The history of a training on disk: its tensors in a safetensors file, everything else as JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from headscope._support.files import describe_obstacle, replace_file
from headscope.stats._checksums import read_checksums, store_checksums
from headscope.stats._header import (
    HISTORY,
    check_format,
    check_utf8,
    damage_named,
    is_cut_short,
    open_entry,
    read_header,
    read_list,
    read_value,
    read_whole,
    read_wholes,
)

HISTORY_VERSION = 1
_DTYPES = {"steps": torch.int64, "values": torch.float32, "alarms": torch.int64, "numbers": torch.float64}
_ABOUT: dict[str, tuple[type[Any], ...]] = {"model": (str,), "options": (dict,), "versions": (dict,), "kinds": (dict,)}
_LIMITS = ("entropy", "max_logit", "sink")

StoredAlarm = tuple[int, str, int, str, float, float, float]
"""Step, layer, head, what, value, limit and reference of an alarm."""


@dataclass(frozen=True, eq=False)
class StoredHistory:
    """The content of the file.

    Attributes:
        columns: layer, quantity and number of heads; their values follow each other.
        steps: the step of each row.
        values: float32 [steps, values of all columns]; NaN = none.
        alarms: all alarms, in order.
        observed: the number of observed steps; each ``stride``-th of them has a row, and so has the last one.
        stride: see ``observed``.
        starts: the first step of each watch.
        about: model, options, versions, kinds, and the numbers of forward passes.
        limits: the limits of the alarms; None = none were requested.
    """

    columns: tuple[tuple[str, str, int], ...]
    steps: tuple[int, ...]
    values: Tensor
    alarms: tuple[StoredAlarm, ...]
    observed: int
    stride: int
    starts: tuple[int, ...]
    about: Mapping[str, Any]
    limits: Mapping[str, float | None] | None


def is_history(path: Path) -> bool:
    """Return whether a file holds a readable history of headscope."""
    try:
        return path.is_file() and read_header(path, HISTORY) is not None  # opening a pipe would wait
    except (OSError, ValueError):  # OSError: a name of 300 characters
        return False


def check_history_target(path: Path, *, force: bool) -> None:
    """Check that a history can be written to this path.

    Raises:
        FileNotFoundError: its folder does not exist.
        FileExistsError: it exists, and ``force`` is False or it is not a regular file.
        ValueError: its name is not UTF-8.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist")
    check_utf8(path)
    if (reason := describe_obstacle(path)) is not None:
        raise FileExistsError(f"{path}: {reason}")
    if path.exists() and not force:
        if is_history(path):
            remedy = "to append to it, pass resume=True; to overwrite it, pass force=True"
            raise FileExistsError(f"{path}: holds the history of an earlier run; {remedy}")
        raise FileExistsError(f"{path}: exists and is not a history of headscope; to overwrite it, pass force=True")


def save_history(path: Path, history: StoredHistory) -> None:
    """Write a history atomically.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save as encode

    layers = list(dict.fromkeys([*(layer for layer, _, _ in history.columns), *(each[1] for each in history.alarms)]))
    place = {layer: n for n, layer in enumerate(layers)}
    what = list(dict.fromkeys(each[3] for each in history.alarms))
    tensors = {
        "steps": torch.tensor(history.steps, dtype=torch.int64, device="cpu"),
        "values": history.values.contiguous(),
        "alarms": torch.tensor(
            [(each[0], place[each[1]], each[2], what.index(each[3])) for each in history.alarms],
            dtype=torch.int64,
            device="cpu",
        ).view(-1, 4),
        "numbers": torch.tensor([each[4:] for each in history.alarms], dtype=torch.float64, device="cpu").view(-1, 3),
    }
    entry = {
        "version": HISTORY_VERSION,
        "checksums": True,
        "layers": layers,
        "columns": [[place[layer], quantity, heads] for layer, quantity, heads in history.columns],
        "what": what,
        "observed": history.observed,
        "stride": history.stride,
        "starts": list(history.starts),
        "about": dict(history.about),
        "limits": None if history.limits is None else dict(history.limits),
    }
    entries = {HISTORY: json.dumps(entry)}
    replace_file(path, encode(tensors, entries | store_checksums(tensors, entries)))


def load_history(path: Path) -> StoredHistory:
    """Return the content of the file, with its checksums compared.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it cannot be opened.
        ValueError: it is not a history, has a newer format, or is damaged.
    """
    file, header = open_entry(path, HISTORY)
    if file is None or header is None:
        if is_cut_short(path, HISTORY):
            raise ValueError(f"{path}: is truncated; its end is missing")
        raise ValueError(f"{path}: is not a training history that headscope.History wrote")
    check_format(path, header, HISTORY_VERSION)
    read_checksums(file, header)
    with damage_named(path):
        return _read(header, file.read(file.entries))


def _read(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StoredHistory:
    """Return the content; raise KeyError, TypeError or ValueError where it is damaged."""
    for name, dtype in _DTYPES.items():
        if tensors[name].dtype != dtype:
            raise TypeError(f"{name}: got {tensors[name].dtype}, expected {dtype}")
    columns = _read_columns(header)
    steps: list[int] = tensors["steps"].tolist()
    shape = (len(steps), sum(heads for _, _, heads in columns))
    if tensors["steps"].ndim != 1 or tensors["values"].shape != shape:
        raise ValueError(f"values: got {list(tensors['values'].shape)}, expected {list(shape)}")
    _check_increasing("steps", steps)
    starts = read_wholes(header, "starts")
    _check_increasing("starts", starts)
    observed, stride = read_whole(header, "observed", 0), read_whole(header, "stride", 1)
    rows = -(-observed // stride)
    if len(steps) != rows + (observed > 0 and (observed - 1) % stride > 0):
        raise ValueError(f"observed: got {observed} with a stride of {stride}, which does not fit {len(steps)} rows")
    about = read_value(header, "about", dict)
    for name, kinds in _ABOUT.items():
        read_value(about, name, *kinds)
    for texts in (about["versions"], about["kinds"]):
        for name in texts:
            read_value(texts, name, str)
    for name in ("forwards", "ran"):
        read_whole(about, name, 0)
    limits = read_value(header, "limits", dict, NoneType)
    if limits is not None:
        limits = {name: read_value(limits, name, float, int, NoneType) for name in _LIMITS}
    alarms = _read_alarms(header, tensors["alarms"], tensors["numbers"])
    return StoredHistory(columns, tuple(steps), tensors["values"], alarms, observed, stride, starts, about, limits)


def _read_columns(header: Mapping[str, Any]) -> tuple[tuple[str, str, int], ...]:
    layers = read_list(header, "layers", str)
    columns: list[tuple[str, str, int]] = []
    heads_of: dict[str, int] = {}
    for at, quantity, heads in read_list(header, "columns", list):
        named = {"layer": at, "quantity": quantity, "heads": heads}
        layer = layers[read_whole(named, "layer", 0, len(layers) - 1)]
        columns.append((layer, read_value(named, "quantity", str), read_whole(named, "heads", 1)))
        if heads_of.setdefault(layer, heads) != heads:
            raise ValueError(f"columns: layer {layer} has {heads_of[layer]} and {heads} heads")
    if len({column[:2] for column in columns}) < len(columns):
        raise ValueError("columns: expected each quantity of a layer once")
    return tuple(columns)


def _read_alarms(header: Mapping[str, Any], places: Tensor, numbers: Tensor) -> tuple[StoredAlarm, ...]:
    layers, what = read_list(header, "layers", str), read_list(header, "what", str)
    if places.ndim != 2 or places.shape[1] != 4 or numbers.shape != (len(places), 3):
        raise ValueError(f"alarms: got {list(places.shape)} and {list(numbers.shape)}, expected [n, 4] and [n, 3]")
    most = torch.tensor([2**62, len(layers) - 1, 2**31, len(what) - 1], device="cpu")
    if bool((places < 0).any()) or bool((places > most).any()) or bool(numbers.isnan().any()):
        raise ValueError("alarms: hold numbers outside the possible range")
    return tuple(
        (step, layers[layer], head, what[kind], *values)
        for (step, layer, head, kind), values in zip(places.tolist(), numbers.tolist(), strict=True)
    )


def _check_increasing(name: str, numbers: Sequence[int]) -> None:
    if any(a >= b for a, b in zip((-1, *numbers), numbers, strict=False)):
        raise ValueError(f"{name}: expected increasing numbers from 0")
