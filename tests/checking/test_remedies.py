"""The line of code of a finding leads to no other finding, and fits the cause."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import check
from headscope.checking._catalogue import CATALOGUE

LINES = [name for name, entry in CATALOGUE.items() if "masked_fill(" in entry.code]
Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Stepped(nn.Module):
    """Attention of three heads of width 8, with a step from queries, keys and mask to scores or weights."""

    def __init__(self, step: Step, weights: bool = False) -> None:
        super().__init__()
        self.step, self.weights = step, weights
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (3, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = self.step(q, k, mask)
        return self.o(((s if self.weights else s.softmax(-1)) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", LINES)
def test_the_line_of_a_fill_leads_to_no_other_finding(name: str) -> None:
    code = CATALOGUE[name].code
    causal, weights = "triu" in code, code.startswith("p = ")

    def step(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = _fill(q @ k.mT / math.sqrt(8), mask if causal else None, torch.finfo(q.dtype).min)
        T = scores.shape[-1]
        visible = torch.ones(T, T, dtype=torch.bool) if mask is None else mask
        names = {"torch": torch, "scores": scores, "visible": visible, "T": T}
        exec(code, names)
        return names["p" if weights else "scores"]  # pyright: ignore[reportReturnType]

    found = check(Stepped(step, weights), mask_means="keep", heads=3)
    assert found.names == (), str(found)
    assert ("not causal: every query attends to every key" in found.understood) != causal


def test_most_fills_are_tested() -> None:
    assert {"looks-into-the-future", "mask-inverted", "mask-after-softmax", "nan-on-empty-row", "fp16-overflow"} < set(
        LINES
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda q, k, mask: _fill(q @ k.mT / math.sqrt(8), mask, -1e9), "torch.finfo(scores.dtype).min"),
        (lambda q, k, mask: _add(q @ k.mT / math.sqrt(8), mask), "torch.finfo(scores.dtype).min"),
        (lambda q, k, mask: _fill((q * 100) @ (k.mT * 100) / math.sqrt(8) / 1e4, mask, -1e4), "(q * D**-0.5)"),
    ],
    ids=["fill", "added", "product"],
)
def test_the_line_for_float16_fits_the_cause(step: Step, expected: str) -> None:
    found = check(Stepped(step), mask_means="keep")
    assert found.names == ("fp16-overflow",), str(found)
    assert expected in found["fp16-overflow"].code
    assert ("Scale before the product" in found["fp16-overflow"].fix) == ("D**-0.5" in expected)


def _fill(s: Tensor, mask: Tensor | None, value: float) -> Tensor:
    return s if mask is None else s.masked_fill(mask == 0, value)


def _add(s: Tensor, mask: Tensor | None) -> Tensor:
    """0 times a number that float16 cannot represent is NaN."""
    return s if mask is None else s + (mask == 0).to(s) * torch.full((1,), -1e9).to(s)
