"""The origin of a watched model: its class, a digest of its configuration, and its part of a layer's heads."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from headscope._intercept.intercepted_call import WatchError
from headscope._intercept.module_names import model_class
from headscope.stats._origin import PROCESS, LayerOrigin, Origin, Part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Names of sizes and counts. They are the same under every dtype, attention function and version of transformers, and in
# every checkpoint of one architecture: fine-tuning changes vocabulary, labels, lengths and rates, not these.
_STRUCTURE = re.compile(
    r"^(model_type|depths?|dim|heads|layers|n_(embd|head|layer|inner)|d_(model|kv|ff|inner)|num_channels)$"
    r"|_(layers?|heads?|depths?|dims?|sizes?|groups|blocks)$"
)
_NO_STRUCTURE = re.compile(
    r"vocab|position|token|image|label|batch|beam|group_size|chunk|cache|max_|context|block_size|sequence|window|return|sample"
)
_HEADS = re.compile(r"(^|_)n?heads?$")
_NO_QUERY_HEADS = re.compile(r"kv|key|value|linear|index")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads")
_DEEPEST = 4  # configurations within configurations

_holders: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def origin_of(model: nn.Module) -> Origin:
    """Return the origin of a recording of ``model``, before its first layer."""
    return Origin(model_class(model).__qualname__, _digest(getattr(model, "config", None)))


def layer_origin(modules: Mapping[str, nn.Module], name: str, heads: int, widths: tuple[int, int]) -> LayerOrigin:
    """Return the origin of a recording of one layer.

    Args:
        modules: those of the model, by path; the model itself under the name of its class.
        name: the module that attends.
        heads: the number of heads of its first call.
        widths: the head width of q and k, and that of v, there.
    """
    return LayerOrigin(widths, layer_part(modules, name, heads, widths))


def layer_part(modules: Mapping[str, nn.Module], name: str, heads: int, widths: tuple[int, int]) -> Part | None:
    """Return the part of a layer's heads that its module holds; None = all, as far as known.

    Args:
        modules: those of the model, by path; the model itself under the name of its class.
        name: the module that attends.
        heads: the number of heads of its call.
        widths: the head width of q and k, and that of v.

    Raises:
        WatchError: its parameters are sharded, and neither they nor a configuration show how many heads there are.
    """
    around = [modules[path] for path in _outwards(name) if path in modules] or [modules[name]]
    root = next(iter(modules.values()))
    around += [] if around[-1] is root else [root]
    return _part(name, around, heads, widths)


def shared_part(modules: Mapping[str, nn.Module], name: str, heads: int, widths: tuple[int, int]) -> Part | None:
    """Return ``layer_part`` if other processes may hold the other heads; None = there are no others to act on."""
    part = layer_part(modules, name, heads, widths)
    alone = part is not None and part.heads is None and _process()[1] == 1
    return None if alone else part


def head_span(name: str, heads: int, part: Part | None) -> tuple[int, int]:
    """Return the number of a layer's first head in the whole model, and the number of its heads there.

    Raises:
        WatchError: the numbers of these heads are unknown.
    """
    if part is None:
        return 0, heads
    if part.heads is None:
        raise WatchError(
            f"heads: layer {name} holds {part}, so its heads cannot be numbered; shard it as DTensors, with "
            'torch.distributed.tensor.parallel, ablate "all", or run the whole model in one process. If the whole '
            f"layer has {heads} heads, set num_attention_heads of its configuration to {heads}"
        )
    return part.heads[0], part.of


def _outwards(name: str) -> Iterator[str]:
    """Yield a module's path, then those of the enclosing modules."""
    parts = name.split(".")
    yield from (".".join(parts[:n]) for n in range(len(parts), 0, -1))


# ---------------------------------------------------------------- the configuration


def _digest(config: object) -> str:
    """Return a short digest of a configuration's structure; empty if it states none."""
    entries: list[tuple[str, Any]] = []
    for name, value in _entries(config):
        if _names_structure(name) and _is_structure(value):
            entries.append((name, tuple(value) if isinstance(value, list) else value))
    return _digest_of(tuple(entries)) if entries else ""


@functools.lru_cache(maxsize=64, typed=True)
def _digest_of(entries: tuple[tuple[str, Any], ...]) -> str:
    """Return the digest of a structure; a watch may be opened for each forward pass of one model."""
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def _names_structure(name: str) -> bool:
    key = name.rpartition(".")[2]
    return bool(_STRUCTURE.search(key)) and not _NO_STRUCTURE.search(key)


def _is_structure(value: object) -> bool:
    if type(value) in (int, str):
        return True
    items = value if isinstance(value, (list, tuple)) else [value]
    return all(type(each) in (int, str) for each in items)


