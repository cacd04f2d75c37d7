"""Dropout: how much is dropped, what seeds it, and that both passes drop the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope._attend.backends import blocked
from headscope.masks import Band, causal, window
from support.attention_cases import ANY, tensors

BY = ANY
LONG = (1, 4, 64, 64)  # B, H, Q, K: 16,384 weights


def dropped_weights(rate: float, *, by: str, heads: int = LONG[1], mask: Any = None) -> tuple[Tensor, Tensor]:
    """The weights with dropout and those without, [B, H, Q, K]: values that are the identity show them."""
    batch, _, queries, keys = LONG
    q, k = torch.randn(batch, heads, queries, 8), torch.randn(batch, heads, keys, 8)
    v = torch.eye(keys).expand(batch, heads, keys, keys)
    arguments: dict[str, Any] = {"mask": mask, "backend": by}
    return headscope.attention(q, k, v, dropout=rate, **arguments), headscope.attention(q, k, v, **arguments)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("backend", BY, indirect=True)
def test_a_weight_is_dropped_or_scaled(rate: float, backend: str) -> None:
    got, usual = dropped_weights(rate, by=backend)
    kept = got != 0
    torch.testing.assert_close(got[kept], (usual / (1 - rate))[kept])
    share = float(kept.float().mean())
    spread = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(share - (1 - rate)) < 5 * spread, f"kept {share:.4f}, expected {1 - rate:.4f} ± {spread:.4f}"


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_weights_are_dropped_independently(backend: str) -> None:
    """Across heads, queries and keys, and across blocks."""
    got, _ = dropped_weights(0.5, by=backend)
    kept = (got != 0).double() - 0.5
    for shift in ((0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 2, 0), (0, 2, 8, 0)):
        overlap = float((kept * kept.roll(shift, (0, 1, 2, 3))).mean()) * 4
        assert abs(overlap) < 5 / kept.numel() ** 0.5, f"shifted by {shift}: correlation {overlap:.4f}"


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_is_seeded_from_torch(backend: str) -> None:
    given = tensors(torch.float32)
    torch.manual_seed(1)
    first = headscope.attention(**given, dropout=0.3, backend=backend)
    second = headscope.attention(**given, dropout=0.3, backend=backend)
    torch.manual_seed(1)
    again = headscope.attention(**given, dropout=0.3, backend=backend)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(first, second), "two calls drop the same"


@pytest.mark.parametrize("backend", [*BY, None], indirect=True)
def test_without_dropout_the_generator_is_left_alone(backend: str) -> None:
    before = torch.get_rng_state()
    headscope.attention(**tensors(torch.float32), backend=backend)
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


@pytest.mark.parametrize("mask", [None, causal(), window(3) & Band(None, None), Band(0, 0, offset=-4)], ids=str)
@pytest.mark.parametrize("backend", BY, indirect=True)
def test_gradients_drop_what_the_forward_pass_dropped(mask: Any, backend: str) -> None:
    leaves = {name: x.double().requires_grad_() for name, x in tensors(torch.float64, v_head_dim=3).items()}

    def seeded(*values: Tensor) -> tuple[Tensor, Tensor]:
        torch.default_generator.manual_seed(7)  # torch.manual_seed also formats the stack, at each call
        given = dict(zip(leaves, values, strict=True))
        out, lse, _ = headscope.attend(**given, mask=mask, dropout=0.4, backend=backend)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(seeded, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_lse_is_that_of_all_weights(backend: str) -> None:
    given = tensors(torch.float32)
    with_dropout = headscope.attend(**given, dropout=0.5, backend=backend)
    torch.testing.assert_close(with_dropout.lse, headscope.attend(**given, backend=backend).lse, rtol=0, atol=0)


def test_the_mean_over_many_draws_is_the_result_without() -> None:
    q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 2)
    many = headscope.attention(q.expand(4000, -1, -1, -1), k.expand(4000, -1, -1, -1), v, dropout=0.3)
    spread = many.std(0) / 4000**0.5
    distance = (many.mean(0) - headscope.attention(q, k, v)[0]).abs() / spread
    assert distance.max() < 5, f"{float(distance.max()):.1f} standard errors away"


def test_half_precision_keeps_its_dtype() -> None:
    given = tensors(torch.bfloat16)
    for by in ("blocked", "reference"):
        out, lse, _ = headscope.attend(**given, dropout=0.3, backend=by)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_blocks_do_not_repeat_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block draws its own numbers."""
    monkeypatch.setattr(blocked, "BLOCK", 8 * 64)
    got, _ = dropped_weights(0.5, by="blocked")
    patterns = (got != 0).reshape(-1, 8 * 64)
    assert len(torch.unique(patterns, dim=0)) == len(patterns)
