"""Tensors whose memory does not hold their numbers: lazily negated ones, and zeros that have no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headscope
from headscope import Observe
from headscope._attend.backends import native
from headscope.masks import Documents, KeyLengths

needs_native = pytest.mark.skipif(native.extension is None, reason="the native extension is not built")

B, H, Q, D = 2, 3, 5, 8
BACKENDS = [pytest.param("cpu", marks=needs_native), "sdpa", "blocked", "reference"]
RTOL, ATOL = 1e-5, 1e-6


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(B, H, Q, D, generator=generator) for name in "qkv"}


def negated(x: Tensor) -> Tensor:
    """Return x with its sign in a flag; the memory holds -x."""
    lazy = torch._neg_view(-x)  # pyright: ignore[reportPrivateImportUsage]
    assert lazy.is_neg()
    return lazy


def imaginary(x: Tensor) -> Tensor:
    """Return x as the imaginary part of a conjugate."""
    lazy = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert lazy.is_neg()
    return lazy


def without_memory(x: Tensor) -> Tensor:
    """Return zeros that have no memory."""
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)  # pyright: ignore[reportAttributeAccessIssue]


def assert_as_a_copy(run: Callable[..., Tensor], ordinary: dict[str, Tensor], name: str, lazy: Tensor) -> None:
    """The call with the lazy tensor equals the call with a copy of it, however often either ran before."""
    run(**ordinary)  # prepares the call for an ordinary tensor
    with torch.no_grad():
        expected = run(**{**ordinary, name: lazy.clone()})
        for _ in range(2):
            torch.testing.assert_close(run(**{**ordinary, name: lazy}), expected, rtol=RTOL, atol=ATOL)
            torch.testing.assert_close(run(**ordinary), run(**ordinary), rtol=0, atol=0)


@pytest.mark.parametrize("make", [negated, imaginary, without_memory])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_reads_lazy_tensors_as_their_copies(
    backend: str, name: str, make: Callable[[Tensor], Tensor]
) -> None:
    ordinary = tensors()

    def run(**given: Tensor) -> Tensor:
        return headscope.attention(**given, backend=backend)

    assert_as_a_copy(run, ordinary, name, make(ordinary[name]))


@pytest.mark.parametrize("make", [negated, without_memory])
@pytest.mark.parametrize(("name", "shape"), [("bias", (B, H, Q, Q)), ("bias", (Q,)), ("sinks", (H,))])
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_native), "blocked", "reference"])
def test_bias_and_sinks_may_be_lazy(
    backend: str, name: str, shape: tuple[int, ...], make: Callable[[Tensor], Tensor]
) -> None:
    ordinary = {**tensors(), name: torch.randn(shape)}

    def run(**given: Tensor) -> Tensor:
        return headscope.attention(**given, backend=backend)

    assert_as_a_copy(run, ordinary, name, make(ordinary[name]))


@pytest.mark.parametrize("make", [negated, without_memory])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("way", ["observe", "attend"])
def test_observing_reads_lazy_tensors_as_their_copies(way: str, name: str, make: Callable[[Tensor], Tensor]) -> None:
    ordinary, what = tensors(), Observe(windows=(2,), map=4)

    def run(**given: Tensor) -> Tensor:
        stats = (
            headscope.observe(**given, what=what) if way == "observe" else headscope.attend(**given, observe=what).stats
        )
        assert stats is not None
        return torch.stack([stats[x].mean for x in ("entropy", "max_logit", "value_norm")])

    for _ in range(3):  # the third call of one observation takes the shortest way
        run(**ordinary)
    assert_as_a_copy(run, ordinary, name, make(ordinary[name]))


def test_a_given_lse_may_be_lazy() -> None:
    ordinary = tensors()
    lse = headscope.attend(**ordinary).lse
    expected = headscope.observe(**ordinary, lse=lse + 1)["mass"].mean
    found = headscope.observe(**ordinary, lse=negated(lse + 1))["mass"].mean
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_native), "blocked"])
def test_tensors_of_masks_may_be_lazy(backend: str) -> None:
    ordinary, ids, lengths = tensors(), torch.tensor([[1, 2, 1, 2, 1]] * B), torch.tensor([3, 4])
    for plain, lazy in (
        (Documents(ids), Documents(negated(ids), ids)),
        (KeyLengths(lengths - lengths), KeyLengths(without_memory(lengths))),
        (KeyLengths(lengths), KeyLengths(negated(lengths))),
    ):
        expected = headscope.attention(**ordinary, mask=plain, backend=backend)
        found = headscope.attention(**ordinary, mask=lazy, backend=backend)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    nothing_visible = without_memory(torch.zeros(Q, Q, dtype=torch.bool))
    assert not headscope.attention(**ordinary, mask=nothing_visible, backend=backend).any()


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_native), "blocked"])
def test_gradients_that_come_in_lazily_negated(backend: str) -> None:
    ordinary = {name: x.requires_grad_() for name, x in tensors().items()}
    grads = torch.randn(B, H, Q, D), torch.randn(B, H, Q)
    results = headscope.attend(**ordinary, backend=backend)[:2]
    expected = torch.autograd.grad(results, list(ordinary.values()), grads, retain_graph=True)
    found = torch.autograd.grad(results, list(ordinary.values()), [negated(x) for x in grads])
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=RTOL, atol=ATOL)


@needs_native
def test_saved_tensors_that_come_back_lazily_negated() -> None:
    ordinary = {name: x.requires_grad_() for name, x in tensors().items()}
    expected = torch.autograd.grad(headscope.attention(**ordinary, backend="cpu").sum(), list(ordinary.values()))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: negated(x.detach())):
        out = headscope.attention(**ordinary, backend="cpu")
    found = torch.autograd.grad(out.sum(), list(ordinary.values()))
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=RTOL, atol=ATOL)


@needs_native
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_a_freed_storage_is_an_error_that_names_it(name: str) -> None:
    ordinary = {**tensors(), "bias": torch.randn(1, 1, Q, Q), "sinks": torch.randn(H)}
    headscope.attention(**ordinary, backend="cpu")
    ordinary[name].untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{name}: its storage is empty"):
            headscope.attention(**ordinary, backend="cpu")
