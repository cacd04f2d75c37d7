"""One rank of test_context_attention.py: prints the errors of each case against one process, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._dynamo  # which watches and nested tensors would import in each rank
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import headscope
from headscope import Observe, masks, parallel, positions
from headscope._support import ranks
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
    yield "dropout, blocked", {"mask": causal(), "dropout": 0.3, "backend": "blocked"}
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
    if "dropout" in given:
        given.pop("backend", None)  # in one process blocked torch drops other weights than the native kernels
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
    """Return the largest difference over the largest number, at least 1; equal infinities differ by nothing."""
    got, expected = got.detach(), expected.detach()
    if got.numel() == 0:
        return 0.0
    difference = torch.where(got == expected, 0.0, (got - expected).abs())
    return float(difference.max()) / max(1.0, float(expected[expected.isfinite()].abs().max()))


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


MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, sinks, softcap": {"kv_heads": 2, "sinks": True, "softcap": 5.0},
    "rotary, norm": {"rotary": positions.Rotary(4), "qk_norm": "rms"},
    "norm of all, gate": {"qk_norm": "rms_all", "gate": True},
    "alibi": {"position_bias": positions.ALiBi(H)},
    "relative": {"position_bias": positions.T5Buckets(8, 16)},
    "bias_kv": {"bias_kv": True},
    "reproducible": {"reproducible": True, "kv_heads": 2},
}


def compare_modules(length: int) -> dict[str, Any]:
    """Return the errors of modules within ``parallel.context``, and of what a watch records."""
    errors: dict[str, Any] = {}
    for number, (name, options) in enumerate(MODULES.items()):
        torch.manual_seed(number)
        module = headscope.MultiHeadAttention(16, H, **options)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.3)
        x, grad = torch.randn(2, B, length, 16)
        tokens = torch.randint(0, 5, (B, length))
        what = Observe(map=4, edges=3, tokens=tokens, windows=(2,))
        with headscope.watch(module, what=what) as seen:
            out = module(x, mask=causal())
        (out * grad).sum().backward()
        expected = {"out": out.detach()}
        expected |= {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        for how in HOW:
            places = places_of("head_tail", length)
            module.zero_grad()
            with parallel.context(None, places, how=how), headscope.watch(module, what=what) as part:
                mine = module(places.shard(x, 1), mask=causal())
            (mine * places.shard(grad, 1)).sum().backward()
            found = {"out": places.join(mine.detach(), 1)}
            for n, p in module.named_parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    found[n] = p.grad
            assert {*found} == {*expected}
            case = errors[f"{name}, {how}"] = {each: error(found[each], expected[each]) for each in found}
            joined = part.stats.gather(to=None)
            assert joined is not None
            case["statistics"] = compare_statistics(joined, seen.stats)
    return errors


def compare_statistics(got: headscope.HeadStats, expected: headscope.HeadStats) -> float:
    """Return the largest difference of any statistic, over its size where that is above 1."""
    assert got.layers == expected.layers
    assert got.names == expected.names, (got.names, expected.names)
    largest = 0.0
    for layer in expected.layers:
        one, other = got[layer], expected[layer]
        assert torch.equal(one.rows, other.rows), (one.rows, other.rows)
        assert torch.equal(one.eligible, other.eligible)
        largest = max(largest, error(one.received, other.received))
        if other.parts[layer].map is None:
            continue
        for a, b in ((one.map.mean, other.map.mean), (one.map.max, other.map.max)):
            largest = max(largest, error(a.nan_to_num(nan=-1), b.nan_to_num(nan=-1)))
        assert torch.equal(one.edges.at[..., 1:], other.edges.at[..., 1:])
    for (*at, a), (*there, b) in zip(got.summaries(), expected.summaries(), strict=True):
        assert at == there
        assert a.count == b.count, (at, a, b)
        for name in ("mean", "std", "min", "max"):
            x, y = getattr(a, name), getattr(b, name)
            largest = max(largest, 0.0 if x == y or (x != x and y != y) else abs(x - y) / max(1.0, abs(y)))
    return largest


def compare_heads_and_parts(length: int) -> dict[str, float]:
    """Return the errors of a module whose heads are split over two ranks, and the sequence over two pairs of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    torch.manual_seed(0)
    options: dict[str, Any] = {"kv_heads": 2, "rotary": positions.Rotary(4), "sinks": True, "gate": True}
    module, alone = (headscope.MultiHeadAttention(16, H, **options) for _ in range(2))
    module.load_state_dict(alone.state_dict())
    x = torch.randn(B, length, 16)
    with headscope.watch(alone) as seen:
        expected = alone(x, mask=causal())
    parallel.tensor_parallel(module, mesh["heads"])
    group = mesh["sequence"].get_group()
    places, found = Places.head_tail(length, group), dict[str, float]()
    for how in ("gather", "ring"):
        with headscope.watch(module) as part, parallel.context(group, places, how=how):
            out = module(places.shard(x, 1), mask=causal())
        found[how] = error(places.join(out, 1), expected)
    rows = part.stats.gather(group, to=None)
    assert rows is not None
    heads = rows.gather(mesh["heads"].get_group(), to=None, axis="heads")
    assert heads is not None
    found["statistics"] = compare_statistics(heads, seen.stats)
    return found


