"""Attention of DTensors in several processes, compared with that of ordinary tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensor_parallel_cases import (  # pyright: ignore[reportMissingImports]  # a program beside this one
    EveryOtherHead,
    attempt,
    difference,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from headscope import attend, masks

BATCH, HEADS, QUERIES, KEYS, WIDTH = 4, 8, 5, 7, 6
WHOLE, ENTRIES, IN_HEADS = Replicate(), Shard(0), Shard(1)


@dataclass
class Case:
    """A call.

    Attributes:
        q, k, v: how each is placed over the last axis of the mesh.
        sizes: of q, k and v.
        options: makes the other arguments; bias and sinks become DTensors.
        placed: how bias and sinks are placed.
        first: how q, k and v are placed over the first axis of a mesh of two; None = the mesh has one.
    """

    q: Any = IN_HEADS
    k: Any = IN_HEADS
    v: Any = IN_HEADS
    sizes: tuple[tuple[int, ...], ...] = ()
    options: Callable[[], dict[str, Any]] = dict
    placed: Any = WHOLE
    first: Any = None

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        whole = (BATCH, HEADS)
        return self.sizes or ((*whole, QUERIES, WIDTH), (*whole, KEYS, WIDTH), (*whole, KEYS, 3))


def grouped(heads: int, batch: int = BATCH) -> tuple[tuple[int, ...], ...]:
    return (BATCH, HEADS, QUERIES, WIDTH), (batch, heads, KEYS, WIDTH), (batch, heads, KEYS, 3)


def all_of(placement: Any, **others: Any) -> Case:
    return Case(placement, placement, placement, **others)


def options(*bias: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"bias": torch.randn(*bias), "sinks": torch.randn(HEADS), "softcap": 2.0}


def masked() -> dict[str, Any]:
    table = torch.rand(BATCH, HEADS, QUERIES, KEYS) < 0.6
    lengths = masks.KeyLengths(torch.tensor([3, 7, 0, 5]))
    offsets = masks.Band(None, 0, offset=(0, 1, 2, 2))
    return {"mask": (masks.Dense(table) | EveryOtherHead()) & lengths & offsets}


def documents() -> dict[str, Any]:
    return {"mask": masks.Documents(torch.randint(3, (BATCH, QUERIES)), torch.randint(3, (1, KEYS)))}


CASES: dict[str, Case] = {
    "heads": all_of(IN_HEADS),
    "batch": all_of(ENTRIES),
    "replicated": all_of(WHOLE),
    "a batch that does not divide": all_of(
        ENTRIES, sizes=((3, 2, QUERIES, WIDTH), (3, 2, KEYS, WIDTH), (3, 2, KEYS, 3))
    ),
    "q in heads alone": Case(IN_HEADS, WHOLE, WHOLE),
    "k in heads alone": Case(WHOLE, IN_HEADS, WHOLE),
    "q in batch, k in heads": Case(ENTRIES, IN_HEADS, WHOLE),
    **{f"{n} kv heads": Case(IN_HEADS, WHOLE, WHOLE, sizes=grouped(n)) for n in (4, 2, 1)},
    "one batch of keys": Case(ENTRIES, WHOLE, WHOLE, sizes=grouped(2, 1)),
    "three axes": all_of(ENTRIES, sizes=((HEADS, QUERIES, WIDTH), (HEADS, KEYS, WIDTH), (HEADS, KEYS, 3))),
    "partial sums": Case(Partial(), IN_HEADS, IN_HEADS),
    "heads, options": all_of(IN_HEADS, options=options(BATCH, HEADS, QUERIES, KEYS)),
    "heads, options of all heads": all_of(IN_HEADS, options=options(BATCH, 1, 1, KEYS), placed=Shard(0)),
    "batch, options": all_of(ENTRIES, options=options(BATCH, HEADS, 1, KEYS), placed=Shard(0)),
    "batch, options of all entries": all_of(ENTRIES, options=options(HEADS, QUERIES, KEYS)),
    "replicated, options": all_of(WHOLE, options=options(QUERIES, KEYS)),
    **{f"{p}, masks": all_of(p, options=masked) for p in (IN_HEADS, ENTRIES, WHOLE)},
    **{f"{p}, documents": all_of(p, options=documents) for p in (IN_HEADS, ENTRIES)},
    "batch and heads": all_of(IN_HEADS, first=ENTRIES, options=options(BATCH, HEADS, QUERIES, KEYS)),
    "batch and heads, masks": all_of(IN_HEADS, first=ENTRIES, options=masked),
    "heads and heads": all_of(IN_HEADS, first=IN_HEADS, options=masked),
    "batch and heads, one kv head": Case(IN_HEADS, WHOLE, WHOLE, grouped(1), options(1, QUERIES, KEYS), WHOLE, ENTRIES),
}
REFUSED: dict[str, Case] = {
    "q on its sequence": Case(Shard(2), WHOLE, WHOLE),
    "k on its sequence": Case(IN_HEADS, Shard(2), WHOLE),
    "v on its width": Case(IN_HEADS, WHOLE, Shard(-1)),
    "heads that do not divide": Case(sizes=((1, 3, 5, 6), (1, 3, 5, 6), (1, 3, 5, 6))),
    "ordinary sinks": all_of(IN_HEADS, options=lambda: {"sinks": torch.randn(HEADS)}, placed=None),
    "ordinary keys": Case(IN_HEADS, None, IN_HEADS),
    "a mask of DTensors": all_of(IN_HEADS, options=lambda: {"mask": torch.ones(QUERIES, KEYS) > 0}, placed="mask"),
}


def distributed(x: Tensor, mesh: DeviceMesh, case: Case, placement: Any) -> Any:
    """Return a DTensor with a gradient of its own."""
    if placement is None:
        return x
    if isinstance(placement, Partial):
        part = x.detach() / mesh.size()
        return DTensor.from_local(part, mesh, [placement], run_check=False).requires_grad_()
    placements = [placement] if mesh.ndim == 1 else [case.first, placement]
    return distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.is_floating_point())


def call(tensors: dict[str, Any], others: dict[str, Any], leaves: dict[str, Any]) -> dict[str, Tensor]:
    """Return out, lse and the gradients as ordinary tensors."""
    found = attend(**tensors, **others)
    results: dict[str, Any] = {"out": found.out, "lse": found.lse.nan_to_num(neginf=-5.0)}
    weighed: list[Any] = []
    for x in results.values():
        w: Any = torch.linspace(-1, 1, x.numel()).view(x.shape).sin()
        w = distribute_tensor(w, x.device_mesh, [Replicate()] * x.device_mesh.ndim) if isinstance(x, DTensor) else w
        weighed.append((x * w).sum())
    sum(weighed[1:], weighed[0]).backward()
    results |= {f"gradient of {name}": x.grad for name, x in leaves.items() if x.requires_grad}
    return {n: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for n, x in results.items()}


def compare(case: Case, world: int) -> float | str:
    """Return how far a call with DTensors is from that of ordinary tensors."""
    mesh = init_device_mesh("cpu", (world,) if case.first is None else (2, world // 2))
    whole = {name: torch.randn(size, requires_grad=True) for name, size in zip("qkv", case.shapes(), strict=True)}
    others = case.options()
    beside = {name: x.requires_grad_() for name, x in others.items() if name in ("bias", "sinks")}
    numbers = {name: x for name, x in others.items() if name not in beside}
    expected = call({**whole}, {**numbers, **beside}, {**whole, **beside})
    parts = {n: distributed(x, mesh, case, getattr(case, n)) for n, x in whole.items()}
    own = {}
    for name, x in beside.items():
        placement = case.placed if case.placed is None or x.shape[0] > 1 else WHOLE
        placements = [placement] if mesh.ndim == 1 or placement is None else [WHOLE, placement]
        own[name] = x if placement is None else distribute_tensor(x.detach(), mesh, placements).requires_grad_()
    if case.placed == "mask":
        numbers = {"mask": masks.Dense(distribute_tensor(numbers["mask"], mesh, [WHOLE]))}
    if isinstance(parts["q"], DTensor) and case.q == Partial():
        return difference({"out": attend(**parts).out.full_tensor()}, {"out": expected["out"]})
    return difference(call(parts, {**numbers, **own}, {**parts, **own}), expected)


@dataclass
class Operator:
    """A call of the operators themselves.

    Attributes:
        placement: of q, k and v.
        mask: encoded.
        expected: the placement of out and lse.
        bias: the sizes of a bias; None = none.
        kv_heads: the heads of k and v.
    """

    placement: Any
    mask: masks.Mask | None
    expected: Any
    bias: tuple[int, ...] | None = None
    kv_heads: int = HEADS


TABLE = masks.Dense(torch.ones(BATCH, HEADS, QUERIES, KEYS).tril(1) > 0)
OPERATORS: dict[str, Operator] = {
    "heads": Operator(IN_HEADS, masks.causal(), IN_HEADS),
    "batch": Operator(ENTRIES, masks.window(3), ENTRIES),
    "replicated": Operator(WHOLE, None, WHOLE),
    "heads, bias": Operator(IN_HEADS, None, IN_HEADS, (1, HEADS, QUERIES, KEYS)),
    "heads, bias of all heads": Operator(IN_HEADS, None, IN_HEADS, (1, 1, QUERIES, KEYS)),
    "batch, bias": Operator(ENTRIES, None, ENTRIES, (BATCH, 1, QUERIES, KEYS)),
    "batch, bias of all entries": Operator(ENTRIES, None, ENTRIES, (1, 1, QUERIES, KEYS)),
    "heads, table": Operator(IN_HEADS, TABLE, IN_HEADS),
    "heads, lengths": Operator(IN_HEADS, masks.KeyLengths(torch.tensor([3, 7, 0, 5])), IN_HEADS),
    "batch, lengths": Operator(ENTRIES, masks.KeyLengths(torch.tensor([3, 7, 0, 5])), WHOLE),
    "batch, offsets": Operator(ENTRIES, masks.Band(None, 0, offset=(0, 1, 2, 2)), WHOLE),
    "one kv head": Operator(IN_HEADS, masks.causal(), WHOLE, kv_heads=1),
    "sequence": Operator(Shard(2), None, WHOLE),
}


def compare_operator(case: Operator, mesh: DeviceMesh) -> float | str:
    """Return how far the operators on DTensors are from those on ordinary tensors, forward and backward."""
    kv = (BATCH, case.kv_heads, KEYS)
    whole = {
        name: torch.randn(size, requires_grad=True)
        for name, size in (("q", (BATCH, HEADS, QUERIES, WIDTH)), ("k", (*kv, WIDTH)), ("v", (*kv, 3)))
    }
    whole["sinks"] = torch.randn(HEADS, requires_grad=True)
    if case.bias is not None:
        whole["bias"] = torch.randn(case.bias, requires_grad=True)
    codes: list[int] = []
    tensors: list[Tensor] = []
    if case.mask is not None:
        case.mask.encode((BATCH, HEADS, QUERIES, KEYS), torch.device("cpu"), codes, tensors)

    def run(x: dict[str, Any], tensors: list[Any]) -> tuple[dict[str, Any], Any]:
        arguments = (x["q"], x["k"], x["v"], x.get("bias"), x["sinks"], codes, tensors, 0.4, 0.0, 0.0, None, "blocked")
        out, lse = torch.ops.headscope.attend_forward(*arguments)
        (out.square().sum() + lse.sin().sum()).backward()
        found: dict[str, Any] = {"out": out, "lse": lse, **{f"gradient of {n}": each.grad for n, each in x.items()}}
        return {n: (y.full_tensor() if isinstance(y, DTensor) else y).detach() for n, y in found.items()}, out

    expected, _ = run(whole, tensors)
    placed = {n: [case.placement if n in "qkv" else WHOLE] for n in whole}
    parts = {n: distribute_tensor(x.detach(), mesh, placed[n]).requires_grad_() for n, x in whole.items()}
    found, out = run(parts, [distribute_tensor(x, mesh, [WHOLE]) for x in tensors])
    if out.placements != (case.expected,):
        return f"out is placed as {out.placements}"
    return difference(found, expected)


def run_all(world: int) -> dict[str, Any]:
    """Return, for each case, how far its results are from those of ordinary tensors, or the error."""
    results: dict[str, Any] = {}
    for name, case in {**CASES, **REFUSED}.items():
        torch.manual_seed(0)
        results[name] = attempt(lambda case=case: compare(case, world))
    mesh = init_device_mesh("cpu", (world,))
    for name, operator in OPERATORS.items():
        torch.manual_seed(0)
        results[f"operator: {name}"] = attempt(lambda operator=operator: compare_operator(operator, mesh))
    return results
