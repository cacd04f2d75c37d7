"""Random calls of ``MultiHeadAttention(reproducible=True)``: each row has the same bits whatever is beside it.

docs/concepts/semantics.md states the contract, "A reproducible module". As a program:
    python tests/support/module_invariance.py --calls 10000 [--first 0]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention
from headscope.masks import KeyLengths, causal
from headscope.positions import ALiBi, Rotary, T5Buckets

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]


def draw_module(draw: random.Random) -> MultiHeadAttention:
    """A reproducible module of random options."""
    kv_heads, width, dtype = draw.choice((1, 2, 4)), draw.choice((8, 12, 16, 32)), draw.choice(DTYPES)
    heads = kv_heads * draw.choice((1, 2))
    places: list[dict[str, Any]] = [{}, {}, {"rotary": Rotary(8)}, {"position_bias": ALiBi(heads)}]
    places += [{"position_bias": T5Buckets()}]
    options: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": width, **draw.choice(places)}
    more = {
        "v_head_dim": 40, "bias": ("q", "v"), "qk_norm": draw.choice(("rms", "layer", "rms_all")), "gate": True,
        "sinks": True, "softcap": 10.0,
    }  # fmt: skip
    options |= {name: value for name, value in more.items() if draw.random() < 0.3}
    module = MultiHeadAttention(draw.choice((24, 100, heads * width)), heads, dtype=dtype, reproducible=True, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def run(module: MultiHeadAttention, x: Tensor, lengths: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of x."""
    x = x.detach().requires_grad_()
    out = module(x, mask=causal() & KeyLengths(lengths))
    return out.detach(), torch.autograd.grad((out * weights).sum(), x)[0]


def differences(seed: int) -> Iterator[str]:
    """What of a random call is not the same to the bit beside other things, in words."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = draw_module(draw)
    batch, length = draw.choice((2, 3, 8)), draw.choice((1, 2, 7, 33, 64, 130))
    dtype, width = module.out_proj.weight.dtype, module.embed_dim
    x, weights = torch.randn(2, batch, length, width, dtype=dtype)
    lengths = torch.randint(1, length + 1, (batch,))
    whole = run(module, x, lengths, weights)
    at = torch.randint(0, batch, (draw.choice((1, 2, 17)),))
    part = run(module, x[at], lengths[at], weights[at])
    torch.set_num_threads(1)
    alone = run(module, x[:1], lengths[:1], weights[:1])
    torch.set_num_threads(2)
    after = draw.choice((1, 6, 40))  # rows of padding
    padding = torch.randn(batch, after, width, dtype=dtype)
    padded = [torch.cat([y, pad * padding], 1) for y, pad in ((x, 1), (weights, 0))]
    longer = run(module, padded[0], lengths, padded[1])
    for beside, values, expected in (
        ("in another batch", part, [y[at] for y in whole]),
        ("alone, with one thread", alone, [y[:1] for y in whole]),
        ("padded", [y[:, :length] for y in longer], whole),
    ):
        for name, value, right in zip(("out", "dx"), values, expected, strict=True):
            if not torch.equal(value, right):
                yield f"{seed}: {name} {beside}: {float((value - right).abs().max())} off; {module}"


def main() -> int:
    """Run as many calls as are asked for; 1 where some bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first call")
    options = parser.parse_args()
    wrong = 0
    for seed in range(options.first, options.first + options.calls):
        for words in differences(seed):
            wrong += 1
            print(words, flush=True)
    print(f"{options.calls:,} modules: {wrong:,} differences")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
