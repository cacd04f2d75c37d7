"""Digest what headscope computes for a fixed set of random calls: python scripts/digest.py [--calls 500]

Prints one SHA-256 for each kind of result. The same digests before and after a change mean that outputs, log-sum-exps,
gradients and statistics are the same to the bit. Digests are of one machine, one version of torch and one number of
threads: compare two checkouts on one machine. Only public names are used, so that any two versions can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headscope
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Prefix, causal, window

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DRAWN_BACKENDS = (None, None, None, "sdpa", "blocked", "reference")
LENGTHS = (1, 2, 7, 16, 33, 64, 100, 130, 257, 513)


class Digests:
    """A running digest for each kind of result."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}

    def add(self, kind: str, *values: Tensor | str | None) -> None:
        """Add the bits of tensors, and text as it is."""
        running = self.of.setdefault(kind, hashlib.sha256())
        for value in values:
            if isinstance(value, Tensor):
                bits = value.detach().cpu().contiguous().flatten().view(torch.uint8)
                running.update(f"{value.dtype}{tuple(value.shape)}".encode() + bits.numpy().tobytes())
            else:
                running.update(repr(value).encode())


def draw_tensor(pick: random.Random, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, in one of three layouts in memory."""
    generator = torch.Generator().manual_seed(pick.randrange(2**31))
    layout = pick.choice(("contiguous", "contiguous", "heads last", "padded"))
    if layout == "heads last":
        batch, heads, length, width = shape
        return torch.randn(batch, length, heads, width, generator=generator).to(dtype).transpose(1, 2)
    if layout == "padded":
        return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(dtype)[..., : shape[-1]]
    return torch.randn(shape, generator=generator).to(dtype)


def draw_mask(pick: random.Random, batch: int, heads: int, queries: int, keys: int) -> Mask | None:
    """One mask, or two combined."""
    generator = torch.Generator().manual_seed(pick.randrange(2**31))

    def ids(length: int) -> Tensor:
        return torch.randint(0, 4, (batch, length), generator=generator)

    kinds: tuple[Callable[[], Mask], ...] = (
        causal,
        lambda: window(pick.randint(1, keys)),
        lambda: Band(pick.randint(0, keys), pick.randint(0, keys), offset=pick.randint(-3, keys)),
        lambda: Prefix(pick.randint(0, keys)),
        lambda: KeyLengths(torch.randint(0, keys + 1, (batch,), generator=generator)),
        lambda: Documents(ids(queries), ids(keys)),
        lambda: Dense(torch.rand(batch, pick.choice((1, heads)), queries, keys, generator=generator) < 0.6),
    )
    number = pick.choice((0, 0, 1, 1, 1, 2))
    masks = [pick.choice(kinds)() for _ in range(number)]
    if not masks:
        return None
    return masks[0] if number == 1 else masks[0] & masks[1] if pick.random() < 0.6 else masks[0] | masks[1]


def draw_call(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and options of one call."""
    pick = random.Random(seed)
    dtype = pick.choice(DTYPES)
    batch, kv_heads, group = pick.choice((1, 2, 3)), pick.choice((1, 2)), pick.choice((1, 1, 2, 3))
    heads, queries, keys = kv_heads * group, pick.choice(LENGTHS), pick.choice(LENGTHS)
    if pick.random() < 0.5:
        keys = queries
    width = pick.choice((1, 5, 16, 32, 64, 80))
    v_width = width if pick.random() < 0.8 else pick.choice((1, 7, 48))
    tensors = {
        "q": draw_tensor(pick, batch, heads, queries, width, dtype=dtype),
        "k": draw_tensor(pick, batch, kv_heads, keys, width, dtype=dtype),
        "v": draw_tensor(pick, batch, kv_heads, keys, v_width, dtype=dtype),
    }
    options: dict[str, Any] = {"mask": draw_mask(pick, batch, heads, queries, keys)}
    if pick.random() < 0.2:
        tensors["bias"] = draw_tensor(pick, batch, pick.choice((1, heads)), queries, keys, dtype=dtype)
    if pick.random() < 0.2:
        tensors["sinks"] = torch.linspace(-2, 3, heads).to(dtype)
    if pick.random() < 0.2:
        options["softcap"] = pick.choice((0.5, 5.0, 30.0))
    if pick.random() < 0.2:
        options["scale"] = pick.choice((0.01, 0.5, 2.0))
    if pick.random() < 0.1:
        options["dropout"] = 0.3
    options["backend"] = pick.choice(DRAWN_BACKENDS)
    return tensors, options


def add_attention(digests: Digests, tensors: dict[str, Tensor], options: dict[str, Any]) -> None:
    """Output, log-sum-exp and gradients, or the refusal."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    torch.manual_seed(5)
    try:
        if options["backend"] == "sdpa":
            results = (headscope.attention(**leaves, **options),)
        else:
            results = headscope.attend(**leaves, **options)[:2]
    except ValueError as refusal:
        digests.add("refusals", type(refusal).__name__)
        return
    digests.add("out", results[0])
    digests.add("lse", *results[1:])
    total = sum(
        (x.double() * torch.linspace(-1, 1, x.numel()).view(x.shape)).nan_to_num(0, 0, 0).sum() for x in results
    )
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    digests.add("gradients", *gradients)
    torch.manual_seed(5)
    if not options.get("dropout"):
        digests.add("out without gradients", headscope.attention(**tensors, **options))


def add_statistics(digests: Digests, tensors: dict[str, Tensor], options: dict[str, Any], seed: int) -> None:
    """Every statistic, of one call that attends and of one that only observes."""
    pick = random.Random(seed)
    batch, keys = tensors["k"].shape[0], tensors["k"].shape[2]
    tokens = None
    if tensors["q"].shape[2] == keys:
        tokens = torch.randint(0, 5, (batch, keys), generator=torch.Generator().manual_seed(seed))
    what = headscope.Observe(
        map=pick.choice((None, 1, 3, 8)), edges=pick.choice((0, 4)), top=pick.choice((0, 2)), windows=(5,),
        tokens=tokens, keep_rows=True, keep_qk=True, rows=pick.choice((None, None, 5)), first=pick.choice((1, 2)),
    )  # fmt: skip
    common = {name: value for name, value in options.items() if name not in ("backend", "dropout")}
    observed = [headscope.observe(**tensors, **common, what=what)]
    attended = headscope.attend(**tensors, **common, observe=what)
    digests.add("out while observing", attended.out, attended.lse)
    observed.append(attended.stats)  # pyright: ignore[reportArgumentType]
    for stats in observed:
        digests.add("statistics", str(sorted((name, repr(value)) for name, value in stats.flat().items())))
        digests.add("received", stats.received, stats.eligible)
        if what.map:
            digests.add("map", stats.map.mean, stats.map.max)
        if what.edges:
            digests.add("edges", stats.edges.p, stats.edges.at)
        for rows in stats.kept:
            digests.add("rows", rows.counted, *(rows.values[name] for name in sorted(rows.values)))
        digests.add("tiles", stats.tile(0, min(5, tensors["q"].shape[2]), 0, min(7, keys)))


def main() -> None:
    """Print the digests, and one of them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    digests = Digests()
    for seed in range(options.calls):
        tensors, call = draw_call(seed)
        add_attention(digests, tensors, call)
        add_statistics(digests, tensors, call, seed)
    whole = hashlib.sha256()
    for kind, running in sorted(digests.of.items()):
        whole.update(running.digest())
        print(f"{running.hexdigest()[:32]}  {kind}")
    print(f"{whole.hexdigest()[:32]}  all of {options.calls} calls, {torch.get_num_threads()} threads")
    print(f"headscope from {Path(headscope.__file__).parent}", file=sys.stderr)


if __name__ == "__main__":
    main()
