"""The statistics of layers on disk: tensors in a safetensors file, everything else as JSON in its header."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from headscope._support.files import describe_obstacle, replace_file
from headscope._support.scalar_options import check_scale, check_softcap
from headscope.masks import FAR
from headscope.stats import _stored_map
from headscope.stats._checks import (
    MOMENTS,
    check_complete,
    check_kept,
    check_moments,
    check_parts,
    check_widths,
)
from headscope.stats._checksums import read_checksums, store_checksums
from headscope.stats._head_weights import HeadWeights, check_weights, store_weights
from headscope.stats._header import (
    HISTORY,
    ORIGIN,
    RECORDING,
    STATISTICS,
    check_format,
    check_utf8,
    damage_named,
    in_order,
    is_cut_short,
    is_statistics,
    open_entry,
    parse_entry,
    read_list,
    read_value,
    read_whole,
    read_wholes,
)
from headscope.stats._kept_weights import KeptWeights, weights_of
from headscope.stats._layer import Edges, HeadMap, Kept, LayerStats
from headscope.stats._moments import Moments
from headscope.stats._nulls import Nulls, check_nulls
from headscope.stats._origin import UNKNOWN, LayerOrigin, Origin, Part
from headscope.stats._quantities import histogram_edges
from headscope.stats._segment_file import LATER, read_segments, segment_entry, segment_tensors
from headscope.stats._tensor_reader import TensorFile

VERSION = 2
_WITHOUT_MAPS = 1  # the version of files without maps, which earlier versions read
_ORIGIN_VERSION = 1
_NUMBERS = ("heads", "runs", "looked_at", "of")
Axes = tuple[str | int, ...]
_PARTS: dict[str, tuple[type[Any], dict[str, Axes]]] = {
    "map": (HeadMap, {**dict.fromkeys(("sum", "count", "max"), ("H", "n", "n")), "argmax": ("H", "n", "n", 4)}),
    "edges": (Edges, {"p": ("H", "k"), "at": ("H", "k", 4)}),
}
_QK: dict[str, Axes] = {
    "q": ("B", "H", "Q", "D"), "k": ("B", "Hkv", "K", "D"), "lse": ("B", "H", "Q"),
    "spans": ("B", "Q", "n", 2), "rest": ("B", "H", "Q", "K"), "bias": ("B", "H", "Q", "K"),
}  # fmt: skip
_KINDS = {"rest": ("BOOL",), "spans": ("I64",)}  # by their safetensors names
_FLOATING = ("F64", "F32", "F16", "BF16")
_WHOLE = ("rows", "broken", "count", "histogram", "eligible", "argmax", "at", "queries", "top_keys", "place", "ends")
_FIGURES = (torch.float32, torch.float64)
_DTYPES = {"counted": torch.bool, **dict.fromkeys(_WHOLE, torch.int64)}  # all others are of ``_FIGURES``
_PAIRS = {"top_keys": "top_weights", "top_weights": "top_keys"}


def save(
    parts: Mapping[str, LayerStats], origin: Origin | None, path: Path, force: bool,
    more: Mapping[str, str] | None = None, *, qk: bool = False, exact: bool = False,
) -> Path:  # fmt: skip
    """See ``HeadStats.save``; ``more`` are further entries of the header, ``qk``: also q, k and lse."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist")
    check_utf8(path)
    if (reason := describe_obstacle(path)) is not None:
        raise FileExistsError(f"{path}: {reason}")
    if path.exists() and not force and not is_statistics(path):
        raise FileExistsError(
            f"{path}: exists and is not a file of headscope statistics; to overwrite it, pass force=True"
        )
    replace_file(path, encode(parts, origin, f"{path}", more, qk=qk, exact=exact))
    return path


def encode(
    parts: Mapping[str, LayerStats], origin: Origin | None, name: str, more: Mapping[str, str] | None = None,
    *, qk: bool = False, exact: bool = True,
) -> bytes:  # fmt: skip
    """Return the bytes of a file; ``name``: what errors call it; see ``save``."""
    from safetensors import SafetensorError
    from safetensors.torch import save as to_bytes

    layers, tensors = _store_layers(parts, qk=qk, exact=exact)
    entries = {
        STATISTICS: json.dumps({"version": _version_of(layers), "checksums": True, "layers": layers}),
        **_store_origin(origin),
        **(more or {}),
    }
    plain = {each: x.detach().cpu().contiguous().clone() for each, x in tensors.items()}
    entries |= store_checksums(plain, entries)
    try:
        return in_order(to_bytes(plain, entries))
    except SafetensorError as error:
        runs = sum(max(len(part.kept), len(part.weights)) for part in parts.values())
        raise ValueError(
            f"{name}: too large for one file ({error}): the header would list {len(plain)} tensors, because the "
            f"rows or weights of {runs} calls are retained; observe without keep_rows, top and weights, or save and "
            "start again more often"
        ) from error


