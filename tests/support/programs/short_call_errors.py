"""Print by how much results of short calls err, as multiples of what plain torch's err in float32.

Short calls have few queries, few keys, narrow heads with large logits, or narrow heads with wide values.

The errors against float64 are pooled: their root mean square over heads, sizes and draws.

python short_call_errors.py TARGET ...

Each target runs in forks of one process, which has the truth and torch's results.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from headscope import attention
from headscope._attend.backends import native

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


@dataclass(frozen=True)
class Draw:
    """A call, and its results in float64."""

    inputs: Sequence[Tensor]
    grad: Tensor
    exact: Sequence[Tensor]

    def square_errors(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the squared errors in float32 of the output and of the gradients of q, k and v."""
        results = compute_results(attend, self.inputs, self.grad, torch.float32)
        return torch.stack([(x - y).square().sum() for x, y in zip(results, self.exact, strict=True)])


def draw_calls(case: Case, seed: int) -> list[Draw]:
    """Return the calls of a case."""
    random = torch.Generator().manual_seed(seed)
    draws: list[Draw] = []
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
        draws.append(Draw(inputs, grad, compute_results(plain_attention, inputs, grad, torch.float64)))
    return draws


def print_ratios(target: str, case: Case, draws: list[Draw], plain: Tensor) -> None:
    """Print the ratios of the pooled errors of a target in a fork, which is the first to run the kernels."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.environ["HEADSCOPE_CPU_TARGET"] = target
        assert native.extension is not None
        assert native.extension.target() == target
        ratios = (sum(draw.square_errors(native_attention) for draw in draws) / plain).sqrt().tolist()
        print(target, case.name, *(f"{name} {ratio:.2f}" for name, ratio in zip(NAMES, ratios, strict=True)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, case in enumerate(CASES, start=1):
        draws = draw_calls(case, seed)
        plain = torch.stack([draw.square_errors(plain_attention) for draw in draws]).sum(0)
        for target in sys.argv[1:]:
            print_ratios(target, case, draws, plain)
