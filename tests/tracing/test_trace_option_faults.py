"""trace finds faults in norms, rotary, biases by distance, the key of bias_kv and the gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headscope import MultiHeadAttention, trace
from headscope.module import _multi_head, _placement
from headscope.positions import Rotary
from headscope.tracing import _own_values, _steps
from support.traced_modules import made
from support.traced_options import OPTIONS, E, H

TURN = Rotary.turn


def failures(module: MultiHeadAttention, **call: Any) -> list[str]:
    return [row.step for row in trace(module, torch.randn(2, 7, E), **call).failed]


@pytest.mark.parametrize(
    ("option", "wrong", "outcome"),
    [
        ("rms", lambda self, norm, x: x, "its size before the gain has error"),
        ("rms", lambda self, norm, x: norm(x.flip(-1)), ": error"),  # of the right size
        ("layer", lambda self, norm, x: norm(x) + 1e-3, "its size before the gain has error"),
        ("rms of all heads", lambda self, norm, x: F.rms_norm(x, (E // H,)), "error"),  # each head by itself
    ],
)
def test_norms_can_fail(monkeypatch: pytest.MonkeyPatch, option: str, wrong: Any, outcome: str) -> None:
    monkeypatch.setattr(MultiHeadAttention, "_normed", wrong)
    found = trace(made(E, H, **OPTIONS[option]), torch.randn(2, 7, E))
    assert [row.step for row in found.failed] == ["normalise queries", "normalise keys"]
    assert outcome in found.failed[0].invariant


@pytest.mark.parametrize(
    ("wrong", "outcome"),
    [
        (lambda self, x, cos, sin: TURN(self, x, cos, -sin), ": error"),  # the other way
        (lambda self, x, cos, sin: TURN(replace(self, pairing="interleaved"), x, cos, sin), "error"),
        (lambda self, x, cos, sin: TURN(self, x, cos, 1.01 * sin), "the norm of a pair has error"),
        (lambda self, x, cos, sin: F.pad(TURN(self, x, cos, sin)[..., :4], (0, 2)), "56 components beyond the first 4"),
    ],
)
def test_rotation_can_fail(monkeypatch: pytest.MonkeyPatch, wrong: Any, outcome: str) -> None:
    monkeypatch.setattr(Rotary, "turn", wrong)
    found = trace(made(E, H, rotary=Rotary(4)), torch.randn(1, 7, E))
    assert [row.step for row in found.failed] == ["rotate queries", "rotate keys"]
    assert outcome in found.failed[0].invariant


@pytest.mark.parametrize("option", ["ALiBi", "T5", "reproducible ALiBi"])
def test_position_bias_can_fail(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    module = made(E, H, **OPTIONS[option])
    for name in ("matrix", "turned_matrix"):
        right = getattr(_placement, name)
        wrong = lambda bias, *args, right=right: right(bias, *args).flip(-3)  # noqa: E731 - of another head
        monkeypatch.setattr(_placement, name, wrong)
    assert failures(module) == ["position bias"]
    assert failures(module, bias=torch.randn(7, 7), causal=True) == ["position bias"]


def test_the_key_of_bias_kv_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(E, H, bias_kv=True, kv_heads=2)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "repeat_interleave", lambda x, n, dim: x.repeat(n, *(1 for _ in x.shape[1:])))
        assert {"bias key", "bias value"} <= set(failures(module))
    right = _own_values.own_share
    wrong = lambda q, k, lse, scale, cap: right(q, k, lse, 1.01 * scale, cap)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(_own_values, "own_share", wrong)
        assert failures(module) == ["head outputs", "output"]
    monkeypatch.setattr(_multi_head, "own_share", wrong)
    assert failures(module) == ["output"]


def test_the_gate_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(E, H, gate=True)
    with monkeypatch.context() as patch:
        patch.setattr(_steps, "gate_of", lambda numbers, reproducible: numbers)
        found = trace(module, torch.randn(2, 7, E))
        assert [row.step for row in found.failed] == ["gate", "output"]
        assert "of its numbers lie outside [0, 1]" in found.failed[0].invariant
        patch.setattr(_steps, "gate_of", lambda numbers, reproducible: 0.999 * numbers.sigmoid())
        assert failures(module) == ["gate", "output"]
    with monkeypatch.context() as patch:
        patch.setattr(_multi_head, "gate_of", lambda numbers, reproducible: numbers.tanh())
        assert failures(module) == ["output"]
    right = Tensor.__mul__

    def multiply(a: Tensor, b: Any) -> Tensor:
        gated = isinstance(b, Tensor) and a.shape == b.shape == (2, 7, E) and a.dtype == torch.float32
        return right(a, b) * 1.001 if gated else right(a, b)

    monkeypatch.setattr(Tensor, "__mul__", multiply)
    assert failures(module) == ["gated outputs"]
