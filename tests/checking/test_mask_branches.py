"""Masks that come after the softmax, and code that only calls with a mask reach."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import check

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Attending(nn.Module):
    """Attention by a function of q, k, v [B, H, T, D] and the mask, which has 2 heads."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.attend = attend

    def project(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Unmasked(Attending):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, None)


def are_later(p: Tensor) -> Tensor:
    return torch.ones(p.shape[-2:], dtype=torch.bool).triu(1)


@pytest.mark.parametrize("causal", [None, True])
@pytest.mark.parametrize("value", [-1.0, -1e4, torch.finfo(torch.float64).min, -math.inf])
def test_a_negative_number_filled_in_after_the_softmax_is_a_late_mask(value: float, causal: bool | None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        p = (q @ k.mT * 8**-0.5).softmax(-1)
        return p.masked_fill(are_later(p), value) @ v

    found = check(Unmasked(attend), causal=causal)
    assert set(found.names) - {"fp16-overflow"} == {"mask-after-softmax"}, str(found)
    finite = value > -1e9
    assert ("number range" in found.not_tested) == (not finite)
    reason = "outputs of ordinary inputs are not finite (mask-after-softmax)"
    assert finite or found.not_tested["number range"] == reason


class Decoding(Attending):
    """Causal attention that takes keys and values of earlier tokens, and puts its own behind them."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v, mask: q)

    def attend_after(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
        s = q @ k.mT * 8**-0.5
        later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        return self.o((s.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)


class AfterFlag(Decoding):
    def forward(self, x: Tensor, use_cache: bool = False, layer_past: tuple[Tensor, Tensor] | None = None) -> object:
        out, cache = self.attend_after(x, layer_past)
        return (out, cache if use_cache else None)


class AfterPosition(Decoding):
    def forward(
        self, x: Tensor, cache_position: object = None, kv_cache: tuple[Tensor, Tensor] | None = None
    ) -> object:
        return self.attend_after(x, kv_cache)


class AfterOther(Decoding):
    def forward(self, x: Tensor, cache_info: object = None, past: tuple[Tensor, Tensor] | None = None) -> object:
        return self.attend_after(x, past)


class Ignoring(Decoding):
    def forward(self, x: Tensor, cache: object = None) -> object:
        return self.attend_after(x, None)


@pytest.mark.parametrize("kind", [AfterFlag, AfterPosition, AfterOther])
def test_the_cache_is_the_argument_that_takes_what_came_back(kind: type[Decoding]) -> None:
    found = check(kind(), causal=True)
    assert found.names == (), str(found)
    assert "decoding with its cache equals the full forward pass" in found.understood


def test_a_cache_that_changes_nothing_is_not_decoded_with() -> None:
    found = check(Ignoring(), causal=True)
    assert found.names == (), str(found)
    assert found.not_tested["decoding with a cache"] == "the returned cache, passed as cache=, changes nothing"


class Masked(Attending):
    """Attention that is right without a mask, and does something else with one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.project(x, mask)


def branch(masked: Attend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return (q @ k.mT * 8**-0.5).softmax(-1) @ v if mask is None else masked(q, k, v, mask)

    return attend


def hide(s: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return s.masked_fill(mask == 0, -1e4)


def attend_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return hide((q @ k.mT * 8**-0.5).softmax(-1), mask).softmax(-1) @ v


def halve_if_hiding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    part = 1.0 if bool((mask != 0).all()) else 0.5
    return hide(q @ k.mT * 8**-0.5, mask).softmax(-1) @ v * part


@pytest.mark.parametrize(
    ("masked", "what"),
    [
        (lambda q, k, v, mask: hide(q @ k.mT, mask).softmax(-1) @ v, "hides nothing, outputs"),
        (lambda q, k, v, mask: hide(-(q @ k.mT) * 8**-0.5, mask).softmax(-1) @ v, "hides nothing, outputs"),
        (lambda q, k, v, mask: hide(q @ k.mT * 8**-0.5, mask).softmax(-1) @ k, "hides nothing, outputs"),
        (attend_twice, "hides nothing, outputs"),
        (halve_if_hiding, "hides nothing from a query, its outputs"),
    ],
    ids=["no scale", "negated", "values are keys", "softmax twice", "halved where it hides some"],
)
def test_a_mask_that_hides_nothing_changes_no_output(masked: Attend, what: str) -> None:
    found = check(Masked(branch(masked)), mask_means="keep")
    assert found.names == ("mask-applied-wrong",), str(found)
    before, _, after = found["mask-applied-wrong"].seen.partition(" differ by up to ")
    assert before == f"mask=: with a mask that {what}"
    assert after.endswith(" from those without one")


@pytest.mark.parametrize("pairs", [True, False])
def test_a_mask_may_take_the_place_of_the_causal_one_or_add_to_it(pairs: bool) -> None:
    def replace_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        s = q @ k.mT * 8**-0.5
        if mask is None or not pairs:
            s = s.masked_fill(are_later(s), -math.inf)
        if mask is not None:
            s = s.masked_fill(~(mask if pairs else mask[:, None, None]), -1e4)
        return s.softmax(-1) @ v

    found = check(Masked(replace_causal), mask_means="keep")
    assert found.names == (), str(found)
    assert any(line.startswith("mask= [T, T]" if pairs else "mask= [B, T]") for line in found.understood)


def test_values_that_a_mask_moves_are_found() -> None:
    moved = branch(lambda q, k, v, mask: hide(q @ k.mT * 8**-0.5, mask).softmax(-1) @ v.roll(1, -2))
    found = check(Masked(moved), mask_means="keep")
    assert found.names == ("values-misplaced",), str(found)
    assert found["values-misplaced"].seen.startswith("mask= [T, T] boolean: ")


def test_a_causal_mask_between_two_softmaxes_hides_none_of_them() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        p = (q @ k.mT * 8**-0.5).softmax(-1)
        return p.masked_fill(are_later(p), -math.inf).softmax(-1) @ v

    found = check(Unmasked(attend), causal=True)
    assert found.names == ("softmax-twice",), str(found)


@pytest.mark.parametrize(
    ("epsilon", "names"), [(1e-9, ()), (1e-5, ("looks-into-the-future", "rows-do-not-sum-to-one"))]
)
def test_a_leak_below_the_rounding_of_float32_is_none(epsilon: float, names: tuple[str, ...]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        p = (q @ k.mT * 8**-0.5).softmax(-1).tril()
        return p / (p.sum(-1, keepdim=True) + epsilon) @ v

    found = check(Unmasked(attend), causal=True)
    assert found.names == names, str(found)
