"""``attend(observe=..., differentiable=...)``: entropy, received and segments in a loss, against float64 autograd."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headscope import Observe, Segments, attend, attention, masks, observe
from headscope._attend.interface import accumulate_dtype
from headscope._observe import inputs, native_gradients
from headscope.stats import DifferentiableStats, HeadStats
from support import oracle, oracle_differentiable
from support.attention_fuzz import Case, cases
from support.tolerance import assert_as_accurate

NAMES = ("entropy", "received", "segments")


@dataclass(repr=False)
class Asked:
    """A call, what of it is differentiated, and how it is observed."""

    case: Case
    names: tuple[str, ...]
    rows: Any
    row_stats: bool
    ids: Tensor
    query_ids: Tensor
    size: int
    kind: str
    attends: bool
    block: int
    seed: int

    def __repr__(self) -> str:
        return f"Asked({vars(self)})"


def sizes_of(case: Case) -> tuple[tuple[int, ...], int, int, int]:
    lead = torch.broadcast_shapes(case.q.shape[:-3], case.k.shape[:-3], case.v.shape[:-3])
    return tuple(lead), case.q.shape[-3], case.q.shape[-2], case.k.shape[-2]


@st.composite
def questions(draw: st.DrawFn) -> Asked:
    case = draw(cases())
    lead, heads, queries, keys = sizes_of(case)
    batch, seed = math.prod(lead), draw(st.integers(0, 2**31 - 1))
    random = torch.Generator().manual_seed(seed)
    rows: Any = draw(st.sampled_from((None, None, "sample", "mask")))
    if rows == "sample":
        rows = draw(st.integers(1, queries + 2))
    elif rows == "mask":
        shape = draw(st.sampled_from(((queries,), (heads, queries), (*lead, heads, queries), (*lead, 1, queries))))
        rows = torch.rand(shape, generator=random) < 0.6
    size = draw(st.sampled_from((1, 3, 17)))
    ids = torch.randint(-1, size, draw(st.sampled_from(((keys,), (batch, keys)))), generator=random)
    query_ids = torch.randint(-1, size, draw(st.sampled_from(((queries,), (batch, queries)))), generator=random)
    return Asked(
        case,
        tuple(sorted(draw(st.sets(st.sampled_from(NAMES), min_size=1)))),
        rows,
        draw(st.booleans()),
        ids,
        query_ids,
        size,
        draw(st.sampled_from(("self", "cross"))),
        draw(st.booleans()),
        draw(st.sampled_from((1 << 19, 1, 10, 64))),
        seed,
    )


@contextmanager
def portable() -> Iterator[None]:
    """The portable form, also where the native kernels could."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_gradients, "native_scene", lambda *_: None)
        yield


@contextmanager
def blocks_of(logits: int) -> Iterator[None]:
    usual, inputs.BLOCK = inputs.BLOCK, logits
    try:
        yield
    finally:
        inputs.BLOCK = usual


def leaves_of(case: Case) -> dict[str, Tensor]:
    """The tensors of a call, each a leaf that requires a gradient; a leaf has the values, not always the strides."""
    return {name: x.detach().requires_grad_() for name, x in case.tensors().items()}


def losses(tensors: dict[str, Tensor], seed: int) -> Tensor:
    """A sum of all numbers with random factors."""
    random = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for x in tensors.values():
        total = total + (x.double() * torch.randn(x.shape, generator=random, dtype=torch.float64)).sum()
    return total


def named(stats: DifferentiableStats, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: getattr(stats, name) for name in names}


