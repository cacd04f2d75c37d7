"""Whether both passes drop the same weights on a GPU: python benchmarks/gpu_dropout.py [--device cpu]

With the identity as values, ``out`` is the matrix of the weights after dropout. So the gradients are known from it, in
float64: those of the kernels are compared with them, in eager mode and as an operator. A row names the kernel and its
largest error over the largest gradient. Where the backward pass drops other weights, that is about 1.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headscope import attend, masks
from headscope._attend.backends import fused
from headscope._attend.prepare import prepare

SIZE, RATE = 64, 0.3  # queries, keys and numbers in a head


def cases(device: torch.device) -> dict[str, tuple[torch.dtype, masks.Mask | None]]:
    """Return the dtype and the mask of each call."""
    half, single = torch.bfloat16, torch.float32
    packed = masks.Documents.from_cu_seqlens(torch.tensor([0, 20, SIZE], device=device)) & masks.causal()
    return {
        "causal": (half, masks.causal()), "window": (half, masks.window(9)), "packed documents": (half, packed),
        "lengths": (half, masks.KeyLengths(torch.tensor([50], device=device))),
        "causal, float32": (single, masks.causal()), "window, float32": (single, masks.window(9)),
    }  # fmt: skip


def compare(dtype: torch.dtype, mask: masks.Mask | None, device: torch.device, operator: bool) -> tuple[str, float]:
    """Return what ran, and the largest error of dq, dk and dv over the largest number of each."""
    draw = torch.Generator().manual_seed(0)
    q, k, grad = (torch.randn(1, 4, SIZE, SIZE, generator=draw).to(device, dtype) for _ in range(3))
    v, grad_lse = torch.eye(SIZE, device=device, dtype=dtype).expand(1, 4, -1, -1), grad[..., 0].float()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with FlopCounterMode(display=False) if operator else nullcontext():  # calls within a mode run as an operator
        out, lse, _ = attend(*leaves, mask=mask, dropout=RATE)
        found = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    arguments: Any = (mask, None, None, None, None, RATE, True, None)
    prepared = prepare(q, k, v, *arguments)
    name = prepared.backend.name
    weights = attend(q.double(), k.double(), v.double(), mask=mask, backend="reference").out
    known = _known([x.detach().double() for x in (out, grad, q, k, grad_lse[..., None], weights)])
    errors = (_error(x, y) for x, y in zip(found, known, strict=True))
    return f"fused: {fused.choose(prepared.call)}" if prepared.backend is fused else name, max(errors)


def _known(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return dq, dk and dv from the weights after dropout, the gradients, and p, the weights before it."""
    dropped, grad, q, k, grad_lse, p = tensors
    ds = dropped * grad - p * ((dropped * grad).sum(-1, keepdim=True) - grad_lse)
    return ds @ k * SIZE**-0.5, ds.mT @ q * SIZE**-0.5, dropped.mT @ grad


def _error(x: Tensor, right: Tensor) -> float:
    return float((x.double() - right).abs().max() / right.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    print("| case | as | ran | error |\n|---|---|---|---|")
    for name, (dtype, mask) in cases(device).items():
        for operator in (False, True):
            ran, error = compare(dtype, mask, device, operator)
            print(f"| {name} | {'operator' if operator else 'eager'} | {ran} | {error:.1e} |")


if __name__ == "__main__":
    main()
