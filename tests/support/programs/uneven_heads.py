"""Three processes that share five heads of one layer unevenly, and act on them by number; started by a test.

python uneven_heads.py RANK WORLD STORE

Each prints, as JSON: kind of sharding -> action -> how far the output is from that of the whole model, or a text: the
part of the heads that a recording states, or the error.
"""

from __future__ import annotations

import copy
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from headscope import ablate, watch
from headscope.watching import WatchError

HEADS, WIDTH = 5, 2  # chunks of 10 rows over three processes are 4, 4 and 2
SIZE = HEADS * WIDTH
CHOSEN = (1, 3, 1)  # heads of each process, where they are no chunks


class Attention(nn.Module):
    """Self-attention with the heads whose rows and columns its process holds; the output is the sum over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in (self.q, self.k, self.v, self.o))
        *projections, o = weights
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in projections)
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), o)


class Model(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def shard(layer: Attention, mesh: DeviceMesh, rank: int, *, chunks: bool) -> None:
    """Give a layer the rows and columns of its process, as DTensors: chunks, or those of ``CHOSEN``."""
    for name, axis in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
        whole = getattr(layer, name).detach()
        if chunks:
            sharded = distribute_tensor(whole, mesh, [Shard(axis)])
        else:
            local = whole.split([WIDTH * heads for heads in CHOSEN], axis)[rank].contiguous()
            shape, stride = whole.shape, whole.stride()
            sharded = DTensor.from_local(local, mesh, [Shard(axis)], run_check=False, shape=shape, stride=stride)
        setattr(layer, name, nn.Parameter(sharded))


def state_part(model: nn.Module, x: Tensor) -> str:
    """Return the part of the heads that a recording of the model states, or the error."""
    try:
        with torch.no_grad(), watch(model) as recording:
            model(x)
    except WatchError as error:
        return f"{type(error).__name__}: {error}"
    return str(recording.about.part.get("attention"))


def compare_ablated(model: nn.Module, whole: nn.Module, x: Tensor, head: int, world: int) -> float | str:
    """Return how far the output without a head is from that of the whole model, or the error of this process."""
    result: Tensor | str
    try:
        with torch.no_grad(), ablate(model, {"attention": head}):
            result = model(x)
    except WatchError as error:
        result = f"{type(error).__name__}: {error}"
    results: list[Any] = [None] * world
    dist.all_gather_object(results, result)  # processes that raise would leave the others waiting in a sum
    if any(isinstance(each, str) for each in results):
        return result if isinstance(result, str) else "no error in this process"
    with torch.no_grad(), ablate(whole, {"attention": head}):
        return float((sum(results) - whole(x)).abs().max())


def main(rank: int, world: int, store: str) -> None:
    """Do everything with each kind of sharding."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    results: dict[str, dict[str, float | str]] = {}
    kinds = [f"{kind}{end}" for kind in ("chunks", "chosen", "another parameter") for end in ("", ", configured")]
    for kind in kinds:
        torch.manual_seed(0)
        model = Model().eval()
        whole, x = copy.deepcopy(model), torch.randn(1, 5, SIZE)
        shard(model.attention, mesh, rank, chunks=not kind.startswith("chosen"))
        if kind.endswith("configured"):
            model.config = SimpleNamespace(num_attention_heads=HEADS)
        if kind.startswith("another parameter"):  # chunks of 7 rows are 3, 3 and 1
            model.attention.gate = nn.Parameter(distribute_tensor(torch.randn(7), mesh, [Shard(0)]))
        results[kind] = {"part": state_part(model, x)}
        results[kind] |= {f"ablate {head}": compare_ablated(model, whole, x, head, world) for head in range(HEADS)}
    print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
