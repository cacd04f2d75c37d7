"""Numbers of numpy and tensors without axes serve where a number is expected: sweeps and sorted heads give these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headscope import HeadStats, MultiHeadAttention, Observe, ablate, observe, trace, watch
from headscope._support.arguments import as_whole, whole
from headscope.cache import RollingCache, StaticCache
from headscope.decisions import kv_budget
from headscope.positions import NTK, ALiBi, Rotary, T5Buckets, YaRN


def observed(what: Observe) -> HeadStats:
    torch.manual_seed(0)
    return observe(torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8), what=what)


def test_what_to_observe() -> None:
    numbers = {"map": 3, "edges": 2, "top": 2, "first": 2, "rows": 5}
    given = {name: np.int64(n) for name, n in numbers.items()}
    what = Observe(windows=(np.float32(1.5), np.int64(3)), **given)  # pyright: ignore[reportArgumentType]
    assert observed(what).flat() == observed(Observe(windows=(1.5, 3), **numbers)).flat()
    assert [type(getattr(what, name)) for name in numbers] == [int] * 5
    with pytest.raises(TypeError, match="map: got float64, expected a whole number from 1 or None"):
        Observe(map=np.float64(3))  # pyright: ignore[reportArgumentType]


def test_a_head_and_a_layer() -> None:
    stats: Any = observed(Observe())
    order = stats["entropy"].mean[0].argsort()
    for head in (order[-1], order.numpy()[-1], np.uint8(int(order[-1]))):
        assert stats[np.int32(0), head, "entropy"].mean == float(stats["entropy"].mean.max())
        assert stats[torch.tensor(-1), head] == stats[0, int(order[-1])]
    for wrong in (True, torch.tensor(True), torch.tensor([1]), 1.0, np.float64(1), np.True_):
        with pytest.raises(TypeError, match=r"stats\[...\]: got"):
            stats[0, wrong]
        with pytest.raises(TypeError, match=r"layer: got"):
            stats[wrong]
    assert kv_budget(stats, tuple(np.arange(1, 3))).to_dict() == kv_budget(stats, (1, 2)).to_dict()


def test_a_module() -> None:
    two, x = np.int64(2), torch.randn(1, 5, 8)
    module = MultiHeadAttention(np.int32(8), np.int64(4), kv_heads=two, qk_norm="rms", qk_norm_eps=np.float32(0.5))  # pyright: ignore[reportArgumentType]
    same = MultiHeadAttention(8, 4, kv_heads=2, qk_norm="rms", qk_norm_eps=0.5)
    same.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), same(x))
    assert repr(module) == repr(same)
    assert {type(n) for n in (module.embed_dim, module.num_heads, module.kv_heads, module.head_dim)} == {int}
    assert trace(seq=two, dim=np.int64(8), heads=two).to_dict() == trace(seq=2, dim=8, heads=2).to_dict()  # pyright: ignore[reportArgumentType]
    assert (StaticCache(two).capacity, RollingCache(two).window) == (2, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (lambda i, f: Rotary(i(8), f(1000), scaling=NTK(f(2), i(16))), Rotary(8, 1000.0, scaling=NTK(2.0, 16))),
        (lambda i, f: YaRN(f(2), i(16), mscale=f(1), mscale_all_dim=f(1)), YaRN(2, 16, mscale=1, mscale_all_dim=1)),
        (lambda i, f: ALiBi(i(2)), ALiBi(2)),
        (lambda i, f: T5Buckets(i(8), i(32)), T5Buckets(8, 32)),
    ],
)
def test_positions(given: Any, same: object) -> None:
    found = given(np.int64, np.float32)
    assert found == same
    assert repr(found).replace(".0,", ",") == repr(same).replace(".0,", ","), "numbers of Python"


def test_watching_and_ablating() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model, x = Attention(), torch.randn(1, 3, 4, 8)
    with watch(model, every=np.int64(2), rows=np.int64(2)) as seen:  # pyright: ignore[reportArgumentType]
        for _ in range(3):
            model(x)
    assert (seen.forwards, int(seen["entropy"].count[0, 0])) == (2, 4)
    for heads in (np.int64(1), np.array([1]), torch.tensor(1)):
        with ablate(model, {"Attention": heads}, scale=np.float32(0.5)):  # pyright: ignore[reportArgumentType]
            torch.testing.assert_close(model(x)[:, 1], nn.functional.scaled_dot_product_attention(x, x, x)[:, 1] / 2)


@pytest.mark.parametrize(
    "value", [True, np.True_, torch.tensor(True), 1.0, "1", None, torch.ones(1, dtype=torch.int64)]
)
def test_what_is_no_whole_number(value: object) -> None:
    assert as_whole(value) is None
    with pytest.raises(TypeError, match=r"n: got \w+, expected a whole number from 1"):
        whole("n", value)
