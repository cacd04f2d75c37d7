"""The native observer beside the portable one, at sizes that fill several blocks, for every option."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope import Observe, Segments, attend, observe
from headscope._attend import prepare
from headscope._attend.backends import native as cpu
from headscope._observe import attend_and_observe, native_observer, scene, steps
from headscope._observe.inputs import Continued
from headscope._observe.native_observer import borders_of
from headscope.masks import Dense, Documents, KeyLengths, Mask, Prefix, causal, window
from headscope.stats import HeadStats, histogram_edges
from headscope.stats._layer import Moments, Packed
from support.native_targets import TARGETS, run
from support.paths import TESTS

pytestmark = pytest.mark.skipif(cpu.extension is None, reason="the native extension is not installed")

B, H, HKV, Q, K, D, DV = 2, 6, 2, 131, 197, 23, 11

# A slice of this file by each target, in a process of its own: of one that has imported what takes long.
FORCED = """
import os, sys, torch
sys.path[:0] = {folders!r}
import test_native_observer as tests

def observe():
    torch.set_num_threads(1)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        tests.test_every_dtype(dtype)
    for option in tests.OPTIONS:
        if "dense" in option or "sinks" in option:
            tests.test_every_option(option)

for target in {targets!r}:
    child = os.fork()
    if child == 0:
        os.environ["HEADSCOPE_CPU_TARGET"] = target
        assert tests.cpu.extension.target() == target, tests.cpu.extension.target()
        observe()
        os._exit(0)
    print(target, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# The weights of a block of rows are kept for all keys, and edges are listed: both are too much.
STARVED = """
import resource, torch
from headscope import Observe, observe

q, many = torch.ones(1, 1, 1500, 4), torch.ones(1, 1, 1 << 20, 4)

def keys():
    return observe(q[:, :, :3], many, what=Observe()).received

def edges():
    return observe(q, q, what=Observe(row_stats=False, received=False, edges=1500)).edges.p

for step in (keys, edges):
    expected = step()  # with what is made once: threads, imports
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), limits[1]))
    try:
        step()
        print("enough memory")
    except MemoryError:
        print("MemoryError")
    resource.setrlimit(resource.RLIMIT_AS, limits)
    torch.testing.assert_close(step(), expected, rtol=0, atol=0)
"""

# Calls that would take minutes: the process would outlast its time if they were not left.
INTERRUPTED = """
import os, signal, threading, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent of the tests does with it
from headscope import Observe, observe

torch.set_num_threads({threads})

def call(length):
    q = torch.ones(1, 1, length, 64)
    return observe(q, q, what=Observe({what})).rows

expected = call(100)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    call(300_000)
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
assert torch.equal(call(100), expected)
"""

FORKED = """
import os, torch
from headscope import Observe, observe
q, what = torch.randn(2, 4, 200, 16), Observe(map=8, edges=4)
expected = observe(q, q, what=what)
child = os.fork()
if child == 0:
    seen = observe(q, q, what=what)
    os._exit(0 if torch.equal(seen.received, expected.received) and torch.equal(seen.edges.p, expected.edges.p) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

# Of a head k rows are looked at again, and k weights of each: not all of them at a time.
MANY_EDGES = """
import resource, torch
from headscope import Observe, observe
q = torch.randn(1, 1, 2500, 4)
observe(q, q, what=Observe(received=False, edges=1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
observe(q, q, what=Observe(received=False, edges=2500))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""

Made = dict[str, Any]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=seeded(), dtype=torch.float64).to(dtype)


def made(dtype: torch.dtype = torch.float32, queries: int = Q, kv_heads: int = HKV) -> Made:
    random = seeded()
    shapes = ((B, H, queries, D), (B, kv_heads, K, D), (B, kv_heads, K, DV))
    return {name: torch.randn(s, generator=random).to(dtype) for name, s in zip("qkv", shapes, strict=True)}


def ids() -> Tensor:
    return torch.arange(K).expand(B, -1) // torch.tensor([[40], [67]])


def segments(keys: int = K, size: int = 19) -> Segments:
    """Some runs of keys, and some keys each of another segment."""
    drawn = torch.randint(-1, size, (B, keys), generator=seeded())
    drawn[:, keys // 3 :] = drawn[:, keys // 3 :].repeat_interleave(23, -1)[:, : keys - keys // 3]
    return Segments([f"s{n}" for n in range(size)], drawn)


def dense(*shape: int) -> Tensor:
    seen = torch.rand(*shape, generator=seeded()) < 0.6
    seen[..., 3, :] = False
    return seen


OPTIONS: dict[str, Callable[[], Made]] = {
    "nothing": dict,
    "causal": lambda: {"mask": causal()},
    "window": lambda: {"mask": window(70)},
    "prefix": lambda: {"mask": causal() | Prefix(30)},
    "lengths": lambda: {"mask": KeyLengths(torch.tensor([197, 88]))},
    "documents": lambda: {"mask": causal() & Documents(ids()[:, -Q:], ids())},
    "dense": lambda: {"mask": dense(B, H, Q, K)},
    "dense of keys": lambda: {"mask": dense(Q, K) | dense(1, 1, Q, K)},
    "bias": lambda: {"bias": normal(H, Q, K)},
    "bias that hides": lambda: {"bias": torch.zeros(B, 1, 1, K).masked_fill_(torch.arange(K) < 60, -math.inf)},
    "softcap": lambda: {"softcap": 1.5, "mask": causal()},
    "scale": lambda: {"scale": 0.9},
    "sinks": lambda: {"sinks": torch.linspace(-2, 4, H), "mask": causal()},
}

WHAT: dict[str, Callable[[], Made]] = {
    "usual": dict,
    "map": lambda: {"map": 16},
    "uneven map": lambda: {"map": 29},
    "more bins than keys": lambda: {"map": 211},
    "edges": lambda: {"edges": 19},
    "top": lambda: {"top": 5},
    "windows": lambda: {"windows": (0, 3, 60.5), "first": 4},
    "tokens": lambda: {"tokens": torch.randint(-9, 9, (B, K), generator=seeded())},
    "segments": lambda: {"segments": segments()},
    "segments and map": lambda: {"segments": segments(size=64), "map": 13, "received": False, "rows": 61},
    "received_max": lambda: {"received_max": True, "map": 3},
    "received_max alone": lambda: {"received_max": True, "received": False, "rows": 61},
    "sample": lambda: {"rows": 37, "map": 16, "edges": 7},
    "rows": lambda: {"rows": torch.rand(B, H, Q, generator=seeded()) < 0.5, "map": 5},
}


@contextmanager
def portable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_observer, "refuses", lambda *_: ["this test wants the portable form"])
        patch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())  # what was made ready before
        yield


@contextmanager
def native() -> Iterator[None]:
    """And nothing else."""

    def must(*asked: Any) -> Any:
        found = usual(*asked)
        assert found is not None
        return found

    usual = native_observer.observe_natively
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_observer, "observe_natively", must)
        patch.setattr("headscope._observe.steps.observe_blocks", None)
        yield


