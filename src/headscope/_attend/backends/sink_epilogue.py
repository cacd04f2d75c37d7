"""Sinks as an epilogue on the results of kernels that do not know them."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse with one more logit in each row.

    lse' = log(exp(lse) + exp(sink)), out' = out · exp(lse - lse'). Torch may differentiate it. Rows without visible
    keys have the sink as lse.

    Args:
        out: [B, H, Q, Dv].
        lse: float32 [B, H, Q], -inf in rows without visible keys.
        sinks: [H].
    """
    sink = sinks.to(lse.dtype)[:, None]  # [H, 1]
    empty = lse == -torch.inf
    some = lse.masked_fill(empty, 0)  # of -inf and -inf, the difference would be NaN
    both = torch.logaddexp(some, sink)
    share = (some - both).exp().masked_fill(empty, 0)
    return (out * share[..., None]).to(out.dtype), torch.where(empty, sink, both)
