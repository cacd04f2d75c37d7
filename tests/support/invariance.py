"""Random calls of which each row has to have the same bits whatever is beside it, in the batch, in heads and padding.

docs/concepts/semantics.md states the contract. As a program:
    python tests/support/invariance.py --calls 100000 [--first 0]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import headscope
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, causal, window

DTYPES = (torch.float32,) * 4 + (torch.bfloat16,) * 2 + (torch.float16, torch.float64)
LENGTHS = (1, 1, 2, 5, 10, 17, 33, 48, 64, 100, 150, 300)
KINDS = ("none", "none", "causal", "window", "lengths", "causal lengths", "table", "documents", "band")
MOST_LOGITS = 2_000_000
Results = dict[str, Tensor]


@dataclass
class Call:
    """A random call of ``attend``; with the gradients of q, k and v where ``train`` says so."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    grad_out: Tensor
    kind: str
    lengths: Tensor
    shown: Tensor
    ids: Tensor
    numbers: dict[str, Any]
    train: bool
    backend: str | None
    band: tuple[int, int, int]
    threads: int = 2

    @staticmethod
    def draw(seed: int) -> Call:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        dtype, kv_heads, group = draw.choice(DTYPES), draw.randint(1, 4), draw.choice((1, 1, 2, 3))
        width = draw.choice((1, 3, 8, 16, 24, 32, 64, 80, 128))
        v_width = draw.choice((width, width, 1, 8, 40, 64))
        queries = draw.choice(LENGTHS)
        keys = draw.choice((queries, queries, draw.randint(1, 400), draw.choice((7, 64, 65, 128, 129, 2100, 5000))))
        heads, batch = kv_heads * group, draw.choice((1, 2, 3, 5))
        batch = max(1, min(batch, MOST_LOGITS // (heads * queries * keys)))
        if heads * queries * keys > MOST_LOGITS:
            keys = queries
        q = torch.randn(batch, queries, heads, width).to(dtype).transpose(1, 2)
        k, v = (torch.randn(batch, kv_heads, keys, n).to(dtype) for n in (width, v_width))
        biases = ((1, heads, queries, keys), (batch, 1, 1, keys), (batch, heads, queries, keys), (1, 1, queries, keys))
        return Call(
            q, k, v,
            torch.randn(draw.choice(biases)).to(dtype) if draw.random() < 0.3 else None,
            torch.randn(heads).to(dtype) if draw.random() < 0.3 else None,
            torch.randn(batch, heads, queries, v_width).to(dtype),
            draw.choice(KINDS),
            torch.randint(0, keys + 1, (batch,)),
            torch.rand(batch, 1, queries, keys) < 0.7,
            torch.randint(0, 3, (batch, keys)).sort(-1).values,
            {name: x for name, x in (("softcap", 20.0), ("scale", 0.3)) if draw.random() < 0.3},
            draw.random() < 0.4,
            draw.choice((None, None, "reproducible")),
            (draw.randint(0, 20), draw.randint(0, 5), draw.randint(-10, keys)),
        )  # fmt: skip

    def mask(self) -> Mask | None:
        if self.kind == "documents" and self.ids.shape[1] != self.q.shape[2]:
            return None
        made: dict[str, Callable[[], Mask | None]] = {
            "none": lambda: None, "causal": causal, "window": lambda: window(20),
            "lengths": lambda: KeyLengths(self.lengths), "causal lengths": lambda: causal() & KeyLengths(self.lengths),
            "table": lambda: Dense(self.shown), "documents": lambda: Documents(self.ids),
            "square causal": lambda: Band(None, 0, offset=0),
            "band": lambda: Band(*self.band[:2], offset=self.band[2]),
            "band lengths": lambda: Band(*self.band[:2], offset=self.band[2]) & KeyLengths(self.lengths),
            "band table": lambda: Band(*self.band[:2], offset=self.band[2]) & Dense(self.shown),
        }  # fmt: skip
        return made[self.kind]()

    def run(self) -> Results:
        """out and lse, and the gradients of q, k and v."""
        torch.set_num_threads(self.threads)
        q, k, v = (x.detach().requires_grad_(self.train) for x in (self.q, self.k, self.v))
        beside: dict[str, Any] = {"mask": self.mask(), "bias": self.bias, "sinks": self.sinks, "backend": self.backend}
        out, lse, _ = headscope.attend(q, k, v, **beside, **self.numbers)
        results = {"out": out.detach(), "lse": lse.detach()}
        if self.train:
            grads = torch.autograd.grad((out * self.grad_out).sum(), (q, k, v))
            results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        return results

    def of_entries(self, at: Tensor) -> Call:
        """The call of some batch entries, in any order."""
        bias = self.bias if self.bias is None or len(self.bias) == 1 else self.bias[at]
        parts = {name: getattr(self, name)[at] for name in ("q", "k", "v", "grad_out", "lengths", "shown", "ids")}
        return self.changed(**parts, bias=bias)

    def of_kv_head(self, head: int) -> Call:
        """The call of one key/value head and the query heads that share it."""
        group = self.q.shape[1] // self.k.shape[1]
        mine = slice(head * group, (head + 1) * group)
        bias = self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, mine]
        parts = {"q": self.q[:, mine], "grad_out": self.grad_out[:, mine]}
        parts |= {"k": self.k[:, head : head + 1], "v": self.v[:, head : head + 1]}
        return self.changed(**parts, bias=bias, sinks=None if self.sinks is None else self.sinks[mine])

    def with_keys(self, before: int, after: int) -> Call | None:
        """The call beside keys of padding, which a mask hides; None where its mask has no such form."""
        kinds = {"none": "table" if before else "lengths", "lengths": "lengths", "table": "table", "causal": ""}
        kinds["band"] = "band table" if after % 2 else "band lengths"
        kind = kinds.get(self.kind, "")
        square = (
            "causal" in self.kind and self.q.shape[2] == self.k.shape[2] and not before and "lengths" not in self.kind
        )
        if square:
            kind = "square causal"
        if not kind or (before and kind != "table"):
            return None
        keys = self.k.shape[2]
        shown = self.shown if self.kind == "table" else torch.ones_like(self.shown)
        return self.changed(
            k=_between(self.k, before, after, 2),
            v=_between(self.v, before, after, 2),
            bias=None if self.bias is None else _between(self.bias, before, after, 3),
            shown=torch.nn.functional.pad(shown, (before, after), value=False),
            lengths=self.lengths if self.kind == "lengths" else torch.full_like(self.lengths, keys),
            kind=kind,
        )

    def with_queries(self, after: int) -> Call | None:
        """The call before rows of padding; their gradients are 0."""
        if self.kind not in ("none", "lengths", "square causal"):
            return None
        bias = self.bias if self.bias is None or self.bias.shape[2] == 1 else _between(self.bias, 0, after, 2)
        padding = self.grad_out.new_zeros((*self.grad_out.shape[:2], after, self.grad_out.shape[3]))
        return self.changed(q=_between(self.q, 0, after, 2), grad_out=torch.cat([self.grad_out, padding], 2), bias=bias)

    def with_document(self, after: int) -> Call | None:
        """The call beside rows and keys of another document; their gradients are 0."""
        keys = self.with_keys(0, after)
        both = None if keys is None or self.kind != "none" else replace(keys, kind="none").with_queries(after)
        if both is None or self.q.shape[2] != self.k.shape[2]:
            return None
        ids = torch.zeros_like(self.ids)
        return both.changed(ids=torch.nn.functional.pad(ids, (0, after), value=1), kind="documents")

    def with_nan(self, entry: int) -> Call:
        """The call with NaN in the queries, keys and values of one batch entry."""
        q, k, v = (x.clone() for x in (self.q, self.k, self.v))
        q[entry, :, -1], k[entry, :, 0], v[entry, :, -1, 0] = (torch.nan,) * 3
        return self.changed(q=q, k=k, v=v)

    def changed(self, **parts: Any) -> Call:
        return replace(self, **parts)


def _between(x: Tensor, before: int, after: int, axis: int) -> Tensor:
    """x between random numbers."""
    sizes = [[*x.shape], [*x.shape]]
    sizes[0][axis], sizes[1][axis] = before, after
    return torch.cat([torch.randn(sizes[0]).to(x.dtype), x, torch.randn(sizes[1]).to(x.dtype)], axis)


def differences(seed: int) -> Iterator[str]:
    """What of a random call is not the same to the bit beside other things, in words."""
    call = Call.draw(seed)
    draw = random.Random(seed + 1)
    (batch, heads, queries, _), (kv_heads, keys) = call.q.shape, call.k.shape[1:3]
    if call.backend == "reproducible" and call.kind == "causal" and queries == keys:
        call.kind = "square causal"  # which rows that follow do not move
    whole = call.run()
    head, entry = draw.randrange(kv_heads), draw.randrange(batch)
    places = torch.randint(0, batch, (draw.choice((2, 5)),))
    own = {"out": heads, "lse": heads, "dq": heads, "dk": kv_heads, "dv": kv_heads}
    parts: list[tuple[str, Call | None, Callable[[str, Tensor], Tensor], Callable[[str, Tensor], Tensor]]] = [
        ("alone", call.of_entries(torch.tensor([entry])), _same, lambda _, x: x[entry : entry + 1]),
        ("in another batch", call.of_entries(places), _same, lambda _, x: x[places]),
        ("with 1 thread", call.changed(threads=1), _same, _same),
        ("with 3 threads", call.changed(threads=3), _same, _same),
        (
            "without other heads",
            call.of_kv_head(head),
            _same,
            lambda name, x: x[:, head * own[name] // kv_heads : (head + 1) * own[name] // kv_heads],
        ),
    ]
    before = draw.choice((0, 0, 2, 64, 70))  # bfloat16 is multiplied in pairs of keys, so the number is even
    parts.append(
        (
            "beside padded keys",
            call.with_keys(before, draw.choice((1, 3, 16, 64, 100))),
            lambda name, x: x[:, :, before : before + keys] if name in ("dk", "dv") else x,
            _same,
        )
    )
    others = [n for n in range(batch) if n != entry]
    if others:
        parts.append(("beside NaN", call.with_nan(entry), lambda _, x: x[others], lambda _, x: x[others]))
    if call.backend == "reproducible":
        parts.append(
            (
                "before other rows",
                call.with_queries(draw.choice((1, 7, 40, 100))),
                lambda name, x: x[:, :, :queries] if name in ("out", "lse", "dq") else x,
                _same,
            )
        )
        parts.append(
            (
                "beside a document",
                call.with_document(draw.choice((1, 5, 16, 40))),
                lambda _, x: x[:, :, :queries],
                _same,
            )
        )
    for words, other, of_other, of_whole in parts:
        if other is None:
            continue
        for name, values in other.run().items():
            got, expected = of_other(name, values), of_whole(name, whole[name])
            if not torch.equal(got.nan_to_num(), expected.nan_to_num()) or got.shape != expected.shape:
                sizes = f"{batch}, {heads}/{kv_heads}, {queries}, {keys}, {call.q.shape[3]}, {call.v.shape[3]}"
                far = float((got - expected).abs().max()) if got.shape == expected.shape else "another shape"
                yield f"{seed}: {name} {words}: {far} off; {call.kind}, {sizes}, {call.q.dtype}, {call.backend}"


def _same(name: str, x: Tensor) -> Tensor:
    return x


def main() -> int:
    """Run as many calls as are asked for; 1 where some bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first call")
    asked = parser.parse_args()
    wrong = 0
    for seed in range(asked.first, asked.first + asked.calls):
        for words in differences(seed):
            wrong += 1
            print(words, flush=True)
    print(f"{asked.calls:,} calls: {wrong:,} differences")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
