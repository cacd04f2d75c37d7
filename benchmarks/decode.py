"""Decoding with a cache beside Hugging Face's caches and SDPA, step by step in turns: python benchmarks/decode.py

    python benchmarks/decode.py                        # the full run; writes decode.json and decode.md
    python benchmarks/decode.py --context 512 --tokens 16 --dtypes fp32

(1, 32 query heads over 8 key/value heads, D 128), 256 tokens after a context of 4096. A step appends one key and one
value and attends with one query: what a layer does beside its projections. All competitors take step t before any takes
step t + 1, in an order that rotates; each step's output is compared with ours. "read once" adds up the keys and values
that are held, as one reads memory at its fastest: no step can be shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headscope import attention
from headscope.cache import Cache, GrowingCache, RollingCache, StaticCache
from headscope.cli import _benchmark
from headscope.masks import causal

HERE = Path(__file__).parent
HEADS, KV_HEADS, WIDTH = 32, 8, 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
STATIC, GROWING, ROLLING = "static", "growing", "rolling"
HF_STATIC, HF_DYNAMIC = "HF static", "HF dynamic"
READ = "read once"
BARS = {"fp32": 1 / 2, "bf16": 1 / 10}  # of the time of Hugging Face's cache

Step = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Token number, q [1, H, 1, D], k and v [1, Hkv, 1, D] -> out [1, 1, H, D]."""


