"""HeadStats on disk: tensors in a safetensors file, everything else as JSON in its header."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from headscope._attend.call import check_scale, check_softcap
from headscope._support.files import amiss, replace
from headscope.masks import FAR
from headscope.stats._checks import MOMENTS, check_complete, check_moments, check_parts
from headscope.stats._head_stats import HeadStats
from headscope.stats._layer import Edges, HeadMap, Kept, LayerStats, Moments, histogram_edges
from headscope.stats._origin import UNKNOWN, LayerOrigin, Origin, Part
from headscope.stats._tiles import KeptWeights, kept_of

VERSION = 1
_LONGEST = 100_000_000  # of a header, by safetensors
_KEY = "headscope.stats"
RECORDING = "headscope.recording"
_ORIGIN = "headscope.origin"
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
_KINDS = {"rest": ("BOOL",), "spans": ("I64",)}  # as safetensors calls them
_FLOATING = ("F64", "F32", "F16", "BF16")
_WHOLE = ("rows", "broken", "count", "histogram", "eligible", "argmax", "at", "queries", "top_keys")
_FIGURES = (torch.float32, torch.float64)
_DTYPES = {"counted": torch.bool, **dict.fromkeys(_WHOLE, torch.int64)}  # all others are of ``_FIGURES``
_NATS = (-1, 100)  # an entropy of 100 nats takes e^100 keys
_PAIRS = {"top_keys": "top_weights", "top_weights": "top_keys"}
_MOST_SHOWN = 300  # characters of what was found: a name may be as long as the file


def save(stats: HeadStats, path: Path, force: bool, more: Mapping[str, str] | None = None, *, qk: bool = False) -> Path:
    """See ``HeadStats.save``; ``more`` are further entries of the header, ``qk``: also q, k and lse."""
    from safetensors import SafetensorError
    from safetensors.torch import save as encode

    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    check_utf8(path)
    if (said := amiss(path)) is not None:
        raise FileExistsError(f"{path}: {said}")
    if path.exists() and not force and not is_ours(path):
        raise FileExistsError(
            f"{path}: is there and is no file of headscope's statistics; give force=True to replace it"
        )
    tensors: dict[str, Tensor] = {}
    layers = [_put(part, name, f"{number}", tensors) for number, (name, part) in enumerate(stats.parts.items())]
    if qk:
        for number, (said, part) in enumerate(zip(layers, stats.parts.values(), strict=True)):
            said["qk"] = [_put_qk(each, f"{number}/qk/{n}", tensors) for n, each in enumerate(part.tiles.values())]
            said["qk_runs"] = [*part.tiles]
    entries = {_KEY: json.dumps({"version": VERSION, "layers": layers}), **_put_origin(stats.origin), **(more or {})}
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    try:
        content = encode(plain, entries)
    except SafetensorError as error:
        runs = sum(len(part.kept) for part in stats.parts.values())
        raise ValueError(
            f"{path}: too much for one file ({error}): the header would name {len(plain)} tensors, for rows of {runs} "
            "calls are kept; observe without keep_rows and top, or save and start anew more often"
        ) from error
    replace(path, content)
    return path


def load(path: Path) -> HeadStats:
    """See ``HeadStats.load``."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if (why := amiss(path)) is not None:
        raise ValueError(f"{path}: {why}")
    check_utf8(path)
    path.open("rb").close()  # what keeps it from being read is said here; safetensors does not say it
    said = header(path)
    if said is None:
        if _is_cut_short(path):
            raise ValueError(f"{path}: is cut short, its end is missing")
        raise ValueError(f"{path}: no file of headscope's statistics")
    check_format(path, said, VERSION)
    origin = header(path, _ORIGIN)
    if origin is not None:
        check_format(path, origin, _ORIGIN_VERSION)
    with sound(path):
        stats = _load(path, said)
        if origin is not None:
            return HeadStats(stats.parts, _take_origin(origin, stats.layers))
    return stats if header(path, RECORDING) is None else HeadStats(stats.parts, UNKNOWN)


def _load(path: Path, said: dict[str, Any]) -> HeadStats:
    from safetensors import safe_open

    layers = listed(said, "layers", dict)
    layer_names = [told(layer, "name", str) for layer in layers]
    if len({*layer_names}) < len(layers):
        raise ValueError(f"layers: got {Counter(layer_names).most_common(1)[0][0]} twice, wanted different names")
    with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType, reportGeneralTypeIssues]
        names: list[str] = [name for name in file.keys() if "/qk/" not in name]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    # stays open: of q and k the pieces that are asked for are read, and no more
    mapped = safe_open(path, framework="pt") if any(layer.get("qk") for layer in layers) else None
    taken = [_take(layer, f"{n}", tensors, mapped) for n, layer in enumerate(layers)]
    check_moments(taken)
    return HeadStats(dict(zip(layer_names, taken, strict=True)))