def size_of(parts: Mapping[str, LayerStats], *, qk: bool = False, exact: bool = False) -> int:
    """Return the bytes of the file that ``save`` would write, without its header."""
    return sum(x.numel() * x.element_size() for x in _store_layers(parts, qk=qk, exact=exact)[1].values())


def _store_layers(
    parts: Mapping[str, LayerStats], *, qk: bool, exact: bool
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the entry of each layer in the header, and all tensors by their name in the file."""
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for number, (name, part) in enumerate(parts.items()):
        entry = _store_layer(replace(part, map=None), name, f"{number}", tensors)
        weights = {run: weights_of(tiles).checked() for run, tiles in part.tiles.items()} if qk else {}
        if qk:
            entry["qk"] = [_store_qk(each, f"{number}/qk/{n}", tensors) for n, each in enumerate(weights.values())]
            entry["qk_runs"] = [*weights]
        cells = _stored_map.store_map(part, f"{number}", tensors, weights, exact=exact)
        layers.append(entry if cells is None else {**entry, "cells": cells})
    return layers, tensors


def _version_of(layers: list[dict[str, Any]]) -> int:
    return VERSION if any("cells" in entry for entry in layers) else _WITHOUT_MAPS


def load(path: Path) -> tuple[dict[str, LayerStats], Origin | None]:
    """Return layer -> its statistics, and their origin; see ``HeadStats.load``."""
    file, header = open_entry(path, STATISTICS)
    if file is None or header is None:
        if is_cut_short(path) or is_cut_short(path, HISTORY):
            raise ValueError(f"{path}: is truncated; its end is missing")
        if file is not None and HISTORY in file.metadata:
            raise ValueError(f"{path}: holds the history of a training; load it with headscope.History.load")
        raise ValueError(f"{path}: is not a file of headscope statistics")
    return _read_all(file, header)


def decode(file: TensorFile) -> tuple[dict[str, LayerStats], Origin | None]:
    """Return the same from the result of ``encode``, opened by ``open_bytes``.

    Raises:
        ValueError: the bytes are damaged, or of a newer format.
    """
    header = parse_entry(file, STATISTICS)
    if header is None:
        raise ValueError(f"{file.path}: does not hold statistics")
    return _read_all(file, header)


def _read_all(file: TensorFile, header: dict[str, Any]) -> tuple[dict[str, LayerStats], Origin | None]:
    check_format(file.path, header, VERSION)
    read_checksums(file, header)
    origin = parse_entry(file, ORIGIN)
    if origin is not None:
        check_format(file.path, origin, _ORIGIN_VERSION)
    with damage_named(file.path):
        parts = _load(file, header)
        if origin is not None:
            read = _read_origin(origin, parts)
            check_widths(read, parts)
            return parts, read
    return parts, None if parse_entry(file, RECORDING) is None else UNKNOWN


def _load(file: TensorFile, header: dict[str, Any]) -> dict[str, LayerStats]:
    layers = read_list(header, "layers", dict)
    layer_names = [read_value(layer, "name", str) for layer in layers]
    if len({*layer_names}) < len(layers):
        raise ValueError(f"layers: got {Counter(layer_names).most_common(1)[0][0]} twice, expected different names")
    tensors = file.read(name for name in file.entries if "/qk/" not in name)  # pieces of q and k are read on request
    parts = [
        _stored_map.with_map(_read_layer(layer, f"{n}", tensors, file), layer, f"{n}", tensors)
        for n, layer in enumerate(layers)
    ]
    check_moments(parts)
    for n, part in enumerate(parts):
        if part.nulls is not None:
            check_nulls(f"{n}", part.nulls, {name: each.count for name, each in part.moments.items()})
    return dict(zip(layer_names, parts, strict=True))


def _store_layer(part: LayerStats, name: str, under: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Store the tensors of a layer, and return its other values."""
    tensors |= {f"{under}/rows": part.rows, f"{under}/broken": part.broken}
    for quantity, moments in part.moments.items():
        tensors |= {f"{under}/moments/{quantity}/{what}": getattr(moments, what) for what in MOMENTS}
    nulls = None if part.nulls is None else part.nulls.compact()
    if nulls is not None:
        tensors[f"{under}/nulls"] = nulls.sums
    if part.received is not None and part.eligible is not None:
        tensors |= {f"{under}/received": part.received, f"{under}/eligible": part.eligible}
    for which, (_, whats) in _PARTS.items():
        if (value := getattr(part, which)) is not None:
            tensors |= {f"{under}/{which}/{what}": getattr(value, what) for what in whats}
    tensors |= segment_tensors(part.segments, under)
    if part.received_max is not None:
        tensors[f"{under}/received_max"] = part.received_max
    for run, rows in enumerate(part.kept):
        tensors |= {f"{under}/kept/{run}/queries": rows.queries, f"{under}/kept/{run}/counted": rows.counted}
        tensors |= {f"{under}/kept/{run}/values/{what}": x for what, x in rows.values.items()}
    store_weights(part.weights, under, tensors)
    return {
        "name": name,
        **{what: getattr(part, what) for what in _NUMBERS},
        "moments": list(part.moments),
        "received": part.received is not None and part.eligible is not None,
        **{which: getattr(part, which) is not None for which in _PARTS},
        "kept": [list(rows.values) for rows in part.kept],
        "lengths": part.lengths,
        "first": part.first,
        **segment_entry(part.segments),
        "received_max": part.received_max is not None,
        **({"weights": [[run.length, *run.heads] for run in part.weights]} if part.weights else {}),
        "nulls": [] if nulls is None else list(nulls.names),
    }


def _store_origin(origin: Origin | None) -> dict[str, str]:
    """Return the entry of the header with the origin of the statistics, or that it is unknown."""
    if origin is None:
        return {}
    return {ORIGIN: json.dumps({"version": _ORIGIN_VERSION, **asdict(origin)})}


def _read_origin(header: dict[str, Any], names: Collection[str]) -> Origin:
    layers: dict[str, Any] = read_value(header, "layers", dict)
    if not layers.keys() <= {*names}:
        raise ValueError(f"layers: got {next(iter(layers.keys() - {*names}))}, expected names of the layers")
    model = read_value(header, "model", str)
    if not model:
        return UNKNOWN
    origins = {name: _read_layer_origin(read_value(layers, name, dict)) for name in layers}
    return Origin(model, read_value(header, "config", str), origins)


def _read_layer_origin(header: dict[str, Any]) -> LayerOrigin:
    widths = read_wholes(header, "widths")
    if len(widths) != 2:
        raise TypeError(f"widths: got {len(widths)} numbers, expected 2")
    part = read_value(header, "part", dict, NoneType)
    if part is None:
        return LayerOrigin((widths[0], widths[1]))
    of, holder = read_whole(part, "of", 1), read_value(part, "holder", str)
    if read_value(part, "heads", list, NoneType) is None:
        return LayerOrigin((widths[0], widths[1]), Part(of, None, holder))
    heads = read_wholes(part, "heads", of)
    if len(heads) != 2 or heads[0] >= heads[1]:
        raise ValueError(f"heads: got {list(heads)}, expected the first head and the one after the last")
    return LayerOrigin((widths[0], widths[1]), Part(of, (heads[0], heads[1]), holder))


def _store_qk(weights: KeptWeights, under: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Store the q, k and lse of a run."""
    tensors |= {f"{under}/{name}": x for name, x in weights.tensors().items()}
    return weights.metadata()


def _read_qk(entry: dict[str, Any], under: str, file: TensorFile, sizes: dict[str, int]) -> KeptWeights:
    entry = {"offset": None, "unverified": False} | entry  # older files lack these
    names = {"q", "k", "lse", *read_list(entry, "parts", str)}
    parts = {name: file.part(f"{under}/{name}") for name in _QK if name in names}
    shapes = {name: x.shape for name, x in parts.items()}
    for name, shape in shapes.items():
        _check_axes(f"{under}/{name}", shape, _QK[name], sizes, ones=name in ("spans", "rest", "bias"))
        if (got := parts[name].dtype) not in (expected := _KINDS.get(name, _FLOATING)):
            raise TypeError(f"{under}/{name}: got {got}, expected {' or '.join(expected)}")
    lead, heads, kv_heads = read_wholes(entry, "lead"), sizes["H"], sizes["Hkv"]
    if math.prod(lead) != sizes["B"] or heads // max(1, kv_heads) * kv_heads != heads:
        raise TypeError(f"{under}: lead {lead} and {kv_heads} key/value heads do not fit {shapes['q']}")
    if "spans" in parts:
        _check_within(f"{under}/spans", parts["spans"][:], 0, sizes["K"] + 1)
    scale = check_scale(read_value(entry, "scale", float, int), sizes["D"])
    softcap = check_softcap(read_value(entry, "softcap", float, int, NoneType))
    offset = None if read_value(entry, "offset", int, NoneType) is None else read_whole(entry, "offset", -FAR, FAR)
    verified = file.checksums and not read_value(entry, "unverified", bool)
    unverified = None if verified else f"{file.path}: is damaged: {under}"
    wide = parts["q"].dtype == "F64"
    return KeptWeights(parts, shapes, lead, scale, softcap, wide, offset, unverified=unverified)


def _check_axes(name: str, shape: tuple[int, ...], axes: Axes, sizes: dict[str, int], *, ones: bool = False) -> None:
    """Raise TypeError unless a letter has the same size everywhere (or 1, if ``ones``)."""
    fit = len(shape) == len(axes)
    for n, axis in zip(shape, axes, strict=False):
        size = sizes.setdefault(axis, n) if isinstance(axis, str) else axis
        fit &= n == size or (ones and n == 1 and isinstance(axis, str))
    if not fit:
        raise TypeError(f"{name}: got {list(shape)}, expected [{', '.join(map(str, axes))}]")


def _check_within(name: str, values: Tensor, least: float, end: int | Tensor | None) -> None:
    """Raise ValueError unless all numbers are from ``least`` up to, not including, ``end``; NaN is ignored."""
    if bool((values < least).any()) or (end is not None and bool((values >= end).any())):
        raise ValueError(f"{name}: holds {values.min()} to {values.max()}, outside the possible range")


def _tensor_reader(tensors: Mapping[str, Tensor], under: str, sizes: dict[str, int]) -> Callable[..., Tensor]:
    """Return a reader of a layer's tensors by name, which checks axes, dtype and range."""

    def read(name: str, *axes: str | int, within: tuple[float, int | Tensor | None] | None = None) -> Tensor:
        name = f"{under}/{name}"
        tensor, expected = tensors[name], _DTYPES.get(name.rpartition("/")[2])
        _check_axes(name, tuple(tensor.shape), axes, sizes)
        if tensor.dtype not in _FIGURES if expected is None else tensor.dtype != expected:
            raise TypeError(f"{name}: got {tensor.dtype}, expected {expected or 'float32 or float64'}")
        if within is not None:
            _check_within(name, tensor, *within)
        return tensor

    return read


def _read_kept(names: list[str], under: str, run: int, read: Callable[..., Tensor], queries: int, keys: int) -> Kept:
    b, r, k = (f"{axis} of run {run}" for axis in "BRk")
    at = f"kept/{run}"
    rows, counted = read(f"{at}/queries", r, within=(0, queries)), read(f"{at}/counted", b, "H", r)
    values: dict[str, Tensor] = {}
    for name in names:
        if (other := _PAIRS.get(name, name)) not in names:
            raise ValueError(f"{at}: {other} is missing; expected together with {name}")
        deep = (k,) if name.startswith("top_") else ()
        within = (-1, keys) if name in ("argmax", "top_keys") else None
        values[name] = read(f"{at}/values/{name}", b, "H", r, *deep, within=within)
    rows_of_run = Kept(rows, counted, values)
    check_kept(f"{under}/{at}/values", rows_of_run)
    return rows_of_run


def _read_layer(entry: dict[str, Any], under: str, tensors: Mapping[str, Tensor], file: TensorFile) -> LayerStats:
    """Read the result of ``_store_layer``."""
    later = {"lengths": None, "first": None, "qk": [], "qk_runs": None, "segments": None, "received_max": False}
    entry = later | {"weights": [], "nulls": [], **LATER} | entry  # older files lack these
    numbers = {what: read_whole(entry, what, 0) for what in _NUMBERS}
    looked_at = read_whole(entry, "looked_at", 0, numbers["of"])
    lengths = _read_lengths(entry)
    queries, keys = lengths or (FAR, FAR)
    ends = torch.tensor([numbers["runs"], numbers["of"], queries, keys], device="cpu")
    sizes = {"H": numbers["heads"]}
    read = _tensor_reader(tensors, under, sizes)
    rows, broken = (read(what, "H", within=(0, looked_at + 1)) for what in ("rows", "broken"))
    moments: dict[str, Moments] = {}
    for name in read_list(entry, "moments", str):
        bins = {"histogram": [len(histogram_edges(name)) - 1]}
        moments[name] = Moments(*(read(f"moments/{name}/{what}", "H", *bins.get(what, ())) for what in MOMENTS))
    check_complete(read_value(entry, "name", str), entry["moments"])
    parts: dict[str, Any] = {
        which: kind(
            *(
                read(f"{which}/{what}", *axes, within=(-1, ends) if axes[-1] == 4 else (0, None))
                for what, axes in whats.items()
            )
        )
        for which, (kind, whats) in _PARTS.items()
        if read_value(entry, which, bool)
    }
    if read_value(entry, "received", bool):
        parts |= {what: read(what, "H", "K", within=(0, None)) for what in ("received", "eligible")}
    parts |= read_segments(entry, read, int(rows.max()) if len(rows) else 0)
    check_parts(under, parts)
    retained = tuple(
        _read_kept(names, under, run, read, queries, keys) for run, names in enumerate(read_list(entry, "kept", list))
    )
    known = {"H": numbers["heads"], **({} if lengths is None else {"Q": queries, "K": keys})}
    tiles = [_read_qk(each, f"{under}/qk/{n}", file, {**known}) for n, each in enumerate(read_list(entry, "qk", dict))]
    runs = (
        [*range(len(tiles))]
        if read_value(entry, "qk_runs", list, NoneType) is None
        else read_list(entry, "qk_runs", int)
    )
    if len(runs) != len(tiles) or runs != sorted({*runs}) or not all(0 <= n < numbers["runs"] for n in runs):
        raise TypeError(f"qk_runs: got {runs} for {len(tiles)} of {numbers['runs']} runs")
    return LayerStats(
        **numbers, rows=rows, broken=broken, moments=moments, **parts, kept=retained,
        tiles=dict(zip(runs, tiles, strict=True)), lengths=lengths,
        first=None if read_value(entry, "first", int, NoneType) is None else read_whole(entry, "first", 1, math.inf),
        weights=_read_weights(read_list(entry, "weights", list), under, tensors, read, numbers),
        nulls=_read_nulls(entry, read),
    )  # fmt: skip


def _read_weights(
    entries: list[list[Any]],
    under: str,
    tensors: Mapping[str, Tensor],
    read: Callable[..., Tensor],
    numbers: dict[str, int],
) -> tuple[HeadWeights, ...]:
    """Read the weights of chosen heads: of each run its number of queries, and its heads."""
    if len(entries) not in (0, numbers["runs"]):
        raise ValueError(f"weights: got {len(entries)} entries for {numbers['runs']} runs")
    runs: list[HeadWeights] = []
    for n, numbers_of_run in enumerate(entries):
        length, *heads = read_wholes({"weights": numbers_of_run}, "weights", 2**40)  # heads: checked below
        b, r, k = (f"{axis} of weights {n}" for axis in "BRK")
        at = f"weights/{n}"
        queries = read(f"{at}/queries", r, within=(0, length))
        p, place = read(f"{at}/p", b, len(heads), r, k), read(f"{at}/place", 4)
        ends = [read(f"{at}/ends", b, 2, 1)] if f"{under}/{at}/ends" in tensors else []  # not in those of before
        run = HeadWeights(tuple(heads), queries, p, length, place, *ends)
        runs.append(check_weights(f"{under}/{at}", run, numbers["heads"]))
    if len({run.heads for run in runs}) > 1:
        raise ValueError(f"weights: got runs of different heads, expected those of {list(runs[0].heads)}")
    return tuple(runs)


def _read_nulls(entry: dict[str, Any], read: Callable[..., Tensor]) -> Nulls | None:
    names = read_list(entry, "nulls", str)
    if not names:  # of an earlier version, or without row quantities
        return None
    return Nulls((*names,), read("nulls", 2, len(names), "H"))


def _read_lengths(entry: dict[str, Any]) -> tuple[int, int] | None:
    """Return the numbers of queries and keys of each run; ``of``: the number of rows of all."""
    if read_value(entry, "lengths", list, NoneType) is None:
        return None
    lengths = read_wholes(entry, "lengths", FAR)
    if len(lengths) != 2:
        raise TypeError(f"lengths: got {len(lengths)} numbers, expected 2")
    return lengths