def ours(cache: Cache, k: Tensor, v: Tensor) -> Step:
    """A step as ``MultiHeadAttention.forward`` takes it."""
    cache.append(k, v, causal())

    def step(token: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, _, mask = cache.append(k, v)
        return attention(q, keys, values, mask=mask).transpose(1, 2)  # [1, 1, H, D]

    return step


def reading(k: Tensor, v: Tensor, tokens: int) -> Step:
    """Add up keys and values, as float32 whatever they are: numbers do not matter."""
    cache = StaticCache(k.shape[2] + tokens)
    cache.append(k, v)

    def step(token: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = [cast(Tensor, each).view(torch.float32) for each in (cache._k, cache._v)]
        return held[0].sum() + held[1].sum()

    return step


def theirs(cache: Any, module: Any, k: Tensor, v: Tensor, capacity: int | None) -> Step:
    """A step as a layer of transformers takes it; with room beyond the tokens there is a mask, made beforehand."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    cache.update(k, v, 0)

    def step(token: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.update(k, v, 0)
        mask = None if capacity is None else masks[token]
        return sdpa_attention_forward(module, q, keys, values, mask, scaling=WIDTH**-0.5)[0]  # [1, 1, H, D]

    masks: dict[int, Tensor] = {}
    if capacity is not None:
        at = torch.arange(capacity)
        masks = {token: (at <= token)[None, None, None] for token in range(k.shape[2], capacity)}  # [1, 1, 1, K]
    return step


def competitors(context: int, tokens: int, dtype: torch.dtype) -> dict[str, Step]:
    """Every cache, filled with the same context."""
    from transformers import DynamicCache, LlamaConfig
    from transformers import StaticCache as TheirStaticCache
    from transformers.models.llama.modeling_llama import LlamaAttention

    k, v = torch.randn(2, 1, KV_HEADS, context, WIDTH, dtype=dtype)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=WIDTH
    )
    module = LlamaAttention(config, 0).eval()  # asked for its groups; its weights are not used
    whole = context + tokens
    return {
        STATIC: ours(StaticCache(whole), k, v),
        GROWING: ours(GrowingCache(), k, v),
        ROLLING: ours(RollingCache(whole), k, v),
        HF_STATIC: theirs(TheirStaticCache(config, whole), module, k, v, whole),
        HF_DYNAMIC: theirs(DynamicCache(config=config), module, k, v, None),
        READ: reading(k, v, tokens),
    }


def measure(context: int, tokens: int, name: str) -> dict[str, list[float]]:
    """Seconds of every step of every competitor."""
    torch.manual_seed(0)
    steps = competitors(context, tokens, DTYPES[name])
    names = list(steps)
    found: dict[str, list[float]] = {each: [] for each in names}
    for token in range(context, context + tokens):
        q = torch.randn(1, HEADS, 1, WIDTH, dtype=DTYPES[name])
        k, v = torch.randn(2, 1, KV_HEADS, 1, WIDTH, dtype=DTYPES[name])
        outs: dict[str, Tensor] = {}
        turn = token % len(names)
        for each in names[turn:] + names[:turn]:
            begun = time.perf_counter()
            outs[each] = steps[each](token, q, k, v)
            found[each].append(time.perf_counter() - begun)
        outs.pop(READ)
        for each, out in outs.items():
            tolerance = TOLERANCE[name]
            torch.testing.assert_close(out, outs[STATIC], rtol=tolerance, atol=tolerance, msg=f"{each} differs")
    return found


def judged(times: dict[str, list[float]], name: str) -> dict[str, Any]:
    """Medians, and ours over each of theirs."""
    median = {each: statistics.median(found) for each, found in times.items()}
    total = {each: sum(found) for each, found in times.items()}
    theirs = (HF_DYNAMIC, HF_STATIC)
    return {
        "dtype": name, "median_s": median, "total_s": total, "target": BARS[name],
        "ratio": {each: median[STATIC] / median[each] for each in theirs},
        "total_ratio": {each: total[STATIC] / total[each] for each in theirs}, "seconds": times,
    }  # fmt: skip


def markdown(made: dict[str, Any]) -> str:
    """The same as a page."""
    machine = ", ".join(f"{name} {value}" for name, value in made["machine"].items())
    names = list(made["rows"][0]["median_s"])
    head = ["dtype", *names, f"static / {HF_DYNAMIC}", f"static / {HF_STATIC}", "target"]
    lines = [
        "# Decoding, interleaved with Hugging Face's caches",
        "",
        f"Made by `{made['command']}` on {machine}, transformers {made['transformers']}. (1, {HEADS}/{KV_HEADS} heads, "
        f"D {WIDTH}), {made['tokens']} tokens after {made['context']}. Medians of a step in ms: append a key and a "
        "value, and attend. In brackets: the ratio of all steps together.",
        "",
        f"`{HF_DYNAMIC}` and `{HF_STATIC}` are the `DynamicCache` (the default) and the `StaticCache` of transformers, "
        "with its SDPA function. With a mask, as for the static cache, it packs the query heads of a group into rows. "
        "Without one, it leaves the groups to SDPA. "
        f"`{READ}` adds up the cached keys and values: no step can be shorter.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
    ]
    for row in made["rows"]:
        cells = [row["dtype"], *(f"{row['median_s'][each] * 1e3:.3g}" for each in names)]
        cells += [f"{row['ratio'][each]:.3f} ({row['total_ratio'][each]:.3f})" for each in (HF_DYNAMIC, HF_STATIC)]
        lines.append(f"| {' | '.join(cells)} | <= {row['target']:g} |")
    return "\n".join([*lines, ""])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens before the first step")
    parser.add_argument("--tokens", type=int, default=256, help="steps")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="by default all cores")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="some of: fp32,bf16")
    parser.add_argument("--out", type=Path, help="FILE.json; the table goes beside it")
    asked = parser.parse_args(arguments)
    for name in ("context", "tokens", "threads"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name}: got {getattr(asked, name)}, expected at least 1")
    asked.dtypes = asked.dtypes.split(",")
    for each in asked.dtypes:
        if each not in DTYPES:
            parser.error(f"--dtypes: got {each!r}, expected some of: {', '.join(DTYPES)}")
    usual = {name: parser.get_default(name) for name in ("context", "tokens")}
    asked.full = asked.dtypes == list(DTYPES) and usual == {name: getattr(asked, name) for name in usual}
    return asked


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0; 2 for a mistake on the command line."""
    asked = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(asked.threads)
    import transformers

    made: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/decode.py", *given]), "machine": _benchmark.machine(),
        "transformers": transformers.__version__, "context": asked.context, "tokens": asked.tokens, "rows": [],
    }  # fmt: skip
    for name in asked.dtypes:
        print(name, file=sys.stderr, flush=True)
        made["rows"].append(judged(measure(asked.context, asked.tokens, name), name))
    print(markdown(made))
    out = asked.out or (HERE / "decode.json" if asked.full else None)
    if out is not None:
        out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(markdown(made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
