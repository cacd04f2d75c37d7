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
    assert finite or found.not_tested["number range"] == "outputs of ordinary inputs are not finite"
