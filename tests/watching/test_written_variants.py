"""watch: attention that a module writes out with masks, keys and passes of other kinds than most do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import watch

HEADS, WIDTH = 3, 7


class Base(nn.Module):
    """Three heads of width 7; subclasses state how queries, keys and values become weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))
        self.weights = torch.empty(0)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (each(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return q, k, v

    def attend(self, scores: Tensor, v: Tensor) -> Tensor:
        self.weights = scores.softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


def inputs(tokens: int = 11) -> Tensor:
    return torch.randn(2, tokens, HEADS * WIDTH, generator=torch.Generator().manual_seed(5))


def row_means(values: Tensor) -> Tensor:
    """Return the mean of values [B, H, Q] for each head."""
    return values.mean((0, 2))


def truth_of(model: Base, x: Tensor) -> Tensor:
    """Return the weights of a model in float64, and leave it as it was."""
    model.double()(x.double())
    model.float()
    return model.weights


def boolean_index(scores: Tensor, hidden: Tensor) -> Tensor:
    scores[hidden] = -1e9
    return scores


def boolean_index_of_matrices(scores: Tensor, hidden: Tensor) -> Tensor:
    rows, mask = scores.reshape(-1, scores.shape[-1]), hidden.reshape(-1, hidden.shape[-1])  # as in d2l.ai
    rows[mask] = -1e6
    return rows.reshape(scores.shape)


def minus_infinity(scores: Tensor, hidden: Tensor) -> Tensor:
    scores[hidden] = -math.inf
    return scores


def index_put(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.index_put((hidden,), scores.new_tensor(-1e9))


def masked_scatter(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_scatter_(hidden, torch.full_like(scores, -1e9))


def index_fill(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.index_fill_(-1, torch.tensor([2, 5]), -3.0)


@pytest.mark.parametrize(
    "hide", [boolean_index, boolean_index_of_matrices, minus_infinity, index_put, masked_scatter, index_fill]
)
def test_scores_that_are_replaced_at_an_index_are_recorded(hide: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Masked(Base):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            scores = q @ k.mT / WIDTH**0.5
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1).expand_as(scores)
            return self.attend(hide(scores, hidden), v)

    model, x = Masked(), inputs()
    plain = model(x)
    with watch(model) as seen:
        out = model(x)
    assert torch.equal(plain, out)
    weights = truth_of(model, x)
    assert seen.about.kinds == {"Masked": "self"}
    torch.testing.assert_close(seen["entropy"].mean[0], row_means(torch.special.entr(weights).sum(-1)))
    torch.testing.assert_close(seen["max_weight"].mean[0], row_means(weights.amax(-1)))
