"""NaN and infinity in q, k, v reach exactly the rows that may see them; what is hidden may hold anything."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import headscope
from headscope import masks
from headscope._attend import visibility
from headscope.masks import Band, Dense, KeyLengths, Prefix, causal
from support import oracle
from support.attention_cases import ANY, BY, INF, MASKS, NATIVE, SIZES, B, D, H, K, Q, gradients, run_by, tensors
from support.cases import case
from support.tolerance import assert_as_accurate

NAN = torch.nan

# Each hides something and leaves something; sdpa takes those marked with True.
HIDING: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "prefix": ({"mask": Prefix(9)}, True),
    "lengths": ({"mask": KeyLengths(torch.tensor([K, 4]))}, True),
    "dense": ({"mask": MASKS["dense"][0]}, True),
    "bias": ({"bias": torch.zeros(Q, K).masked_fill(torch.ones(Q, K).triu(3).bool(), -INF)}, True),
    "causal": ({"mask": causal()}, False),
    "combined": ({"mask": MASKS["causal & documents | dense"][0]}, False),
    "empty rows": ({"mask": Band(2, 0, offset=-3)}, False),
}
RUNS = [(name, by) for name, (_, fused) in HIDING.items() for by in (BY if fused else ANY)]


def seen_by(said: dict[str, Any]) -> Tensor:
    """What may be seen, [B, H, Q, K]."""
    if "bias" in said:
        return (said["bias"] != -INF).expand(SIZES)
    mask = said.get("mask")
    return mask.dense(*SIZES) if mask is not None else torch.ones(SIZES, dtype=torch.bool)


def spoilt(name: str, given: dict[str, Tensor], seen: Tensor) -> Tensor:
    """The values of out that must not be finite, [B, H, Q, D]: by counting, or by the oracle for infinite logits."""
    x = given[name]
    if name != "v" and x.isinf().any():
        return ~oracle.attention(**given, seen=seen).out.isfinite()
    bad = ~x.isfinite()
    if name == "q":
        return (bad.any(-1) & seen.any(-1))[..., None].expand(*seen.shape[:3], D)  # [B, H, Q, D]
    bad = bad.repeat_interleave(H // x.shape[1], 1)  # [B, H, K, D]
    if name == "k":
        return (seen & bad.any(-1)[:, :, None]).any(-1)[..., None].expand(*seen.shape[:3], D)  # [B, H, Q, D]
    return (seen[..., None] & bad[:, :, None]).any(-2)  # [B, H, Q, D]


@pytest.mark.parametrize(("hiding", "backend"), RUNS, indirect=["backend"])
def test_what_is_not_finite_reaches_exactly_who_may_see_it(hiding: str, backend: str) -> None:
    for name, value in product("qkv", (NAN, INF, -INF)):
        with case(name, value):
            check_reach(hiding, name, value, backend)


def check_reach(hiding: str, name: str, value: float, backend: str) -> None:
    said, clean = HIDING[hiding][0], tensors(torch.float32)
    x = clean[name].clone()
    for b, h, at, d in ((0, 0, 2, 1), (1, 1, 7, 0), (1, 2, 10, 4)):
        x[b, h, at, d] = value
    wanted = spoilt(name, {**clean, name: x}, seen_by(said))
    results = run_by(backend, {**clean, name: x}, said)
    out = results["out"]
    torch.testing.assert_close(~out.isfinite(), wanted)
    assert name == "v" or out[wanted].isnan().all(), "NaN, where a logit is not a number"
    if name == "v":
        torch.testing.assert_close(out[wanted], torch.full_like(out[wanted], value), equal_nan=True)
    usual = x if name != "v" and x.isinf().any() else x.masked_fill(~x.isfinite(), 0)
    exact = oracle.attention(**{**clean, name: usual}, seen=seen_by(said))
    torch.testing.assert_close(out[~wanted], exact.out.float()[~wanted])
    if "lse" in results:
        rows = wanted.any(-1) if name != "v" else torch.zeros(B, H, Q, dtype=torch.bool)
        torch.testing.assert_close(results["lse"].isnan(), rows)
        torch.testing.assert_close(results["lse"][~rows], exact.lse.float()[~rows])


@pytest.mark.parametrize("keys", [1, 3, 7, 8, 15, 16, 17, 33])
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("backend", BY, indirect=True)
def test_few_keys(name: str, keys: int, backend: str) -> None:
    """torch's fused kernel makes 0 of a row of NaN where there are fewer keys than lanes."""
    for said in ({}, {"mask": causal()}):
        given = {each: torch.randn(1, 2, keys, D) for each in ("q", "k", "v")}
        given[name][0, 1, 0, 0] = NAN
        out = headscope.attention(**given, **said, backend=None if backend == "sdpa" and said else backend)
        rows = slice(0, 1) if name == "q" else slice(0, keys)
        assert out[0, 1, rows].isnan().all()
        assert out[0, 0].isfinite().all()
        assert name == "k" or out[0, 1, 1:].isfinite().all()


