"""attention and attend: leading axes, strides, and axes of size 0 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope import masks
from headscope._attend import prepare
from headscope.masks import KeyLengths, Prefix, causal
from support import oracle
from support.attention_cases import ANY, BY, HKV, B, D, H, K, Q, gradients, run_by, tensors


@pytest.mark.parametrize("backend", BY, indirect=True)
@pytest.mark.parametrize("shape", ["three axes", "five axes", "broadcast", "one head", "4 and 3 axes"])
def test_leading_axes(shape: str, backend: str) -> None:
    q_lead, k_lead, v_lead = {
        "three axes": ((), (), ()),
        "five axes": ((2, 3), (2, 3), (2, 3)),
        "broadcast": ((2, 1), (1, 3), (3,)),
        "one head": ((2,), (2,), (1,)),
        "4 and 3 axes": ((3,), (), ()),
    }[shape]
    q = torch.randn(*q_lead, H, Q, D, dtype=torch.float64)
    k = torch.randn(*k_lead, 1 if shape == "one head" else HKV, K, D, dtype=torch.float64)
    v = torch.randn(*v_lead, HKV, K, D, dtype=torch.float64)
    lead = torch.broadcast_shapes(q_lead, k_lead, v_lead)
    leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}
    results = run_by(backend, leaves, {})
    exact = oracle.attention(q, k, v)
    assert results["out"].shape == (*lead, H, Q, D)
    torch.testing.assert_close(results["out"], exact.out)
    if "lse" in results:
        assert results["lse"].shape == (*lead, H, Q)
        torch.testing.assert_close(results["lse"], exact.lse)
    want = gradients({"out": exact.out, "lse": exact.lse} if "lse" in results else {"out": exact.out}, leaves)
    torch.testing.assert_close(gradients(results, leaves), want)


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_masks_and_biases_of_leading_axes(backend: str) -> None:
    q, k, v = (torch.randn(2, 3, H, length, D, dtype=torch.float64) for length in (Q, K, K))
    for shape in ((2, 1, 1, Q, K), (3, 1, 1, K), (2, 3, H, Q, K), (K,), ()):
        seen = torch.rand(shape) < 0.6
        exact = oracle.attention(q, k, v, seen=seen.expand(2, 3, H, Q, K)).out
        torch.testing.assert_close(headscope.attention(q, k, v, mask=seen), exact, msg=f"mask {shape}")
        bias = torch.randn(shape, dtype=torch.float64)
        exact = oracle.attention(q, k, v, bias=bias).out
        torch.testing.assert_close(
            run_by(backend, {"q": q, "k": k, "v": v, "bias": bias}, {})["out"], exact, msg=f"bias {shape}"
        )
    lengths = [3, 0, K, 5, 7, 1]
    exact = oracle.attention(q, k, v, seen=oracle.table(oracle.key_lengths(lengths), (6, H, Q, K))).out
    torch.testing.assert_close(headscope.attention(q, k, v, mask=KeyLengths(torch.tensor(lengths))), exact)


def _layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values, laid out otherwise; what lies between them is NaN."""
    yield "heads after lengths", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "columns", x.mT.contiguous().mT
    wide = x.new_full((*x.shape[:-1], 3 * x.shape[-1] + 1), torch.nan)
    wide[..., 1::3] = x
    yield "every third column", wide[..., 1::3]
    long = x.new_full((*x.shape[:-2], 2 * x.shape[-2] + 1, x.shape[-1]), torch.nan)
    long[..., 1::2, :] = x
    yield "every second row", long[..., 1::2, :]
    packed = x.new_full((x.shape[0], x.shape[2], x.shape[1] * x.shape[3] + 5), torch.nan)
    packed[..., 3:-2] = x.transpose(1, 2).flatten(2)
    yield "part of a packed projection", packed[..., 3:-2].unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)


