"""check: what differs between training and eval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headscope import Findings, check
from support.buggy.packed_projection import Packed

Weights = Callable[[Packed, Tensor, Tensor | None], Tensor]


def hide(s: Tensor, mask: Tensor | None) -> Tensor:
    return s if mask is None else s.masked_fill(mask == 0, -1e4)


def check_with(weights: Weights, causal: bool | None = None) -> Findings:
    """Check a module whose weights are a function of itself, of q·k / √D, and of its mask."""

    class Changed(Packed):
        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            return weights(self, self.scores(q, k), mask)

    return check(Changed(24, 3, dropout=0.1), mask_means="keep", causal=causal)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_mask_that_training_ignores_is_found(rate: float) -> None:
    def ignore(module: Packed, s: Tensor, mask: Tensor | None) -> Tensor:
        p = hide(s, None if module.training else mask).softmax(-1)
        return F.dropout(p, rate, module.training)

    found = check_with(ignore)
    assert found.names == ("mask-ignored",)
    assert found["mask-ignored"].seen == "mask= in training: the weights are the same as without the mask"


def test_a_mask_that_changes_the_output_of_training_is_not_ignored() -> None:
    class Cutting(Packed):
        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            return hide(self.scores(q, k), None if self.training else mask).softmax(-1)

        def forward(self, x: Tensor, mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
            out, past = super().forward(x, mask, past)
            return (out if mask is None else out * mask.double().mean(-1, keepdim=True)), past

    found = check(Cutting(24, 3), mask_means="keep")
    assert found.names == ("mask-applied-wrong",)
    assert " is visible, but masked in eval" in found["mask-applied-wrong"].seen


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_mask_that_training_respects_is_no_finding(rate: float) -> None:
    found = check_with(lambda module, s, mask: F.dropout(hide(s, mask).softmax(-1), rate, module.training))
    assert found.names == ()


def test_a_mask_that_training_applies_to_some_heads_is_found() -> None:
    def expose(module: Packed, s: Tensor, mask: Tensor | None) -> Tensor:
        masked = hide(s, mask)
        return (torch.cat([s[:, :1], masked[:, 1:]], 1) if module.training else masked).softmax(-1)

    found = check_with(expose)
    assert found.names == ("mask-applied-wrong",)
    assert " in head 0 is visible, but masked in eval" in found["mask-applied-wrong"].seen


def test_a_causal_mask_that_training_lacks_is_found() -> None:
    def uncover(module: Packed, s: Tensor, mask: Tensor | None) -> Tensor:
        future = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        return hide(s if module.training else s.masked_fill(future, -1e4), mask).softmax(-1)

    found = check_with(uncover)
    assert found.names == ("looks-into-the-future",)
    assert found["looks-into-the-future"].seen.startswith("in training, key 1 of query 0 in head 0 is visible")


@pytest.mark.parametrize(("factor", "name"), [(8**0.5, "scale-missing"), (0.5, "scale-unusual")])
def test_a_scale_of_training_alone_is_no_dropout(factor: float, name: str) -> None:
    found = check_with(lambda module, s, mask: hide(s * (factor if module.training else 1), mask).softmax(-1))
    assert found.names == (name,)
    evidence = f"in training, logits are {factor * 8**-0.5:.4g} · q·k, in eval 0.3536 · q·k"
    assert found[name].seen == evidence
    assert found.not_tested["dropout of weights"] == "in training two seeds give the same weights"


def test_a_scale_that_eval_alone_lacks_is_reported_once() -> None:
    found = check_with(lambda module, s, mask: hide(s * (1 if module.training else 8**0.5), mask).softmax(-1))
    assert found.names == ("scale-missing",)
    assert found["scale-missing"].seen.startswith("logits are 1 · q·k")


def test_a_scale_of_queries_in_training_alone_is_no_dropout() -> None:
    class Scaled(Packed):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q * 8**0.5 if self.training else q, k)

    assert check(Scaled(24, 3)).names == ("scale-missing",)


def test_other_weights_in_training_are_no_dropout() -> None:
    found = check_with(lambda module, s, mask: hide(s.tanh() if module.training else s, mask).softmax(-1))
    assert found.names == ("training-differs",)


def test_dropped_logits_are_dropout_before_the_softmax() -> None:
    found = check_with(lambda module, s, mask: F.dropout(hide(s, mask), 0.3, module.training).softmax(-1))
    assert found.names == ("dropout-before-softmax",)


@pytest.mark.parametrize("causal", [None, True])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_that_does_not_rescale_is_found(rate: float, causal: bool | None) -> None:
    def drop(module: Packed, s: Tensor, mask: Tensor | None) -> Tensor:
        future = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        p = hide(s.masked_fill(future, -1e4) if causal else s, mask).softmax(-1)
        return p * (torch.rand_like(p) >= rate) if module.training else p

    found = check_with(drop, causal)
    assert found.names == ("dropout-not-rescaled",)
    assert found["dropout-not-rescaled"].seen.endswith("of the weights are 0, and the others are the same as in eval")
