"""Time of a training step whose loss has statistics of attention weights: python benchmarks/differentiable.py

A step is a forward and a backward pass, causal, float32, 8 heads of 64. The ways take turns, and each has the shortest
of its times, so that other programs disturb them least. docs/guides/attention_in_a_loss.md has the table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from headscope import Observe, Segments, attend, attention, masks

HEADS, WIDTH, SEGMENTS = 8, 64, 16
SIZES = ((8, 128), (2, 1024), (1, 4096))


def steps(batch: int, length: int) -> dict[str, Callable[[], object]]:
    """Return each way to take a step."""
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
    grad, mask = torch.randn(batch, HEADS, length, WIDTH), masks.causal()
    names = [f"segment {n}" for n in range(SEGMENTS)]
    segments = Segments(names, torch.arange(length) * SEGMENTS // length)
    visible = torch.ones(length, length, dtype=torch.bool).tril()

    def plain() -> object:
        return torch.autograd.grad(attention(q, k, v, mask=mask), (q, k, v), grad)

    def with_statistics(*names: str) -> Callable[[], object]:
        what = Observe(received="received" in names, segments=segments if "segments" in names else None)

        def step() -> object:
            attended = attend(q, k, v, mask=mask, observe=what, differentiable=names)
            assert attended.stats is not None
            stats = attended.stats.differentiable
            loss = (attended.out * grad).sum()
            for name in names:
                values: Tensor = getattr(stats, name)
                loss = loss + values.square().sum()
            return torch.autograd.grad(loss, (q, k, v))

        return step

    def dense() -> object:
        p = (q @ k.mT * WIDTH**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
        entropy = -torch.where(visible, p * p.clamp_min(1e-30).log(), 0.0).sum(-1)
        return torch.autograd.grad((p @ v * grad).sum() + entropy.square().sum(), (q, k, v))

    return {
        "attention": plain,
        "entropy": with_statistics("entropy"),
        "received": with_statistics("received"),
        "segments": with_statistics("segments"),
        "all three": with_statistics("entropy", "received", "segments"),
        "dense entropy": dense,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    print("| batch, length | attention, ms | entropy | received | segments | all three | dense entropy |")
    print("|---|---|---|---|---|---|---|")
    for batch, length in SIZES:
        ways = steps(batch, length)
        best = dict.fromkeys(ways, float("inf"))
        for turn in range(max(3, chosen.rounds * 128 // length) + 1):
            for name, step in ways.items():
                start = time.perf_counter()
                step()
                if turn:  # the first one prepares the call
                    best[name] = min(best[name], time.perf_counter() - start)
        ratios = " | ".join(f"{best[name] / best['attention']:.2f}" for name in ways if name != "attention")
        print(f"| {batch}, {length:,} | {1e3 * best['attention']:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
