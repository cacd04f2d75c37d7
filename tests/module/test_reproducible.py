"""MultiHeadAttention(reproducible=True): docs/concepts/semantics.md, "The same bits"."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import MultiHeadAttention, watch
from headscope._attend.backends import native
from headscope._linear import reproducible_linear, reproducible_sigmoid
from headscope.cache import GrowingCache
from headscope.masks import KeyLengths, causal
from headscope.positions import ALiBi, Rotary, T5Buckets

if native.extension is None:
    pytest.skip("the native extension was not built: no C++ compiler", allow_module_level=True)

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]


def drawn(draw: random.Random) -> MultiHeadAttention:
    """A reproducible module of random options."""
    kv_heads, width, dtype = draw.choice((1, 2, 4)), draw.choice((8, 12, 16, 32)), draw.choice(DTYPES)
    heads = kv_heads * draw.choice((1, 2))
    places: list[dict[str, Any]] = [{}, {}, {"rotary": Rotary(8)}, {"position_bias": ALiBi(heads)}]
    places += [{"position_bias": T5Buckets()}]
    options: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": width, **draw.choice(places)}
    more = {
        "v_head_dim": 40, "bias": ("q", "v"), "qk_norm": draw.choice(("rms", "layer", "rms_all")), "gate": True,
        "sinks": True, "softcap": 10.0,
    }  # fmt: skip
    options |= {name: value for name, value in more.items() if draw.random() < 0.3}
    module = MultiHeadAttention(draw.choice((24, 100, heads * width)), heads, dtype=dtype, reproducible=True, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def run(module: MultiHeadAttention, x: Tensor, lengths: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of x."""
    x = x.detach().requires_grad_()
    out = module(x, mask=causal() & KeyLengths(lengths))
    return out.detach(), torch.autograd.grad((out * weights).sum(), x)[0]


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_a_row_has_the_same_bits_whatever_is_beside_it(first: int) -> None:
    for seed in range(first, first + 15):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        module = drawn(draw)
        batch, length = draw.choice((2, 3, 8)), draw.choice((1, 2, 7, 33, 64, 130))
        dtype, width = module.out_proj.weight.dtype, module.embed_dim
        x, weights = torch.randn(2, batch, length, width, dtype=dtype)
        lengths = torch.randint(1, length + 1, (batch,))
        whole = run(module, x, lengths, weights)
        at = torch.randint(0, batch, (draw.choice((1, 2, 17)),))
        part = run(module, x[at], lengths[at], weights[at])
        torch.set_num_threads(1)
        alone = run(module, x[:1], lengths[:1], weights[:1])
        torch.set_num_threads(2)
        after = draw.choice((1, 6, 40))  # rows of padding
        padding = torch.randn(batch, after, width, dtype=dtype)
        padded = [torch.cat([y, pad * padding], 1) for y, pad in ((x, 1), (weights, 0))]
        longer = run(module, padded[0], lengths, padded[1])
        for name, values, expected in (
            ("in another batch", part, [y[at] for y in whole]),
            ("alone, with one thread", alone, [y[:1] for y in whole]),
            ("padded", [y[:, :length] for y in longer], whole),
        ):
            for got, right in zip(values, expected, strict=True):
                assert torch.equal(got, right), (seed, name, module)


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
