"""attention and attend: repeated, under autocast, on meta, compiled; and the weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import headscope
from headscope import HeadStats, Observe, attend, comparing, decisions, functional, observe
from headscope._attend import prepare
from headscope._observe.native_observer import borders_of
from headscope._observe.placement import _frames
from headscope._observe.steps import _prepared_observations
from headscope.masks import Band, KeyLengths, Mask, Prefix, _base, causal, window
from support import oracle
from support.attention_cases import FUSED, INF, NATIVE, OPTIONS, SIZES, D, H, K, Q, gradients, pairs, run_by, tensors
from support.tolerance import assert_as_accurate

LONG = pytest.mark.long  # on combinations of what other cases trace or compile

REPEATED = ["nothing", "mask: causal & documents | dense", "everything", "bias that hides", "mask: dense"]


@pytest.mark.parametrize(("option", "backend"), pairs(REPEATED, FUSED), indirect=["backend"])
def test_a_second_run_is_bitwise_equal_and_leaves_its_inputs_alone(option: str, backend: str) -> None:
    asked = OPTIONS[option](torch.float32)
    before = {name: x.clone() for name, x in asked.tensors.items()}
    runs = []
    for _ in range(2):
        leaves = {name: x.detach().requires_grad_(name != "bias") for name, x in asked.tensors.items()}
        results = run_by(backend, leaves, asked.said)
        runs.append({**results, **gradients(results, {name: x for name, x in leaves.items() if x.requires_grad})})
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    torch.testing.assert_close(asked.tensors, before, rtol=0, atol=0)


def test_what_was_called_before_does_not_matter() -> None:
    """Nothing kept from one call, with other grad modes, options or masks, changes another."""
    given, calls = (
        tensors(torch.float32),
        [{}, {"mask": causal()}, {"mask": window(3)}, {"scale": 0.1}, {"softcap": 2.0}],
    )
    fresh = []
    for said in calls:
        prepare.prepared_calls.clear()
        _base.plan_by_value.cache_clear()
        fresh.append(headscope.attention(**given, **said))
    prepare.prepared_calls.clear()
    _base.plan_by_value.cache_clear()
    with torch.inference_mode():
        kept = [headscope.attention(**given, **said) for said in calls]
    for said, wanted, got in zip(calls, fresh, kept, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        again = headscope.attention(**leaves, **said)
        torch.testing.assert_close(again, wanted, rtol=0, atol=0)
        seen = said["mask"].dense(*SIZES) if "mask" in said else None
        exact = oracle.attention(**leaves, **{name: x for name, x in said.items() if name != "mask"}, seen=seen).out
        found, exact_found = gradients({"out": again}, leaves), gradients({"out": exact}, leaves)
        torch.testing.assert_close(found, exact_found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["q", "v", "bias", "sinks"])
@pytest.mark.parametrize("run", [headscope.attention, headscope.attend])
def test_gradients_flow_whether_or_not_the_same_call_ran_without_them(run: Any, name: str) -> None:
    """The same tensors, so that nothing but the grad mode differs."""
    prepare.prepared_calls.clear()
    given = {**tensors(torch.float32), "bias": torch.zeros(Q, K), "sinks": torch.zeros(H)}
    given = given if name in ("bias", "sinks") else {each: given[each] for each in ("q", "k", "v")}

    def out_of_call() -> Tensor:
        result = run(**given)
        return result if isinstance(result, Tensor) else result[0]

    assert not out_of_call().requires_grad
    given[name].requires_grad_()
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with mode():
            out = out_of_call()
        assert out.requires_grad == (mode is torch.enable_grad), mode
        if out.requires_grad:
            (gradient,) = torch.autograd.grad(out.sum() + (out * out).sum(), given[name])
            assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_a_tensor_that_learns_has_its_gradient_after_one_that_does_not(name: str) -> None:
    given, sizes = tensors(torch.float32), {"bias": (H, 1, K), "sinks": (H,)}
    prepare.prepared_calls.clear()
    headscope.attention(**given, **{name: torch.zeros(sizes[name])})
    leaf = torch.zeros(sizes[name], requires_grad=True)
    (found,) = torch.autograd.grad(headscope.attention(**given, **{name: leaf}).square().sum(), leaf)
    exact = oracle.attention(**given, **{name: leaf}).out
    torch.testing.assert_close(found, torch.autograd.grad(exact.square().sum(), leaf)[0], rtol=1e-4, atol=1e-5)


def test_the_table_of_prepared_calls_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls(most=5))
    for keys in range(1, 17):
        headscope.attention(torch.zeros(1, 1, D), torch.zeros(1, keys, D), torch.zeros(1, keys, D))
        assert len(prepare.prepared_calls) <= 5


def test_the_table_of_prepared_observations_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    _prepared_observations.clear()
    monkeypatch.setattr(_prepared_observations, "most", 5)
    sizes: list[int] = []
    for length in range(1, 17):
        q = torch.randn(1, 1, length, 8)
        attend(q, q, q, observe=Observe())
        sizes.append(len(_prepared_observations))
    assert max(sizes) <= 5


def test_a_call_that_becomes_the_latest_during_a_comparison_replaces_no_other() -> None:
    """As another thread may; here the comparison of two masks makes the other call."""

    @dataclass(frozen=True, eq=False)
    class Comparing(Band):
        def __eq__(self, other: object) -> bool:
            headscope.attention(*(torch.zeros(1, 1, 2, 1) for _ in range(3)))
            return isinstance(other, Comparing)

        def __hash__(self) -> int:
            return 0

    inputs = tensors(torch.float32)
    expected = headscope.attention(**inputs, mask=causal())
    for _ in range(3):
        out = headscope.attention(**inputs, mask=Comparing(None, 0))
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


# ---------------------------------------------------------------- modes of torch


AUTOCAST = {"nothing": {}, "window": {"mask": window(3)}, "softcap": {"softcap": 2.0}}


@pytest.mark.parametrize(("option", "backend"), pairs(AUTOCAST, "nothing"), indirect=["backend"])
def test_autocast_changes_nothing(option: str, backend: str) -> None:
    """Logits and weights stay in float32, and out in q's dtype, forward and backward."""
    said = AUTOCAST[option]
    leaves = {name: x.requires_grad_() for name, x in tensors(torch.float32).items()}
    wanted = run_by(backend, leaves, said)
    wanted_gradients = gradients(wanted, leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = run_by(backend, leaves, said)
        weights = functional.weights(leaves["q"], leaves["k"], **said)
        torch.testing.assert_close(results, wanted, rtol=0, atol=0)
        if backend != "reference":  # its backward pass is made of torch's own, which autocast changes
            torch.testing.assert_close(gradients(results, leaves), wanted_gradients, rtol=0, atol=0)
            results = run_by(backend, leaves, said)
    found = gradients(results, leaves)
    torch.testing.assert_close(found, wanted_gradients, rtol=0, atol=0)
    torch.testing.assert_close(weights, functional.weights(leaves["q"], leaves["k"], **said), rtol=0, atol=0)


@pytest.mark.parametrize("said", [{}, {"mask": window(3)}, {"mask": Prefix(3)}, {"dropout": 0.2}], ids=str)
def test_the_default_device_does_not_matter(said: dict[str, Any]) -> None:
    given = tensors(torch.float32)
    given["q"][0, 0, 0, 0] = torch.nan
    with torch.device("meta"):
        out = headscope.attention(**given, **said)
    assert out.device.type == "cpu"


def forget() -> None:
    """As in a new process."""
    for kept in (prepare.prepared_calls, _frames, _prepared_observations):
        kept.clear()
    for made in (borders_of, _base.plan_by_value):
        made.cache_clear()


def test_the_default_device_does_not_matter_to_observe() -> None:
    q = torch.randn(2, 3, 11, 5)
    what = Observe(rows=7, top=2, keep_rows=True, edges=3, map=4, windows=(2,))
    asked = [lambda: observe(q, q), lambda: observe(q, q, what=what), lambda: attend(q, q, q, observe=Observe()).stats]
    wanted = [run().flat() for run in asked]
    forget()
    with torch.device("meta"):
        found = [run() for run in asked]
    assert [stats.flat() for stats in found] == wanted
    assert [run().flat() for run in asked] == wanted


READ: dict[str, Callable[[HeadStats], Any]] = {
    "columns": lambda stats: stats["entropy"].mean.tolist(),
    "merged": lambda stats: stats.merge(stats).flat(),
    "duplicates": lambda stats: decisions.near_duplicates(stats),
    "patterns": lambda stats: decisions.patterns(stats),
    "streaming": lambda stats: decisions.streaming_heads(stats),
    "compared": lambda stats: comparing.compare(stats, stats).to_dict(),
    "tile": lambda stats: stats.tile(3, 9, 0, 5).tolist(),
}


@pytest.mark.parametrize("read", READ)
def test_the_default_device_does_not_matter_to_who_reads(read: str) -> None:
    q = torch.randn(2, 3, 11, 5)
    stats = observe(q, q, what=Observe(keep_rows=True, keep_qk=True, map=4, windows=(2,)))
    wanted = repr(READ[read](stats))
    with torch.device("meta"):
        assert repr(READ[read](stats)) == wanted


def faked(q: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(q)


def within_a_fake_mode(q: Tensor) -> Any:
    with FakeTensorMode():
        return observe(q, q)


def faked_in_a_mode(q: Tensor) -> Any:
    with FakeTensorMode():
        fake = torch.randn(q.shape)
        return observe(fake, fake)


WITHOUT_VALUES = {
    "meta": lambda q: observe(q.to("meta"), q.to("meta")),
    "fake": lambda q: observe(faked(q), faked(q)),
    "fake mode": faked_in_a_mode,
    "fake mode, real tensors": within_a_fake_mode,
    "make_fx": make_fx(lambda q: q + observe(q, q)["entropy"].mean.sum()),
    "attend": lambda q: attend(q.to("meta"), q.to("meta"), q.to("meta"), observe=Observe()),
}


@pytest.mark.parametrize("under", WITHOUT_VALUES)
def test_what_has_no_values_is_not_observed_and_leaves_nothing_behind(under: str) -> None:
    q = torch.randn(2, 4, 9, 8)
    wanted = observe(q, q).flat()
    forget()
    with pytest.raises(
        ValueError,
        match="observe: its tensors have no values",
    ):
        WITHOUT_VALUES[under](q)
    assert observe(q, q).flat() == wanted


def within_a_level(run: Any, q: Tensor) -> Any:
    with forward_ad.dual_level():
        return run(q)


def counted(run: Any, q: Tensor) -> Any:
    with FlopCounterMode(display=False):
        return run(q)


def transformed(run: Any, q: Tensor) -> Any:
    seen = []
    torch.func.grad(lambda x: seen.append(run(x.detach())) or x.sum())(q)
    return seen[0]


def in_a_checkpoint(run: Any, q: Tensor) -> Any:
    seen = []
    save = torch.utils.checkpoint.create_selective_checkpoint_contexts
    context = partial(save, [torch.ops.aten.mm.default])
    torch.utils.checkpoint.checkpoint(
        lambda x: seen.append(run(x)) or x * 1, q.clone().requires_grad_(), use_reentrant=False, context_fn=context
    )
    return seen[0]


LOOKING_ON: dict[str, Callable[[Any, Tensor], Any]] = {
    "a counter": counted,
    "a level of forward gradients": within_a_level,
    "torch.func": transformed,
    "a selective checkpoint": in_a_checkpoint,
    "a compiler": lambda run, q: torch.compile(run, backend="eager", dynamic=True)(q),
}


@pytest.mark.filterwarnings("ignore:.*Graph break from `Tensor.item:UserWarning")
@pytest.mark.parametrize(
    ("under", "mask"),
    [
        # a compiler has no other way for lengths: that takes a second
        pytest.param(under, mask, marks=LONG if under == "a compiler" and isinstance(mask, KeyLengths) else ())
        for under in LOOKING_ON
        for mask in (window(3) | Prefix(1), KeyLengths(torch.tensor([3, 9])))
    ],
    ids=str,
)
def test_what_is_observed_is_the_same_whoever_looks_on(under: str, mask: Mask) -> None:
    q = torch.randn(2, 4, 9, 8)
    torch.compiler.reset()
    for run in (lambda x: observe(x, x, x, mask=mask), lambda x: attend(x, x, x, mask=mask, observe=Observe()).stats):
        wanted = run(q).flat()
        forget()
        assert LOOKING_ON[under](run, q).flat() == pytest.approx(wanted)
        assert run(q).flat() == wanted, "nothing is left behind"


@pytest.mark.parametrize("under", ["a counter", "a level of forward gradients", "a selective checkpoint"])
def test_what_a_watch_sees_is_the_same_whoever_looks_on(under: str) -> None:
    module = headscope.MultiHeadAttention(8, 2)

    def run(x: Tensor) -> HeadStats:
        with headscope.watch(module) as seen:
            module(x, mask=causal())
        return seen.stats

    x = torch.randn(1, 6, 8)
    assert LOOKING_ON[under](run, x).flat() == pytest.approx(run(x).flat())


def test_observing_leaves_a_compilers_graph() -> None:
    q = torch.randn(2, 4, 9, 8)
    for run in (lambda x: attend(x, x, x, observe=Observe()).stats, lambda x: observe(x, x, x)):
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="observe reads values"):
            torch.compile(run, backend="eager", fullgraph=True)(q)


def fakely(run: Any, q: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return run(mode.from_tensor(q))


TRACED = {
    "fake": fakely,
    "make_fx": lambda run, q: make_fx(run)(q)(q),
    "symbolic": lambda run, q: make_fx(run, tracing_mode="symbolic")(q)(q),
}


RULES, LENGTHS = window(2) | Prefix(1), KeyLengths(torch.tensor([3, 9]))


@pytest.mark.parametrize(
    ("how", "mask", "warm"),
    # torch takes no tensors, as lengths are, from around a function that it traces with fake ones
    [
        ("fake", LENGTHS, False),
        ("fake", LENGTHS, True),
        ("make_fx", LENGTHS, False),
        ("make_fx", LENGTHS, True),
        ("symbolic", RULES, True),
        pytest.param("symbolic", RULES, False, marks=LONG),  # as make_fx does, and takes a second
    ],
    ids=str,
)
def test_the_definition_is_traced_whatever_ran_before(how: str, mask: Mask, warm: bool) -> None:
    q = torch.randn(2, 4, 9, 8)
    asked = (lambda q: headscope.attention(q, q, q, mask=mask, backend="reference"),
             lambda q: functional.weights(q, q, mask=mask))  # fmt: skip
    forget()
    vars(mask).pop("_plans", None)
    wanted = [run(q) for run in asked] if warm else []
    found = [TRACED[how](run, q) for run in asked]
    wanted = wanted or [run(q) for run in asked]
    for got, right in zip(found, wanted, strict=True):
        assert got.shape == right.shape
        if how != "fake":
            torch.testing.assert_close(got, right)


@pytest.mark.parametrize("option", OPTIONS)
def test_meta(option: str) -> None:
    asked = OPTIONS[option](torch.bfloat16)
    on_meta = {name: x.to("meta") for name, x in asked.tensors.items()}
    said = {name: x for name, x in asked.said.items() if name != "mask" or isinstance(x, (Band, Prefix))}
    out, lse, _ = headscope.attend(**on_meta, **said)
    wanted = headscope.attend(**asked.tensors, **said)
    assert (out.shape, out.dtype, out.device.type) == (wanted.out.shape, wanted.out.dtype, "meta")
    assert (lse.shape, lse.dtype, lse.device.type) == (wanted.lse.shape, wanted.lse.dtype, "meta")
    assert headscope.attention(**on_meta, **said).shape == wanted.out.shape


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"
)  # torch's
@pytest.mark.parametrize(
    "option",  # test_operators.py compiles every option; a dense mask is in "everything"
    [
        "nothing", "mask: causal", "everything", pytest.param("mask: dense", marks=LONG),
        pytest.param("mask: documents", marks=LONG),
    ],
)  # fmt: skip
def test_compiles_without_a_break(option: str) -> None:
    asked = OPTIONS[option](torch.float32)
    leaves = {name: x.requires_grad_() for name, x in asked.tensors.items()}

    def both(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return headscope.attention(**given, **asked.said), headscope.attend(**given, **asked.said).lse

    torch.compiler.reset()
    out, lse = torch.compile(both, backend="aot_eager", fullgraph=True)(leaves)
    wanted = both(leaves)
    torch.testing.assert_close((out, lse), wanted)
    results, wanted_results = ({"out": x, "lse": y} for x, y in ((out, lse), wanted))
    torch.testing.assert_close(gradients(results, leaves), gradients(wanted_results, leaves), rtol=1e-4, atol=1e-5)


def test_bf16_of_many_rows_compiles_without_a_break() -> None:
    q = torch.randn(1, 2, 33, 16).bfloat16()  # where torch is asked for matrix tiles
    torch.compiler.reset()
    out = torch.compile(lambda x: headscope.attention(x, x, x), backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(out, headscope.attention(q, q, q))


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_batches_of_gradients_are_refused_by_name(backend: str) -> None:
    x = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(
        RuntimeError,
        match="does not support batched gradients",
    ):
        torch.autograd.functional.jacobian(
            lambda q: headscope.attention(q, x[1], x[2], backend=backend), x[0], vectorize=True
        )


# ---------------------------------------------------------------- the weights


@pytest.mark.parametrize("option", OPTIONS)
def test_weights(option: str) -> None:
    asked = OPTIONS[option](torch.float32)
    given = {name: x for name, x in asked.tensors.items() if name != "v"}
    p = functional.weights(**given, **asked.said)
    exact = oracle.attention(**asked.tensors, **asked.seen)
    assert_as_accurate(p, exact.weights, oracle.plain(**asked.tensors, **asked.seen).weights, message="weights")
    total = p.sum(-1)
    if "sinks" in given:
        assert (total < 1).all()
    else:
        empty = exact.lse == -INF
        torch.testing.assert_close(total, (~empty).float())


def test_weights_of_half_precision_are_float32() -> None:
    given = tensors(torch.bfloat16)
    assert functional.weights(given["q"], given["k"]).dtype == torch.float32
    three = functional.weights(given["q"][0], given["k"][0])
    assert three.shape == (H, Q, K)


def test_backends_agree() -> None:
    """The same numbers whichever runs, beyond rounding."""
    given = tensors(torch.float64)
    for said in ({}, {"mask": Prefix(3)}, {"bias": torch.randn(Q, K, dtype=torch.float64)}):
        one, *others = (
            headscope.attention(**given, **said, backend=name) for name in (*NATIVE, "sdpa", "blocked", "reference")
        )
        for other in others:
            torch.testing.assert_close(other, one)


def test_signature_is_the_design() -> None:
    names = ["q", "k", "v", "mask", "bias", "scale", "softcap", "sinks", "dropout", "backend"]
    for function, more in ((headscope.attention, []), (headscope.attend, ["observe", "differentiable"])):
        assert list(inspect.signature(function).parameters) == names + more
        assert re.search("Raises:|as ``attention``", function.__doc__ or "")