def raised(run: Callable[[], Any]) -> str:
    """Return the error of a call, or "returned"."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def errors_of_wrong_calls(length: int) -> dict[str, str]:
    """Return what calls raise whose arguments differ between ranks, or do not fit."""
    places, rank = Places.head_tail(length), dist.get_rank()
    own = places.lengths[rank]
    q, k, v = torch.randn(3, 1, H, own, D)
    module, x = headscope.MultiHeadAttention(16, H, rotary=positions.Rotary(4)), torch.randn(1, own, 16)
    other: dict[str, dict[str, Any]] = {
        "dropout": {"dropout": 0.5 * (rank == 1)},
        "softcap": {"softcap": 1.0 + rank},
        "mask": {"mask": window(3 + rank)},
        "documents": {"mask": Documents(torch.arange(length)[None] // (2 + rank))},
        "how": {"how": "ring" if rank else "gather"},
        "sinks": {"sinks": torch.zeros(H) if rank else None},
    }
    found: dict[str, str] = {}
    for name, options in other.items():
        found[name] = raised(partial(context_attention, q, k, v, **{"places": places, **options}))
    found["length on one rank"] = raised(lambda: context_attention(q[:, :, rank:], k, v, places=places))
    found["length"] = raised(lambda: context_attention(q[:, :, 1:], k, v, places=places))
    found["mask of the rows"] = raised(
        lambda: context_attention(q, k, v, places=places, mask=Dense(torch.ones(own, length, dtype=torch.bool)))
    )
    found["heads"] = raised(lambda: context_attention(*(t[:, :3] for t in (q, k, v)), places=places, how="heads"))
    found["selected"] = raised(
        lambda: context_attention(q, k, v, places=places, observe=Observe(selected=torch.zeros(1, dtype=torch.long)))
    )
    found["second derivative"] = raised(lambda: second_derivative(q, k, v, places))
    found["on no rank"] = raised(lambda: Places(((slice(0, 2),), (slice(3, 4),))))
    found["on two ranks"] = raised(lambda: Places.of(torch.arange(4)))
    with parallel.context(None, places):
        found["cache"] = raised(lambda: module(x, cache=headscope.cache.GrowingCache()))
        found["context"] = raised(lambda: headscope.MultiHeadAttention(16, H)(x, x[:, :1]))
        found["x on one rank"] = raised(lambda: module(x[:, rank:], mask=causal()))
        found["need_weights on one rank"] = raised(lambda: module(x, need_weights=rank == 1))
        found["need_weights"] = raised(lambda: module(x, need_weights=True))
        found["nested"] = raised(lambda: module(torch.nested.nested_tensor([x[0]], layout=torch.jagged)))
        found["traced"] = raised(lambda: make_fx(lambda q, k, v: headscope.attention(q, k, v))(q, k, v))
        found["cross"] = raised(lambda: headscope.observe(q, k, v, kind="cross"))
    found["after"] = raised(lambda: headscope.attention(q, k, v))
    return found


def second_derivative(q: Tensor, k: Tensor, v: Tensor, places: Places) -> None:
    q = q.clone().requires_grad_()
    out = context_attention(q, k, v, places=places).out
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    gradient.sum().backward()


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    ranks._LAST_WORDS = 1.0 if world == 2 else 3.0  # the ranks of a test have little else to do
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    length = int(sys.argv[4])
    found = {"errors": compare_all(length), "modules": compare_modules(length), "raised": errors_of_wrong_calls(length)}
    if world == 4:
        found["both"] = compare_heads_and_parts(length)
    places = Places.contiguous(length)
    q = torch.randn(1, H, places.lengths[rank], D)
    dist.barrier()
    if rank == world - 1:
        print(json.dumps(found), flush=True)
        os._exit(0)  # as if it were killed
    found["a rank ended"] = raised(lambda: context_attention(q, q, q, places=places))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
