"""Two processes that share the heads of one model and act on them by number; started by a test.

python sharded_heads.py RANK WORLD STORE

Each prints, as JSON: kind of sharding -> action -> how far the output is from that of the whole model, or the error.
Four processes also share the data, and print: kind -> the part of the heads that a recording states, or the error.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sharded_recordings import (  # pyright: ignore[reportMissingImports]  # a program beside this one
    SIZE,
    WIDTH,
    Model,
    shard_by_hand,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from headscope import ablate, head_importance, watch
from headscope.watching import WatchError

HEADS: dict[str, Any] = {"0": 0, "1": 1, "3": 3, "1 and 2": [1, 2], "all": "all", "4": 4}
KINDS = [
    *("tensors", "ambiguous", "by_hand", "data"),  # with a configuration
    *("unconfigured", "grouped", "gathered", "data, unconfigured", "data by projection"),
    *("siblings", "siblings, gathered", "siblings, packed", "siblings, grouped"),
    *("siblings, data", "siblings, data by projection"),
]


class Attending(nn.Module):
    """Self-attention without an output projection, over as many heads as its projections have rows for.

    Args:
        groups: heads of q for each head of k and v.
        packed: whether q, k and v of each head are rows of one projection.
    """

    def __init__(self, groups: int = 1, *, packed: bool = False) -> None:
        super().__init__()
        sizes = {"qkv": 3 * SIZE} if packed else {"q": SIZE, "k": SIZE // groups, "v": SIZE // groups}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(SIZE, size, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        rows = [project(x).unflatten(-1, (-1, WIDTH)) for project in self.children()]  # [B, T, H, WIDTH]
        rows = rows if len(rows) == 3 else rows[0].unflatten(-2, (-1, 3)).unbind(-2)
        q, k, v = (each.transpose(1, 2) for each in rows)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)  # [B, T, SIZE]


class Siblings(nn.Module):
    """A model of one layer whose output projection is beside the module that attends, and not in it."""

    def __init__(self, groups: int = 1, *, packed: bool = False) -> None:
        super().__init__()
        self.attention = Attending(groups, packed=packed)
        self.output = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.attention(x))


class Block(nn.Module):
    """Attention and an MLP in one module."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(SIZE, hidden, bias=False), nn.Linear(hidden, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y + self.down(self.up(y).relu())  # [B, T, SIZE]


class Layer(nn.Module):
    """A model of one such block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = Block(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def share(model: nn.Module, mesh: DeviceMesh, *, gathered: bool) -> None:
    """Shard a model's heads, or only the computation of its projections, whose outputs are then gathered."""
    columns = ColwiseParallel(output_layouts=Replicate()) if gathered else ColwiseParallel()
    rows = RowwiseParallel(input_layouts=Replicate()) if gathered else RowwiseParallel()
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    outputs = {"output", "attention.o"}
    parallelize_module(model, mesh, {name: rows if name in outputs else columns for name in layers})


def shard_data(model: nn.Module, mesh: DeviceMesh, *, each: bool) -> None:
    """Shard the parameters of a model, by projection or by child; they are gathered where they run."""
    for module in [*model.modules()] if each else [*model.children()]:
        if not each or isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def state_part(model: nn.Module, x: Tensor) -> str:
    """Return the part of the heads that a recording of the model states, or the error."""
    try:
        with torch.no_grad(), watch(model) as recording:
            model(x)
    except WatchError as error:
        return f"{type(error).__name__}: {error}"
    return str(recording.about.part.get("attention"))


def actions(x: Tensor) -> dict[str, Callable[[nn.Module], Tensor]]:
    """What is done with a model, by name."""

    def ablated(model: nn.Module, heads: Any) -> Tensor:
        with torch.no_grad(), ablate(model, {"attention": heads}, 0.3):
            return model(x)

    def importance(model: nn.Module, method: Any) -> Tensor:
        return head_importance(model, lambda model: model(x).square().sum(), method=method)["attention"]

    named = {f"ablate {name}": lambda model, heads=heads: ablated(model, heads) for name, heads in HEADS.items()}
    return {**named, **{way: lambda model, way=way: importance(model, way) for way in ("ablation", "gradient")}}


def compared(action: Callable[[nn.Module], Tensor], model: nn.Module, whole: nn.Module) -> float | str:
    """How far the results of two models are from each other, or the error of the first."""
    try:
        result = action(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected = action(whole)
    return float((result - expected).abs().max()) if result.shape == expected.shape else f"shape {list(result.shape)}"


def share_mlp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the MLP of a block alone; each process attends with all heads."""
    parallelize_module(model, mesh, {"attention.up": ColwiseParallel(), "attention.down": RowwiseParallel()})


CROSSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, DeviceMesh], None]]] = {
    "one module": (lambda: Model(False), lambda model, mesh: share(model, mesh, gathered=False)),
    "siblings": (Siblings, lambda model, mesh: share(model, mesh, gathered=False)),
    "packed": (lambda: Siblings(packed=True), lambda model, mesh: share(model, mesh, gathered=False)),
    "gathered": (Siblings, lambda model, mesh: share(model, mesh, gathered=True)),
    "mlp": (lambda: Layer(40), share_mlp),
    "mlp that fits": (lambda: Layer(2 * SIZE), share_mlp),
    "data alone": (lambda: Model(False), lambda model, mesh: None),
}


def state_parts(world: int) -> dict[str, str]:
    """Return the part that a recording states where some processes share the heads, and others the data."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "heads"))
    parts: dict[str, str] = {}
    for kind, (make, share_layers) in CROSSED.items():
        for data in ("by layer", "by projection"):
            torch.manual_seed(0)
            model = make().eval()
            share_layers(model, mesh["heads"])
            shard_data(model, mesh["data"], each=data == "by projection")
            parts[f"{kind}, {data}"] = state_part(model, torch.randn(1, 5, SIZE))
    return parts


def main(rank: int, world: int, store: str) -> None:
    """Do everything with each kind of sharding."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if world > 2:
        print(json.dumps(state_parts(world)))
        dist.barrier()
        dist.destroy_process_group()
        return
    mesh = init_device_mesh("cpu", (world,))
    results: dict[str, dict[str, float | str]] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        configured = kind in ("tensors", "ambiguous", "by_hand", "data")
        model: Any = Model(configured)
        if kind.startswith("siblings"):
            model = Siblings(2 if "grouped" in kind else 1, packed="packed" in kind)
        elif kind == "grouped":
            model.attention.k, model.attention.v = (nn.Linear(SIZE, SIZE // 2, bias=False) for _ in range(2))
        model.eval()
        if kind == "ambiguous":
            model.config.decoder_attention_heads = 2  # as many as each process has of the four
        whole = copy.deepcopy(model)
        x = torch.randn(1, 5, SIZE)
        if "data" in kind:
            shard_data(model, mesh, each="by projection" in kind)
        elif kind == "by_hand":
            shard_by_hand(model.attention, rank, world)
            shard_by_hand(whole.attention, rank, world)
            del whole.config  # its heads pass for all that there are
        else:
            share(model, mesh, gathered="gathered" in kind)
        results[kind] = {"part": state_part(model, x)}
        results[kind] |= {name: compared(action, model, whole) for name, action in actions(x).items()}
    print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