def both(what: Observe, given: Made, **places: Any) -> tuple[HeadStats, HeadStats]:
    with native():
        ours = observe(**given, what=what, **places)
    with portable():
        return ours, observe(**given, what=what, **places)


def same(ours: HeadStats, theirs: HeadStats, dtype: torch.dtype = torch.float32) -> None:
    rtol, atol = (1e-5, 2e-6) if dtype != torch.float64 else (1e-11, 1e-12)

    def near(name: str, x: Tensor, y: Tensor) -> None:
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{name}: {m}")

    a, b = next(iter(ours.parts.values())), next(iter(theirs.parts.values()))
    assert a.rows.tolist() == b.rows.tolist()
    assert list(a.moments) == list(b.moments)
    for name, x in a.moments.items():
        y = b.moments[name]
        assert x.count.tolist() == y.count.tolist(), name
        for what in ("mean", "min", "max"):
            near(f"{name} {what}", getattr(x, what), getattr(y, what))
        moved = (x.histogram - y.histogram).abs().sum()
        assert moved <= 2 + 0.001 * x.histogram.sum(), f"{name}: {x.histogram} {y.histogram}"
    if a.received is not None:
        near("received", a.received, b.received)
        assert torch.equal(a.eligible, b.eligible)
    if a.segments is not None:
        assert torch.equal(a.segments.count, b.segments.count)
        near("segments", a.segments.sum, b.segments.sum)
        near("segments on the first keys", a.segments.first_sum, b.segments.first_sum)
        assert (a.segments.null_sums is None) == (b.segments.null_sums is None)
        if a.segments.null_sums is not None:
            near("means of segments by chance", a.segments.null_sums[0], b.segments.null_sums[0])
            near("variances of segments by chance", a.segments.null_sums[1], b.segments.null_sums[1])
    assert (a.received_max is None) == (b.received_max is None)
    if a.received_max is not None:
        near("received_max", a.received_max, b.received_max)
    if a.map is not None:
        assert torch.equal(a.map.count, b.map.count)
        near("map", a.map.sum, b.map.sum)
        near("map", a.map.max, b.map.max)
        apart = (a.map.argmax != b.map.argmax).any(-1)  # where two weights are all but equal
        assert apart.sum() <= 0.01 * apart.numel()
    if a.edges is not None:
        near("edges", a.edges.p, b.edges.p)
        assert (a.edges.at != b.edges.at).any(-1).sum() <= 0.01 * a.edges.p.numel()
    for x, y in zip(a.kept, b.kept, strict=True):
        assert torch.equal(x.counted, y.counted)
        assert list(x.values) == list(y.values)
        for name, values in x.values.items():
            if name in ("argmax", "top_keys"):
                assert (values != y.values[name]).sum() <= 0.01 * values.numel(), name
            else:
                near(name, values, y.values[name])


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option: str) -> None:
    what = Observe(map=16, edges=9, top=3, windows=(2, 50), tokens=ids(), keep_rows=True)
    same(*both(what, made() | OPTIONS[option]()))


