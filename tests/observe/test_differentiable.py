"""``attend(observe=..., differentiable=...)``: entropy, received and segments in a loss, against float64 autograd."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headscope import Observe, Segments, attend, attention, masks, observe, watch
from headscope._attend.interface import accumulate_dtype
from headscope._observe import inputs, native_gradients
from headscope.stats import DifferentiableStats, HeadStats
from support import oracle, oracle_differentiable
from support.attention_fuzz import Case, cases, sizes_of
from support.native_targets import run
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


def logit_size(case: Case) -> float:
    """A bound of the logits without their bias."""
    norms = [x.detach().double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1) for x in (case.q, case.k)]
    scale = case.numbers.get("scale")
    return math.prod(float(x.max()) if x.numel() else 0.0 for x in norms) * (
        case.q.shape[-1] ** -0.5 if scale is None else abs(scale)
    )


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
    # in float64 the oracle rounds its logits, too, and in the same way as plain torch
    magnitude = 1.0 if wide == torch.float32 else max(1.0, logit_size(case))
    for name, values in named(got, asked.names).items():
        assert values.dtype == wide
        assert_as_accurate(values, exact[name], plain[name], magnitude=magnitude, message=name)
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


@settings(max_examples=45, deadline=None)
@given(questions())
def test_values_and_gradients_are_those_of_float64(asked: Asked) -> None:
    check(asked)


@settings(max_examples=30, deadline=None)
@given(questions())
def test_the_portable_form_gives_those_of_float64(asked: Asked) -> None:
    with portable():
        check(asked)


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@given(questions(), st.booleans())
def test_values_and_gradients_are_those_of_float64_in_many_calls(asked: Asked, native: bool) -> None:
    event("native where possible" if native else "portable")
    with blocks_of(1 << 19) if native else portable():
        check(asked)


# ---------------------------------------------------------------- several blocks of keys


def draw_call(
    queries: int = 401, keys: int = 401, heads: int = 4, kv_heads: int = 2, batch: int = 2, width: int = 32,
    dtype: torch.dtype = torch.float32, loud: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    random = torch.Generator().manual_seed(queries + keys)
    sizes = ((heads, queries, loud), (kv_heads, keys, 1.0), (kv_heads, keys, 1.0))
    return tuple(
        (size * torch.randn(batch, *shape, width, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()
        for *shape, size in sizes
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(53), "sinks": True},
    "lengths": {"mask": masks.KeyLengths(torch.tensor([307, 0])) & masks.causal()},
    "documents": {"mask": masks.Documents((torch.arange(401) // 150)[None]), "softcap": 3.0},
    "cap": {"mask": masks.causal(), "softcap": 2.0, "bias": (1, 4, 401, 401), "sinks": True},
    "key bias": {"bias": (2, 1, 1, 401), "scale": 0.3},
    "loud": {"mask": masks.causal(), "loud": 23.0},
    "loud sinks": {"loud": 23.0, "sinks": True, "bias": (401, 401)},
    "many heads": {"heads": 6, "kv_heads": 1, "mask": masks.causal()},
    "wide": {"width": 96, "mask": masks.causal()},
    "double": {"dtype": torch.float64, "sinks": True, "mask": masks.causal()},
}


BOTH_FORMS = ("plain", "cap", "loud sinks", "double")  # the portable form has the others in the long runs


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if form == "native" or name in BOTH_FORMS else pytest.mark.long)
        for name in OPTIONS
        for form in ("native", "portable")
    ],
)
def test_long_rows_have_the_gradients_of_float64(name: str, form: str) -> None:
    options = dict(OPTIONS[name])
    size = {key: options.pop(key) for key in ("loud", "heads", "kv_heads", "width", "dtype") if key in options}
    q, k, v = draw_call(**size)
    batch, heads, queries, keys = 2, q.shape[1], 401, 401
    random = torch.Generator().manual_seed(7)
    call: dict[str, Any] = {"q": q, "k": k, "v": v}
    for beside, shape in (("sinks", (heads,)), ("bias", options.pop("bias", None))):
        if options.pop(beside, False) is True or (beside == "bias" and shape is not None):
            call[beside] = torch.randn(shape, generator=random).to(q.dtype).requires_grad_()
    mask: masks.Mask | None = options.pop("mask", None)
    seen = None
    if mask is not None:
        whole = (slice(0, batch), slice(0, heads), slice(0, queries), slice(0, keys))
        seen = mask.plan(batch, heads, queries, keys).tile(*whole).expand(batch, heads, queries, keys)
    ids = torch.randint(-1, 5, (batch, keys), generator=random)
    what = Observe(segments=Segments(list("abcde"), ids))
    with portable() if form == "portable" else blocks_of(1 << 19):
        stats = attend(**call, mask=mask, **options, observe=what, differentiable=NAMES).stats
        assert stats is not None
        got = named(stats.differentiable, NAMES)
        leaves = [x for name, x in call.items() if name != "v"]
        gradients = torch.autograd.grad(losses(got, 3), leaves)
    counted = stats.differentiable.counted

    def dense(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        told: dict[str, Any] = {name: x.detach().to(dtype).requires_grad_() for name, x in call.items()}
        p = oracle.plain(**told, seen=seen, **options).weights
        values = {
            "entropy": oracle_differentiable.entropy(p, counted),
            "received": oracle_differentiable.received(p, counted),
            "segments": oracle_differentiable.segments(p, counted, ids, ids, 5),
        }
        return values, torch.autograd.grad(losses(values, 3), [x for name, x in told.items() if name != "v"])

    exact, right = dense(torch.float64)
    plain, theirs = dense(q.dtype)
    for each in NAMES:
        assert_as_accurate(got[each], exact[each], plain[each], message=each)
    for x, mine, wanted, their in zip(leaves, gradients, right, theirs, strict=True):
        assert x.shape == mine.shape
        assert_as_accurate(mine, wanted, their, magnitude=1.0, message=f"{name}: gradient of {list(x.shape)}")


@pytest.mark.parametrize("form", ["native", "portable"])
def test_gradcheck(form: str) -> None:
    q, k, v = draw_call(5, 7, 2, 1, 2, 3, torch.float64)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 2, 5, 7, dtype=torch.float64, requires_grad=True)
    what = Observe(segments=Segments(["a", "b"], [0, 1, 1, -1, 0, 1, 0]))

    def statistics(*inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, bias, sinks = inputs
        options: dict[str, Any] = {"bias": bias, "sinks": sinks, "softcap": 2.0, "mask": masks.causal()}
        return tuple(named(observe(q, k, v, **options, what=what, differentiable=NAMES).differentiable, NAMES).values())

    with portable() if form == "portable" else blocks_of(1 << 19):
        assert torch.autograd.gradcheck(statistics, (q, k, bias, sinks))


# ---------------------------------------------------------------- what does not change


WHATS = (
    Observe(),
    Observe(map=4, edges=3, top=2, keep_rows=True, segments=Segments(["a"], [0] * 13), received_max=True, weights=[1]),
    Observe(row_stats=False, received=False, map=4, top=2),
    Observe(rows=5, top=1),
)


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("requires", [True, False])
def test_outputs_and_statistics_are_the_same_to_the_bit(what: Observe, requires: bool) -> None:
    q, k, v = (x.detach().requires_grad_(requires) for x in draw_call(13, 13))
    for mask in (None, masks.causal()):
        plain = attend(q, k, v, mask=mask, observe=what)
        for _ in range(2):  # the second time similar calls take a short way
            result = attend(q, k, v, mask=mask, observe=what, differentiable=("entropy", "received"))
            assert torch.equal(result.out, plain.out)
            assert torch.equal(result.lse, plain.lse)
            assert result.stats is not None
            assert plain.stats is not None
            assert result.stats.differentiable.entropy.requires_grad is requires
            assert_equal(result.stats, plain.stats)
            if requires:
                one, other = (torch.autograd.grad(x.out.sum(), (q, k, v), retain_graph=True) for x in (plain, result))
                assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def assert_equal(one: HeadStats, other: HeadStats) -> None:
    assert one.names == other.names
    assert [*one.flat()] == [*other.flat()]
    parts = [stats.parts["0"] for stats in (one, other)]
    for name in ("rows", "broken", "received", "eligible", "received_max"):
        x, y = (getattr(part, name) for part in parts)
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x.nan_to_num(-1.0), y.nan_to_num(-1.0)), name
    for quantity in one.names:
        assert torch.equal(one[quantity].mean.nan_to_num(-1.0), other[quantity].mean.nan_to_num(-1.0)), quantity
    kept, wanted = (part.kept for part in parts)
    assert [[*x.values] for x in kept] == [[*x.values] for x in wanted]
    for x, y in zip(kept, wanted, strict=True):
        assert all(torch.equal(x.values[name].nan_to_num(-1), y.values[name].nan_to_num(-1)) for name in x.values)


def test_values_are_those_of_the_statistics() -> None:
    q, k, v = draw_call(53, 53)
    ids = torch.arange(53) % 3
    what = Observe(segments=Segments(["a", "b", "c"], ids), keep_rows=True)
    stats = attend(q, k, v, mask=masks.causal(), observe=what, differentiable=NAMES).stats
    assert stats is not None
    got = stats.differentiable
    assert torch.equal(got.entropy, stats.kept[0].values["entropy"])
    torch.testing.assert_close(got.received.double().sum(0), stats.received, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.segment_rows.sum(0), stats.segments.count)
    total = (got.segments * got.segment_rows[..., None]).double().sum(0)
    torch.testing.assert_close(total, stats.segments.sum, rtol=1e-5, atol=1e-6)


def test_threads_do_not_change_a_bit() -> None:
    q, k, v = draw_call(211, 211)
    what = Observe(segments=Segments(["a", "b"], torch.arange(211) % 2))
    results: list[tuple[Tensor, ...]] = []
    usual = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = observe(q, k, v, mask=masks.causal(), what=what, differentiable=NAMES).differentiable
            values = named(got, NAMES)
            results.append((*values.values(), *torch.autograd.grad(losses(values, 1), (q, k))))
    finally:
        torch.set_num_threads(usual)
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


# ---------------------------------------------------------------- rows that do not count


def test_rows_that_do_not_count_have_neither_value_nor_gradient() -> None:
    q, k, v = draw_call(11, 11, 2, 2, 1)
    hidden = torch.ones(11, 11, dtype=torch.bool).tril()
    hidden[3] = False  # an empty row
    rows = torch.ones(11, dtype=torch.bool)
    rows[5] = False
    with torch.no_grad():
        q[0, 0, 7] = torch.nan
    what = Observe(rows=rows, segments=Segments(["a", "none"], [0] * 11))
    for form in (portable(), blocks_of(1 << 19)):
        with form:
            got = attend(q, k, v, mask=hidden, observe=what, differentiable=NAMES).stats
            assert got is not None
            seen = got.differentiable
            out = [3, 5]
            assert not seen.counted[..., out].any()
            assert not seen.counted[0, 0, 7]
            assert seen.counted[0, 1, 7]
            assert torch.equal(seen.entropy[~seen.counted], torch.zeros(5))
            assert torch.equal(seen.segments[:, :, 1], torch.zeros(1, 2, 2))  # a segment without rows: not NaN
            assert seen.segment_rows[..., 1].tolist() == [[0, 0]]
            dq, dk = torch.autograd.grad(seen.entropy.sum() + seen.received[..., 0].sum() + seen.segments.sum(), (q, k))
            assert dq.isfinite().all()
            assert dk.isfinite().all()
            assert not dq[..., out, :].any()
            assert not dq[0, 0, 7].any()


def test_calls_without_rows_or_keys() -> None:
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        q, k, v = draw_call(queries, keys, 2, 2, 2, 4)
        what = Observe(segments=Segments(["a"], [0] * keys, [0] * queries))
        got = named(attend(q, k, v, observe=what, differentiable=NAMES).stats.differentiable, NAMES)  # pyright: ignore[reportOptionalMemberAccess]
        gradients = torch.autograd.grad(sum(x.sum() for x in got.values()), (q, k))  # pyright: ignore[reportArgumentType]
        assert [x.shape for x in gradients] == [q.shape, k.shape]
        assert not any(x.any() for x in (*got.values(), *gradients))


# ---------------------------------------------------------------- autograd, compilers, modes


def test_a_second_derivative_is_an_error() -> None:
    q, k, v = draw_call(11, 11)
    entropy = observe(q, k, v, differentiable=("entropy",)).differentiable.entropy
    (dq,) = torch.autograd.grad(entropy.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable: these statistics do not support second derivatives"):
        dq.square().sum().backward()
    entropy = observe(q, k, v, differentiable=("entropy",)).differentiable.entropy
    (dq,) = torch.autograd.grad(entropy.sum(), q, create_graph=True)
    assert dq.detach().any()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, within torch
def test_other_kinds_of_gradients_are_an_error() -> None:
    q, k, v = (x.detach() for x in draw_call(11, 11))

    def loss(q: Tensor) -> Tensor:
        return observe(q, k, v, differentiable=("entropy",)).differentiable.entropy.sum()

    text = "differentiable: these statistics do not support torch.func, forward-mode or batched gradients"
    with pytest.raises(RuntimeError, match=text):
        torch.func.grad(loss)(q)
    with pytest.raises(RuntimeError, match=text):
        torch.func.vmap(loss)(q[None])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=text):
        loss(torch.autograd.forward_ad.make_dual(q, q))
    entropy = observe(q.requires_grad_(), k, v, differentiable=("entropy",)).differentiable.entropy
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(entropy, q, torch.ones(3, *entropy.shape), is_grads_batched=True)


def test_without_a_gradient_there_is_no_graph() -> None:
    q, k, v = draw_call(11, 11)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            got = observe(q, k, v, differentiable=("entropy", "received")).differentiable
        assert not got.entropy.requires_grad
        assert not got.received.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_have_float32_statistics(dtype: torch.dtype) -> None:
    q, k, v = draw_call(31, 31, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(q, k, v, mask=masks.causal(), observe=Observe(), differentiable=("entropy",)).stats
        assert got is not None
        entropy = got.differentiable.entropy
        assert entropy.dtype == torch.float32
        (dq,) = torch.autograd.grad(entropy.sum(), q)
    assert dq.dtype == dtype
    p = oracle.plain(*(x.detach().float() for x in (q, k, v)), seen=torch.ones(31, 31).tril().bool()).weights
    torch.testing.assert_close(entropy, oracle_differentiable.entropy(p, got.differentiable.counted))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, at a graph break
def test_a_compiled_function_has_the_same_gradients() -> None:
    q, k, v = draw_call(17, 17)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = attend(q, k, v, mask=masks.causal(), observe=Observe(), differentiable=("entropy", "received"))
        assert attended.stats is not None
        stats = attended.stats.differentiable
        return attended.out.sin().sum() + stats.entropy.square().sum() + stats.received.square().sum()

    plain = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(q, k, v), (q, k, v))
    for x, y in zip(plain, compiled, strict=True):
        torch.testing.assert_close(x, y)


class Loss(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return observe(q, k, v, differentiable=("entropy",)).differentiable.entropy.sum()


def test_an_export_is_an_error() -> None:
    with pytest.raises(ValueError, match="observe: its tensors have no values"):
        torch.export.export(Loss(), draw_call(5, 5), strict=False)


def test_a_watched_call_has_them_too() -> None:
    q, k, v = draw_call(11, 11)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attended = attend(q, k, v, observe=Observe(), differentiable=("entropy",))
            assert attended.stats is not None
            return attended.stats.differentiable.entropy.sum()

    layer = Layer()
    plain = torch.autograd.grad(layer(q, k, v), (q, k))
    with watch(layer) as recording:
        watched = torch.autograd.grad(layer(q, k, v), (q, k))
    assert recording.heads == 4
    assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))


def test_checkpointing_gives_the_same_gradients() -> None:
    q, k, v = draw_call(29, 29)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = attend(q, k, v, mask=masks.causal(), observe=Observe(), differentiable=("entropy", "received"))
        assert attended.stats is not None
        seen = attended.stats.differentiable
        return attended.out.square().sum() + seen.entropy.square().sum() + seen.received.square().sum()

    plain = torch.autograd.grad(loss(q, k, v), (q, k, v))
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, q, k, v, use_reentrant=False), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_stored_penalty_has_a_graph_unless_checkpointing_is_reentrant(reentrant: bool) -> None:
    """As in docs/guides/attention_in_a_loss.md: the statistics are no output of the function that is checkpointed."""
    q, k, v = draw_call(11, 11)
    stored: list[Tensor] = []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = attend(q, k, v, observe=Observe(), differentiable=("entropy",))
        assert attended.stats is not None
        stored.append(attended.stats.differentiable.entropy)
        return attended.out

    out = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=reentrant)
    penalty = stored[0].square().sum()
    assert out.requires_grad
    assert penalty.requires_grad is not reentrant
    if not reentrant:
        layer(q, k, v)
        expected = torch.autograd.grad(stored[1].square().sum(), (q, k))
        assert all(map(torch.equal, torch.autograd.grad(penalty, (q, k)), expected))


def test_a_mask_that_changes_before_the_backward_pass_is_an_error() -> None:
    q, k, v = draw_call(11, 11)
    hidden = torch.ones(11, 11, dtype=torch.bool)
    entropy = observe(q, k, v, mask=hidden, differentiable=("entropy",)).differentiable.entropy
    hidden[0, 1] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entropy.sum().backward()


def test_inputs_that_broadcast_get_gradients_of_their_own_sizes() -> None:
    q, k, _ = draw_call(7, 11, 4, 1, 1, 5)
    q = q.detach()[0].requires_grad_()  # [H, Q, D]
    k = k.detach().expand(3, 1, 1, 11, 5).clone().requires_grad_()  # [3, 1, 1, K, D]
    got = observe(q, k, kind="cross", differentiable=("entropy", "received")).differentiable
    assert got.entropy.shape == (3, 1, 4, 7)
    assert got.received.shape == (3, 1, 4, 11)
    (got.entropy.sum() + got.received.square().sum()).backward()
    assert q.grad is not None
    assert k.grad is not None
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


LINEAR = """
import resource, sys, torch
from headscope import Observe, Segments, attend, masks
from headscope._observe import native_gradients, native_observer
if sys.argv[-1] == "portable":
    native_observer.refuses = lambda *_: ["this test wants the portable form"]
    native_gradients.native_scene = lambda *_: None