def check_format(path: Path, said: Mapping[str, Any], most: int) -> None:
    """Raises: ValueError: what a header says is of a newer format, or of none."""
    with sound(path):
        version = whole(said, "version", 1)
    if version > most:
        raise ValueError(f"{path}: format {version}, this version of headscope reads up to {most}")


def header(path: Path, key: str = _KEY) -> dict[str, Any] | None:
    """What the header says under a key, or None for any other file.

    Raises:
        ValueError: what it says cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType, reportGeneralTypeIssues]
            said: Mapping[str, str] = file.metadata() or {}
    except (SafetensorError, OSError):
        return None
    if key not in said:
        return None
    with sound(path):
        return {**json.loads(said[key])}


def _is_cut_short(path: Path) -> bool:
    """Whether a file that safetensors does not read has our header, or its beginning, and less than that tells of."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            head = file.read(min(length, size)) if length <= _LONGEST else b""
        if f'"{_KEY}"'.encode() not in head:
            return False
        if len(head) < length:
            return True
        tensors = (said for name, said in json.loads(head).items() if name != "__metadata__")
        return size < 8 + length + max((said["data_offsets"][1] for said in tensors), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False  # it is damaged in another way


def is_ours(path: Path) -> bool:
    """Whether a file is one of headscope's statistics that can be read, and so may be replaced."""
    try:
        return path.is_file() and header(path) is not None  # to open a pipe is to wait
    except ValueError:
        return False


def check_utf8(path: Path) -> None:
    """Raises: ValueError: a file of this name can be written, but not read."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{str(path)!a}: is no UTF-8, and safetensors opens no file of such a name") from error


@contextmanager
def sound(path: Path) -> Generator[None]:
    """Whatever is found amiss in a file's header or tensors is told as the damage that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is damaged: its header is no JSON ({error})") from error
    except KeyError as error:
        raise ValueError(f"{path}: is damaged: it lacks {_short(error)}") from error
    except (TypeError, ValueError, AttributeError, IndexError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path}: is damaged: {_short(error)}") from error


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def told(said: Mapping[str, Any], name: str, *kinds: type[Any]) -> Any:
    """A value that a header says.

    Raises:
        KeyError: it does not.
        TypeError: the value is of another kind; True and False are no whole numbers.
    """
    value = said[name]
    if type(value) not in kinds:
        wanted = " or ".join(each.__name__ for each in kinds)
        raise TypeError(f"{name}: got {type(value).__name__}, wanted {wanted}")
    return value


def listed(said: Mapping[str, Any], name: str, kind: type[Any]) -> list[Any]:
    """Several values of one kind; likewise."""
    return [told({name: each}, name, kind) for each in told(said, name, list)]


def whole(said: Mapping[str, Any], name: str, least: int, most: float = 2**62) -> int:
    """A whole number that a header says, by default one that 64 bits hold.

    Raises:
        KeyError, TypeError: as ``told``.
        ValueError: it is out of range.
    """
    value = told(said, name, int)
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}, wanted {least} to {most}")
    return value


def _wholes(said: Mapping[str, Any], name: str, most: int = 2**62) -> tuple[int, ...]:
    """Several from 0 on; likewise."""
    return tuple(whole({name: each}, name, 0, most) for each in told(said, name, list))


