"""trace finds faults: each invariant can fail, on all rows and on a sample; and a mask's pairs are counted right."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headscope import MultiHeadAttention, functional, masks, trace
from headscope.tracing import _attention_steps, _invariants, _steps
from headscope.tracing._invariants import VisiblePairs, count_visible_pairs, spread
from support.traced_modules import WithoutOutput, made, printed


class SplitByView(MultiHeadAttention):
    """Cuts into heads by a view, without the transpose."""

    def project(self, x: Tensor, context: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, context)
        return tuple(t.transpose(1, 2).flatten(2).reshape(t.shape) for t in (q, k, v))


class SwapsKeys(MultiHeadAttention):
    """Says that its keys come from the queries' matrix."""

    def projection(self, name: str) -> tuple[Tensor, Tensor | None]:
        return super().projection("q" if name == "k" else name)


@pytest.mark.parametrize(
    ("wrong", "steps"),
    [
        (SplitByView, ["split queries", "split keys", "split values"]),
        (WithoutOutput, ["output"]),
        (SwapsKeys, ["split keys"]),
    ],
)
def test_a_wrong_module_fails_where_it_is_wrong(wrong: type[MultiHeadAttention], steps: list[str]) -> None:
    found = trace(wrong(15, 3), torch.randn(2, 7, 15))
    assert [row.step for row in found.failed] == steps
    assert found.held is False
    assert f"failed: {', '.join(steps)}" in found.summary
    assert "✗" in printed(found)


def test_a_module_of_another_width_fails() -> None:
    class Narrow(MultiHeadAttention):
        def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
            return super().forward(x)[..., :-1]

    assert "the shape is [2, 7, 14]" in trace(Narrow(15, 3), torch.randn(2, 7, 15)).row("output").invariant


def test_the_worst_error_is_said_beside_values_that_are_not_finite() -> None:
    class AddsOne(MultiHeadAttention):
        def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
            return super().forward(x, *args, **options) + 1

    x = torch.randn(2, 7, 15)
    x[0, 6] = torch.inf
    row = trace(AddsOne(15, 3), x, causal=True).row("output")
    assert row.held is False
    assert "error 1e+00, allowed" in row.invariant


def failing(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, wrong: Any, **case: Any) -> list[str]:
    """The steps that fail once ``wrong`` stands in for something a trace uses."""
    module, x = made(15, 3, **case.pop("module", {})), torch.randn(2, 7, 15)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, wrong)
        return [row.step for row in trace(module, x, **case).failed]


def test_projections_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(linear=lambda x, w, b: x @ w + b)
    assert failing(monkeypatch, _steps, "F", wrong)[:3] == ["queries", "keys", "values"]


def test_split_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = failing(monkeypatch, _steps, "split_heads", lambda x, h, d: x.reshape(len(x), h, -1, d))
    assert found == ["split queries", "split keys", "split values", "concatenation"]


def test_concatenation_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = failing(monkeypatch, _steps, "merge_heads", lambda x: x.reshape(len(x), x.shape[2], -1))
    assert "concatenation" in found


def test_sharing_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda x, n, dim: x.repeat(1, n, 1, 1)  # noqa: E731
    found = failing(monkeypatch, Tensor, "repeat_interleave", wrong, module={"head_dim": 5, "kv_heads": 1})
    assert found == [], "with one key head both are the same"
    module, x = made(20, 4, kv_heads=2), torch.randn(2, 7, 20)
    monkeypatch.setattr(Tensor, "repeat_interleave", wrong)
    assert [row.step for row in trace(module, x).failed][:2] == ["share keys", "share values"]


def _changed(name: str, change: Any) -> Any:
    """``sample_matrix``, with one of its tensors changed."""
    original = _attention_steps.sample_matrix

    def wrong(*args: Any) -> Any:
        matrix = original(*args)
        setattr(matrix, name, change(getattr(matrix, name)))
        return matrix

    return wrong


@pytest.mark.parametrize(
    ("part", "change", "step", "call"),
    [
        ("s", lambda s: s * (5 / 15) ** 0.5, "scores", {}),  # √E for √D
        ("bias", lambda b: b.flip(-1), "bias", {"bias": torch.randn(7, 7)}),
        ("allowed", lambda m: ~m, "mask", {"causal": True}),  # polarity
        ("allowed", lambda m: ~m, "mask", {"mask": masks.Prefix(2)}),
        ("allowed", lambda m: m.transpose(-1, -2), "mask", {"causal": True}),
        ("allowed", lambda m: m.roll(1, -1), "mask", {"causal": True, "module": {"sinks": True}}),
    ],
)
def test_steps_of_the_matrix_can_fail(
    monkeypatch: pytest.MonkeyPatch, part: str, change: Any, step: str, call: dict[str, Any]
) -> None:
    found = failing(monkeypatch, _attention_steps, "sample_matrix", _changed(part, change), **call)
    assert found[0] == step
    assert "head outputs" in found, "what is wrong in the scores must show in the heads"


