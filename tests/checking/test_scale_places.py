"""check: a scale that is applied before the projection of queries, and logits that follow q in steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import check

Project = Callable[[Tensor, nn.Linear], Tensor]


class Scaled(nn.Module):
    """Three heads of eight numbers, with queries and logits as they are handed in."""

    def __init__(
        self,
        project: Project,
        logits: Callable[[Tensor], Tensor] = lambda s: s,
        project_others: Project = lambda x, linear: linear(x),
    ) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.project, self.logits, self.project_others = project, logits, project_others

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.project(x, self.q), self.k(x), self.project_others(x, self.v))
        q, k, v = (each.unflatten(-1, (3, 8)).transpose(1, 2) for each in projected)
        return self.project_others((self.logits(q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2), self.o)


BEFORE: list[Project] = [
    lambda x, q: F.linear(x, q.weight * 8**-0.5, q.bias * 8**-0.5),
    lambda x, q: F.linear(x * 8**-0.5, q.weight),
    lambda x, q: x @ (q.weight.mT / 8**0.5),
]


@pytest.mark.parametrize("project", BEFORE)
def test_a_scale_before_the_projection_is_not_missing(project: Project) -> None:
    torch.manual_seed(0)
    findings = check(Scaled(project))
    assert findings.names == (), str(findings)
    assert any("before a projection" in text for text in findings.understood)


@pytest.mark.parametrize("project", [lambda x, q: q(x), lambda x, q: F.linear(x, q.weight * 0.5)])
def test_another_factor_there_is_no_scale(project: Project) -> None:
    torch.manual_seed(0)
    assert check(Scaled(project)).names == ("scale-missing",)


@pytest.mark.parametrize("project", BEFORE)
def test_a_scale_of_values_and_of_the_output_is_not_that_of_the_logits(project: Project) -> None:
    torch.manual_seed(0)
    assert "scale-missing" in check(Scaled(lambda x, q: q(x), project_others=project)).names


def test_weights_that_count_in_large_steps_alone_are_used() -> None:
    torch.manual_seed(0)
    findings = check(Scaled(lambda x, q: q(x) * 8**-0.5, torch.round))
    assert findings.names == ("gradient-blocked",)
    assert "q.weight (only in large steps)" in findings["gradient-blocked"].seen


@pytest.mark.parametrize(
    ("divisor", "name"), [(lambda s: 7**0.5, "scale-unusual"), (lambda s: s.shape[-1] ** 0.5, "scale-of-length")]
)
def test_a_number_that_is_the_length_by_chance_is_another_scale(divisor: Callable[[Tensor], float], name: str) -> None:
    torch.manual_seed(0)
    assert check(Scaled(lambda x, q: q(x), lambda s: s / divisor(s))).names == (name,)


class Filled(nn.Module):
    """A mask by the lowest number of the logits' dtype, and a softmax in float32."""

    def __init__(self, fill: Callable[[torch.dtype], float]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.fill = fill

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (3, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        s = q @ k.mT * 8**-0.5
        s = s if mask is None else s.masked_fill(mask == 0, self.fill(s.dtype))
        return self.o((s.softmax(-1, dtype=torch.float32).to(s.dtype) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("fill", "names"),
    [(lambda dtype: torch.finfo(dtype).min, ()), (lambda dtype: -torch.inf, ("nan-on-empty-row",))],
    ids=["lowest", "infinity"],
)
def test_the_lowest_float64_is_no_infinity_of_a_module_in_float32(
    fill: Callable[[torch.dtype], float], names: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    assert check(Filled(fill)).names == names
