"""What a watched model is: its class, a digest of its configuration, and which part of a layer's heads it holds."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from headscope._intercept.call import Call
from headscope.stats._origin import PROCESS, LayerOrigin, Origin, Part

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
    """What a recording of ``model`` is of, before its first layer."""
    # fully_shard gives each module a class of torch's own, derived from that of the model
    classes = (each for each in type(model).__mro__ if not each.__module__.startswith("torch.distributed."))
    return Origin(next(classes).__qualname__, _digest(getattr(model, "config", None)))


def layer_origin(modules: Mapping[str, nn.Module], name: str, call: Call) -> LayerOrigin:
    """What a recording of one layer is of.

    Args:
        modules: those of the model, by path; the model itself under the name of its class.
        name: the module that attends.
        call: its first call.
    """
    width = 0 if call.v is None else call.v.shape[-1]
    return LayerOrigin((call.q.shape[-1], width), layer_part(modules, name, call.q.shape[-3]))


def layer_part(modules: Mapping[str, nn.Module], name: str, heads: int) -> Part | None:
    """The part of a layer's heads that its module holds; None = all, as far as is known.

    Args:
        modules: those of the model, by path; the model itself under the name of its class.
        name: the module that attends.
        heads: how many heads its call has.
    """
    around = [modules[path] for path in _outwards(name) if path in modules] or [modules[name]]
    root = next(iter(modules.values()))
    around += [] if around[-1] is root else [root]
    return _part(around, heads)


def shared_part(modules: Mapping[str, nn.Module], name: str, heads: int) -> Part | None:
    """``layer_part`` where other processes may hold the other heads; None = there are no others to act on."""
    part = layer_part(modules, name, heads)
    alone = part is not None and part.heads is None and _process()[1] == 1
    return None if alone else part


def _outwards(name: str) -> Iterator[str]:
    """A module's path, then those of the modules around it."""
    parts = name.split(".")
    yield from (".".join(parts[:n]) for n in range(len(parts), 0, -1))


# ---------------------------------------------------------------- the configuration


def _digest(config: object) -> str:
    """A short digest of a configuration's structure; empty where it states none."""
    entries = sorted((name, value) for name, value in _entries(config) if _is_structure(name, value))
    if not entries:
        return ""
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def _is_structure(name: str, value: object) -> bool:
    key = name.rpartition(".")[2]
    if not _STRUCTURE.search(key) or _NO_STRUCTURE.search(key):
        return False
    items = value if isinstance(value, (list, tuple)) else [value]
    return all(type(each) in (int, str) for each in items)


def _entries(config: object, before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Name -> value of a configuration and of those within it: a mapping, or an object with attributes."""
    if depth > _DEEPEST or isinstance(config, type):
        return
    held = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    for key, value in (held or {}).items():
        if not isinstance(key, str) or key.startswith("_"):
            continue
        if key.endswith("config") and not isinstance(value, (str, int, list, tuple, type(None))):
            yield from _entries(value, f"{before}{key}.", depth + 1)
        else:
            yield f"{before}{key}", value


# ---------------------------------------------------------------- the part


def _part(around: list[nn.Module], heads: int) -> Part | None:
    """The part of the heads that a layer holds; None = all, as far as is known.

    Args:
        around: the layer's module, and those around it outwards.
        heads: how many heads the call has.
    """
    configs = (getattr(each, "config", None) for each in around)
    config = next((each for each in configs if each is not None), None)
    count = next((n for name in _HEAD_COUNTS if type(n := getattr(config, name, None)) is int), None)
    if count is not None and not 1 <= heads < count:
        return None
    may_be_all = count is None or count % heads != 0 or heads in _declared(config)
    shard = _shard(around)
    if shard is not None:
        place, size, both_ways = shard
        if (count is None and both_ways) or (count == heads * size and not may_be_all):
            return Part(heads * size, (place * heads, (place + 1) * heads))
        may_be_all = may_be_all and not both_ways
    return None if count is None or may_be_all else Part(count, None, _holder(around[-1]))


def _declared(config: object) -> set[int]:
    """Every number of query heads that a configuration states."""
    counts: set[int] = set()
    for name, value in _entries(config):
        key = name.rpartition(".")[2]
        if _HEADS.search(key) and not _NO_QUERY_HEADS.search(key):
            counts |= {each for each in (value if isinstance(value, (list, tuple)) else [value]) if type(each) is int}
    return counts


def _shard(around: list[nn.Module]) -> tuple[int, int, bool] | None:
    """How the parameters of a layer are sharded: place, number of shards, and whether over rows and columns alike.

    The query projection is split over its rows and the output projection over its columns only under tensor
    parallelism. Shards of data parallelism are gathered while the layer runs.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor

    layer = next((each for each in around if any(True for _ in each.parameters())), None)
    shards: set[tuple[int, int]] = set()
    axes: set[int] = set()
    for parameter in [] if layer is None else layer.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements: tuple[Any, ...] = parameter.placements
            for dim, placement in enumerate(placements):
                if placement.is_shard() and mesh.size(dim) > 1:
                    shards.add((mesh.get_local_rank(dim), mesh.size(dim)))
                    axes.add(placement.dim % parameter.ndim)
    if len(shards) != 1:
        return None
    (place, size) = shards.pop()
    return place, size, axes == {0, 1}


def _holder(model: nn.Module) -> str:
    """What holds an unknown part: this process of its group, or this one module object."""
    rank, world = _process()
    if rank is not None:
        return f"{PROCESS} {rank} of {world}"
    return f"module {_holders.setdefault(model, uuid.uuid4().hex[:12])}"


def _process() -> tuple[int | None, int]:
    """This process's rank in its group, None without one, and how many processes there are."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None, 1