@pytest.mark.parametrize("backend", BY, indirect=True)
def test_both_infinities_of_v_make_nan(backend: str) -> None:
    given = tensors(torch.float32)
    given["v"][0, 0, 1, 2], given["v"][0, 0, 3, 2] = INF, -INF
    out = run_by(backend, given, {"mask": Prefix(5)})["out"]
    assert out[0, :2, :, 2].isnan().all(), "both heads of the group"
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()
    assert out[0, 0, :, :2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BY, indirect=True)
def test_memory_beyond_the_lengths_may_hold_anything(dtype: torch.dtype, backend: str) -> None:
    lengths = torch.tensor([5, 11])
    clean = tensors(dtype)
    beyond = (torch.arange(K) >= lengths[:, None])[:, None, :, None]  # [B, 1, K, 1]
    dirty = {**clean, **{name: clean[name].masked_fill(beyond, NAN) for name in ("k", "v")}}
    zeros = {**clean, **{name: clean[name].masked_fill(beyond, 0) for name in ("k", "v")}}
    found = []
    for given in (dirty, zeros):
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        results = run_by(backend, leaves, {"mask": KeyLengths(lengths)})
        found.append({**results, **gradients(results, leaves)})
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    for name in ("k", "v"):
        assert not found[0][f"gradient of {name}"].masked_select(beyond).any(), "a gradient where nobody looks"


@pytest.mark.parametrize(
    ("hiding", "backend"), [run for run in RUNS if run[0] not in ("nothing", "bias")], indirect=["backend"]
)
def test_gradients_of_hidden_nan(hiding: str, backend: str) -> None:
    """A key that nobody sees, and a query that sees nothing, may be NaN: every gradient is as if they were not."""
    said = HIDING[hiding][0]
    seen = seen_by(said).clone()
    seen[:, :, :, 12], seen[:, :, 9] = False, False  # nobody sees key 12, query 9 sees nothing
    said = {"mask": seen if backend == "sdpa" else said["mask"] & Dense(seen)}
    clean = tensors(torch.float32)
    dirty = {name: x.clone() for name, x in clean.items()}
    dirty["q"][:, :, 9, 1], dirty["k"][:, :, 12, 0], dirty["v"][:, :, 12, 3] = NAN, INF, NAN
    exact_leaves = {name: x.double().requires_grad_() for name, x in dirty.items()}
    plain_leaves = {name: x.detach().requires_grad_() for name, x in clean.items()}
    leaves = {name: x.requires_grad_() for name, x in dirty.items()}
    results = run_by(backend, leaves, said)
    exact = oracle.attention(**exact_leaves, seen=seen)
    plain = oracle.plain(**plain_leaves, seen=seen)
    for name in results:
        assert_as_accurate(results[name], getattr(exact, name), getattr(plain, name), message=name)
    found, wanted, usual = (
        gradients({name: getattr(by, name) if by is not None else results[name] for name in results}, given)
        for by, given in ((None, leaves), (exact, exact_leaves), (plain, plain_leaves))
    )
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        assert_as_accurate(gradient, wanted[name], usual[name], magnitude=4.0, message=name)


def test_blocks_of_visibility(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(torch.float32)
    given["k"][0, 1, 8, 2] = NAN
    mask = MASKS["causal & documents | dense"][0]
    whole = headscope.attend(**given, mask=mask)
    monkeypatch.setattr(visibility, "ROWS", 2 * B * H * K)
    parts = headscope.attend(**given, mask=mask)
    torch.testing.assert_close(parts[:2], whole[:2], rtol=0, atol=0, equal_nan=True)
    assert whole.out.isnan().any()
    assert whole.out.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BY, indirect=True)
def test_sums_that_overflow_are_no_infinity(dtype: torch.dtype, backend: str) -> None:
    """The look at the sums may be wrong; the result is not."""
    large = torch.finfo(dtype).max / 64
    given = {"q": torch.zeros(1, 1, 9, 3), "k": torch.zeros(1, 1, 211, 3), "v": torch.full((1, 1, 211, 3), large)}
    given = {name: x.to(dtype) for name, x in given.items()}
    assert given["v"].sum().isinf()
    out = run_by(backend, given, {"mask": Prefix(4)})["out"]
    torch.testing.assert_close(out, given["v"][:, :, :9])


