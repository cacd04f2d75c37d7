"""The weights of chosen heads, and of the runs of one sequence, by definition: float64, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from support import oracle


def weights_of_heads(call: dict[str, Any], heads: Sequence[int], rows: Sequence[int]) -> dict[int, Tensor]:
    """Head -> p [B, R, K] of the arguments of ``oracle.attention``."""
    double = {name: call[name].double() for name in ("q", "k", "v", "bias") if call.get(name) is not None}
    q, k, _ = oracle.spread(*(double[name] for name in "qkv"))
    visible, _ = oracle._visible(q, k, call.get("seen"), double.get("bias"))  # pyright: ignore[reportPrivateUsage]
    p = torch.where(visible, oracle.attention(**call).weights, 0.0)  # [..., H, Q, K]
    p = p.reshape(math.prod(p.shape[:-3]), *p.shape[-3:])
    return {head: torch.stack([p[:, head, i] for i in rows], 1) if len(rows) else p[:, head, :0] for head in heads}


def joined(runs: Sequence[Tensor], keys: int) -> Tensor:
    """The rows [Q, K] of the runs of a sequence, one after another, each with zeros beyond its own keys."""
    rows = [[*row, *[0.0] * (keys - len(row))] for run in runs for row in run.tolist()]
    return torch.tensor(rows, dtype=torch.float64)
