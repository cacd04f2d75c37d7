"""Where headscope attends, a call like an earlier one is attended and measured in one pass over the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headscope
from headscope import MultiHeadAttention, Observe, masks, watch
from headscope._observe.steps import NativeRepetition
from headscope.stats import merge
from support.watched_models import SIZES, spread

Passes = list[bool]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Whether each attempt to attend and measure in one pass succeeded."""
    attend, results = NativeRepetition.attend, Passes()

    def counted(self: NativeRepetition, q: Tensor, k: Tensor, v: Tensor) -> Any:
        result = attend(self, q, k, v)
        results.append(result is not None)
        return result

    monkeypatch.setattr(NativeRepetition, "attend", counted)
    return results


def module(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(24, 3, **options).eval()


def teach(model: nn.Module, x: Tensor, what: Observe | None = None, **call: Any) -> None:
    """Show a watch what the model does: it follows the first call, and describes the second."""
    with torch.no_grad(), watch(model, what=what):
        model(x, **call)
        model(x, **call)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "grouped": {"kv_heads": 1},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "what", [Observe(), Observe(map=7, edges=5, top=3, keep_rows=True), Observe(rows=64), Observe(rows=4, map=3)]
)
@torch.no_grad()
def test_output_and_statistics_are_those_of_two_passes(name: str, what: Observe, passes: Passes) -> None:
    options = dict(OPTIONS[name])
    call = {"mask": options.pop("mask")} if "mask" in options else {}
    attention, batches = module(**options), [numbers(2, 13, 24) * scale for scale in (1, 3, 2)]
    expected = [attention(x, **call) for x in batches]
    teach(attention, batches[0], what=what, **call)
    with watch(attention, what=what) as recording:
        for x, output in zip(batches, expected, strict=True):
            assert torch.equal(attention(x, **call), output)
    assert passes == [True, True, True]
    separate = []
    for x in batches:
        with watch(attention, what=what, verify=1) as each:  # describes each call
            attention(x, **call)
        separate.append(each.stats)
    assert passes == [True, True, True]
    merged = merge(*separate)
    rtol = 1e-6 if what.rows == 4 else 0  # to verify a sample, its rows are computed alone
    for column in recording.names:
        torch.testing.assert_close(recording[column].mean, merged[column].mean, rtol=rtol, atol=0, equal_nan=True)
    torch.testing.assert_close(recording.stats.received, merged.received, rtol=rtol, atol=0)


@pytest.mark.parametrize("case", ["sample", "gradient", "dropout", "not finite", "two watches", "other length"])
def test_calls_that_cannot_be_one_pass_are_two(case: str, passes: Passes) -> None:
    attention, x = module(dropout=0.25 if case == "dropout" else 0.0), numbers(1, 13, 24)
    what = Observe(rows=2) if case == "sample" else Observe()
    teach(attention, x, what)
    attention.train(case == "dropout")
    teach(attention, x, what)
    passes.clear()
    second = {
        "not finite": x.index_fill(1, torch.tensor([3]), float("nan")),
        "other length": numbers(1, 11, 24),
    }.get(case, x)
    with torch.set_grad_enabled(case == "gradient"):
        torch.manual_seed(2)
        expected = attention(x), attention(second)
        with watch(attention, what=what) as recording:
            torch.manual_seed(2)
            outputs: list[Tensor] = [attention(x)]
            if case == "two watches":
                with watch(attention) as inner:
                    outputs.append(attention(second))
                assert inner["entropy"].count.sum() == 3 * 13
            else:
                outputs.append(attention(second))
    for output, each in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, each, rtol=0, atol=0, equal_nan=True)
    one_pass = {"sample": [False, False], "not finite": [True, False], "two watches": [True], "other length": [True]}
    assert passes == one_pass.get(case, [])
    rows = {"sample": 2 * 2, "not finite": 13, "other length": 13 + 11}.get(case, 2 * 13)
    assert recording["entropy"].count.tolist() == [[rows] * 3]


@torch.no_grad()
def test_another_backend_attends_as_without_a_watch(passes: Passes) -> None:
    q = numbers(1, 3, 13, 8)

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return headscope.attention(x, x, x, backend="blocked")

    model = Calls()
    expected = model(q)
    with watch(model) as recording:
        assert torch.equal(model(q), expected)
        assert torch.equal(model(q), expected)
    assert passes == []
    assert recording["entropy"].count.tolist() == [[26] * 3]


@torch.no_grad()
def test_accelerated_transformers_give_the_same_twice(passes: Passes) -> None:
    model = spread(transformers.LlamaModel(transformers.LlamaConfig(**SIZES, use_cache=False)))
    ids = torch.arange(13)[None] % 7
    plain = model(ids)[0]
    with watch(model):
        model(ids)
    with watch(model, accelerate=True) as recording:
        first, second, third = model(ids)[0], model(ids)[0], model(ids)[0]
    assert passes
    assert all(passes)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-5)
    with watch(model) as other:
        for _ in range(3):
            model(ids)
    for name in ("entropy", "max_weight", "distance", "value_norm"):
        torch.testing.assert_close(recording[name].mean, other[name].mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(recording[name].count, other[name].count)


@torch.no_grad()
def test_a_sample_is_measured_alike_from_the_first_watch_on(passes: Passes) -> None:
    attention, x = module(), numbers(1, 13, 24)
    recordings: list[headscope.Recording] = []
    for _ in range(4):
        with watch(attention, what=Observe(rows=6, map=3)) as recording:
            attention(x)
        recordings.append(recording)
    assert passes == [True, True]
    first, *others = recordings
    for other in others:
        assert torch.equal(other.stats.received, first.stats.received)
        assert all(torch.equal(other[name].mean, first[name].mean) for name in ("entropy", "max_weight", "distance"))
        assert torch.equal(other.stats.map.sum, first.stats.map.sum)
