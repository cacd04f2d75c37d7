"""Reading the weights of one attention module from a state dict or from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from headscope._attend.call import FLOATS
from headscope._layouts.messages import list_names
from headscope._layouts.table import HeadSplit, Layout, Part, read_part, split_of
from headscope._support.arguments import check_layout, check_type, kind
from headscope._support.files import is_inside

State = Mapping[str, Any]
"""Tensors, or arrays that numpy can read, by key."""


@dataclass(frozen=True)
class Weights:
    """Copies of the weights of one attention module, by headscope's names.

    Attributes:
        tensors: such as ``q.weight``.
        keys: the key of the state dict that each tensor came from.
        splits: the heads that the axes of a tensor show, if they do.
    """

    tensors: dict[str, Tensor]
    keys: dict[str, str]
    splits: dict[str, HeadSplit]


def read_state(state: State | str | Path, prefix: str) -> dict[str, Any]:
    """Return the entries whose keys begin with the prefix, by the rest of the key.

    Raises:
        TypeError: the state, a key or the prefix is of the wrong kind.
        ValueError: no key begins with the prefix, or a file is not safetensors or not in the folder of its index.
    """
    prefix = end_prefix(prefix)
    text = "a mapping of tensors, or the path of a safetensors file"
    check_type("state", state, (str, Path, Mapping), text)
    entries: Mapping[Any, Any]
    if isinstance(state, (str, Path)):
        entries = _read_safetensors(Path(state), prefix)
    else:
        entries = {key: state[key] for key in state if str(key).startswith(prefix)}
    if isinstance(state, Mapping) and not state:
        raise ValueError("state: is empty, expected a mapping of tensors")
    if not entries:
        names = list_names(state) if isinstance(state, Mapping) else str(state)
        raise ValueError(f"prefix: no key begins with {prefix!r}; {names}")
    for key in entries:
        if not isinstance(key, str):
            raise TypeError(f"state: has the key {key!r} of {kind(key)}, expected strings")
    return {key.removeprefix(prefix): x for key, x in entries.items()}


def _read_safetensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """Return the entries that begin with the prefix in one file, or in the files of an index in the same folder."""
    if not (path.name.endswith(".index.json") and path.is_file()):
        return _read_file(path, prefix)
    places = {key: file for key, file in _weight_map(path).items() if key.startswith(prefix)}
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        more = _read_file(path.parent / file, prefix, {key for key, where in places.items() if where != file})
        if twice := sorted(tensors.keys() & more.keys()):
            raise ValueError(
                f"state: {path} does not list {list_names(twice)}, which more than one of its files contains"
            )
        tensors |= more
    if missing := [f"{key} in {file}" for key, file in places.items() if key not in tensors]:
        raise ValueError(
            f"state: {path} lists {list_names(missing)}, but no file contains it; the checkpoint is damaged"
        )
    return tensors


def _read_file(path: Path, prefix: str, elsewhere: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the entries of one file that begin with the prefix, except those that the index has in another file."""
    if path.exists() and not path.is_file():
        problem = (
            "a directory, expected a safetensors file in it"
            if path.is_dir()
            else "not a file, expected a safetensors file"
        )
        raise ValueError(f"state: {path} is {problem}, or its .index.json")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            keys = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            return {key: file.get_tensor(key) for key in keys if key not in elsewhere}
    except SafetensorError as error:
        raise ValueError(
            f"state: {path} is not a safetensors file ({error}); headscope does not read pickles"
        ) from error


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of each key by an index."""
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"state: {path} is not JSON ({error})") from error
    places = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    files = cast("dict[str, str]", places) if isinstance(places, dict) else None
    if files is None or not all(isinstance(file, str) for file in cast("dict[str, object]", files).values()):
        raise ValueError(f'state: {path} has no "weight_map" from keys to files')
    for file in files.values():
        if not is_inside(file):
            raise ValueError(f"state: {path}: weight_map: expected a file in the same folder, got {file!r}")
    return files


def end_prefix(prefix: str) -> str:
    """Return a prefix that ends in a dot or a slash, unless it is empty."""
    check_type("prefix", prefix, str, "the prefix of the keys, as a string")
    return prefix if not prefix or prefix[-1] in "./" else f"{prefix}."


def read_weights(layout: Layout, state: dict[str, Any]) -> Weights:
    """Return copies of the tensors of a state without prefix.

    Raises:
        TypeError, ValueError: an entry is not a tensor of the right number of axes, type or device.
    """
    tensors: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    splits: dict[str, HeadSplit] = {}
    for part in layout.parts:
        if part.key not in state:
            continue
        entry = _check_tensor(part, state[part.key])
        x, split = read_part(part, entry), split_of(part, entry)
        if x.shape[0] % len(part.holds):
            raise ValueError(
                f"{part.key}: holds {', '.join(part.holds)}, but its {x.shape[0]} rows are not divisible by "
                f"{len(part.holds)}; it is {list(entry.shape)}"
            )
        for name, own in zip(part.holds, x.chunk(len(part.holds)), strict=True):
            tensors[name] = own.detach().clone(memory_format=torch.contiguous_format)
            keys[name] = part.key
            if split is not None:
                splits[name] = split
    first = tensors["q.weight"]
    for name, x in tensors.items():
        if x.dtype != first.dtype or x.device != first.device:
            got, expected = f"{kind(x)} on {x.device}", f"{kind(first)} on {first.device}, as {keys['q.weight']}"
            raise ValueError(f"{keys[name]}: is {got}, expected {expected}")
    return Weights(tensors, keys, splits)


def _check_tensor(part: Part, x: Any) -> Tensor:
    """Return one entry of a state as a tensor with the axes that its form has."""
    if isinstance(x, np.ndarray):  # torch reads neither the other byte order nor negative strides
        x = np.array(x, x.dtype.newbyteorder("="), order="C")
    try:
        tensor = x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")  # a copy: arrays may not be writable
    except (TypeError, ValueError, RuntimeError):
        got = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else kind(x)
        raise TypeError(f"{part.key}: got {got}, expected a tensor or an array of numbers") from None
    if is_lazy(tensor):
        raise ValueError(f"{part.key}: is uninitialised, expected weights; call the lazy module once first")
    check_layout(part.key, tensor)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{part.key}: dtype is {kind(tensor)}, expected float32, bfloat16, float16 or float64")
    flat = part.holds[0].split(".")[-1] == "bias" or "_norm." in part.holds[0]
    axes = {"rows": 1 if flat else 2, "columns": 2, "to heads": 2 if flat else 3, "from heads": 3, "token": 3}[
        part.form
    ]
    if tensor.ndim != axes:
        raise ValueError(f"{part.key}: has {tensor.ndim} axes, expected {axes}; it is {list(tensor.shape)}")
    return tensor
