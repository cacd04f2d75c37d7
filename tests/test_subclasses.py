"""Subclasses of Tensor: the result is of the class that torch's own attention returns, whichever argument has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import headscope
from headscope.masks import Documents, KeyLengths

B, H, Q, D = 1, 2, 5, 8


class Inherited(Tensor):
    """One whose operators return its own class, as ``Tensor.__torch_function__`` does by default."""


class Plain(Tensor):
    """One whose operators return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]


class Wrapped(Tensor):
    """One that holds its numbers in another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type[Wrapped], inner: Tensor) -> Wrapped:
        made: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapped) else x

        out = func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, Tensor) else x, out)


CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "inherited": lambda x: x.as_subclass(Inherited),
    "plain": lambda x: x.as_subclass(Plain),
    "wrapped": Wrapped,
}


def numbers(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, Wrapped) else x.detach().as_subclass(Tensor)


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(B, H, Q, D, generator=generator) for name in "qkv"}


@pytest.mark.parametrize("backend", [None, "sdpa", "blocked", "reference"])
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
@pytest.mark.parametrize("made", CLASSES)
def test_the_result_has_the_class_that_torch_returns(made: str, name: str, backend: str | None) -> None:
    given = arguments()
    given |= {"mask": torch.eye(Q, dtype=torch.bool)} if name == "mask" else {}
    given |= {"bias": torch.eye(Q)} if name == "bias" else {}
    expected = headscope.attention(**given, backend="reference")
    given[name] = CLASSES[made](given[name])
    of_torch = F.scaled_dot_product_attention(given["q"], given["k"], given["v"], given.get("mask", given.get("bias")))
    for _ in range(2):
        found = headscope.attention(**given, backend=backend)
        assert type(found) is type(of_torch)
        torch.testing.assert_close(numbers(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [None, "blocked", "reference"])
@pytest.mark.parametrize("name", ["sinks", "lengths", "documents"])
@pytest.mark.parametrize("made", CLASSES)
def test_sinks_and_tensors_of_masks_give_the_result_their_class(made: str, name: str, backend: str | None) -> None:
    options: dict[str, Callable[[Callable[[Tensor], Tensor]], dict[str, Any]]] = {
        "sinks": lambda of: {"sinks": of(torch.linspace(-1, 1, H))},
        "lengths": lambda of: {"mask": KeyLengths(of(torch.tensor([3])))},
        "documents": lambda of: {"mask": Documents(of(torch.tensor([[0, 1, 0, 1, 1]])))},
    }
    expected = headscope.attention(**arguments(), **options[name](lambda x: x), backend="reference")
    found = headscope.attention(**arguments(), **options[name](CLASSES[made]), backend=backend)
    assert type(found) is {"inherited": Inherited, "plain": Tensor, "wrapped": Wrapped}[made]
    torch.testing.assert_close(numbers(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["k", "bias"])
def test_gradients_and_lse_beside_a_subclass(name: str) -> None:
    given = {**arguments(), "bias": torch.eye(Q)}
    plain = {n: x.clone().requires_grad_() for n, x in given.items()}
    mixed = {n: x.clone().requires_grad_() for n, x in given.items()}
    expected = headscope.attend(**plain, backend="reference")
    found = headscope.attend(**{**mixed, name: mixed[name].as_subclass(Inherited)}, backend="blocked")
    assert type(found.lse) is Inherited
    for attended, leaves in ((expected, plain), (found, mixed)):
        ((attended.out**2).sum() + attended.lse.sum()).backward()
        assert all(x.grad is not None for x in leaves.values())
    for n, x in plain.items():
        assert x.grad is not None
        grad = mixed[n].grad
        assert grad is not None
        torch.testing.assert_close(numbers(grad), x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("made", CLASSES)
def test_observing_a_subclass_measures_its_numbers(made: str, name: str) -> None:
    given = {**arguments(), "bias": torch.eye(Q)}
    expected = headscope.observe(**given)["entropy"].mean
    given[name] = CLASSES[made](given[name])
    torch.testing.assert_close(headscope.observe(**given)["entropy"].mean, expected, rtol=1e-5, atol=1e-6)
