"""Masks beside a bias or a cap of the logits, whose hidden pairs are seen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import check

Step = Callable[[Tensor, Tensor | None], Tensor]


class Attending(nn.Module):
    """Attention whose logits and mask become weights in a step of its own."""

    def __init__(self, weights: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.weights = weights

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o((self.weights(q @ k.mT * 8**-0.5, mask) @ v).transpose(1, 2).flatten(2))


class Masked(Attending):
    """Attention that is handed a mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, mask)


class BuiltIn(Attending):
    """Attention whose mask, if it has one, is part of what is done to the logits."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda s, mask: logits(s).softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, None)


def fill(s: Tensor, mask: Tensor | None, value: float) -> Tensor:
    return s if mask is None else s.masked_fill(mask == 0, value)


def add_alibi(s: Tensor) -> Tensor:
    i = torch.arange(s.shape[-1])
    return s - (i[:, None] - i).abs() * torch.tensor([0.5, 0.25])[:, None, None].to(s)


def cap_after(cap: float, value: float) -> Step:
    return lambda s, mask: (cap * torch.tanh(fill(s, mask, value) / cap)).softmax(-1)


def cap_twice(s: Tensor, mask: Tensor | None) -> Tensor:
    return fill(30 * torch.tanh(s / 30), mask, -1e4).softmax(-1).softmax(-1)


def fill_later(s: Tensor, value: float) -> Tensor:
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), value)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (cap_after(2, -math.inf), 0.217),
        (lambda s, mask: fill(add_alibi(s), mask, 1e-9).softmax(-1), 0.786),
        (lambda s, mask: fill(add_alibi(s), mask, -30.0).softmax(-1), 3.43e-13),
        (lambda s, mask: add_alibi(fill(s, mask, 0.0)).softmax(-1), 0.656),
        (lambda s, mask: fill(fill_later(add_alibi(s), -1e4), mask, -2.0).softmax(-1), 0.366),
    ],
    ids=["cap", "ALiBi, 1e-9", "ALiBi, -30", "zeros, then ALiBi", "ALiBi, later keys uncovered"],
)
def test_a_mask_whose_hidden_keys_have_weight_is_not_ignored(step: Step, share: float) -> None:
    found = check(Masked(step), mask_means="keep")
    assert found.names == ("mask-fill-too-small",), str(found)
    before, number, after = re.split(r"up to (\S+)", found["mask-fill-too-small"].seen)
    assert (before, after) == ("mask= [T, T] boolean: masked keys get ", " of a query's weight")
    assert float(number) == pytest.approx(share, rel=1e-2)


def test_a_cap_after_the_mask_that_bends_little_is_a_number_in_place_of_logits() -> None:
    found = check(Masked(cap_after(20, -1e4)), mask_means="keep")
    assert found.names == ("mask-fill-too-small",), str(found)
    assert found["mask-fill-too-small"].seen == "mask= [T, T] boolean: logits of masked pairs are -20"


def test_two_softmaxes_of_capped_logits_are_found_where_a_mask_shows_them() -> None:
    found = check(Masked(cap_twice), mask_means="keep")
    assert found.names == ("softmax-twice",), str(found)


def test_a_mask_before_relu_is_not_reported_beside_the_relu() -> None:
    found = check(Masked(lambda s, mask: fill(s, mask, -math.inf).relu().softmax(-1)), mask_means="keep")
    assert found.names == ("logits-changed",), str(found)
    assert found.not_tested["mask="] == "the change of the logits may also affect masked keys (logits-changed)"


def show_last_key(s: Tensor, mask: Tensor | None) -> Tensor:
    s = add_alibi(s)
    return torch.cat([fill(s, mask, -1e4)[..., :-1], s[..., -1:]], -1).softmax(-1)


def standardise(s: Tensor, mask: Tensor | None) -> Tensor:
    s = fill(s, mask, -2.0)
    return ((s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)).softmax(-1)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (show_last_key, "is visible"),
        (standardise, "stays visible, and the weights of other keys change by more than one"),
    ],
)
def test_a_mask_that_does_something_else_is_no_fill(step: Step, text: str) -> None:
    found = check(Masked(step), mask_means="keep")
    assert "mask-applied-wrong" in found.names, str(found)
    assert not {"mask-ignored", "mask-fill-too-small"} & set(found.names)
    assert text in found["mask-applied-wrong"].seen


def test_a_mask_that_changes_the_output_alone_is_not_ignored() -> None:
    class Cutting(Masked):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            out = self.attend(x, None)
            return out if mask is None else out * mask.double().mean(-1, keepdim=True)

    found = check(Cutting(lambda s, mask: s.softmax(-1)), mask_means="keep")
    assert found.names == ("mask-applied-wrong",), str(found)
    seen = "mask= [T, T] boolean: the weights are the same as without the mask, but the outputs are not"
    assert found["mask-applied-wrong"].seen == seen


@pytest.mark.parametrize("causal", [None, True])
@pytest.mark.parametrize(
    ("step", "weight"),
    [
        (lambda s: fill_later(add_alibi(s), 1e-9), 0.846),
        (lambda s: add_alibi(s.tril()), 0.722),
        (lambda s: fill_later(add_alibi(s), -10.0), 0.000249),
        (lambda s: 5 * torch.tanh(fill_later(s, -math.inf) / 5), 0.0356),
    ],
    ids=["ALiBi, 1e-9", "zeros, then ALiBi", "ALiBi, -10", "cap"],
)
def test_later_keys_whose_products_do_not_count_are_found(
    step: Callable[[Tensor], Tensor], weight: float, causal: bool | None
) -> None:
    found = check(BuiltIn(step), causal=causal)
    assert found.names == ("mask-fill-too-small",), str(found)
    before, number, after = re.split(r"up to ([^ ,]+)", found["mask-fill-too-small"].seen)
    assert (before, after) == ("built-in mask: later keys get ", " of a query's weight, whatever their q·k")
    assert float(number) == pytest.approx(weight, rel=1e-2)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda s: add_alibi(s) - 10 * torch.ones_like(s).triu(1), "it may be an intended bias"),
        (lambda s: 2 * torch.tanh(s / 2), "the logits are not known"),
        (lambda s: s, None),
    ],
    ids=["bias", "cap", "plain"],
)
def test_where_a_number_added_to_later_logits_would_not_show_that_is_told(
    step: Callable[[Tensor], Tensor], why: str | None
) -> None:
    found = check(BuiltIn(step))
    assert found.names == (), str(found)
    assert found.not_tested.get("a number added to the logits of later keys") == why
