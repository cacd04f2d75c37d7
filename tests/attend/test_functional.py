"""attention and attend: every option, by every backend, in every dtype, against the float64 oracle; gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope import functional, masks
from headscope._attend.backends import blocked
from headscope._attend.interface import accumulate_dtype
from headscope.masks import Band, Dense, KeyLengths, Prefix, causal, window
from support import oracle
from support.attention_cases import (
    ANY,
    BY,
    DTYPES,
    FUSED,
    INF,
    NATIVE,
    OPTIONS,
    B,
    D,
    H,
    K,
    Q,
    gradients,
    pairs,
    run_by,
    tensors,
    wanted,
)
from support.cases import case
from support.tolerance import assert_as_accurate


@pytest.mark.parametrize(("option", "backend"), pairs(OPTIONS, FUSED), indirect=["backend"])
def test_out_lse_and_gradients(option: str, backend: str) -> None:
    for dtype in DTYPES:
        with case(dtype):
            check_call(option, dtype, backend)


def check_call(option: str, dtype: torch.dtype, backend: str) -> None:
    asked = OPTIONS[option](dtype)
    leaves = {name: x.detach().requires_grad_(name != "bias" or backend != "sdpa") for name, x in asked.tensors.items()}
    results = run_by(backend, leaves, asked.said)
    assert results["out"].dtype == dtype
    given = {name: x for name, x in leaves.items() if x.requires_grad}
    got = {**results, **gradients(results, given)}
    assert "lse" not in results or results["lse"].dtype == accumulate_dtype(dtype)
    exact, plain = wanted(option, dtype, "lse" in results)
    for name, value in got.items():
        rounding = None if name == "lse" else dtype
        magnitude = (
            4.0 if name.startswith("gradient") else 0.0
        )  # sums of up to 13 terms of size about 1 that may cancel
        assert_as_accurate(
            value, exact[name], plain[name], magnitude=magnitude, dtype=rounding, message=f"{option}: {name}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "mask", "backend"),
    [
        (*sizes, by)
        for *sizes, fused in (
            (67, 131, 16, None, True),
            (131, 131, 32, causal(), True),
            (67, 601, 8, causal(), False),
            (601, 601, 8, window(97) | Prefix(3), False),
            (301, 301, 64, window(4), False),  # blocks of rows whose first key is odd
            (64, 64, 16, None, True),
            (1, 523, 24, KeyLengths(torch.tensor([400])), True),
        )
        for by in (BY if fused else ANY)
    ],
    indirect=["backend"],
)
def test_longer_than_vectors_and_blocks(
    queries: int, keys: int, head_dim: int, mask: masks.Mask | None, dtype: torch.dtype, backend: str
) -> None:
    q, k, v = (torch.randn(1, 2, length, head_dim).to(dtype) for length in (queries, keys, keys))
    got = run_by(backend, {"q": q, "k": k, "v": v}, {"mask": mask})
    seen = None if mask is None else mask.dense(1, 2, queries, keys)
    exact = oracle.plain(q.double(), k.double(), v.double(), seen=seen)
    plain = oracle.plain(q, k, v, seen=seen)
    assert_as_accurate(got["out"], exact.out, plain.out, message="out")
    if "lse" in got:
        assert_as_accurate(
            got["lse"], exact.lse, oracle.plain(q.float(), k.float(), v.float(), seen=seen).lse, message="lse"
        )


@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_ids_of_documents_that_differ_above_their_32nd_bit_are_different(backend: str) -> None:
    ids = torch.tensor([7, 7 + 2**32, -1, 7, 2**32 - 1, 7 + 2**32, -1, 7, 7 - 2**40, 2**32 - 1, -1, 7 - 2**40])
    q, k, v = torch.randn(3, 1, 2, len(ids), D)
    found = run_by(backend, {"q": q, "k": k, "v": v}, {"mask": masks.Documents(ids[None])})
    exact = oracle.plain(q.double(), k.double(), v.double(), seen=ids == ids[:, None])
    torch.testing.assert_close(found["out"].double(), exact.out, rtol=1e-5, atol=1e-6)


SMALL = (1, 2, 3, 5)  # B, H, Q, K of what gradcheck differentiates by differences


def _small(*names: str) -> dict[str, Tensor]:
    batch, heads, queries, keys = SMALL
    shapes = {
        "q": (batch, heads, queries, 2), "k": (batch, 1, keys, 2), "v": (batch, 1, keys, 3), "v2": (batch, 1, keys, 2),
        "bias": (heads, 1, keys), "sinks": (heads,),
    }  # fmt: skip
    random = torch.Generator().manual_seed(13)
    made = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return {name.rstrip("2"): made[name].requires_grad_() for name in names}


GRADCHECKED = {
    "nothing": (("q", "k", "v2"), {}),
    "Dv": (("q", "k", "v"), {}),
    "causal": (("q", "k", "v2"), {"mask": causal()}),
    "keys": (("q", "k", "v2"), {"mask": Prefix(3)}),
    "empty rows": (("q", "k", "v"), {"mask": Band(1, 0, offset=-1)}),
    "dense": (("q", "k", "v2"), {"mask": Dense(torch.eye(5, dtype=torch.bool)[:3])}),
    "scale": (("q", "k", "v2"), {"scale": -1.3}),
    "softcap": (("q", "k", "v"), {"softcap": 1.1}),
    "bias": (("q", "k", "v", "bias"), {}),
    "sinks": (("q", "k", "v", "sinks"), {}),
    "everything": (("q", "k", "v", "bias", "sinks"), {"mask": window(2) | Prefix(1), "softcap": 2.0, "scale": 0.9}),
}


@pytest.mark.parametrize(("option", "backend"), pairs(GRADCHECKED, "nothing; keys; dense; scale"), indirect=["backend"])
def test_gradcheck(option: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, said = GRADCHECKED[option]
    leaves = _small(*names)
    if blocked.BLOCK < 1000:
        monkeypatch.setattr(blocked, "BLOCK", 5)

    def results(*values: Tensor) -> tuple[Tensor, ...]:
        found = run_by(backend, dict(zip(leaves, values, strict=True)), said)
        return tuple(x.masked_fill(x == -INF, 0) for x in found.values())

    assert torch.autograd.gradcheck(results, tuple(leaves.values()))


def test_second_derivatives_of_the_reference() -> None:
    leaves = _small("q", "k", "v", "bias", "sinks")

    def results(*values: Tensor) -> Any:
        given = dict(zip(leaves, values, strict=True))
        return headscope.attend(**given, mask=causal(), softcap=2.0, backend="reference")[:2]

    assert torch.autograd.gradgradcheck(results, tuple(leaves.values()))


SECOND = {
    **dict.fromkeys(
        (*NATIVE, "blocked"),
        'attention: this backend does not support second derivatives; backend="reference"',
    ),
    "sdpa": "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented",
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_elsewhere_are_an_error(name: str) -> None:
    leaves = _small("q", "k", "v2")
    out = headscope.attention(**leaves, backend=name)
    (first,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND[name]):
        torch.autograd.grad(first.sum(), leaves["q"])


@pytest.mark.parametrize("name", SECOND)
def test_a_penalty_on_a_gradient_is_an_error(name: str) -> None:
    """Not a sum that is silently short of one term."""
    leaves = _small("q", "k", "v2")
    out = headscope.attention(**leaves, backend=name)
    (first,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND[name]):
        (out.sum() + first.square().sum()).backward()


def test_create_graph_alone_is_no_error() -> None:
    leaves = _small("q", "k", "v2")
    usual, kept = (
        torch.autograd.grad(headscope.attend(**leaves).out.sum(), list(leaves.values()), create_graph=create)
        for create in (False, True)
    )
    torch.testing.assert_close(kept, usual, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_gradients_of_lse_alone(backend: str) -> None:
    asked = OPTIONS["everything"](torch.float64)
    leaves = {name: x.requires_grad_() for name, x in asked.tensors.items()}
    got = gradients({"lse": run_by(backend, leaves, asked.said)["lse"]}, leaves)
    want = gradients({"lse": oracle.attention(**leaves, **asked.seen).lse}, leaves)
    torch.testing.assert_close(got, want)
    assert not got["gradient of v"].any(), "the log-sum-exp does not depend on v"


def test_lse_gives_the_weights_again() -> None:
    asked = OPTIONS["everything"](torch.float64)
    lse = headscope.attend(**asked.tensors, **asked.said).lse
    exact = oracle.attention(**asked.tensors, **asked.seen)
    torch.testing.assert_close(lse, exact.lse)
    given = {name: x for name, x in asked.tensors.items() if name != "v"}
    torch.testing.assert_close(functional.weights(**given, **asked.said), exact.weights)


# ---------------------------------------------------------------- rows that may see nothing


HIDING: dict[str, dict[str, Any]] = {
    "band": {"mask": Band(0, 0, offset=K)},
    "lengths": {"mask": KeyLengths(torch.zeros(B, dtype=torch.long))},
    "dense": {"mask": torch.zeros(Q, K, dtype=torch.bool)},
    "bias": {"bias": torch.full((Q, K), -INF)},
    "combined": {"mask": causal() & Dense(torch.zeros(K, dtype=torch.bool)) & KeyLengths(torch.tensor([K, 0]))},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "backend"), pairs(HIDING, "lengths; dense; bias"), indirect=["backend"])
def test_empty_rows_give_zero_and_zero_gradients(name: str, dtype: torch.dtype, backend: str) -> None:
    leaves = {key: x.requires_grad_() for key, x in tensors(dtype).items()}
    said = {key: x.to(dtype) if key == "bias" else x for key, x in HIDING[name].items()}
    results = run_by(backend, leaves, said)
    zeros = torch.zeros(B, H, Q, D, dtype=dtype)
    torch.testing.assert_close(results["out"], zeros, rtol=0, atol=0)
    for key, gradient in gradients(results, leaves).items():
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0, msg=key)
    if "lse" in results:
        assert (results["lse"] == -INF).all(), "lse of a row that sees nothing"


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_an_empty_row_beside_full_ones(backend: str) -> None:
    seen = torch.ones(Q, K, dtype=torch.bool)
    seen[3] = False
    leaves = {key: x.requires_grad_() for key, x in tensors(torch.float32).items()}
    results = run_by(backend, leaves, {"mask": seen})
    found = gradients(results, leaves)
    assert not results["out"][:, :, 3].any()
    assert not found["gradient of q"][:, :, 3].any()
    assert all(x.isfinite().all() for x in (results["out"], *found.values()))
    assert (found["gradient of q"][:, :, 2] != 0).all()


@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_an_empty_row_with_a_sink(backend: str) -> None:
    sinks = torch.linspace(-1, 2, H).requires_grad_()
    leaves = {**{key: x.requires_grad_() for key, x in tensors(torch.float32).items()}, "sinks": sinks}
    results = run_by(backend, leaves, {"mask": Band(0, 0, offset=K)})
    assert not results["out"].any()
    torch.testing.assert_close(results["lse"], sinks.detach()[:, None].expand(B, H, Q), rtol=0, atol=1e-6)
    found = torch.autograd.grad(results["lse"].sum() + results["out"].sum(), list(leaves.values()))
    assert not any(x.any() for x in found[:3])
    torch.testing.assert_close(found[3], torch.full((H,), float(B * Q)))


def test_what_to_observe_is_judged_under_its_own_name() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(TypeError, match=r"observe: got bool, expected a headscope.Observe or None"):
        headscope.attend(q, q, q, observe=True)  # pyright: ignore[reportArgumentType]
