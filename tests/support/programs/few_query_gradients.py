"""Print by how much the gradients of few queries err, as multiples of what plain torch's err in float32.

The errors against float64 are pooled: their root mean square over heads, sizes and draws. A test of its own process
starts this for each target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from headscope import attention

HEADS = ((2, 2), (8, 2), (8, 1))  # query heads, key/value heads
KEYS = (256, 1024)
DEPTHS = (64, 128)
NAMES = ("q", "k", "v")


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend as a textbook has it."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def native_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with the native kernels."""
    return attention(q, k, v, backend="cpu")


def gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return the gradients of q, k and v, computed in a dtype, as float64."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    attend(*leaves).backward(grad.to(dtype))
    return [x.grad.double() for x in leaves if x.grad is not None]


def error_ratios(queries: int) -> list[float]:
    """Return the ratio of the pooled errors for the gradients of q, k and v."""
    random = torch.Generator().manual_seed(queries)
    native_squares, plain_squares = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for (heads, kv_heads), keys, depth, _ in product(HEADS, KEYS, DEPTHS, range(3)):
        shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
        *inputs, grad = (torch.randn(1, *shape, depth, generator=random) for shape in shapes)
        exact = gradients(plain_attention, inputs, grad, torch.float64)
        for squares, attend in ((native_squares, native_attention), (plain_squares, plain_attention)):
            results = gradients(attend, inputs, grad, torch.float32)
            squares += torch.stack([(x - y).square().sum() for x, y in zip(results, exact, strict=True)])
    return (native_squares / plain_squares).sqrt().tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for queries in (1, 2, 3):
        print(queries, *(f"{name} {ratio:.2f}" for name, ratio in zip(NAMES, error_ratios(queries), strict=True)))
