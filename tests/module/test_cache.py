"""Decoding with a cache is the full forward pass, token by token and in chunks, whatever the module's options."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, Observe, watch
from headscope.cache import LEAST, Cache, GrowingCache, RollingCache, StaticCache
from headscope.masks import Band, Dense, KeyLengths, Mask, Prefix, causal, window
from headscope.positions import NTK, ALiBi, Rotary, T5Buckets
from support.tolerance import assert_as_accurate

B, T, E, H = 3, 17, 24, 4
CUTS = {"tokens": [1] * T, "prefill": [11] + [1] * 6, "chunks": [5, 1, 3, 7, 1], "at once": [T]}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary, grouped": {"rotary": Rotary(4), "kv_heads": 2},
    "alibi, sinks": {"position_bias": ALiBi(H), "sinks": True},
    "t5, one kv head": {"position_bias": T5Buckets(6, 8, bidirectional=False), "kv_heads": 1, "v_head_dim": 5},
    "norm, gate, softcap": {"qk_norm": "rms", "gate": True, "softcap": 2.0, "rotary": Rotary(6, pairing="interleaved")},
}
W = 4
CACHES: dict[str, Callable[[], Cache]] = {
    "growing": GrowingCache,
    "static": lambda: StaticCache(T),
    "rolling": lambda: RollingCache(W),
}


def module(**said: Any) -> MultiHeadAttention:
    made = MultiHeadAttention(E, H, dtype=torch.float64, **said).requires_grad_(False)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made


def inputs(batch: int = B) -> Tensor:
    return torch.randn(batch, T, E, dtype=torch.float64)


def decoded(m: MultiHeadAttention, x: Tensor, cache: Cache, cuts: list[int], mask: Mask | None = None) -> Tensor:
    outs: list[Tensor] = []
    for part in x.split(cuts, 1):
        outs.append(m(part, cache=cache, mask=mask))
        for buffer in (cache._k, cache._v):  # what is beyond must not be read
            assert buffer is not None
            buffer[:, :, cache.length - cache._first :] = torch.nan
    return torch.cat(outs, 1)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_is_the_full_forward_pass(name: str, kind: str, cuts: str) -> None:
    m, x = module(**OPTIONS[name]), inputs()
    mask = window(W) if kind == "rolling" else causal()
    cache = CACHES[kind]()
    torch.testing.assert_close(decoded(m, x, cache, CUTS[cuts]), m(x, mask=mask))
    assert cache.length == T


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("mask", [window(3), Band(2, 2), Prefix(2) | window(3), Prefix(6)])
def test_masks_mean_what_they_mean_without_a_cache(mask: Mask, cuts: str) -> None:
    m, x = module(rotary=Rotary(6)), inputs()
    torch.testing.assert_close(decoded(m, x, StaticCache(T), CUTS[cuts], mask), m(x, mask=mask & causal()))


@pytest.mark.parametrize("offset", [-1, 0, 3])
def test_no_query_of_a_call_looks_ahead_whatever_the_offset_of_its_band(offset: int) -> None:
    m, x, mask = module(rotary=Rotary(6)), inputs(), Band(None, 0, offset=offset)
    torch.testing.assert_close(m(x, cache=StaticCache(T), mask=mask), m(x, mask=mask & causal()))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["rotary, grouped", "alibi, sinks"])
def test_padded_rows_are_as_if_alone(name: str, kind: str, cuts: str) -> None:
    m, x, padding = module(**OPTIONS[name]), inputs(), (0, 7, 3)
    cache = CACHES[kind]()
    cache.reset(padding=padding)
    out = decoded(m, x, cache, CUTS[cuts])
    for b, count in enumerate(padding):
        alone = m(x[b, count:], mask=window(W) if kind == "rolling" else causal())
        torch.testing.assert_close(out[b, count:], alone)
        nothing = m.projection("out")[1]  # of a row that sees nothing
        torch.testing.assert_close(out[b, :count], nothing.expand(count, E) if nothing is not None else out[b, :0])


def test_the_default_device_does_not_matter() -> None:
    m, x = module(rotary=Rotary(6)), inputs()
    wanted = decoded(m, x, GrowingCache(padding=[1, 0, 2]), [1] * T)
    with torch.device("meta"):
        found = decoded(m, x, GrowingCache(padding=[1, 0, 2]), [1] * T)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", CACHES)
def test_reordered_rows_go_on_as_what_they_were(kind: str) -> None:
    m, x = module(**OPTIONS["alibi, sinks"]), inputs()
    mask = window(W) if kind == "rolling" else causal()
    cache = CACHES[kind]()
    cache.reset(padding=[2, 0, 1])
    m(x[:, :9], cache=cache)
    for rows in ([2, 0, 0], [1, 1, 0, 2, 2], [4, 3]):  # as many, more, fewer
        x = x[rows]
        before = cache.padding
        cache.reorder(torch.tensor(rows, dtype=torch.int16))
        assert cache.padding == tuple(before[row] for row in rows)
        m(x[:, cache.length : cache.length + 2], cache=cache)
    out = m(x[:, 15:], cache=cache)
    for b, count in enumerate(cache.padding):
        torch.testing.assert_close(out[b], m(x[b, count:], mask=mask)[-2:])


def test_a_boolean_tensor_and_a_bias_count_held_keys() -> None:
    m, x = module(), inputs()
    seen, bias = torch.rand(B, 1, T, T) < 0.7, torch.randn(T, T, dtype=torch.float64)
    wanted, weights = m(x, mask=causal() & Dense(seen), bias=bias, need_weights=True)
    cache = GrowingCache()
    for a, b in ((0, 6), (6, 7), (7, T)):
        out, got = m(x[:, a:b], mask=seen[:, :, a:b, :b], bias=bias[a:b, :b], cache=cache, need_weights=True)
        torch.testing.assert_close(out, wanted[:, a:b])
        torch.testing.assert_close(got, weights[:, :, a:b, :b])


def test_a_static_cache_never_moves_and_a_growing_one_seldom() -> None:
    m, x = module(), torch.randn(1, 4 * LEAST + 1, E, dtype=torch.float64)
    static, growing = StaticCache(x.shape[1]), GrowingCache()
    places: dict[Cache, list[int]] = {static: [], growing: []}
    for token in x.split(1, 1):
        for cache, found in places.items():
            m(token, cache=cache)
            found.append(cache.keys.data_ptr())
            assert cache.keys.shape[2] == cache.length
    assert len(set(places[static])) == 1
    assert growing.capacity == 8 * LEAST
    assert len(set(places[growing])) <= 4
    torch.testing.assert_close(static.keys, growing.keys, rtol=0, atol=0)
    torch.testing.assert_close(static.keys, m.project(x)[1])
    torch.testing.assert_close(static.values, m.project(x)[2])


def test_a_rolling_cache_holds_no_more_than_twice_its_window() -> None:
    m, x, cache = module(), inputs(), RollingCache(W)
    decoded(m, x, cache, CUTS["chunks"])
    assert cache.capacity == 2 * W
    assert cache.length == T
    torch.testing.assert_close(cache.keys[:, :, -1], m.project(x)[1][:, :, -1])


def test_a_cache_is_used_again_and_in_and_out_of_inference_mode() -> None:
    m, x, cache = module(), inputs(), StaticCache(T)
    with torch.inference_mode():
        first = m(x, cache=cache)
    at = cache.keys.data_ptr()
    cache.reset()
    assert cache.length == 0
    torch.testing.assert_close(m(x, cache=cache), first, rtol=0, atol=0)
    assert cache.keys.data_ptr() == at
    assert repr(cache) == "StaticCache(17 tokens, room for 17)"
    assert repr(StaticCache(3, padding=torch.tensor([1, 0]))) == "StaticCache(0 tokens, room for 3, padding=[1, 0])"


@pytest.mark.parametrize("kind", CACHES)
def test_a_reset_cache_has_the_padding_of_its_next_tokens(kind: str) -> None:
    m, x, cache = module(rotary=Rotary(6)), inputs(), CACHES[kind]()
    cache.reset(padding=[5, 0, 1])
    m(x[:, :7], cache=cache)
    cache.reset(padding=[0] * B)
    assert cache.padding == ()
    torch.testing.assert_close(
        decoded(m, x, cache, CUTS["prefill"]), m(x, mask=window(W) if kind == "rolling" else causal())
    )


@pytest.mark.parametrize("kind", CACHES)
def test_a_padded_cache_is_reset_only_with_the_padding_of_its_next_tokens(kind: str) -> None:
    m, x, cache = module(), inputs(), CACHES[kind]()
    cache.reset(padding=[5, 0, 1])
    m(x[:, :7], cache=cache)
    refused(ValueError, r"padding: .* the cache has padding \[5, 0, 1\]; .* padding=\[0, …\] for none", cache.reset)
    assert (cache.length, cache.padding) == (7, (5, 0, 1))  # as it was
    cache.reset(padding=[5, 0, 1])
    assert (cache.length, cache.padding) == (0, (5, 0, 1))
    cache.reset(padding=[0] * B)
    cache.reset()
    assert cache.padding == ()


@pytest.mark.parametrize("kind", CACHES)
def test_a_reset_cache_takes_tokens_of_other_sizes(kind: str) -> None:
    m, x, cache = module(), inputs(), CACHES[kind]()
    expected = m(x, mask=window(W) if kind == "rolling" else causal())
    m(x[:, :5], cache=cache)
    cache.reorder([0, 0, 1, 1, 2])
    cache.reset()
    torch.testing.assert_close(decoded(m, x, cache, CUTS["prefill"]), expected)
    cache.reset()
    half = m.float()(x.float(), cache=cache)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), expected, rtol=1e-4, atol=1e-4)


def test_half_precision_decodes_in_it() -> None:
    m, x = module(rotary=Rotary(6)).bfloat16(), inputs().bfloat16()
    cache = StaticCache(T)
    out = decoded(m, x, cache, CUTS["prefill"])
    assert out.dtype == cache.keys.dtype == torch.bfloat16
    full = m(x, mask=causal())
    assert_as_accurate(out, m.double()(x.double(), mask=causal()), full)


def test_a_watched_module_shows_each_step() -> None:
    m, x, cache = module(rotary=Rotary(6)), inputs(), StaticCache(T)
    m(x[:, :-1], cache=cache)
    weights = m(x, mask=causal(), need_weights=True)[1][:, :, -1]  # [B, H, K]
    with watch(m) as seen:
        m(x[:, -1:], cache=cache)
    entropy = -(weights * weights.log()).sum(-1).mean(0)
    for h in range(H):
        found: Any = seen["MultiHeadAttention", h, "entropy"]
        torch.testing.assert_close(found.mean, entropy[h].item(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", CACHES)
def test_a_step_of_one_token_beside_padding_stands_at_the_end(kind: str) -> None:
    m, x, padding, cache = module(rotary=Rotary(6)), inputs(), (0, 7, 3), CACHES[kind]()
    what = Observe(keep_rows=True, windows=(2,))
    cache.reset(padding=padding)
    m(x[:, :-1], cache=cache)
    with watch(m, what=what, tokens=torch.arange(T) % 6) as seen:
        m(x[:, -1:], cache=cache)
    step = seen.stats[0].kept[0].values
    assert {"self", "previous", "next", "distance", "window_2", "duplicate", "induction"} < step.keys()
    for b, count in enumerate(padding):
        with watch(m, what=what, tokens=torch.arange(count, T) % 6) as seen:
            m(x[b : b + 1, count:], mask=window(W) if kind == "rolling" else causal())
        whole = seen.stats[0].kept[0].values
        for name in step.keys() - {"argmax", "first", "streaming_2"}:  # places of keys are others
            torch.testing.assert_close(step[name][b, :, -1], whole[name][0, :, -1], equal_nan=True, msg=name)


@pytest.mark.parametrize("kind", CACHES)
def test_watched_steps_that_a_window_slides_over_are_those_of_one_pass(kind: str) -> None:
    m, x, cache = module(rotary=Rotary(6)), inputs(), CACHES[kind]()
    what, mask = Observe(received=True, windows=(2,)), window(W)
    with watch(m, what=what, tokens=torch.arange(T) % 3) as steps:
        for part in x.split([11, *[1] * 6], 1):
            m(part, cache=cache, mask=mask)
    with watch(m, what=what, tokens=torch.arange(T) % 3) as whole:
        m(x, mask=mask)
    ours, exact = (each.stats.parts["MultiHeadAttention"] for each in (steps, whole))
    assert {*ours.moments} == {*exact.moments}
    for name in ("received", "eligible"):
        torch.testing.assert_close(getattr(ours, name), getattr(exact, name), msg=name)
    dropped = {"first", "streaming_2"}  # which keys were the first is known of the prompt alone
    for name in exact.moments:
        if name in dropped:
            assert ours.moments[name].count.tolist() == [B * 11] * H
        else:
            assert torch.equal(ours.moments[name].count, exact.moments[name].count), name
            torch.testing.assert_close(ours.moments[name].mean, exact.moments[name].mean, equal_nan=True, msg=name)


def refused(error: type[Exception], says: str, act: Callable[[], Any]) -> None:
    with pytest.raises(error, match=says):
        act()


def test_a_full_cache_says_so_and_stays_as_it_was() -> None:
    m, x, cache = module(), inputs(), StaticCache(8)
    m(x[:, :6], cache=cache)
    says = "cache: is full; it holds 6 of 8 tokens, got 3 more; expected a capacity of at least 9"
    refused(ValueError, says, lambda: m(x[:, 6:9], cache=cache))
    torch.testing.assert_close(m(x[:, 6:8], cache=cache), m(x[:, :8], mask=causal())[:, 6:])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("before", "new"), [(0, 1), (0, 11), (3, 2), (8, 1), (8, 9), (9, 3)])
def test_a_call_that_raises_leaves_the_cache_as_it_was(before: int, new: int, kind: str) -> None:
    m, x, cache = module(rotary=Rotary(6)), inputs(), CACHES[kind]()
    mask = window(W) if kind == "rolling" else causal()
    for t in range(before):
        m(x[:, t : t + 1], cache=cache)
    said, held = repr(cache), None if not before else (cache.keys.clone(), cache.values.clone())

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    def refuse(error: type[Exception], **given: Any) -> None:
        with pytest.raises(error):
            m(x[:, before : before + new], cache=cache, **given)
        assert repr(cache) == said
        if held is not None:
            torch.testing.assert_close((cache.keys, cache.values), held, rtol=0, atol=0)

    refuse(ValueError, bias=torch.zeros(99, 99))
    refuse(ValueError, mask=Dense(torch.ones(99, 99) > 0))
    hook = m.out_proj.register_forward_hook(fails)
    refuse(RuntimeError)
    hook.remove()
    wanted = m(x[:, : before + new], mask=mask)[:, before:]
    torch.testing.assert_close(m(x[:, before : before + new], cache=cache), wanted)


@pytest.mark.parametrize("kind", CACHES)
def test_tokens_of_a_call_within_a_call_are_not_taken_for_its_own(kind: str) -> None:
    ours, cache, x = MultiHeadAttention(E, 2).eval(), CACHES[kind](), torch.randn(1, 4, E)

    def inner(*_: object) -> None:
        hook.remove()
        with pytest.raises(ValueError, match="bias"):
            ours(x[:, :2], cache=cache, bias=torch.zeros(7, 7))
        ours(x[:, :1], cache=cache)

    hook = ours.out_proj.register_forward_hook(inner)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cache: another call added tokens while this one ran"):
        ours(x, cache=cache)
    assert cache.length == 1


@pytest.mark.parametrize("kind", CACHES)
def test_keys_over_which_a_failing_call_has_written_are_not_taken_for_its_own(kind: str) -> None:
    ours, cache, x = MultiHeadAttention(E, 2).eval(), CACHES[kind](), torch.randn(1, 4, E)

    def inner(*_: object) -> None:
        hook.remove()
        with pytest.raises(ValueError, match="bias"):
            ours(x[:, :2], cache=cache, bias=torch.zeros(7, 7))

    hook = ours.out_proj.register_forward_hook(inner)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cache: another call added tokens while this one ran"):
        ours(x, cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize("cache", [GrowingCache(), StaticCache(300), RollingCache(400)], ids=repr)
def test_of_two_threads_each_call_that_returns_has_its_tokens_in_the_cache(cache: Cache) -> None:
    """Each token has a number of its own, which its keys hold: none is lost, and none is there twice."""
    done: tuple[list[float], list[float]] = ([], [])

    def work(thread: int) -> None:
        for n in range(1, 151):
            number = torch.full((1, 1, 1, 2), float(n if thread else -n))
            with contextlib.suppress(RuntimeError):
                cache.append(number, number)
                done[thread].append(float(number[0, 0, 0, 0]))

    threads, interval = [Thread(target=work, args=(n,)) for n in (0, 1)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    held = cache.keys[0, 0, :, 0].tolist()
    assert torch.equal(cache.keys, cache.values)
    assert ([x for x in held if x < 0], [x for x in held if x > 0]) == done


def test_a_cache_is_copied_and_pickled() -> None:
    cache = GrowingCache(padding=[1, 0])
    cache.append(*torch.randn(2, 2, 1, 3, 4))
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.append(*torch.randn(2, 2, 1, 1, 4))
        assert (cache.length, other.length, other.padding) == (3, 4, (1, 0))
        assert torch.equal(other.keys[:, :, :3], cache.keys)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_step_holds_no_cache(strict: bool) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.cache = MultiHeadAttention(E, 2).eval(), GrowingCache()

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x, cache=self.cache)

    step = Step()
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"cache: torch\.export does not support a cache|Observed exception"),
    ):
        torch.export.export(step, (torch.randn(1, 1, E),), strict=strict)
    assert step.cache.length == 0


def test_a_first_call_that_raises_leaves_the_sizes_open() -> None:
    m, x, cache = module(), inputs(), GrowingCache()
    refused(ValueError, "bias: ", lambda: m(x, cache=cache, bias=torch.zeros(99, 99)))
    assert m(x[:2], cache=cache).shape == (2, T, E)


def test_what_does_not_fit_is_named() -> None:
    m, x, cache = module(), inputs(), GrowingCache()
    refused(ValueError, "cache: is empty", lambda: cache.reorder([0]))
    m(x[:, :2], cache=cache)
    refused(ValueError, r"cache: k is \[2, 4, 1, 6\], expected \[3, 4, T, 6\]", lambda: m(x[:2, :1], cache=cache))
    refused(ValueError, "cache: expected x with three axes", lambda: m(x[0], cache=cache))
    refused(
        TypeError, "cache: k is float32 on cpu, the cached one is float64", lambda: m.float()(x.float(), cache=cache)
    )
    m.double()
    refused(TypeError, "cache: got int, expected a cache of headscope.cache", lambda: m(x, cache=3))  # pyright: ignore[reportArgumentType]
    refused(ValueError, "context: expected None together with a cache", lambda: m(x, x, cache=cache))
    refused(ValueError, r"rows: got \[3\], expected numbers from 0 to 2", lambda: cache.reorder([3]))
    refused(ValueError, "rows: got none, expected at least one number from 0 to 2", lambda: cache.reorder([]))
    refused(TypeError, r"rows: got float32 \[1\], expected integers", lambda: cache.reorder(torch.zeros(1)))
    learning = module().requires_grad_()
    refused(ValueError, "cache: k and v require gradients", lambda: learning(x, cache=GrowingCache()))
    turning = module(rotary=Rotary(6))
    refused(
        ValueError,
        "positions: expected None together with a cache",
        lambda: turning(x, positions=torch.arange(T), cache=GrowingCache()),
    )
    dynamic = module(rotary=Rotary(6, scaling=NTK(2, 8)))
    refused(ValueError, r"cache: this module has NTK\(original_length", lambda: dynamic(x, cache=GrowingCache()))


def test_options_that_do_not_fit_are_named() -> None:
    m, x = module(), inputs()
    refused(ValueError, "capacity: got 0, expected a whole number from 1", lambda: StaticCache(0))
    refused(TypeError, "window: got float, expected a whole number", lambda: RollingCache(2.0))  # pyright: ignore[reportArgumentType]
    refused(ValueError, r"padding: got \[-1\], expected numbers from 0", lambda: GrowingCache(padding=[-1]))
    refused(
        TypeError, r"padding: got bool \[1\], expected integers", lambda: GrowingCache(padding=torch.tensor([True]))
    )
    refused(ValueError, "cache: padding has 2 rows, expected 3", lambda: m(x, cache=GrowingCache(padding=[1, 0])))
    for mask in (Prefix(2), KeyLengths(torch.tensor([1, 2, 3])), Band(None, 0, offset=0), causal() & Prefix(2)):
        refused(
            ValueError, "mask: got .*, expected causal.* a RollingCache drops keys",
            lambda mask=mask: m(x, mask=mask, cache=RollingCache(3)),
        )  # fmt: skip
