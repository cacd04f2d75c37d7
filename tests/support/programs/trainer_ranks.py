"""One rank of test_trainer_ranks.py: a training with a monitor, on its part of each batch."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headscope import MultiHeadAttention, masks
from headscope.integrations._steps import Settings, Steps


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MultiHeadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x, mask=masks.causal())


def train(parts: slice, first: bool) -> dict[int, dict[str, float]]:
    """Return the values that are written at each step."""
    torch.manual_seed(0)
    model, batches, written = Model(), torch.randn(5, 4, 12, 16), dict[int, dict[str, float]]()
    steps = Steps(Settings(every=2, rows=None), lambda values, number: written.update({number: values}))
    steps.open(model, first=first)
    for number, batch in enumerate(batches):
        if steps.is_open and number % 2 == 0:
            steps.begin(number)
        model(batch[parts])
        steps.end()
    steps.close()
    return written


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    alone = train(slice(0, 4), first=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    together = train(slice(2 * rank, 2 * rank + 2), first=rank == 0)
    print(json.dumps({"alone": alone, "together": together}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
