"""watch: written attention whose operands lie in buffers, or are projected by weights on the left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import watch

Parts = tuple[Tensor, Tensor, Tensor]


def put(x: Tensor, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a buffer that a tensor was written into."""
    return torch.empty(*size, *x.shape, dtype=dtype).copy_(x)


class Attends(nn.Module):
    """Attention of three heads of width 5, whose weights a test computes.

    Args:
        weigh: returns the weights [B, H, T, T] from queries and keys [B, H, T, D].
        project: returns queries, keys and values [B, H, T, D] from x and their weights [E, E].
    """

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor], project: Callable[..., Parts]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(15, 15, bias=False) for _ in range(4))
        self.weigh, self.project = weigh, project
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x, self.q.weight, self.k.weight, self.v.weight)
        p = self.weigh(q, k)
        self.weights = p.detach().double()
        return self.o((p @ v).transpose(1, 2).flatten(-2))


def on_the_right(x: Tensor, *weights: Tensor) -> Parts:
    q, k, v = ((x @ each.T).unflatten(-1, (3, 5)).transpose(1, 2) for each in weights)
    return q, k, v


def on_the_left(x: Tensor, *weights: Tensor) -> Parts:
    q, k, v = ((each @ x.mT).unflatten(1, (3, 5)).mT for each in weights)
    return q, k, v


def on_the_left_of_each(x: Tensor, *weights: Tensor) -> Parts:
    q, k, v = (torch.bmm(each.expand(len(x), 15, 15), x.mT).unflatten(1, (3, 5)).mT for each in weights)
    return q, k, v


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 5**0.5


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as they are": lambda q, k: scores(q, k).softmax(-1),
    "queries in a buffer": lambda q, k: scores(put(q), k).softmax(-1),
    "queries in a buffer of float64": lambda q, k: scores(put(q, dtype=torch.float64), k.double()).softmax(-1).float(),
    "queries in each part of a buffer": lambda q, k: scores(put(q, 2)[1], k).softmax(-1),
    "scores in a buffer": lambda q, k: put(scores(q, k)).softmax(-1),
    "weights in a buffer": lambda q, k: put(scores(q, k).softmax(-1)),
}


@pytest.mark.parametrize("project", [on_the_right, on_the_left, on_the_left_of_each])
@pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_operand_is_recorded(
    weigh: Callable[[Tensor, Tensor], Tensor], project: Callable[..., Parts], batch: int
) -> None:
    model, x = Attends(weigh, project), torch.randn(batch, 7, 15)
    with torch.no_grad(), watch(model) as seen:
        model(x)
    assert seen.about.kinds == {"Attends": "self"}
    p = model.weights
    for quantity, values in (("entropy", torch.special.entr(p).sum(-1)), ("max_weight", p.amax(-1))):
        torch.testing.assert_close(seen[quantity].mean[0], values.mean((0, 2)), rtol=1e-5, atol=1e-6)


def test_parameters_that_are_parts_of_one_buffer_are_told_apart() -> None:
    model, x = Attends(WEIGHTS["as they are"], on_the_right), torch.randn(2, 7, 15)
    model.o.bias = nn.Parameter(torch.zeros(15))
    parameters = [*model.parameters()]
    buffer = torch.cat([each.detach().flatten() for each in parameters])
    for parameter, part in zip(parameters, buffer.split([each.numel() for each in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)  # as optimisers that flatten parameters do
    with torch.no_grad(), watch(model) as seen:
        model(x)
    assert seen.layers == ("Attends",)