def step(length):
    q = torch.randn(1, 1, length, 4, requires_grad=True)
    what = Observe(segments=Segments(["a", "b"], torch.arange(length) % 2))
    names = ("entropy", "received", "segments")
    stats = attend(q, q, q, mask=masks.causal(), observe=what, differentiable=names).stats.differentiable
    loss = stats.entropy.sum() + stats.received.square().sum() + stats.segments.square().sum()
    assert torch.autograd.grad(loss, q)[0].any()
step(101)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(6007)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in other units elsewhere")
@pytest.mark.parametrize("form", ["native", "portable"])
def test_memory_is_linear_in_the_length(form: str) -> None:
    done = run(LINEAR, form)
    assert int(done.stdout) < 60, done.stdout + done.stderr  # MiB; one matrix of this length has 137


def test_a_sample_of_a_very_long_sequence() -> None:
    length = 1 << 15
    q = torch.randn(1, 1, length, 4, requires_grad=True)
    what = Observe(rows=97, segments=Segments(["a", "b"], torch.arange(length) % 2))
    stats = attend(q, q, q, mask=masks.causal(), observe=what, differentiable=NAMES).stats
    assert stats is not None
    assert int(stats.differentiable.counted.sum()) == 97
    (dq,) = torch.autograd.grad(losses(named(stats.differentiable, NAMES), 1), q)
    assert dq.isfinite().all()
    assert dq.any()