def by_definition(asked: Asked, call: dict[str, Tensor], counted: Tensor, *, plain: bool) -> dict[str, Tensor]:
    """The same statistics of dense weights, with a graph; rows that do not count hold no NaN."""
    case = asked.case
    lead, heads, queries, keys = sizes_of(case)
    clean = {name: x.nan_to_num(0.0) if name in ("q", "k", "v") else x for name, x in call.items()}
    told: dict[str, Any] = {**clean, **case.numbers, "seen": case.seen}
    if plain:
        p = oracle.plain(**told).weights.reshape(math.prod(lead), heads, queries, keys)
    else:
        p = oracle_differentiable.weights(told).reshape(math.prod(lead), heads, queries, keys)
    counted = counted.reshape(p.shape[:-1])
    of_queries, of_keys = asked.query_ids.expand(len(p), -1), asked.ids.expand(len(p), -1)
    values = {
        "entropy": lambda: oracle_differentiable.entropy(p, counted),
        "received": lambda: oracle_differentiable.received(p, counted),
        "segments": lambda: oracle_differentiable.segments(p, counted, of_queries, of_keys, asked.size),
    }
    return {name: values[name]().reshape(*lead, *values[name]().shape[1:]) for name in asked.names}


def check(asked: Asked) -> None:
    case = asked.case
    segments = Segments([f"s{n}" for n in range(asked.size)], asked.ids, asked.query_ids)
    what = Observe(rows=asked.rows, row_stats=asked.row_stats, segments=segments)
    leaves = leaves_of(case)
    options: dict[str, Any] = {**leaves, **case.numbers, "mask": case.mask, "differentiable": asked.names}
    with blocks_of(asked.block):
        if asked.attends and asked.kind == "self":
            stats = attend(**options, observe=what).stats
            assert stats is not None
        else:
            stats = observe(**options, kind=asked.kind, what=what)
    got = stats.differentiable
    plainly: dict[str, Any] = {**case.tensors(), **case.numbers, "mask": case.mask}
    (kept,) = observe(**plainly, kind=asked.kind, what=Observe(rows=asked.rows, keep_rows=True)).kept
    lead, heads, queries, _ = sizes_of(case)
    counted = torch.zeros(math.prod(lead), heads, queries, dtype=torch.bool)
    counted[:, :, kept.queries] = kept.counted
    assert torch.equal(got.counted, counted.reshape(got.counted.shape))
    exact_leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    wide = accumulate_dtype(case.q.dtype)
    plain_leaves = {name: x.detach().to(wide).requires_grad_() for name, x in leaves.items()}
    exact = by_definition(asked, exact_leaves, counted, plain=False)
    plain = by_definition(asked, plain_leaves, counted, plain=True)
    for name, values in named(got, asked.names).items():
        assert values.dtype == wide
        assert_as_accurate(values, exact[name], plain[name], magnitude=1.0, message=name)
    others = [losses(x, asked.seed) for x in (named(got, asked.names), exact, plain)]
    sets = [
        torch.autograd.grad(loss, list(of.values()), allow_unused=True, materialize_grads=True) if loss.requires_grad
        else tuple(torch.zeros_like(x) for x in of.values())
        for loss, of in zip(others, (leaves, exact_leaves, plain_leaves), strict=True)
    ]  # fmt: skip
    size = max([1.0, *(float(x.detach().double().nan_to_num(0.0).abs().max()) for x in (case.q, case.k) if x.numel())])
    for (name, leaf), mine, right, theirs in zip(leaves.items(), *sets, strict=True):
        assert mine.dtype == leaf.dtype
        assert_as_accurate(mine, right, theirs, magnitude=size, dtype=leaf.dtype, message=f"gradient of {name}")


@settings(max_examples=300, deadline=None)
@given(questions())
def test_values_and_gradients_are_those_of_float64(asked: Asked) -> None:
    check(asked)


@settings(max_examples=200, deadline=None)
@given(questions())
def test_the_portable_form_gives_those_of_float64(asked: Asked) -> None:
    with portable():
        check(asked)


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@given(questions(), st.booleans())
def test_values_and_gradients_are_those_of_float64_in_many_calls(asked: Asked, native: bool) -> None:
    event("native where possible" if native else "portable")
    if native:
        return check(asked)
    with portable():
        check(asked)
