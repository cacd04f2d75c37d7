"""The seed of dropout. A backend draws it for a call; under a compiler, the caller of the operator does."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed() -> Tensor:
    """Draw a seed of dropout from torch's generator: one int64 on the CPU. A graph draws one in each run."""
    return torch.randint(2**62, (), device="cpu")
