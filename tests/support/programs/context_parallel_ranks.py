"""One of the two ranks of test_context_parallel.py. Prints what headscope does in torch's context parallelism."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _attention as context  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

import headscope
from headscope import masks

B, H, T, D = 1, 2, 16, 8


class Layer(nn.Module):
    """Attention of torch's, which ``watch`` records."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def outcome(run: Callable[[], Any]) -> str:
    """Return the error of a call, or "returned"."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def outcomes(q: torch.Tensor, calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return what each call does."""
    return {name: outcome(run) for name, run in calls.items()}


def main(rank: int, store: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(0))
    half = q[:, :, : T // 2].clone()  # the size of a shard: these calls are prepared before the context opens
    layer, module = Layer(), headscope.MultiHeadAttention(H * D, H)
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: headscope.attention(half, half, half),
        "attention, causal": lambda: headscope.attention(half, half, half, mask=masks.causal()),
        "sdpa": lambda: headscope.attention(half, half, half, backend="sdpa"),
        "blocked": lambda: headscope.attention(half, half, half, backend="blocked"),
        "attend and observe": lambda: headscope.attend(half, half, half, observe=WHAT),
        "observe": lambda: headscope.observe(half, half, half),
        "module": lambda: module(half.transpose(1, 2).flatten(2)),
        "watch": lambda: watched(layer, half),
        "watch the module": lambda: watched(module, half.transpose(1, 2).flatten(2)),
    }
    found: dict[str, Any] = {}
    for _ in range(2):
        found["before"] = outcomes(half, calls)
    shard = q.clone()
    with context_parallel(mesh, buffers=[shard], buffer_seq_dims=[2]):
        found["length"] = shard.shape[2]
        found["inside"] = outcomes(shard, calls)
    found["after"] = outcomes(half, calls)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context._context_parallel_shard(mesh, [q], [2])
        found["sharded"] = outcomes(half, {name: calls[name] for name in ("attention", "observe")})
    found["warnings"] = [str(each.message) for each in caught if "headscope" in str(each.message)]
    context._enable_context_parallel_dispatcher()
    found["dispatcher"] = outcomes(half, calls)
    context._disable_context_parallel_dispatcher()
    found["disabled"] = outcomes(half, calls)
    dist.destroy_process_group()
    return found


WHAT = headscope.Observe()


def watched(module: nn.Module, x: torch.Tensor) -> None:
    with headscope.watch(module), torch.no_grad():
        module(x)


if __name__ == "__main__":
    assert DTensor is not None
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])))
