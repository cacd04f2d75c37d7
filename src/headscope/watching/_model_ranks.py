"""The ranks that run a model together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from headscope._support.ranks import Ranks, in_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BY_GROUP = ("DistributedDataParallel", "FullyShardedDataParallel")
REMEDY = "pass the group of the ranks that watch the model together, or group=None for this process alone"


def ranks_together(model: nn.Module, group: ProcessGroup | Literal["model"] | None) -> tuple[int, ...]:
    """Return the ranks, among all processes, that watch a model together, ascending; () = this process alone.

    Args:
        model: as the caller passed it, with its wrappers.
        group: these; "model": the ranks among which ``DistributedDataParallel``, FSDP or DTensor parameters split it.

    Raises:
        TypeError, ValueError: it is not a group, or the model has several groups, of which none holds the others.
    """
    if group is None or (group == "model" and not in_processes()):
        return ()
    if group != "model":
        names = Ranks(group).names
    else:
        found = {*_groups_of(model)}
        names = max(found, key=len, default=())
        if any(not {*each} <= {*names} for each in found):
            shown = " and ".join(f"{list(each)}" for each in sorted(found))
            raise ValueError(f"group: the model is split over several groups of ranks, {shown}; {REMEDY}")
    return tuple(sorted(names)) if len(names) > 1 else ()


def _groups_of(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of every group over which a model, or a module in it, is split."""
    import torch.distributed as dist

    for module in model.modules():
        if type(module).__name__ in _BY_GROUP and type(module).__module__.startswith("torch."):
            process_group: Any = module.process_group
            yield tuple(sorted(dist.get_process_group_ranks(process_group)))
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    parameters: list[Any] = [each for each in model.parameters() if isinstance(each, tensors.DTensor)]
    for mesh in {each.device_mesh for each in parameters}:
        yield tuple(sorted(mesh.mesh.flatten().tolist()))
