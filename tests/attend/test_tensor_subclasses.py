"""Subclasses of Tensor: the result is of the class that torch's own attention returns, whichever argument has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import headscope
from headscope import Observe
from headscope.masks import Documents, KeyLengths
from headscope.stats import HeadStats

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


def measured(name: str, of: Callable[[Tensor], Tensor], **changed: Tensor) -> HeadStats:
    """Observe with one more tensor, which ``of`` makes a subclass."""
    q, k, v = {**arguments(), **changed}.values()
    tensors = {
        "tokens": torch.tensor([0, 1, 0, 1, 1]),
        "rows": torch.tensor([True, False, True, True, True]),
        "lse": headscope.attend(q, k, v).lse,
        "q_pos": torch.tensor([0, 1, 2, 4, 8]),
        "k_pos": torch.tensor([0, 1, 2, 4, 8]),
    }
    if name in ("tokens", "rows"):
        given: dict[str, Any] = {name: of(tensors[name])}
        return headscope.observe(q, k, v, what=Observe(**given))
    positions = {each: tensors[each] for each in ("q_pos", "k_pos") if name in ("q_pos", "k_pos")}
    return headscope.observe(q, k, v, **{**positions, name: of(tensors[name])})


OBSERVED = ["tokens", "rows", "lse", "q_pos", "k_pos"]


def assert_same_stats(found: HeadStats, expected: HeadStats) -> None:
    assert found.names == expected.names
    for name in expected.names:
        torch.testing.assert_close(found[name].mean, expected[name].mean, equal_nan=True)
        assert type(found[name].mean) is Tensor


@pytest.mark.parametrize("name", OBSERVED)
@pytest.mark.parametrize("made", ["inherited", "plain"])
def test_observing_reads_the_memory_of_a_subclass_that_keeps_it(made: str, name: str) -> None:
    assert_same_stats(measured(name, CLASSES[made]), measured(name, lambda x: x))


@pytest.mark.parametrize("name", OBSERVED)
def test_observing_refuses_a_tensor_that_may_have_no_memory(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: got Wrapped; expected an ordinary tensor$"):
        measured(name, Wrapped)


def test_attending_and_observing_in_one_pass_refuses_it_too() -> None:
    what = Observe(tokens=Wrapped(torch.arange(Q)))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^tokens: got Wrapped; expected an ordinary tensor$"):
            headscope.attend(**arguments(), observe=what)


@pytest.mark.parametrize("name", ["tokens", "rows", "q_pos", "k_pos"])
def test_beside_a_wrapped_q_operators_read_wrapped_tensors(name: str) -> None:
    found = measured(name, Wrapped, q=Wrapped(arguments()["q"]))
    expected = measured(name, lambda x: x)
    for each in expected.names:
        mean = numbers(found[each].mean)
        torch.testing.assert_close(mean, expected[each].mean, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def distribute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Tensor], Tensor]]:
    """Make a tensor a DTensor on a mesh of this process alone."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield lambda x: distribute_tensor(x, mesh, [Replicate()])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", OBSERVED)
def test_observing_names_the_remedy_for_a_dtensor(distribute: Callable[[Tensor], Tensor], name: str) -> None:
    remedy = r"expected an ordinary tensor: \.full_tensor\(\) or \.to_local\(\)$"
    with pytest.raises(TypeError, match=f"^{name}: got DTensor; {remedy}"):
        measured(name, distribute)
