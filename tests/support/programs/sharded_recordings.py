"""Two processes that share the heads of one model, each of which saves its recordings; started by a test.

python sharded_recordings.py RANK WORLD STORE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import headscope

HEADS, WIDTH = 4, 6
SIZE = HEADS * WIDTH


class Attention(nn.Module):
    """Self-attention over as many heads as its projections have rows for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.o(
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        )  # [B, T, SIZE]


class Model(nn.Module):
    """A model of one layer, with a configuration or without."""

    def __init__(self, configured: bool = True) -> None:
        super().__init__()
        self.attention = Attention()
        if configured:
            self.config = SimpleNamespace(num_attention_heads=HEADS, hidden_size=SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def shard_by_hand(layer: Attention, rank: int, world: int) -> None:
    """Give a layer the rows and columns of its process, as plain tensors."""
    for project in (layer.q, layer.k, layer.v):
        project.weight = nn.Parameter(project.weight.detach().chunk(world)[rank])
    layer.o.weight = nn.Parameter(layer.o.weight.detach().chunk(world, 1)[rank])


def main(rank: int, world: int, store: str, folder: Path) -> None:
    """Record each kind of sharding twice, on two inputs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    columns, rows = ColwiseParallel, RowwiseParallel
    for kind in ("tensors", "unconfigured", "by_hand", "data"):
        torch.manual_seed(0)
        model = Model(kind != "unconfigured").eval()
        if kind in ("tensors", "unconfigured"):
            parallelize_module(model.attention, mesh, {"q": columns(), "k": columns(), "v": columns(), "o": rows()})
        elif kind == "by_hand":
            shard_by_hand(model.attention, rank, world)
        else:
            fully_shard(model.attention, mesh=mesh)
            fully_shard(model, mesh=mesh)
        for text in range(2):
            with torch.no_grad(), headscope.watch(model) as seen:
                model(torch.randn(1, 5, SIZE))
            seen.save(folder / f"{kind}_{rank}_{text}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
