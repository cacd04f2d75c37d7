"""check: weights that are cut after the softmax, and sums that an epsilon or a sink explains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headscope import Findings, check
from support.buggy.packed_projection import Packed


def check_with(weights: Callable[[Tensor], Tensor], seed: int, causal: bool | None = None) -> Findings:
    """Check a module whose weights are a function of its logits, where a mask has been applied."""

    class Changed(Packed):
        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            s = self.scores(q, k)
            if causal:
                s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -1e4)
            return weights(s if mask is None else s.masked_fill(mask == 0, -1e4))

    torch.manual_seed(seed)
    return check(Changed(24, 3), mask_means="keep", causal=causal)


def drop_small(s: Tensor) -> Tensor:
    p = s.softmax(-1)
    return p * (p > 0.05)


@pytest.mark.parametrize("causal", [None, True])
@pytest.mark.parametrize("seed", range(12))
def test_small_weights_that_are_dropped_are_no_mask(seed: int, causal: bool | None) -> None:
    assert check_with(drop_small, seed, causal).names == ("rows-do-not-sum-to-one",)


def test_a_built_in_mask_after_the_softmax_is_one_where_it_is_the_same_for_each_input() -> None:
    assert check_with(lambda s: s.softmax(-1).tril(), 3).names == ("mask-after-softmax",)
    inverted = check_with(lambda s: s.softmax(-1).triu(1), 3)
    assert set(inverted.names) == {"mask-after-softmax", "mask-inverted"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("epsilon", "names"), [(1e-2, ("rows-do-not-sum-to-one",)), (1e-3, ("rows-do-not-sum-to-one",)), (1e-9, ())]
)
def test_an_epsilon_in_the_sum_is_no_sink(epsilon: float, names: tuple[str, ...], seed: int) -> None:
    def divide(s: Tensor) -> Tensor:
        e = (s - s.amax(-1, keepdim=True)).exp()
        return e / (e.sum(-1, keepdim=True) + epsilon)

    found = check_with(divide, seed, True)
    assert found.names == names
    assert not [text for text in found.understood if "sink" in text]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("logit", [1.5, -4.0])
def test_a_sink_is_understood_in_either_precision(logit: float, dtype: torch.dtype) -> None:
    def add_sink(s: Tensor) -> Tensor:
        return torch.cat([s, torch.full_like(s[..., :1], logit)], -1).to(dtype).softmax(-1)[..., :-1].to(s)

    found = check_with(add_sink, 3)
    assert found.names == ()
    assert [text for text in found.understood if "sink" in text]


@pytest.mark.parametrize("causal", [None, True])
@pytest.mark.parametrize("fill", [0.0, -2.0])
def test_a_number_in_place_of_logits_is_named_also_where_it_uncovers_later_keys(
    fill: float, causal: bool | None
) -> None:
    class Filled(Packed):
        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            s = self.scores(q, k)
            if causal:
                s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -1e4)
            return (s if mask is None else s.masked_fill(mask == 0, fill)).softmax(-1)

    torch.manual_seed(3)
    found = check(Filled(24, 3), mask_means="keep", causal=causal)
    assert found.names == ("mask-fill-too-small",)
    assert found["mask-fill-too-small"].seen == f"mask= [T, T] boolean: logits of masked pairs are {fill:.4g}"
