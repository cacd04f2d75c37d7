"""Several processes that share the heads of modules, and attend with DTensors; started by a test.

python tensor_parallel_ranks.py RANK WORLD FOLDER

Each prints, as JSON: "modules", "uses" and "tensors" -> case -> the difference from one process, what it found, or the
error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dtensor_cases  # pyright: ignore[reportMissingImports]  # programs beside this one
import tensor_parallel_cases  # pyright: ignore[reportMissingImports]
import tensor_parallel_uses  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def main(rank: int, world: int, folder: Path) -> None:
    """Run every case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    results: dict[str, Any] = {
        "modules": tensor_parallel_cases.run_all(mesh),
        "uses": tensor_parallel_uses.run_all(mesh, folder),
        "tensors": dtensor_cases.run_all(world),
    }
    print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
