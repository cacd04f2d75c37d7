"""The typed base of functions with a gradient: to torch it is no different from torch.autograd.Function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headscope._support.autograd import Function, outside_transforms


class Doubled(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        return (grads[0] * 2,)


@pytest.mark.parametrize("name", ["forward", "setup_context", "backward", "vjp", "jvp", "vmap"])
def test_the_base_overrides_no_method_of_torch(name: str) -> None:
    assert getattr(Function, name) is getattr(torch.autograd.Function, name)
    assert Function.apply.__func__ is torch.autograd.Function.apply.__func__


@pytest.mark.parametrize("apply", [Doubled.apply, outside_transforms(Doubled)], ids=["apply", "outside_transforms"])
def test_both_ways_of_applying_a_function_have_its_gradient(apply: Any) -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    out = apply(x)
    out.sum().backward()
    assert torch.equal(out, torch.tensor([2.0, 6.0]))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([2.0, 2.0]))


def test_a_function_without_setup_context_is_refused_under_torch_func() -> None:
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: Doubled.apply(x).sum())(torch.ones(2))
