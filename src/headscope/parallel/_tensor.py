"""tensor_parallel: the heads of ``MultiHeadAttention`` split over the ranks of a mesh."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from headscope._attend.sharding_rules import register_rules
from headscope._linear import check_own_parameters, unknown_projections
from headscope._support.arguments import kind
from headscope._support.tensor_classes import is_distributed
from headscope.module import MultiHeadAttention, check_splits_evenly, write_packed
from headscope.positions import RelativeBias

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def tensor_parallel(module: Module, mesh: DeviceMesh) -> Module:
    """Split the heads of every ``MultiHeadAttention`` in a module over the ranks of a mesh, in place, and return it.

    Each rank projects to its own heads, attends in them, and multiplies them by its columns of ``out_proj``; the sum
    over the ranks is the output. Inputs and outputs are whole on every rank, as in one process: the same x, mask, bias
    (of all heads), cache and weights. A forward pass sums the output once over the ranks, a backward pass the gradient
    of x. Parameters become DTensors over the mesh: rows of ``q_proj``, ``k_proj``, ``v_proj`` and ``gate_proj`` (a
    packed ``qkv_proj`` is unpacked first), columns of ``out_proj``, entries of ``sinks``, ``bias_k`` and ``bias_v``.
    With fewer key/value heads than ranks, every rank holds all of them and uses one; their gradients are summed.

    Every rank passes the same module; rank 0 of the mesh gives the values of its parameters. Build the optimizer after
    it. A state dict has the keys of the module before; one of a single process loads, as ordinary tensors on each rank.

    Args:
        module: a ``MultiHeadAttention``, or a model that contains some; other modules do not change.
        mesh: one axis of ranks, such as ``init_device_mesh("cuda", (8,))`` or ``mesh["tp"]`` of a larger one.

    Raises:
        TypeError: ``mesh`` is not a ``DeviceMesh``.
        ValueError: no attention in it; a number of ranks that does not divide the query heads, or neither divides the
            key/value heads nor is a multiple of them; ``reproducible=True``; a module that is split already, or that
            shares a parameter with another; a projection that is not a linear, or has hooks; ranks whose modules
            differ.

    Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism", section 3.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from headscope import MultiHeadAttention
        >>> from headscope.parallel import tensor_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more
        >>> module = tensor_parallel(MultiHeadAttention(8, 2), init_device_mesh("cpu", (1,)))
        >>> module(torch.randn(1, 3, 8)).shape, module.out_proj.weight.placements
        (torch.Size([1, 3, 8]), (Shard(dim=1),))
        >>> dist.destroy_process_group()
    """
    _check_mesh(mesh)
    found = {name: each for name, each in module.named_modules() if isinstance(each, MultiHeadAttention)}
    if not found:
        raise ValueError(f"module: expected a MultiHeadAttention, or a model that contains some; got {kind(module)}")
    for name, each in found.items():
        _check_module(name or "MultiHeadAttention", each, mesh.size())
    _check_shared(module, found)
    _check_agreement(found, mesh)
    register_rules()
    for each in found.values():
        _split(each, mesh)
    return module


def _check_mesh(mesh: object) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: got {kind(mesh)}, expected a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        remedy = f'one of its axes: mesh["{names[-1]}"]' if names else "one with names for its axes, and one of those"
        raise ValueError(f"mesh: has {mesh.ndim} axes, {list(mesh.shape)}, expected one; pass {remedy}")


def _check_module(name: str, module: MultiHeadAttention, ranks: int) -> None:
    """Raise unless the heads of a module can be split over so many ranks."""
    if any(is_distributed(x) for x in module.parameters()):
        raise ValueError(f"module: {name} has DTensors as parameters; expected one that is not split or sharded yet")
    check_splits_evenly(name, module, ranks)
    for part, projection in unknown_projections(module).items():
        raise ValueError(f"module: {part} of {name} is a {type(projection).__name__}, expected nn.Linear")
    check_own_parameters(module, *module.modules())


def _check_shared(module: nn.Module, found: dict[str, MultiHeadAttention]) -> None:
    """Raise if a parameter of an attention module has another name too; layers may share a ``position_bias``."""
    names: dict[int, list[str]] = {}
    for name, x in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    for path, each in found.items():
        before = f"{path}." if path else ""
        for name, x in each.named_parameters():
            if len(also := names[id(x)]) > 1 and not name.startswith("position_bias."):
                raise ValueError(
                    f"module: {before}{name} is the same parameter as {next(n for n in also if n != before + name)}; "
                    "expected its own, because the two would be split separately"
                )


def _check_agreement(found: dict[str, MultiHeadAttention], mesh: DeviceMesh) -> None:
    """Raise on every rank if the modules of two ranks differ in sizes or options."""
    own = {name or "MultiHeadAttention": _described(each) for name, each in found.items()}
    ranks: list[Any] = [None] * mesh.size()
    dist.all_gather_object(ranks, own, group=mesh.get_group())
    for rank, other in enumerate(ranks):
        if [*other] != [*ranks[0]]:
            raise ValueError(f"module: ranks differ; rank {rank} has attention at {[*other]}, rank 0 at {[*ranks[0]]}")
        for name, first in ranks[0].items():
            for got, expected in zip(other[name], first, strict=False):
                if got != expected:
                    raise ValueError(f"module: ranks differ in {name}; rank {rank} has ({got}), rank 0 ({expected})")


def _described(module: MultiHeadAttention) -> list[str]:
    """Return a module's options, and each parameter."""
    parameters = [f"{name} {list(x.shape)} {x.dtype}" for name, x in module.named_parameters()]
    return [module.extra_repr(), *parameters, "end"]