@pytest.mark.parametrize("asked", WHAT)
@pytest.mark.parametrize("option", ["causal", "dense"])
def test_every_quantity(option: str, asked: str) -> None:
    same(*both(Observe(**WHAT[asked](), keep_rows=True), made() | OPTIONS[option]()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    what = Observe(map=16, edges=9, keep_rows=True, segments=segments(), received_max=True)
    same(*both(what, made(dtype) | {"mask": causal()}), dtype)


@pytest.mark.parametrize("queries", [1, 5, 17, 48, 97])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_numbers_of_rows(queries: int, kv_heads: int) -> None:
    what = Observe(map=8, edges=3, keep_rows=True, segments=segments(), received_max=True)
    same(*both(what, made(queries=queries, kv_heads=kv_heads) | {"mask": causal()}))


def test_parts_alone() -> None:
    given = made() | {"mask": causal()}
    for said in (
        {"row_stats": False, "received": False, "edges": 5},
        {"row_stats": False, "map": 4, "edges": 5},
        {"received": False},
    ):
        same(*both(Observe(**said), given))


def test_cross() -> None:
    same(*both(Observe(map=16, edges=9, keep_rows=True), made() | OPTIONS["lengths"](), kind="cross"))


@pytest.mark.parametrize("off", [0.0, 0.4])
def test_a_given_lse(off: float) -> None:
    given = made() | {"mask": causal()}
    lse = attend(**given).lse + off
    same(*both(Observe(keep_rows=True), given | {"lse": lse}))


def test_a_given_lse_agrees_relative_to_its_own_size() -> None:
    """A kernel's float32 rounds an lse of some hundreds by far more than one of 1."""
    given = made()
    given["q"] *= 200
    lse = attend(**given).lse
    assert float(lse.abs().min()) > 50
    own, rounded = (both(Observe(keep_rows=True), given | more) for more in ({}, {"lse": lse * (1 + 4e-6)}))
    for found, wanted in zip(rounded, own, strict=True):
        same(found, wanted)


def test_a_cache_of_a_static_size() -> None:
    mask: Mask = headscope.masks.Band(None, 0, offset=torch.tensor([20, 55])) & KeyLengths(torch.tensor([151, 186]))
    same(*both(Observe(map=8, keep_rows=True, windows=(9,)), made() | {"mask": mask}))


def test_shares_of_the_rows_add_up() -> None:
    q, k = normal(1, 2, 2111, 4), normal(1, 2, 2111, 4)
    parts = Segments([str(n) for n in range(7)], torch.arange(2111) * 8 // 2111 - 1)
    what = Observe(map=16, edges=9, segments=parts, received_max=True)
    same(*both(what, {"q": q, "k": k, "mask": causal()}))


def test_long_rows_do_not_lose_small_weights() -> None:
    q, k = normal(1, 1, 3, 8), normal(1, 1, 70_001, 8)
    with native():
        found = observe(q, k, what=Observe(keep_rows=True))
    exact = observe(q.double(), k.double(), what=Observe(keep_rows=True))
    for name, values in found.kept[0].values.items():
        wanted = exact.kept[0].values[name]
        torch.testing.assert_close(values.double(), wanted.double(), rtol=2e-6, atol=1e-9, equal_nan=True, msg=name)


@pytest.mark.parametrize("option", OPTIONS)
def test_attending_is_to_the_bit_what_it_is_unobserved(option: str) -> None:
    given = made() | OPTIONS[option]()
    plain = attend(**given, backend="cpu")
    seen = attend(**given, backend="cpu", observe=Observe(map=7))
    assert torch.equal(plain.out, seen.out)
    assert torch.equal(plain.lse, seen.lse)
    assert seen.stats is not None
    same(seen.stats, observe(**given, what=Observe(map=7)))


@pytest.mark.parametrize("queries", [1, 7, 51, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_are_attended_as_ever(queries: int, dtype: torch.dtype) -> None:
    given = made(dtype, queries)
    plain, seen = attend(**given, backend="cpu"), attend(**given, backend="cpu", observe=Observe())
    assert torch.equal(plain.out, seen.out)
    assert torch.equal(plain.lse, seen.lse)


def test_threads_do_not_change_it() -> None:
    q, k = normal(1, 2, 2111, 4), normal(1, 2, 2111, 4)  # several parts of the rows
    parts = Segments([str(n) for n in range(7)], torch.arange(2111) * 8 // 2111 - 1)
    given: Made = {"q": q, "k": k, "mask": causal()}
    what = Observe(map=16, edges=9, keep_rows=True, segments=parts, received_max=True)
    found: list[HeadStats] = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(observe(**given, what=what))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(found[0].received, other.received)
        assert torch.equal(found[0].segments.sum, other.segments.sum)
        assert torch.equal(found[0].received_max, other.received_max)
        assert torch.equal(found[0].map.sum, other.map.sum)
        assert torch.equal(found[0].map.argmax, other.map.argmax)
        for name, moments in found[0].parts["0"].moments.items():
            assert torch.equal(moments.mean.nan_to_num(-1), other.parts["0"].moments[name].mean.nan_to_num(-1)), name


REFUSED: dict[str, Callable[[], tuple[Made, Made, Made]]] = {
    "sizes": lambda: ({name: x[:0] for name, x in made().items()}, {}, {}),
    "rows": lambda: (made(), {"rows": torch.zeros(B, H, Q, dtype=torch.bool)}, {}),
    "positions": lambda: (made(), {}, {"q_pos": torch.rand(Q, 2), "k_pos": torch.rand(K, 2)}),
    "windows": lambda: (made(), {"windows": tuple(range(9))}, {}),
    "first": lambda: (made(), {"first": 17}, {}),
    "tokens": lambda: (made(), {"tokens": torch.full((K,), 2**40)}, {}),
}
"""First word of a reason -> tensors, what is asked and positions that are refused for this reason alone."""


@pytest.mark.parametrize("word", REFUSED)
def test_what_the_kernels_refuse_is_observed_portably(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, asked, places = REFUSED[word]()
    usual, reasons = native_observer.refuses, []
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())  # what was made ready before

    def told(*work: Any) -> list[str]:
        reasons.extend(usual(*work))
        return reasons

    monkeypatch.setattr(native_observer, "refuses", told)
    seen = observe(**given, what=Observe(**asked), **places)
    assert [reason.partition(":")[0] for reason in reasons] == [word]
    with portable():
        same(seen, observe(**given, what=Observe(**asked), **places))


@pytest.mark.parametrize("option", OPTIONS)
def test_where_looking_at_the_numbers_would_take_waiting_the_figures_are_the_same(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, what = made() | OPTIONS[option](), Observe(map=5, edges=3, keep_rows=True)
    with portable():
        expected = observe(**given, what=what)
        usual, looks = scene._clean, []

        def on_a_gpu(of: scene.Scene) -> bool:
            looks.append(usual(replace(of, call=replace(of.call, device="cuda"))))
            return looks[-1]

        monkeypatch.setattr(scene, "_clean", on_a_gpu)
        same(observe(**given, what=what), expected)
    assert looks == [False]


def test_a_token_before_the_first_key_is_looked_at_portably() -> None:
    """Where a sliding cache has dropped the keys before."""
    ids = torch.randint(0, 9, (B, K + 1), generator=seeded())
    given, asked = made(), {"received": False, "keep_rows": True}
    what = Continued(**asked, tokens=ids[:, 1:], token_before=ids[:, 0])
    seen = observe(**given, what=what)
    longer = {name: torch.cat([x[:, :, :1], x], 2) if name != "q" else x for name, x in given.items()}
    hidden = Dense(torch.arange(K + 1) > 0)
    whole = observe(**longer, what=Observe(**asked, tokens=ids), mask=hidden)
    without = observe(**given, what=Observe(**asked, tokens=ids[:, 1:]))
    for name in ("duplicate", "induction"):
        torch.testing.assert_close(seen.kept[0].values[name], whole.kept[0].values[name], equal_nan=True)
    assert (seen.kept[0].values["induction"] > without.kept[0].values["induction"]).any()


def test_tokens_of_no_keys() -> None:
    nothing = torch.zeros(1, 2, 0, 4)
    assert observe(nothing, nothing, what=Observe(tokens=torch.zeros(0, dtype=torch.int64))).rows.tolist() == [0, 0]


# ---------------------------------------------------------------- numbers at the end of their range


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_bias_of_the_smallest_number_hides_nothing(dtype: torch.dtype) -> None:
    bias = torch.zeros(Q, K, dtype=dtype)
    bias[:, :70] = bias[40:, 150:] = torch.finfo(dtype).min  # whole blocks of keys, and the first ones
    same(*both(Observe(map=16, edges=9, keep_rows=True), made(dtype) | {"bias": bias}), dtype)


def test_a_row_of_the_smallest_biases_is_even() -> None:
    given = made() | {"bias": torch.zeros(Q, K)}
    given["bias"][5] = torch.finfo(torch.float32).min
    seen, truth = attend(**given, backend="cpu", observe=Observe(keep_rows=True)), attend(**given, backend="reference")
    torch.testing.assert_close(seen.out, truth.out)
    torch.testing.assert_close(seen.lse, truth.lse)
    assert seen.stats is not None
    torch.testing.assert_close(seen.stats.kept[0].values["max_weight"][:, :, 5], torch.full((B, H), 1 / K))


def test_an_infinite_sink_breaks_its_rows() -> None:
    seen = observe(**made(), sinks=torch.full((H,), math.inf))
    assert seen.broken.tolist() == [B * Q] * H
    assert not seen.rows.any()


def test_a_window_is_not_rounded_up() -> None:
    below = math.nextafter(3.0, 0.0)  # 3 in float32
    what = Observe(windows=(below,), keep_rows=True)
    ours, two = observe(**made(), what=what), observe(**made(), what=Observe(windows=(2,), keep_rows=True))
    for name in ("window", "streaming"):
        assert torch.equal(ours.kept[0].values[f"{name}_3"], two.kept[0].values[f"{name}_2"])


def test_a_window_where_float32_has_no_odd_numbers() -> None:
    keys = 2**24 + 70
    q, k = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, keys, 1)
    k[..., -2, :] = 60.0  # all weight is one before its own
    for seen in both(Observe(windows=(0, 1), received=False), {"q": q, "k": k}):
        assert float(seen["window_0"].mean) == float(seen["self"].mean) < 1e-20
        assert float(seen["window_1"].mean) == pytest.approx(1)


def test_weights_too_small_to_be_squared() -> None:
    """1 / Σ p² is not infinity, which would be the mean of all rows."""
    for seen in both(Observe(), made() | {"sinks": torch.full((H,), 48.0)}):
        assert not seen["effective_keys"].mean.isinf().any()
        assert seen["max_weight"].count.tolist() == [[B * Q] * H]


def test_few_rows_and_many_keys_are_attended_as_ever() -> None:
    given = {"q": normal(1, 2, 3, 16), "k": normal(1, 2, 4099, 16), "v": normal(1, 2, 4099, 8)}
    plain, seen = attend(**given, backend="cpu"), attend(**given, backend="cpu", observe=Observe())
    assert torch.equal(plain.out, seen.out)
    assert torch.equal(plain.lse, seen.lse)
    assert seen.stats is not None
    same(seen.stats, observe(**given))


def test_few_rows_and_many_keys_do_not_meet_a_hidden_nan() -> None:
    """Their keys are cut into shares, which attend before anything is measured."""
    given = {"q": normal(1, 2, 3, 16), "k": normal(1, 2, 4099, 16), "v": normal(1, 2, 4099, 8)}
    given["v"][:, :, -1] = math.nan  # causal: the last row alone sees it
    done = attend(**given, mask=causal(), backend="cpu", observe=Observe(row_stats=False))
    assert done.out[:, :, :2].isfinite().all()
    assert done.out[:, :, 2].isnan().all()


def test_tokens_below_32_bits_are_not_taken_for_others() -> None:
    """The kernels hold ids in 32 bits, where -2**31 - 1 would be 2**31 - 1."""
    given, tokens = made(), torch.arange(K) % 5
    tokens[::3], tokens[1::3] = -(2**31) - 1, 2**31 - 1
    seen = observe(**given, what=Observe(tokens=tokens))
    with portable():
        same(seen, observe(**given, what=Observe(tokens=tokens)))


def test_many_of_each_row() -> None:
    given = {"q": normal(1, 1, 50, 8), "k": normal(1, 1, 400, 8)}
    given["k"][:, :, 200:] = given["k"][:, :, :200]
    ours, theirs = (x.kept[0].values for x in both(Observe(row_stats=False, received=False, top=400), given))
    keys = ours["top_keys"]
    assert torch.equal(keys[..., 0::2] + 200, keys[..., 1::2])  # of equal weights the first comes first
    torch.testing.assert_close(ours["top_weights"], theirs["top_weights"])


AGAIN: dict[str, Made] = {
    "usual": {"map": 16, "edges": 9},
    "edges alone": {"row_stats": False, "received": False, "edges": 5},
    "rows": {"keep_rows": True, "windows": [2, 50], "top": 3},
    "a sample": {"rows": 37, "received": False},
}


@pytest.mark.parametrize("option", ["nothing", "causal", "window", "prefix"])
@pytest.mark.parametrize("asked", AGAIN)
def test_what_was_observed_before_is_described_once(option: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
    given = made() | OPTIONS[option]()
    observe(**given, what=Observe(**AGAIN[asked]))
    others = given | {name: x.flip(2) * 1.5 for name, x in made().items()}
    with portable():
        wanted = observe(**others, what=Observe(**AGAIN[asked]))
    monkeypatch.setattr(steps, "build_scene", None)  # what made it ready
    same(observe(**others, what=Observe(**AGAIN[asked])), wanted)


@pytest.mark.parametrize("option", ["nothing", "causal", "window", "prefix"])
@pytest.mark.parametrize("asked", ["usual", "rows", "edges alone", "a sample"])
def test_what_was_attended_before_is_described_once(option: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
    given, what = made() | OPTIONS[option](), Observe(**AGAIN[asked])
    first = attend(**given, observe=what)
    others = given | {name: x.flip(2) * 1.5 for name, x in made().items()}
    with portable():
        wanted, before = (attend(**tensors, observe=what) for tensors in (others, given))
    monkeypatch.setattr(steps, "attend_request", None)  # what describes it
    again = attend(**others, observe=what)
    assert torch.equal(again.out, wanted.out)
    assert torch.equal(again.lse, wanted.lse)
    for seen, of in ((again, wanted), (first, before)):
        assert seen.stats is not None
        assert of.stats is not None
        same(seen.stats, of.stats)
    same(copy.deepcopy(again.stats), again.stats)


SAMPLED: dict[str, Made] = {
    "rows": {},
    "map and edges": {"map": 7, "edges": 5},
    "many edges": {"edges": 300, "received_max": True, "windows": (4,)},
    "segments": {"segments": Segments(names=("a", "b"), ids=torch.arange(77) // 40)},
}


@pytest.mark.parametrize("asked", SAMPLED)
@pytest.mark.parametrize("mask", [None, causal(), window(20)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2)])
def test_a_sample_of_rows_in_the_pass_of_all(heads: tuple[int, int], mask: Mask | None, asked: str) -> None:
    q, k, v = (normal(2, n, 77, 16) for n in (heads[0], heads[1], heads[1]))
    what = Observe(rows=30, **SAMPLED[asked])
    for scale in (1.0, 2.0, 0.5):
        together = attend_and_observe(q * scale, k, v, mask, None, None, None, None, 0.0, None, what)
        assert together is not None
        assert torch.equal(together[0], headscope.attention(q * scale, k, v, mask=mask))
        apart = observe(q * scale, k, mask=mask, what=replace(what, extra=()))
        same(together[2], observe(q * scale, k, v, mask=mask, what=what))
        (one,), (other,) = together[2].parts.values(), apart.parts.values()
        assert (one.looked_at, one.of) == (other.looked_at, other.of) == (60, 154)
        assert one.rows.tolist() == [60] * heads[0]


@pytest.mark.parametrize(
    ("rows", "width", "shared"), [(8, 64, True), (7, 64, False), (15, 32, False), (16, 32, True), (99, 16, True)]
)
def test_a_small_sample_takes_a_pass_of_its_own(rows: int, width: int, shared: bool) -> None:
    q = normal(1, 2, 64, width)
    result = attend_and_observe(q, q, q, None, None, None, None, None, 0.0, None, Observe(rows=rows))
    assert (result is not None) == shared
    stats = attend(q, q, q, observe=Observe(rows=rows)).stats
    assert stats is not None
    assert stats["entropy"].count.tolist() == [[min(rows, 64)] * 2]


def test_attending_a_row_that_is_not_finite_the_second_time() -> None:
    given, what = made(), Observe()
    attend(**given, observe=what)
    given["q"][0, 1, 5] = math.nan
    seen = attend(**given, observe=what).stats
    with portable():
        same(seen, attend(**given, observe=what).stats)
    assert seen is not None
    assert seen.broken.tolist() == [0, 1, 0, 0, 0, 0]


def test_what_tensors_say_is_read_each_time() -> None:
    given, lengths = made(), torch.tensor([K, K // 2])
    for said in (lengths, lengths.flip(0)):
        same(*both(Observe(), given | {"mask": KeyLengths(said)}))
    tokens = torch.randint(3, (B, K), generator=seeded())
    for each in (tokens, tokens.flip(1)):
        same(*both(Observe(tokens=each), given))
    for lse in (attend(**given).lse, attend(**given).lse + 1):
        same(*both(Observe(), given | {"lse": lse}))


def test_a_row_that_is_not_finite_the_second_time() -> None:
    given = made()
    observe(**given)
    given["q"][0, 1, 5] = math.nan
    seen = observe(**given)
    with portable():
        same(seen, observe(**given))
    assert next(iter(seen.parts.values())).broken.tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("bins", [0, 8])
def test_more_edges_than_are_listed_at_a_time(bins: int) -> None:
    given = {"q": normal(B, H, 307, 8), "k": normal(B, H, 311, 8)}
    same(*both(Observe(row_stats=False, received=False, map=bins or None, edges=300), given))


@pytest.mark.parametrize("bins", [0, 5])
def test_of_equal_weights_the_first_are_named(bins: int) -> None:
    length = 1111  # of which several tasks share the rows
    q = torch.zeros(B, H, length, 4)
    seen = next(iter(observe(q, q, what=Observe(map=bins or None, edges=7)).parts.values()))
    assert seen.edges is not None
    assert seen.edges.at.tolist() == [[[0, 0, 0, key] for key in range(7)]] * H
    if seen.map is not None:
        first = [n * length // bins for n in range(bins)]
        assert seen.map.argmax.tolist() == [[[[0, 0, i, j] for j in first] for i in first]] * H


# ---------------------------------------------------------------- processes and threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_whose_weights_are_all_too_small_count_in_the_map(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16, dtype=dtype, generator=seeded())
    lse = headscope.attend(q, k, v).lse + 2000  # exp(-2000) is 0 in either dtype
    ours, theirs = both(Observe(map=8, edges=3), {"q": q, "k": k, "v": v, "lse": lse})
    for stats in (ours, theirs):
        (layer,) = stats.parts.values()
        assert layer.map is not None
        assert int(layer.map.count.sum()) == 2 * 40 * 40
        torch.testing.assert_close(layer.map.max, torch.zeros_like(layer.map.max))
        torch.testing.assert_close(layer.moments["max_weight"].max, torch.zeros_like(layer.moments["max_weight"].max))


def test_each_target_observes_the_same() -> None:
    done = run(FORCED.format(targets=TARGETS, folders=[str(TESTS), str(TESTS / "observe")]))
    assert done.stdout == "".join(f"{target} 0\n" for target in TARGETS), done.stderr


def test_observing_in_several_threads() -> None:
    given, what = made() | OPTIONS["causal"](), Observe(map=16, edges=9)
    wanted = observe(**given, what=what)
    found: list[HeadStats] = []
    workers = [
        threading.Thread(target=lambda: found.extend(observe(**given, what=what) for _ in range(5))) for _ in "abcd"
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 20
    for seen in found:
        assert torch.equal(seen.received, wanted.received)
        assert torch.equal(seen.map.argmax, wanted.map.argmax)
        assert torch.equal(seen.edges.at, wanted.edges.at)


def test_a_forked_child_observes() -> None:
    done = run(FORKED)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(("threads", "what"), [(1, "map=8"), (2, "received=False, edges=3")])
def test_a_long_observation_can_be_interrupted(threads: int, what: str) -> None:
    done = run(INTERRUPTED.format(threads=threads, what=what), timeout=60)
    assert done.stdout == "interrupted\n", done.stdout + done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_too_little_memory_is_a_memory_error() -> None:
    done = run(STARVED)
    assert done.stdout == "MemoryError\n" * 2, done.stdout + done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs ru_maxrss in KiB")
def test_many_edges_take_little_memory() -> None:
    done = run(MANY_EDGES)
    assert int(done.stdout) < 100, done.stdout + done.stderr  # MiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["lse", "entropy", "mass", "effective_keys", "distance", "value_norm"])
def test_moments_are_those_of_the_portable_form(name: str, dtype: torch.dtype) -> None:
    """With values on the edges of the histogram and a rounding beside them, far outside, infinite and NaN."""
    edges = torch.tensor(histogram_edges(name), dtype=dtype)
    far = torch.tensor([-1e4, 1e30, -0.0, 1e-30, math.inf, -math.inf, math.nan], dtype=dtype)
    sides = [edges.nextafter(torch.full_like(edges, side)) for side in (-math.inf, math.inf)]
    special = torch.cat([edges, *sides, far])
    for rows in (1, 15, 16, 17, 50, 333):
        torch.manual_seed(rows)
        values = torch.randn(3, 2, 4, rows, dtype=dtype) * 20  # [names, B, H, R]
        values[1] = special[torch.randint(len(special), (2, 4, rows))]
        values[2] = math.nan
        borders = borders_of((name, name, name), dtype)
        found = Packed.empty(3, 4, borders.shape[1])
        cpu.extension.moments(
            values.data_ptr(), dtype == torch.float64, values.shape, (borders.data_ptr(), borders.shape[1]),
            found.whole.data_ptr(), found.numbers.data_ptr(), 1,
        )  # fmt: skip
        packed = found.moments()
        for n in range(3):
            wanted = Moments.of(name, values[n])
            for what in ("count", "histogram"):
                assert torch.equal(getattr(packed, what)[n], getattr(wanted, what)), (rows, n, what)
            for what in ("mean", "M2", "min", "max"):
                torch.testing.assert_close(
                    getattr(packed, what)[n], getattr(wanted, what), rtol=1e-12, atol=1e-12, equal_nan=True
                )


def test_a_quantity_that_the_kernels_lack_is_observed_by_the_portable_form(monkeypatch: pytest.MonkeyPatch) -> None:
    what, given = Observe(extra=("second_weight",)), made()
    expected = observe(**given, what=what)
    lacking = tuple(name for name in native_observer.QUANTITIES if name != "second_weight")
    monkeypatch.setattr(native_observer, "QUANTITIES", lacking)
    monkeypatch.setattr(native_observer, "observe_natively", None)  # calling it would raise
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
    same(observe(**given, what=what), expected)


def test_a_layer_that_is_built_when_it_is_read_is_a_mapping_of_one() -> None:
    q, k, v = normal(1, 2, 5, 4), normal(1, 2, 5, 4), normal(1, 2, 5, 4)
    what = Observe()
    described, again = (attend(q, k, v, observe=what).stats for _ in range(2))
    assert not isinstance(again.parts, dict)  # else this looks at the first way twice
    assert repr(again) == repr(described)
    assert again.layers == ("0",)
    assert "1" not in again.parts
    with pytest.raises(KeyError, match="1: is neither a quantity nor a layer"):
        again["1"]


@pytest.mark.parametrize("where", ["sinks", "v"])
def test_sinks_and_values_beyond_the_range_of_sums(where: str) -> None:
    """The portable form then takes care that nothing infinite passes through a mask."""
    given = made(torch.float64) | {"mask": causal()}
    huge = torch.full((H,), 1e31) if where == "sinks" else given["v"] * 1e31
    same(*both(Observe(map=16, edges=9), given | {where: huge}), torch.float64)


@pytest.mark.parametrize("options", [{"what": Observe(rows=3)}, {"what": Observe(), "dropout": 0.5}])
def test_what_one_pass_cannot_measure_is_observed_after_it(options: dict[str, Any]) -> None:
    """A sample of rows, and weights as they are before dropout."""
    what, given, dropout = options["what"], made(), options.get("dropout", 0.0)
    torch.manual_seed(0)
    out, lse = attend(**given, dropout=dropout)[:2]
    torch.manual_seed(0)
    attended = attend(**given, dropout=dropout, observe=what)
    assert torch.equal(attended.out, out)
    assert torch.equal(attended.lse, lse)
    same(attended.stats, observe(**given, what=what))
    assert attended.stats.sampled == (what.rows is not None)
