"""MultiHeadAttention(reproducible=True): docs/concepts/semantics.md, "The same bits"."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headscope import MultiHeadAttention, watch
from headscope._attend.backends import native
from headscope._linear import reproducible_linear, reproducible_sigmoid
from headscope.cache import GrowingCache
from headscope.masks import KeyLengths, causal
from headscope.positions import Rotary
from support.module_invariance import differences

if native.extension is None:
    pytest.skip("the native extension was not built: no C++ compiler", allow_module_level=True)


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_a_row_has_the_same_bits_whatever_is_beside_it(first: int) -> None:
    assert [words for seed in range(first, first + 15) for words in differences(seed)] == []


def test_decoding_is_prefill() -> None:
    """Token by token with a cache, in chunks, and all at once."""
    torch.manual_seed(0)
    module = MultiHeadAttention(64, 4, kv_heads=2, rotary=Rotary(16), reproducible=True)
    x = torch.randn(2, 70, 64)
    with torch.no_grad():
        whole = module(x, mask=causal())
        for step in (1, 13):
            cache = GrowingCache()
            parts = [module(x[:, at : at + step], cache=cache) for at in range(0, 70, step)]
            assert torch.equal(torch.cat(parts, 1), whole)


def test_cross_attention() -> None:
    torch.manual_seed(0)
    module, x, context = MultiHeadAttention(64, 4, reproducible=True), torch.randn(5, 3, 64), torch.randn(5, 40, 64)
    whole = module(x, context)
    assert torch.equal(module(x[2:3], context[2:3]), whole[2:3])
    longer = torch.cat([context, torch.randn(5, 30, 64)], 1)
    assert torch.equal(module(x, longer, mask=KeyLengths(torch.full((5,), 40))), whole)


def test_a_watch_changes_nothing() -> None:
    torch.manual_seed(0)
    module, x = MultiHeadAttention(64, 4, reproducible=True), torch.randn(2, 9, 64)
    with torch.no_grad():
        plain = module(x, mask=causal())
        with watch(module) as seen:
            assert torch.equal(module(x, mask=causal()), plain)
    assert seen.stats[0].heads == 4


def test_compiled_it_is_the_same() -> None:
    torch.manual_seed(0)
    module, x = MultiHeadAttention(64, 4, reproducible=True, gate=True), torch.randn(3, 9, 64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, own = compiled(inputs[0], mask=causal()), module(inputs[1], mask=causal())
    assert torch.equal(out, own)
    for result in (out, own):
        result.square().sum().backward()
    assert torch.equal(*(x.grad for x in inputs))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "outs"), [(1, 1), (7, 3), (64, 48), (130, 200), (513, 17)])
def test_the_product_is_as_accurate_as_torch(width: int, outs: int, bias: bool, dtype: torch.dtype) -> None:
    ratios: list[float] = []
    for seed in range(9):
        torch.manual_seed(seed)
        x, weight = torch.randn(5, 4, width).to(dtype), torch.randn(outs, width).to(dtype)
        added = torch.randn(outs).to(dtype) if bias else None
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        if dtype == torch.float64:
            torch.testing.assert_close(reproducible_linear(x, weight, added), exact, rtol=1e-12, atol=1e-12)
            continue
        errors = [(f(x, weight, added) - exact).square().mean().sqrt() for f in (reproducible_linear, F.linear)]
        ratios.append(float(errors[0] / errors[1].clamp_min(1e-12)))
    assert dtype == torch.float64 or sorted(ratios)[4] < 1.5


def test_gradients_of_the_product() -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*sizes, dtype=torch.float64, requires_grad=True) for sizes in ((2, 3, 7), (5, 7), (5,))
    )
    assert torch.autograd.gradcheck(reproducible_linear, (x, weight, bias))
    assert torch.autograd.gradgradcheck(reproducible_linear, (x, weight, bias))


def test_the_product_under_transforms() -> None:
    torch.manual_seed(0)
    x, weight, weights, bias = torch.randn(4, 3, 8), torch.randn(5, 8), torch.randn(4, 5, 8), torch.randn(5)
    whole = reproducible_linear(x, weight, bias)
    assert torch.equal(torch.vmap(lambda y: reproducible_linear(y, weight, bias))(x), whole)
    each = torch.stack([reproducible_linear(y, w, bias) for y, w in zip(x, weights, strict=True)])
    assert torch.equal(torch.vmap(lambda y, w: reproducible_linear(y, w, bias))(x, weights), each)
    grad = torch.func.grad(lambda y: reproducible_linear(y, weight, bias).sum())(x)
    torch.testing.assert_close(grad, weight.sum(0).expand_as(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reproducible_linear(x, weight, bias).dtype == torch.bfloat16


def test_the_sigmoid() -> None:
    """Everywhere the same bits, which torch's does not have, and as accurate."""
    x = torch.linspace(-120, 120, 4001)
    whole = reproducible_sigmoid(x)
    assert all(torch.equal(reproducible_sigmoid(x[n : n + 7].clone()), whole[n : n + 7]) for n in range(0, 3990, 3))
    torch.testing.assert_close(whole.double(), x.double().clamp(-80).sigmoid(), rtol=4e-7, atol=0)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(reproducible_sigmoid(x).sum(), x)
    torch.testing.assert_close(grad, torch.autograd.functional.jvp(torch.sigmoid, x, torch.ones_like(x))[1])


# ---------------------------------------------------------------- refused


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="reproducible: expected False or None with bias_kv"):
        MultiHeadAttention(8, 2, bias_kv=True, reproducible=True)
    with pytest.raises(TypeError, match="reproducible: got 1, expected True or False"):
        MultiHeadAttention(8, 2, reproducible=1)  # pyright: ignore[reportArgumentType]
    weight = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"reproducible: x has the layout torch\.sparse_coo, expected torch\.strided"):
        reproducible_linear(torch.randn(2, 4).to_sparse(), weight, None)
    with pytest.raises(TypeError, match=r"x: dtype is torch\.float64, the weight has torch\.float32"):
        reproducible_linear(torch.randn(2, 4, dtype=torch.float64), weight, None)
    with pytest.raises(ValueError, match=r"x: got \[2, 5\], expected \[..., 4\]"):
        reproducible_linear(torch.randn(2, 5), weight, None)


def test_what_lies_in_no_memory() -> None:
    x, weight, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    zeros = torch._efficientzerotensor((2, 4))
    assert torch.equal(reproducible_linear(zeros, weight, bias), bias.expand(2, 3))
    assert torch.equal(reproducible_linear(torch._neg_view(x), weight, bias), reproducible_linear(-x, weight, bias))
    for name, lost in (("x", x), ("weight", weight), ("bias", bias)):
        inputs = {"x": x.clone(), "weight": weight.clone(), "bias": bias.clone(), name: lost}
        lost.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"^{name}: its storage is empty"):
            reproducible_linear(*inputs.values())
        lost.untyped_storage().resize_(4 * lost.numel())
        lost.fill_(1.0)


def test_without_the_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MultiHeadAttention(8, 2, reproducible=True)
    monkeypatch.setattr(native, "extension", None)
    with pytest.raises(ValueError, match="reproducible: requires the native kernels"):
        module(torch.randn(1, 3, 8))


def test_it_shows_itself() -> None:
    assert "reproducible=True" in repr(MultiHeadAttention(8, 2, reproducible=True))
    assert "reproducible" not in repr(MultiHeadAttention(8, 2))