def _put(part: LayerStats, name: str, under: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """File the tensors of a layer, and return all else that has to be known of it."""
    tensors |= {f"{under}/rows": part.rows, f"{under}/broken": part.broken}
    for quantity, moments in part.moments.items():
        tensors |= {f"{under}/moments/{quantity}/{what}": getattr(moments, what) for what in MOMENTS}
    if part.received is not None and part.eligible is not None:
        tensors |= {f"{under}/received": part.received, f"{under}/eligible": part.eligible}
    for which, (_, whats) in _PARTS.items():
        if (found := getattr(part, which)) is not None:
            tensors |= {f"{under}/{which}/{what}": getattr(found, what) for what in whats}
    for run, kept in enumerate(part.kept):
        tensors |= {f"{under}/kept/{run}/queries": kept.queries, f"{under}/kept/{run}/counted": kept.counted}
        tensors |= {f"{under}/kept/{run}/values/{what}": x for what, x in kept.values.items()}
    return {
        "name": name,
        **{what: getattr(part, what) for what in _NUMBERS},
        "moments": list(part.moments),
        "received": part.received is not None,
        **{which: getattr(part, which) is not None for which in _PARTS},
        "kept": [list(kept.values) for kept in part.kept],
        "lengths": part.lengths,
        "first": part.first,
    }


def _put_origin(origin: Origin | None) -> dict[str, str]:
    """The entry of the header that states what the statistics are of, or that it is unknown."""
    if origin is None:
        return {}
    return {_ORIGIN: json.dumps({"version": _ORIGIN_VERSION, **asdict(origin)})}


def _take_origin(said: dict[str, Any], names: Collection[str]) -> Origin:
    layers: dict[str, Any] = told(said, "layers", dict)
    if not layers.keys() <= {*names}:
        raise ValueError(f"layers: got {next(iter(layers.keys() - {*names}))}, expected names of the layers")
    model = told(said, "model", str)
    if not model:
        return UNKNOWN
    found = {name: _take_layer_origin(told(layers, name, dict)) for name in layers}
    return Origin(model, told(said, "config", str), found)


def _take_layer_origin(said: dict[str, Any]) -> LayerOrigin:
    widths = _wholes(said, "widths")
    if len(widths) != 2:
        raise TypeError(f"widths: got {len(widths)} numbers, expected 2")
    part = told(said, "part", dict, NoneType)
    if part is None:
        return LayerOrigin((widths[0], widths[1]))
    of, holder = whole(part, "of", 1), told(part, "holder", str)
    if told(part, "heads", list, NoneType) is None:
        return LayerOrigin((widths[0], widths[1]), Part(of, None, holder))
    heads = _wholes(part, "heads", of)
    if len(heads) != 2 or heads[0] >= heads[1]:
        raise ValueError(f"heads: got {list(heads)}, expected the first head and the one after the last")
    return LayerOrigin((widths[0], widths[1]), Part(of, (heads[0], heads[1]), holder))


def _put_qk(tiles: Any, under: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """File the q, k and lse of a run."""
    kept = kept_of(tiles)
    tensors |= {f"{under}/{name}": x for name, x in kept.tensors().items()}
    return kept.said()


def _take_qk(said: dict[str, Any], under: str, file: Any, sizes: dict[str, int]) -> KeptWeights:
    said = {"offset": None} | said  # older files do not say it
    names = {"q", "k", "lse", *listed(said, "parts", str)}
    parts = {name: file.get_slice(f"{under}/{name}") for name in _QK if name in names}
    shapes = {name: tuple(x.get_shape()) for name, x in parts.items()}
    for name, shape in shapes.items():
        _check_axes(f"{under}/{name}", shape, _QK[name], sizes, ones=name in ("spans", "rest", "bias"))
        if (got := parts[name].get_dtype()) not in (wanted := _KINDS.get(name, _FLOATING)):
            raise TypeError(f"{under}/{name}: got {got}, wanted {' or '.join(wanted)}")
    lead, heads, kv_heads = _wholes(said, "lead"), sizes["H"], sizes["Hkv"]
    if math.prod(lead) != sizes["B"] or heads // max(1, kv_heads) * kv_heads != heads:
        raise TypeError(f"{under}: lead {lead} and {kv_heads} key/value heads do not fit {shapes['q']}")
    if "spans" in parts:
        _check_within(f"{under}/spans", parts["spans"][:], 0, sizes["K"] + 1)
    scale = check_scale(told(said, "scale", float, int), sizes["D"])
    softcap = check_softcap(told(said, "softcap", float, int, NoneType))
    offset = None if told(said, "offset", int, NoneType) is None else whole(said, "offset", -FAR, FAR)
    return KeptWeights(parts, shapes, lead, scale, softcap, parts["q"].get_dtype() == "F64", offset)


def _check_axes(name: str, shape: tuple[int, ...], axes: Axes, sizes: dict[str, int], *, ones: bool = False) -> None:
    """Raises: TypeError: a letter is not everywhere the same size (or 1, if ``ones``)."""
    fit = len(shape) == len(axes)
    for n, axis in zip(shape, axes, strict=False):
        size = sizes.setdefault(axis, n) if isinstance(axis, str) else axis
        fit &= n == size or (ones and n == 1 and isinstance(axis, str))
    if not fit:
        raise TypeError(f"{name}: got {list(shape)}, wanted [{', '.join(map(str, axes))}]")


def _check_within(name: str, found: Tensor, least: int, end: int | Tensor | None) -> None:
    """Raises: ValueError: not all numbers are from ``least`` up to, not including, ``end``; NaN is left alone."""
    if bool((found < least).any()) or (end is not None and bool((found >= end).any())):
        raise ValueError(f"{name}: holds {found.min()} to {found.max()}, beyond what there can be")


def _taker(tensors: Mapping[str, Tensor], under: str, sizes: dict[str, int]) -> Callable[..., Tensor]:
    """What gives a tensor of a layer by its name, if its axes, dtype and range are those that go with the name."""

    def take(name: str, *axes: str | int, within: tuple[int, int | Tensor | None] | None = None) -> Tensor:
        name = f"{under}/{name}"
        found, wanted = tensors[name], _DTYPES.get(name.rpartition("/")[2])
        _check_axes(name, tuple(found.shape), axes, sizes)
        if found.dtype not in _FIGURES if wanted is None else found.dtype != wanted:
            raise TypeError(f"{name}: got {found.dtype}, expected {wanted or 'float32 or float64'}")
        if within is not None:
            _check_within(name, found, *within)
        return found

    return take


def _take_kept(names: list[str], run: int, take: Callable[..., Tensor], queries: int, keys: int) -> Kept:
    b, r, k = (f"{axis} of run {run}" for axis in "BRk")
    at = f"kept/{run}"
    rows, counted = take(f"{at}/queries", r, within=(0, queries)), take(f"{at}/counted", b, "H", r)
    values: dict[str, Tensor] = {}
    for name in names:
        if (other := _PAIRS.get(name, name)) not in names:
            raise ValueError(f"{at}: {other} is missing; expected beside {name}")
        deep = (k,) if name.startswith("top_") else ()
        within = (-1, keys) if name in ("argmax", "top_keys") else _NATS if name == "entropy" else None
        values[name] = take(f"{at}/values/{name}", b, "H", r, *deep, within=within)
    return Kept(rows, counted, values)


def _take(said: dict[str, Any], under: str, tensors: Mapping[str, Tensor], mapped: Any) -> LayerStats:
    """The reverse of ``_put``."""
    said = {"lengths": None, "first": None, "qk": [], "qk_runs": None} | said  # older files do not say these
    numbers = {what: whole(said, what, 0) for what in _NUMBERS}
    looked_at = whole(said, "looked_at", 0, numbers["of"])
    lengths = _take_lengths(said, numbers["of"])
    queries, keys = lengths or (FAR, FAR)
    ends = torch.tensor([numbers["runs"], numbers["of"], queries, keys], device="cpu")
    sizes = {"H": numbers["heads"]}
    take = _taker(tensors, under, sizes)
    rows, broken = (take(what, "H", within=(0, looked_at + 1)) for what in ("rows", "broken"))
    moments: dict[str, Moments] = {}
    for name in listed(said, "moments", str):
        bins = {"histogram": [len(histogram_edges(name)) - 1]}
        moments[name] = Moments(*(take(f"moments/{name}/{what}", "H", *bins.get(what, ())) for what in MOMENTS))
    check_complete(told(said, "name", str), said["moments"])
    parts: dict[str, Any] = {
        which: kind(
            *(
                take(f"{which}/{what}", *axes, within=(-1, ends) if axes[-1] == 4 else (0, None))
                for what, axes in whats.items()
            )
        )
        for which, (kind, whats) in _PARTS.items()
        if told(said, which, bool)
    }
    if told(said, "received", bool):
        parts |= {what: take(what, "H", "K", within=(0, None)) for what in ("received", "eligible")}
    check_parts(under, parts)
    kept = tuple(_take_kept(names, run, take, queries, keys) for run, names in enumerate(listed(said, "kept", list)))
    known = {"H": numbers["heads"], **({} if lengths is None else {"Q": queries, "K": keys})}
    tiles = [_take_qk(each, f"{under}/qk/{n}", mapped, {**known}) for n, each in enumerate(listed(said, "qk", dict))]
    runs = [*range(len(tiles))] if told(said, "qk_runs", list, NoneType) is None else listed(said, "qk_runs", int)
    if len(runs) != len(tiles) or runs != sorted({*runs}) or not all(0 <= n < numbers["runs"] for n in runs):
        raise TypeError(f"qk_runs: got {runs} for {len(tiles)} of {numbers['runs']} runs")
    return LayerStats(
        **numbers, rows=rows, broken=broken, moments=moments, **parts, kept=kept,
        tiles=dict(zip(runs, tiles, strict=True)), lengths=lengths,
        first=None if told(said, "first", int, NoneType) is None else whole(said, "first", 1, math.inf),
    )  # fmt: skip


def _take_lengths(said: dict[str, Any], of: int) -> tuple[int, int] | None:
    """How many queries and keys each run had; ``of``: how many rows all had."""
    if told(said, "lengths", list, NoneType) is None:
        return None
    found = _wholes(said, "lengths", FAR)
    if len(found) != 2:
        raise TypeError(f"lengths: got {len(found)} numbers, wanted 2")
    if of % max(1, found[0]):
        raise ValueError(f"lengths: got {found[0]} queries for {of} rows in all")
    return found