def _split(module: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Split the parameters of a module, and convert its inputs to DTensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    was_packed = module.packed
    module.unpack()
    all_kv = module.kv_heads % mesh.size() > 0  # on every rank
    columns = ["q_proj", *(() if all_kv else ("k_proj", "v_proj"))]
    columns += [] if module.gate_proj is None else ["gate_proj"]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    parallelize_module(module, mesh, {**plan, "out_proj": RowwiseParallel()})
    if all_kv:
        for name in ("k_proj", "v_proj"):
            _replicate(getattr(module, name), mesh)
    kv = Replicate() if all_kv else Shard(0)
    together = module.qk_norm == "rms_all"
    for owner, name, placement in (
        (module, "sinks", Shard(0)),
        (module, "bias_k", kv),
        (module, "bias_v", kv),
        *((module.q_norm, name, Shard(0) if together else Replicate()) for name in ("weight", "bias")),
        *((module.k_norm, name, kv if together else Replicate()) for name in ("weight", "bias")),
        (module.position_bias if isinstance(module.position_bias, RelativeBias) else None, "weight", Shard(1)),
    ):
        if owner is not None:
            _distribute(owner, name, mesh, placement)
    module.register_forward_pre_hook(partial(_to_distributed, mesh), with_kwargs=True)
    module.is_split = True
    if was_packed:
        write_packed(module)


def _distribute(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Any) -> None:
    """Replace a parameter, if there is one, by its parts on the ranks."""
    from torch.distributed.tensor import distribute_tensor

    x = owner._parameters.get(name)
    if x is None or is_distributed(x):  # a position bias of an earlier layer
        return
    part = nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]), requires_grad=x.requires_grad)
    owner.register_parameter(name, part)


def _replicate(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Let every rank project to all heads."""
    from torch.distributed.tensor import Replicate

    for name in ("weight", "bias"):
        _distribute(linear, name, mesh, Replicate())

    def to_distributed(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_replicated(mesh, x) for x in inputs)

    def to_local(module: nn.Module, inputs: Any, output: Any) -> Tensor:
        return output.to_local()

    linear.register_forward_pre_hook(to_distributed)
    linear.register_forward_hook(to_local)


def _to_distributed(mesh: DeviceMesh, module: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Make x and context DTensors, so the gradients of their uses are summed over the ranks once, not for each use."""
    made: dict[int, Any] = {}

    def distributed(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(distributed, x))
        return made.setdefault(id(x), _replicated(mesh, x))

    named = {name: distributed(x) if name in ("x", "context") else x for name, x in options.items()}
    return tuple(map(distributed, inputs)), named


def _replicated(mesh: DeviceMesh, x: Any) -> Any:
    """Return an ordinary tensor, which every rank holds whole, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(x, DTensor):
        return x.redistribute(mesh, [Replicate()])
    if not isinstance(x, Tensor) or x.is_nested:
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