# ---------------------------------------------------------------- errors, files


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"differentiable": "entropy"}, TypeError, "differentiable: got 'entropy', expected a tuple of names"),
        ({"differentiable": 3}, TypeError, "differentiable: got int, expected a tuple of names"),
        ({"differentiable": ("mass",)}, ValueError, "differentiable: got 'mass', expected names from 'entropy', 're"),
        ({"differentiable": ("entropy",), "observe": None}, ValueError, "differentiable: observe= is missing"),
        ({"differentiable": ("segments",)}, ValueError, r"segments are not observed; expected Observe\(segments="),
    ],
)
def test_names_that_do_not_fit(options: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, v = draw_call(5, 5)
    with pytest.raises(error, match=text):
        attend(q, k, v, **{"observe": Observe(), **options})


def test_a_specified_lse_is_an_error() -> None:
    q, k, v = draw_call(5, 5)
    lse = attention(q, k, v).new_zeros(2, 4, 5)
    with pytest.raises(ValueError, match=r"lse: expected None together with differentiable=.*\[2, 4, 5\]"):
        observe(q, k, v, lse=lse, differentiable=("entropy",))


def test_what_was_not_requested_is_an_error() -> None:
    q, k, v = draw_call(5, 5)
    with pytest.raises(ValueError, match="differentiable: was not requested; attend with observe="):
        _ = observe(q, k, v).differentiable
    got = observe(q, k, v, differentiable=["entropy"]).differentiable
    for name in ("received", "segments", "segment_rows"):
        with pytest.raises(ValueError, match="has no gradient here; expected its name in differentiable="):
            getattr(got, name)


def test_files_copies_and_merged_statistics_have_no_graph(tmp_path: Any) -> None:
    q, k, v = draw_call(5, 5)
    stats = observe(q, k, v, differentiable=("entropy",))
    others = (
        HeadStats.load(stats.save(tmp_path / "a.safetensors")),
        stats.merge(stats),
        stats[0],
        copy.deepcopy(stats),
        pickle.loads(pickle.dumps(stats)),
    )
    for other in others:
        assert other.names == stats.names
        with pytest.raises(ValueError, match="differentiable: was not requested"):
            _ = other.differentiable