@pytest.mark.parametrize("backend", BY, indirect=True)
@pytest.mark.parametrize("mask", [None, Prefix(5), KeyLengths(torch.tensor([3, K]))], ids=["all", "prefix", "lengths"])
def test_strides_do_not_matter(mask: masks.Mask | None, backend: str) -> None:
    given = tensors(torch.float32, kv_heads=H)
    usual = {name: x.clone().requires_grad_() for name, x in given.items()}
    wanted = run_by(backend, usual, {"mask": mask})
    wanted_gradients = gradients(wanted, usual)
    for name, x in given.items():
        for layout, y in _layouts(x):
            leaves = {**given, name: y.detach()}
            assert leaves[name].stride() != x.stride()
            leaves = {key: value.detach().requires_grad_() for key, value in leaves.items()}
            results = run_by(backend, leaves, {"mask": mask})
            torch.testing.assert_close(results, wanted, msg=lambda text, where=f"{name}, {layout}": f"{where}: {text}")
            torch.testing.assert_close(gradients(results, leaves), wanted_gradients, msg=f"gradients: {name}, {layout}")


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_expanded_inputs(backend: str) -> None:
    q, k, v = (
        torch.randn(1, 1, 1, D).expand(B, H, Q, D),
        torch.randn(B, 1, K, 1).expand(B, H, K, D),
        torch.randn(D).expand(B, H, K, D),
    )
    exact = oracle.attention(q, k, v).out
    torch.testing.assert_close(
        run_by(backend, {"q": q, "k": k, "v": v}, {})["out"].double(), exact, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_strides_of_masks_and_biases(backend: str) -> None:
    given = tensors(torch.float64)
    wide = torch.randn(Q, H, 2 * K, B, dtype=torch.float64)
    bias = wide.permute(3, 1, 0, 2)[..., ::2]
    assert bias.shape == (B, H, Q, K)
    exact = oracle.attention(**given, bias=bias).out
    torch.testing.assert_close(run_by(backend, {**given, "bias": bias}, {})["out"], exact)
    exact = oracle.attention(**given, seen=bias > 0).out
    torch.testing.assert_close(run_by(backend, given, {"mask": bias > 0})["out"], exact)
    expanded = torch.randn(1, 1, K, dtype=torch.float64).expand(H, Q, K)
    exact = oracle.attention(**given, bias=expanded).out
    torch.testing.assert_close(run_by(backend, {**given, "bias": expanded}, {})["out"], exact)


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_biases_of_one_shape_and_other_strides_in_turn(backend: str) -> None:
    prepare.prepared_calls.clear()
    given, wide = tensors(torch.float64), torch.randn(H, B, Q, K, dtype=torch.float64)
    bias = wide.transpose(0, 1)
    exact = oracle.attention(**given, bias=bias).out
    for laid_out in (bias, bias.contiguous(), bias):
        torch.testing.assert_close(run_by(backend, {**given, "bias": laid_out}, {})["out"], exact)


@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_strides_of_sinks(backend: str) -> None:
    prepare.prepared_calls.clear()
    given, wide = tensors(torch.float64), torch.linspace(-3, 3, 2 * H, dtype=torch.float64)
    for sinks in (wide[::2], wide[1::2].contiguous(), wide[::2], wide[:1].expand(H)):
        exact = oracle.attention(**given, sinks=sinks).out
        torch.testing.assert_close(run_by(backend, {**given, "sinks": sinks}, {})["out"], exact)


@pytest.mark.parametrize(
    "mask", [None, causal(), KeyLengths(torch.zeros(2, dtype=torch.long))], ids=["all", "causal", "lengths"]
)
@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (5, 0), (0, 0), (1, 1), (1, 7), (7, 1)])
def test_lengths_of_0_and_1(queries: int, keys: int, mask: masks.Mask | None) -> None:
    for lead in ((), (2,), (2, 1)):
        if isinstance(mask, KeyLengths) and lead == ():
            continue
        made = {
            "q": torch.randn(*lead, H, queries, D),
            "k": torch.randn(*lead, 1, keys, D),
            "v": torch.randn(*lead, 1, keys, 3),
        }
        leaves = {name: x.double().requires_grad_() for name, x in made.items()}
        batch = 2 if lead else 1
        seen = None if mask is None else mask.dense(batch, H, queries, keys)
        for name in ("blocked", "reference", None):
            exact = oracle.attention(**leaves, seen=seen)
            out, lse, _ = headscope.attend(**leaves, mask=mask, backend=name)
            torch.testing.assert_close((out, lse), (exact.out, exact.lse))
            wanted = gradients({"out": exact.out, "lse": exact.lse}, leaves)
            torch.testing.assert_close(gradients({"out": out, "lse": lse}, leaves), wanted)
        torch.testing.assert_close(headscope.attention(**leaves, mask=mask), exact.out)


def test_no_batch_and_no_heads() -> None:
    q, k = torch.randn(0, H, Q, D), torch.randn(0, H, K, D)
    for said in ({}, {"mask": causal()}, {"mask": KeyLengths(torch.zeros(0, dtype=torch.long))}, {"softcap": 2.0}):
        assert headscope.attention(q, k, k, **said).shape == (0, H, Q, D)
        assert headscope.attend(q, k, k, **said).lse.shape == (0, H, Q)


@pytest.mark.parametrize("nan", [False, True], ids=["finite", "NaN"])
@pytest.mark.parametrize("option", [None, "mask", "softcap", "bias"])
@pytest.mark.parametrize("kv_heads", [1, H])
@pytest.mark.parametrize("backend", [None, "cpu", "blocked", "reference"])
def test_no_query_heads_give_an_empty_result(backend: str | None, kv_heads: int, option: str | None, nan: bool) -> None:
    options: dict[str, Any] = {"mask": causal(), "softcap": 2.0, "bias": torch.zeros(Q, K)}
    options = {} if option is None else {option: options[option]}
    q, k = torch.randn(B, 0, Q, D, requires_grad=True), torch.randn(B, kv_heads, K, D)
    k = (k.fill_(torch.nan) if nan else k).requires_grad_()
    for _ in range(2):  # prepared, then repeated
        out, lse, _ = headscope.attend(q, k, k, backend=backend, **options)
        assert (out.shape, lse.shape) == ((B, 0, Q, D), (B, 0, Q))
        dq, dk = torch.autograd.grad(headscope.attention(q, k, k, backend=backend, **options).sum(), (q, k))
        assert dq.shape == q.shape
        assert torch.equal(dk, torch.zeros_like(k))
    assert torch.func.vmap(lambda q: headscope.attention(q, k, k, backend=backend))(q[None]).shape == (1, B, 0, Q, D)


def test_sdpa_refuses_no_query_heads() -> None:
    q, k = torch.randn(B, 0, Q, D), torch.randn(B, H, K, D)
    with pytest.raises(ValueError, match="sdpa refuses this call: an axis of size 0"):
        headscope.attention(q, k, k, backend="sdpa")
