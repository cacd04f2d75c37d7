"""Print by how much results of short calls err, as multiples of what plain torch's err in float32.

Short calls have few queries, few keys, narrow heads with large logits, or narrow heads with wide values.

The errors against float64 are pooled: their root mean square over heads, sizes and draws. A test of its own process
starts this for each target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from headscope import attention

HEADS = ((2, 2), (8, 2), (8, 1))  # query heads, key/value heads
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Calls whose errors are pooled."""

    name: str
    queries: int
    keys: tuple[int, ...]
    depths: tuple[int, ...]
    deviation: float = 1  # of q and k
    width: int | None = None  # of the values; by default the depth


CASES = (
    *(Case(f"queries={queries}", queries, (256, 1024), (64, 128)) for queries in (1, 2, 3)),
    *(Case(f"keys={keys}", 64, (keys,), (128, 256)) for keys in (3, 8, 11)),
    Case("keys=10", 64, (10,), (48, 64), 3),
    *(Case(f"depth={depth}", 64, (64,), (depth,), 4) for depth in (8, 32)),
    Case("width=256", 64, (64,), (8,), 2, 256),
    Case("width=256", 64, (100,), (8,), 2, 256),
)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend as a textbook has it."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def native_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with the native kernels."""
    return attention(q, k, v, backend="cpu")


def compute_results(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output and the gradients of q, k and v, computed in a dtype, as float64."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype)))]


def error_ratios(case: Case, seed: int) -> list[float]:
    """Return the ratio of the pooled errors for the output and the gradients of q, k and v."""
    random = torch.Generator().manual_seed(seed)
    native_squares, plain_squares = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for (heads, kv_heads), keys, depth, _ in product(HEADS, case.keys, case.depths, range(3)):
        width = case.width or depth
        shapes = (
            (heads, case.queries, depth),
            (kv_heads, keys, depth),
            (kv_heads, keys, width),
            (heads, case.queries, width),
        )
        *inputs, grad = (torch.randn(1, *shape, generator=random) for shape in shapes)
        for x in inputs[:2]:
            x *= case.deviation
        exact = compute_results(plain_attention, inputs, grad, torch.float64)
        for squares, attend in ((native_squares, native_attention), (plain_squares, plain_attention)):
            results = compute_results(attend, inputs, grad, torch.float32)
            squares += torch.stack([(x - y).square().sum() for x, y in zip(results, exact, strict=True)])
    return (native_squares / plain_squares).sqrt().tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, case in enumerate(CASES, start=1):
        ratios = zip(NAMES, error_ratios(case, seed), strict=True)
        print(case.name, *(f"{name} {ratio:.2f}" for name, ratio in ratios))
