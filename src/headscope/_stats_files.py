"""HeadStats on disk: tensors in a safetensors file, everything else as JSON in its header."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from headscope._files import replace
from headscope._kept_weights import KeptWeights, kept_of
from headscope._stats_parts import Edges, HeadMap, Kept, LayerStats, Moments
from headscope.stats import HeadStats

VERSION = 1
_LONGEST = 100_000_000  # of a header, by safetensors
_KEY = "headscope.stats"
_NUMBERS = ("heads", "runs", "looked_at", "of")
_PARTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "map": (HeadMap, ("sum", "count", "max", "argmax")),
    "edges": (Edges, ("p", "at")),
}
_MOMENTS = ("count", "mean", "M2", "min", "max", "histogram")


def save(stats: HeadStats, path: Path, force: bool, more: Mapping[str, str] | None = None, *, qk: bool = False) -> Path:
    """See ``HeadStats.save``; ``more`` are further entries of the header, ``qk``: also q, k and lse."""
    from safetensors.torch import save as encode

    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    check_name(path)
    if path.exists() and not force and not is_ours(path):
        raise FileExistsError(
            f"{path}: is there and is no file of headscope's statistics; give force=True to replace it"
        )
    tensors: dict[str, Tensor] = {}
    layers = [_put(part, name, f"{number}", tensors) for number, (name, part) in enumerate(stats.parts.items())]
    if qk:
        for number, (said, part) in enumerate(zip(layers, stats.parts.values(), strict=True)):
            said["qk"] = [_put_qk(each, f"{number}/qk/{n}", tensors) for n, each in enumerate(part.tiles)]
            said["qk_runs"] = [*part.tiles_by_run]
    entries = {_KEY: json.dumps({"version": VERSION, "layers": layers}), **(more or {})}
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    replace(path, encode(plain, entries))
    return path


def load(path: Path) -> HeadStats:
    """See ``HeadStats.load``."""

    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    said = header(path)
    if said is None:
        if _is_cut_short(path):
            raise ValueError(f"{path}: is cut short, its end is missing")
        raise ValueError(f"{path}: no file of headscope's statistics")
    with sound(path):
        return _load(path, said)


def _load(path: Path, said: dict[str, Any]) -> HeadStats:
    from safetensors import safe_open

    if said["version"] > VERSION:
        raise ValueError(f"{path}: format {said['version']}, this version of headscope reads up to {VERSION}")
    with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType, reportGeneralTypeIssues]
        names: list[str] = [name for name in file.keys() if "/qk/" not in name]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    # stays open: of q and k the pieces that are asked for are read, and no more
    mapped = safe_open(path, framework="pt") if any(layer.get("qk") for layer in said["layers"]) else None
    return HeadStats({layer["name"]: _take(layer, f"{n}", tensors, mapped) for n, layer in enumerate(said["layers"])})


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
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # it is damaged in another way


def is_ours(path: Path) -> bool:
    """Whether a file is one of headscope's statistics that can be read, and so may be replaced."""
    try:
        return header(path) is not None
    except ValueError:
        return False


def check_name(path: Path) -> None:
    """Raises: ValueError: a file of this name could be written, but not read again."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{str(path)!a}: is no UTF-8, and safetensors opens no file of such a name") from error


@contextmanager
def sound(path: Path) -> Generator[None]:
    """Whatever is found amiss in a file's header or tensors is told as the damage that it is."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is damaged: its header is no JSON ({error})") from error
    except KeyError as error:
        raise ValueError(f"{path}: is damaged: it lacks {error}") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}: is damaged: {error}") from error


def _put(part: LayerStats, name: str, under: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """File the tensors of a layer, and return all else that has to be known of it."""
    tensors |= {f"{under}/rows": part.rows, f"{under}/broken": part.broken}
    for quantity, moments in part.moments.items():
        tensors |= {f"{under}/moments/{quantity}/{what}": getattr(moments, what) for what in _MOMENTS}
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


def _put_qk(tiles: Any, under: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """File the q, k and lse of a run."""
    kept = kept_of(tiles)
    tensors |= {f"{under}/{name}": x for name, x in kept.tensors().items()}
    return kept.said()


def _take_qk(said: dict[str, Any], under: str, file: Any) -> KeptWeights:
    parts = {name: file.get_slice(f"{under}/{name}") for name in said["parts"]}
    sizes = {name: tuple(x.get_shape()) for name, x in parts.items()}
    wide = parts["q"].get_dtype() == "F64"
    return KeptWeights(parts, sizes, tuple(said["lead"]), said["scale"], said["softcap"], wide)


def _take(said: dict[str, Any], under: str, tensors: Mapping[str, Tensor], mapped: Any = None) -> LayerStats:
    """The reverse of ``_put``."""
    moments = {
        name: Moments(*(tensors[f"{under}/moments/{name}/{what}"] for what in _MOMENTS)) for name in said["moments"]
    }
    parts: dict[str, Any] = {
        which: kind(*(tensors[f"{under}/{which}/{what}"] for what in whats)) if said[which] else None
        for which, (kind, whats) in _PARTS.items()
    }
    kept = tuple(
        Kept(
            tensors[f"{under}/kept/{run}/queries"],
            tensors[f"{under}/kept/{run}/counted"],
            {name: tensors[f"{under}/kept/{run}/values/{name}"] for name in names},
        )
        for run, names in enumerate(said["kept"])
    )
    found: dict[str, Any] = {what: tensors[f"{under}/{what}"] for what in ("rows", "broken")}
    found |= {what: tensors[f"{under}/{what}"] if said["received"] else None for what in ("received", "eligible")}
    found |= {what: said[what] for what in _NUMBERS}
    lengths = said.get("lengths")  # older files do not say it
    tiles = tuple(_take_qk(each, f"{under}/qk/{run}", mapped) for run, each in enumerate(said.get("qk", ())))
    lengths = tuple(lengths) if lengths else None
    runs = said.get("qk_runs")  # nor this: q and k are then of all runs
    return LayerStats(
        **found, moments=moments, **parts, kept=kept, tiles=tiles, lengths=lengths, first=said.get("first"),
        tile_runs=tuple(runs) if runs else None,
    )  # fmt: skip
