"""Two processes that share the heads of one model and act on them by number; started by a test.

python sharded_heads.py RANK WORLD STORE

Each prints, as JSON: kind of sharding -> action -> how far the output is from that of the whole model, or the error.
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
    Model,
    shard_by_hand,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headscope import ablate, head_importance

HEADS: dict[str, Any] = {"0": 0, "1": 1, "3": 3, "1 and 2": [1, 2], "all": "all", "4": 4}


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


def main(rank: int, world: int, store: str) -> None:
    """Do everything with each kind of sharding."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    columns, rows = ColwiseParallel, RowwiseParallel
    results: dict[str, dict[str, float | str]] = {}
    for kind in ("tensors", "unconfigured", "ambiguous", "by_hand", "data"):
        torch.manual_seed(0)
        model = Model(kind != "unconfigured").eval()
        if kind == "ambiguous":
            model.config.decoder_attention_heads = 2  # as many as each process has of the four
        whole = copy.deepcopy(model)
        x = torch.randn(1, 5, SIZE)
        if kind in ("tensors", "unconfigured", "ambiguous"):
            parallelize_module(model.attention, mesh, {"q": columns(), "k": columns(), "v": columns(), "o": rows()})
        elif kind == "by_hand":
            shard_by_hand(model.attention, rank, world)
            shard_by_hand(whole.attention, rank, world)
            del whole.config  # its heads pass for all that there are
        else:
            fully_shard(model, mesh=mesh)
        results[kind] = {name: compared(action, model, whole) for name, action in actions(x).items()}
    print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