def test_softcap_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.tanh
    wrong = lambda s: s if s.dtype == torch.float32 else right(s)  # noqa: E731
    assert "softcap" in failing(monkeypatch, torch, "tanh", wrong, module={"softcap": 0.1})


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda s, dim: (s - s.logsumexp(-2, keepdim=True)).exp(), "error"),  # over the wrong axis
        (lambda s, dim: s.masked_fill(s == -torch.inf, 0).exp() / s.shape[dim], "masked pairs have weight"),
        (lambda s, dim: s, "outside"),
    ],
)
def test_weights_can_fail(monkeypatch: pytest.MonkeyPatch, wrong: Any, found: str) -> None:
    module, x = made(15, 3), torch.randn(2, 7, 15)
    monkeypatch.setattr(torch, "softmax", wrong)
    row = trace(module, x, causal=True).row("weights")
    assert row.held is False
    assert found in row.invariant


def test_a_weight_on_the_future_is_found_whatever_the_mask_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks.Band, "allows", lambda self, b, h, i, j: j <= i + 1)
    found = trace(made(15, 3), torch.randn(2, 7, 15), causal=True)
    assert [row.step for row in found.failed] == ["mask", "weights", "head outputs"]
    assert "36 masked pairs have weight" in found.row("weights").invariant


def test_head_outputs_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.attention
    wrong = lambda q, k, v, **options: right(q, k, v.flip(-2), **options)  # noqa: E731
    assert failing(monkeypatch, functional, "attention", wrong) == ["head outputs"]


def test_a_small_error_in_a_weight_is_found() -> None:
    class Off(MultiHeadAttention):
        def project(self, x: Tensor, context: Any = None) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().project(x, context)
            return q * (1 + 1e-4), k, v

    assert [row.step for row in trace(Off(15, 3), torch.randn(2, 7, 15)).failed] == ["split queries"]


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal": True},
        {"mask": masks.KeyLengths(torch.tensor([7, 31]))},
        {"mask": masks.Documents(torch.arange(31).repeat(2, 1) % 3), "bias": torch.randn(4, 1, 31)},
    ],
)
def test_large_inputs_are_checked_on_a_sample(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any]) -> None:
    module, x = made(20, 4, kv_heads=2), torch.randn(2, 31, 20)
    whole = trace(module, x, **call)
    monkeypatch.setattr(_invariants, "MATRIX", 1 << 10)
    monkeypatch.setattr(_invariants, "PRODUCTS", 1 << 12)
    monkeypatch.setattr(_steps, "PRODUCTS", 1 << 12)
    found = trace(module, x, **call)
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]
    assert re.search(r"\(on \d+ of 248 rows\)$", found.row("weights").invariant)
    assert found.row("queries").invariant.endswith("(on 10 of 62 positions)")
    assert [row.shape for row in found.rows] == [row.shape for row in whole.rows]
    for mine, theirs in zip(found.rows, whole.rows, strict=True):
        torch.testing.assert_close(torch.tensor(mine.corner), torch.tensor(theirs.corner), msg=mine.step)
    monkeypatch.setattr(_attention_steps, "sample_matrix", _changed("s", lambda s: s / 2))
    assert "scores" in [row.step for row in trace(module, x, **call).failed], "a sample must find it too"


@given(st.integers(0, 50), st.integers(1, 60))
def test_spread_covers_an_axis(size: int, wanted: int) -> None:
    chosen = spread(size, wanted).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= max(4, wanted)
    assert all(0 <= index < size for index in chosen)
    assert chosen[: min(4, wanted, size)] == list(range(min(4, wanted, size))) or wanted < 4
    if wanted >= size:
        assert chosen == list(range(size))


reach = st.none() | st.integers(-3, 8)
bands = st.builds(
    masks.Band, reach, reach, st.none() | st.integers(-9, 9) | st.tuples(st.integers(-9, 9), st.integers(-9, 9))
)
simple = bands | st.builds(masks.Prefix, st.integers(0, 9))


@given(simple | st.builds(lambda a, b: a & b, simple, simple) | st.builds(lambda a, b: a | b, simple, simple),
       st.integers(0, 7), st.integers(0, 8))  # fmt: skip
def test_visible_pairs_are_counted_as_they_are(mask: masks.Mask, queries: int, keys: int) -> None:
    dense = mask.dense(2, 3, queries, keys)
    wanted = VisiblePairs(int(dense.sum()), int((~dense.any(-1)).sum()))
    assert count_visible_pairs(mask, (2, 3, queries, keys)) == wanted


def test_visible_pairs_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.Dense(torch.rand(2, 1, 5, 7) > 0.5) & masks.Band(None, 1)
    dense = mask.dense(2, 3, 5, 7)
    monkeypatch.setattr(_invariants, "MATRIX", 100)  # more than one run of rows
    assert count_visible_pairs(mask, (2, 3, 5, 7)) == VisiblePairs(int(dense.sum()), int((~dense.any(-1)).sum()))
    monkeypatch.setattr(_invariants, "COUNTED", 100)
    assert count_visible_pairs(mask, (2, 3, 5, 7)) is None
    assert count_visible_pairs(masks.KeyLengths(torch.tensor([1, 2], device="meta")), (2, 3, 5, 7)) is None