@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_nan_in_sinks_and_biases_propagates(backend: str) -> None:
    given = tensors(torch.float32)
    sinks = torch.zeros(H)
    sinks[3] = NAN
    out = run_by(backend, {**given, "sinks": sinks}, {})["out"]
    assert out[:, 3].isnan().all()
    assert out[:, [0, 1, 2, 4, 5]].isfinite().all()
    bias = torch.zeros(Q, K)
    bias[4, 2], bias[5, 12] = NAN, NAN
    out = run_by(backend, {**given, "bias": bias}, {"mask": Prefix(10)})["out"]
    assert out[:, :, 4].isnan().all()
    assert out[:, :, 5].isfinite().all(), "the mask hides key 12"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_a_sink_of_infinity_makes_the_rows_of_its_head_nan(backend: str, dtype: torch.dtype) -> None:
    sinks = torch.zeros(H, dtype=dtype)
    sinks[3] = INF
    results = run_by(backend, {**tensors(dtype), "sinks": sinks}, {"mask": causal()})
    for result in results.values():
        assert result[:, 3].isnan().all()
        assert result[:, [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("keys", [0, K])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_a_sink_that_is_no_number_makes_rows_nan_that_see_nothing(backend: str, value: float, keys: int) -> None:
    sinks = torch.linspace(-1, 1, H)
    sinks[3], sinks[4] = value, -INF
    given = {name: x if name == "q" else x[:, :, :keys] for name, x in tensors(torch.float32).items()}
    leaves = {name: x.requires_grad_() for name, x in {**given, "sinks": sinks.clone()}.items()}
    results = run_by(backend, leaves, {"mask": Prefix(0)})
    out = torch.zeros(B, H, Q, D)
    out[:, 3] = NAN
    lse = sinks[:, None].expand(B, H, Q).clone()
    lse[:, 3] = NAN
    torch.testing.assert_close(results["out"], out, equal_nan=True)
    torch.testing.assert_close(results["lse"], lse, equal_nan=True)
    (grad,) = torch.autograd.grad(results["out"].sum() + results["lse"].sum(), leaves["sinks"])
    torch.testing.assert_close(grad, torch.tensor([1, 1, 1, NAN, 0, 1]) * B * Q, equal_nan=True)


def test_a_sink_that_is_minus_infinity_is_none() -> None:
    given = tensors(torch.float64)
    for by in (*NATIVE, "blocked", "reference"):
        found = headscope.attend(**given, sinks=torch.full((H,), -INF), mask=Band(0, 0, offset=3), backend=by)
        usual = headscope.attend(**given, mask=Band(0, 0, offset=3), backend=by)
        torch.testing.assert_close(found[:2], usual[:2])


@pytest.mark.parametrize("backend", ANY, indirect=True)
def test_a_sink_that_is_minus_infinity_has_no_gradient(backend: str) -> None:
    """Also where rows see nothing, so that no term of the softmax is left."""
    sinks = torch.full((H,), -INF)
    sinks[2] = 0.5
    leaves = {name: x.requires_grad_() for name, x in {**tensors(torch.float32), "sinks": sinks}.items()}
    results = run_by(backend, leaves, {"mask": Band(0, 0, offset=K - 3)})  # queries from 3 on see nothing
    (found,) = torch.autograd.grad(results["out"].sum() + results["lse"].sum(), leaves["sinks"])
    assert found[2] > 0
    found[2] = 0
    torch.testing.assert_close(found, torch.zeros(H), rtol=0, atol=0)


def test_dropout_hides_no_nan() -> None:
    given = tensors(torch.float32)
    given["v"][0, 0, 1, 2] = NAN
    out = headscope.attention(**given, mask=Prefix(3), dropout=0.9)
    assert out[0, :2, :, 2].isnan().all()
    assert out[1].isfinite().all()


def test_a_mask_object_is_not_spoilt_by_bad_values() -> None:
    mask: masks.Mask = causal()
    given = tensors(torch.float32)
    before = headscope.attention(**given, mask=mask)
    headscope.attention(given["q"] * NAN, given["k"], given["v"], mask=mask)
    torch.testing.assert_close(headscope.attention(**given, mask=mask), before, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 1, Q, K), (B, 1, 1, K), (1, H, Q, 1), (B, H, Q, K)], ids=str)
@pytest.mark.parametrize("backend", [*NATIVE, "blocked", "reference"])
def test_a_nan_spoils_the_gradients_of_the_biases_that_its_row_has(backend: str, shape: tuple[int, ...]) -> None:
    given = tensors(torch.float32)
    given["q"][1, 2, 3, 0] = NAN
    bias = torch.randn(shape).requires_grad_()
    met = torch.zeros(SIZES, dtype=torch.bool)
    met[1, 2, 3] = causal().dense(*SIZES)[0, 0, 3]
    spoilt = met.float().sum_to_size(shape) > 0
    out = headscope.attention(**given, bias=bias, mask=causal(), backend=backend)
    (found,) = torch.autograd.grad(out.sum(), bias)
    torch.testing.assert_close(found.isnan(), spoilt)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's, of forward mode
@pytest.mark.parametrize("grad", [False, True])
def test_a_nan_spoils_the_tangent_of_its_row_alone(grad: bool) -> None:
    """Also of a tensor that needs a gradient besides."""
    given = tensors(torch.float32)
    given["k"][0, 0, 9, 1] = NAN
    q = given["q"].requires_grad_(grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        results = headscope.attend(dual, given["k"], given["v"], mask=causal(), backend="reference")[:2]
        for result in map(forward_ad.unpack_dual, results):
            assert result.tangent is not None
            torch.testing.assert_close(result.tangent.isnan(), result.primal.isnan())
            assert result.primal.isnan().any()
            assert result.primal.isfinite().any()