def _entries(config: object, before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield name and value of a configuration and of those within it: a mapping, or an object with attributes."""
    if depth > _DEEPEST or isinstance(config, type):
        return
    held: Mapping[Any, Any] = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    if isinstance(kind := getattr(type(config), "model_type", None), str):  # its own attribute only once it was loaded
        held = {**held, "model_type": kind}
    for key, value in held.items():
        if not isinstance(key, str) or key[:1] == "_":
            continue
        if key[-6:] == "config" and not isinstance(value, (str, int, list, tuple, type(None))):
            yield from _entries(value, f"{before}{key}.", depth + 1)
        else:
            yield before + key, value


# ---------------------------------------------------------------- the part


@dataclass(frozen=True)
class _Slice:
    """This process's part of a sharded parameter.

    Attributes:
        parameter: its name.
        axis: 0 = it is sharded by rows, 1 = by columns.
        total: the number of rows or columns of the whole parameter.
        length: the number that this process holds.
        start: the index of the first one; None if this process does not hold the shard of the placement.
    """

    parameter: str
    axis: int
    total: int
    length: int
    start: int | None

    def __str__(self) -> str:
        return f"{self.length} of {self.total} {'columns' if self.axis else 'rows'} of {self.parameter}"


def _read(config: Any, name: str) -> Any:
    """Return an attribute of a configuration; None if it has none, or one for each layer, which transformers raises."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _part(name: str, around: list[nn.Module], heads: int, widths: tuple[int, int]) -> Part | None:
    """Return the part of the heads that a layer holds; None = all, as far as known.

    Args:
        name: the layer, for the error.
        around: the layer's module, then the enclosing ones.
        heads: the number of heads of the call.
        widths: the head width of q and k, and that of v.
    """
    configs = (getattr(each, "config", None) for each in around)
    config = next((each for each in configs if each is not None), None)
    count = next((n for name in _HEAD_COUNTS if type(n := _read(config, name)) is int), None)
    if count is not None and heads >= count:
        return None
    stated = heads in _declared(config)
    may_be_all = count is None or stated or (heads > 0 and count % heads != 0)
    slices, shapes = _slices(around)
    answers = _shares(slices, heads, widths)
    if count is None and True in (answers or {True}) and _are_complete([shape[0] for shape in shapes], heads, widths):
        if _are_complete([each.length for each in slices if each.axis == 0], heads, widths):
            raise _unknown_share(name, heads, slices)
        return None  # whole projections of q, k and v; the sharded ones are others, such as those of an MLP
    # Where no width fits: parameters are split over rows and others over columns only under tensor parallelism. Shards
    # of data parallelism are gathered while the layer runs.
    shared = answers == {True} if len(answers) == 1 else {each.axis for each in slices} == {0, 1}
    total, first = _locate(slices, heads)
    if count is None and len(answers) == 2:
        raise _unknown_share(name, heads, slices)
    if count is None and shared:
        if total is None:
            raise _unknown_count(name, heads, slices)
        return Part(total, None, _holder(around[-1])) if first is None else Part(total, (first, first + heads))
    if total is not None and total == count and first is not None and not stated and (shared or not may_be_all):
        return Part(total, (first, first + heads))
    return None if count is None or (may_be_all and not shared) else Part(count, None, _holder(around[-1]))


def _shares(slices: list[_Slice], heads: int, widths: tuple[int, int]) -> set[bool]:
    """Return what each parameter shows: True = the process attends with its share of the heads, False = all.

    The output projection has a column for each component of the heads' outputs. The query projection has a row for each
    component of q, a packed projection also rows for k and v. If a shard has as many as the call requires, the process
    attends with its shard; if the whole parameter has, all heads are here: the outputs were gathered. The first kind of
    projection that fits decides, since a packed one with few heads of k can have as many rows as another.
    """
    width, value_width = widths
    groups = [n for n in range(1, heads + 1) if heads % n == 0 and value_width]
    packed = {heads * width + n * (width + value_width) for n in groups}
    for axis, lengths in ((1, {heads * value_width}), (0, {heads * width}), (0, packed)):
        lengths = lengths - {0}
        along = [each for each in slices if each.axis == axis]
        shares = any(each.length in lengths for each in along)
        whole = any(each.total in lengths for each in along)
        if shares or whole:
            return {answer for answer, shown in ((True, shares), (False, whole)) if shown}
    return set()


def _are_complete(rows: list[int], heads: int, widths: tuple[int, int]) -> bool:
    """Return whether projections with these rows can make q, k and v of a call: one has q's, and at least three fit."""
    width, value_width = widths
    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    fitting = {n * each for n in groups for each in widths}
    packed = heads * (2 * width + value_width) in rows and value_width > 0
    return packed or (heads * width in rows and sum(each in fitting for each in rows) >= 3)


def _locate(slices: list[_Slice], heads: int) -> tuple[int | None, int | None]:
    """Return the number of heads in all processes, and the first one here; None = undetermined.

    Both follow if each slice holds the same part of its parameter, and each boundary lies between two heads.
    """
    if heads == 0 or not all(each.length for each in slices):
        return None, None
    totals = {Fraction(heads * each.total, each.length) for each in slices}
    firsts = {None if each.start is None else Fraction(heads * each.start, each.length) for each in slices}
    total, first = (next(iter(each)) if len(each) == 1 else None for each in (totals, firsts))
    if total is None or total.denominator != 1:
        return None, None
    return total.numerator, first.numerator if first is not None and first.denominator == 1 else None


def _unknown_count(name: str, heads: int, slices: list[_Slice]) -> WatchError:
    return WatchError(
        f"model: layer {name} is sharded, and its parameters do not show which heads this process holds; expected the "
        f"same part of each parameter, in whole heads; got, for {heads} heads, {', '.join(map(str, slices))}; state "
        "how many heads the whole layer has as num_attention_heads of model.config"
    )


def _unknown_share(name: str, heads: int, slices: list[_Slice]) -> WatchError:
    return WatchError(
        f"model: layer {name} is sharded, and its parameters do not show whether this process holds all of its heads; "
        "expected shards with as many rows or columns as the heads of the call, or whole parameters with as many; got "
        f"both, for {heads} heads, {', '.join(map(str, slices))}; state how many heads the whole layer has as "
        "num_attention_heads of model.config"
    )


def _declared(config: object) -> set[int]:
    """Return every number of query heads that a configuration states."""
    counts: set[int] = set()
    for name, value in _entries(config):
        key = name.rpartition(".")[2]
        if _HEADS.search(key) and not _NO_QUERY_HEADS.search(key):
            counts |= {each for each in (value if isinstance(value, (list, tuple)) else [value]) if type(each) is int}
    return counts


def _slices(around: list[nn.Module]) -> tuple[list[_Slice], list[tuple[int, ...]]]:
    """Return this process's slices of a layer's sharded parameters, and the shapes of the other matrices.

    It follows from the placements. The processes do not communicate: one that does not watch would block the others.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return [], []
    from torch.distributed.tensor import DTensor

    layer = next((each for each in around if any(True for _ in each.parameters())), None)
    named = {} if layer is None else dict(layer.named_parameters())
    parameters = {name: parameter for name, parameter in named.items() if isinstance(parameter, DTensor)}
    gathered = _gathered_axes(around, list(parameters.values()))
    slices = {name: _slice(name, parameter, gathered) for name, parameter in parameters.items()}
    others = [tuple(each.shape) for name, each in named.items() if each.ndim == 2 and slices.get(name) is None]
    return [each for each in slices.values() if each is not None], others


def _gathered_axes(around: list[nn.Module], parameters: list[DTensor]) -> set[str]:
    """Return the names of the mesh axes of data parallelism, if others exist for tensor parallelism.

    fully_shard puts its axis before that of tensor parallelism, and gathers over it when the parameter is used. A
    parameter that is sharded over one axis does not show which of the two it is.
    """
    from torch.distributed.fsdp import FSDPModule

    inside = next((each.modules() for each in around if any(True for _ in each.parameters())), ())
    if not any(isinstance(each, FSDPModule) for each in (*around, *inside)):
        return set()
    axes: set[str] = set()
    for parameter in parameters:
        placements, names = parameter.placements, list(parameter.device_mesh.mesh_dim_names or ())
        sharded = [name for name, placement in zip(names, placements, strict=False) if _is_shard(placement)]
        replicated_last = len(sharded) == 1 and sharded[0] != names[-1]  # over the axis of tensor parallelism
        axes |= set(sharded[:1]) if len(sharded) > 1 or replicated_last else set()
    return axes


def _is_shard(placement: Any) -> bool:
    """Return whether a placement is a shard, also a strided one, which some versions of torch do not count."""
    return bool(placement.is_shard()) or hasattr(placement, "split_factor")


def _slice(name: str, parameter: DTensor, gathered: set[str]) -> _Slice | None:
    """Return this process's slice of a parameter, once gathered over some axes of the mesh; None = all."""
    mesh = parameter.device_mesh
    placements: tuple[Any, ...] = parameter.placements
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    sharded = [
        dim
        for dim, placement in enumerate(placements)
        if _is_shard(placement) and mesh.size(dim) > 1 and names[dim] not in gathered
    ]
    if not sharded:
        return None
    axes = [placements[dim].dim % parameter.ndim for dim in sharded]
    total = length = parameter.shape[axes[0]]
    start = 0
    for dim in sharded:  # DTensor cuts as torch.chunk does: the last chunks may be shorter, or empty
        chunk = -(-length // mesh.size(dim))
        offset = min(mesh.get_local_rank(dim) * chunk, length)
        start, length = start + offset, min(chunk, length - offset)
    held = parameter.to_local().shape[axes[0]]
    local = length if gathered & {*names} else held
    by_placement = local == length and len({*axes}) == 1
    return _Slice(name, axes[0], total, local, start if by_placement else None)


def _holder(model: nn.Module) -> str:
    """Return the holder of an unknown part: this process of its group, or this one module object."""
    rank, world = _process()
    if rank is not None:
        return f"{PROCESS} {rank} of {world}"
    return f"module {_holders.setdefault(model, uuid.uuid4().hex[:12])}"


def _process() -> tuple[int | None, int]:
    """Return this process's rank in its group, None without one, and the number of processes."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None, 1
