"""One rank of test_context_attention.py: prints the errors of each case against one process, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import headscope
from headscope import Observe, masks
from headscope.masks import Band, Dense, Documents, KeyLengths, Prefix, causal, window
from headscope.parallel import Places, context_attention

B, H, HKV, D, DV = 2, 4, 2, 8, 6
HOW = ("gather", "ring", "heads")


class EvenDistance(masks.Mask):
    """A mask of a caller's own class."""

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return ((i - j + h) % 2 == 0) & (j <= i)


def cases(length: int, random: torch.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options of each case; a bias is that of the whole sequence."""
    ids = torch.arange(length) * 4 // length
    rows = torch.rand(B, H, length, length, generator=random) > 0.4
    yield "none", {}
    yield "causal", {"mask": causal()}
    yield "window", {"mask": window(5)}
    yield "band of offset", {"mask": Band(3, 2, offset=(1, -2))}
    yield "band of a tensor", {"mask": Band(3, 0, offset=torch.tensor([0, -1]))}
    yield "prefix and window", {"mask": (Prefix(3) | window(4)) & causal()}
    yield "documents", {"mask": causal() & Documents(ids[None])}
    yield "documents out of order", {"mask": Documents(torch.stack([ids, ids.flip(0) % 2]))}
    yield "lengths", {"mask": causal() & KeyLengths(torch.tensor([length, length // 3]))}
    yield "table", {"mask": Dense(rows)}
    yield "own class", {"mask": EvenDistance()}
    yield "empty rows", {"mask": Band(None, -length // 2)}
    yield "softcap", {"mask": causal(), "softcap": 3.0, "scale": 0.7}
    yield "sinks", {"mask": causal(), "sinks": torch.randn(H, generator=random)}
    yield "sinks, empty rows", {"mask": Band(None, -4), "sinks": torch.randn(H, generator=random)}
    yield "bias", {"mask": causal(), "bias": torch.randn(B, H, length, length, generator=random)}
    yield "bias of keys", {"bias": torch.randn(1, 1, 1, length, generator=random)}
    yield "bias of rows", {"mask": causal(), "bias": torch.randn(H, length, 1, generator=random)}
    yield "dropout", {"mask": causal(), "dropout": 0.3}
    yield "blocked", {"mask": causal(), "softcap": 4.0, "sinks": torch.randn(H, generator=random), "backend": "blocked"}
    yield "reproducible", {"mask": causal(), "backend": "reproducible"}


def places_of(name: str, length: int) -> Places:
    if name == "contiguous":
        return Places.contiguous(length)
    if name == "head_tail":
        return Places.head_tail(length)
    every = torch.randperm(length, generator=torch.Generator().manual_seed(3))
    return Places.of(every.tensor_split(dist.get_world_size())[dist.get_rank()])


def whole(qkv: list[Tensor], options: dict[str, Any], grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return out, lse and all gradients in one process."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    given = {name: x.clone().requires_grad_() if name in ("bias", "sinks") else x for name, x in options.items()}
    torch.manual_seed(7)
    out, lse, _ = headscope.attend(*leaves, **given)
    ((out * grads[0]).sum() + (lse.nan_to_num(neginf=0) * grads[1]).sum()).backward()
    found = {"out": out, "lse": lse, "dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
    return found | {f"d{name}": given[name].grad for name in ("bias", "sinks") if name in given}


def parts(
    qkv: list[Tensor], options: dict[str, Any], grads: tuple[Tensor, Tensor], places: Places, how: str
) -> dict[str, Tensor]:
    """Return the same over ranks, joined."""
    leaves = [places.shard(x, 2).requires_grad_() for x in qkv]
    given = dict(options)
    has_rows = "bias" in given and given["bias"].shape[-2] > 1
    if has_rows:
        given["bias"] = places.shard(given["bias"], -2)
    for name in {"bias", "sinks"} & {*given}:
        given[name] = given[name].clone().requires_grad_()
    torch.manual_seed(7 + dist.get_rank())  # the seed of rank 0 counts
    result = context_attention(*leaves, places=places, how=how, **given)  # pyright: ignore[reportArgumentType]
    own = [places.shard(x, 2) for x in grads]
    ((result.out * own[0]).sum() + (result.lse.nan_to_num(neginf=0) * own[1]).sum()).backward()
    found = {"out": places.join(result.out.detach(), 2), "lse": places.join(result.lse.detach(), 2)}
    for name, x in zip(("dq", "dk", "dv"), leaves, strict=True):
        assert x.grad is not None
        found[name] = places.join(x.grad, 2)
    for name in {"bias", "sinks"} & {*given}:
        grad = given[name].grad
        if name == "bias" and has_rows:
            found["dbias"] = places.join(grad, -2)
        else:
            dist.all_reduce(grad)
            found[f"d{name}"] = grad
    return found


def error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference; equal infinities differ by nothing."""
    if got.numel() == 0:
        return 0.0
    difference = (got - expected).abs()
    return float(torch.where(got == expected, 0.0, difference).max())


def compare_all(length: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    qkv = [torch.randn(B, heads, length, width, generator=random) for heads, width in ((H, D), (HKV, D), (HKV, DV))]
    grads = torch.randn(B, H, length, DV, generator=random), torch.randn(B, H, length, generator=random)
    errors: dict[str, Any] = {}
    for number, (name, options) in enumerate(cases(length, random)):
        expected = whole(qkv, options, grads)
        for how in HOW:
            kinds = ("contiguous", "head_tail", "scattered") if name in ("causal", "dropout") else ("head_tail",)
            for kind in kinds if number % 4 or len(kinds) > 1 else ("contiguous",):
                got = parts(qkv, options, grads, places_of(kind, length), how)
                assert {*got} == {*expected}, (got.keys(), expected.keys())
                errors[f"{name}, {how}, {kind}"] = {each: error(got[each], expected[each]) for each in got}
    return errors


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found = {"errors": compare_all(int(sys.argv[4]))}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
