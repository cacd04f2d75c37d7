"""Numbers far from 1, and more keys and rules than the kernels count: what is rare and must be right nevertheless."""

from __future__ import annotations

import math
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from headscope import MultiHeadAttention, Observe, attend, attention, observe
from headscope._attend.backends import native
from headscope._attend.call import Options, check_call
from headscope._attend.select import select
from headscope.masks import Dense, window

N, D = 50, 8
NATIVE = pytest.mark.skipif(native.extension is None, reason="the native extension was not built: no C++ compiler")
BACKENDS = ["blocked", "reference", pytest.param("cpu", marks=NATIVE)]


def made(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and a gradient of the output, [1, N, D]."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, N, D, generator=random).to(dtype) for _ in range(4)]


def weights_of(out: Tensor, v: Tensor) -> Tensor:
    """Those of the first row, as its gradient says."""
    return torch.autograd.grad(out[:, 0].sum(), v, retain_graph=True)[0][0, :, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_the_smallest_biases_has_even_weights_in_the_backward_too(backend: Any, dtype: torch.dtype) -> None:
    q, k, v, grad = made(dtype)
    v.requires_grad_()
    bias = torch.zeros(N, N, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    bias[0] = torch.finfo(bias.dtype).min
    out = attention(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(weights_of(out, v).double(), torch.full((N,), 1 / N).double(), rtol=0.01, atol=0)
    even = attention(torch.cat((torch.zeros_like(q[:, :1]), q[:, 1:]), 1), k, v)
    rest = (2e-3, 0.05)[dtype == torch.bfloat16]
    ours, theirs = (torch.autograd.grad(x, v, grad)[0] for x in (out, even))
    torch.testing.assert_close(ours, theirs, rtol=rest, atol=rest)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("far", [3e3, 1e5, 1e6, 1e7, 1e8, -1e5, -1e8, torch.finfo(torch.float32).min])
def test_a_sink_far_from_zero_has_its_share(backend: Any, far: float) -> None:
    """With two keys like it: a third, and of a gradient what a third has."""
    q, k = torch.zeros(1, 1, 1), torch.zeros(1, 2, 1)
    sinks, bias = torch.tensor([far], requires_grad=True), torch.full((1, 2), far)
    out = attention(q, k, torch.ones(1, 2, 1, requires_grad=True), bias=bias, sinks=sinks, backend=backend)
    assert out.item() == pytest.approx(2 / 3, rel=1e-5)
    out.sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.item() == pytest.approx(-2 / 9, rel=1e-3)


@NATIVE
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_rows_far_from_zero_are_weights(dtype: torch.dtype, sinks: bool) -> None:
    """lse cannot hold both the largest logit and the sum: by it alone they came to 1e19."""
    q, k, v, _ = made(dtype)
    v.requires_grad_()
    random = torch.Generator().manual_seed(1)
    given = {"sinks": torch.zeros(1)} if sinks else {}
    for size in (10.0 ** (3 + 6 * torch.rand(60, generator=random))).tolist():
        for far in (size, -size):
            bias = torch.zeros(N, N)
            bias[0] = far
            weights = weights_of(attention(q, k, v, bias=bias, backend="cpu", **given), v).double()
            gone = 1.0 if sinks and far < 0 else 0.0
            assert abs(float(weights.sum()) - 1 + gone) < (0.02 if dtype == torch.bfloat16 else 1e-3), far
            assert float(weights.max()) < 1.01, far


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "reference"])
@pytest.mark.parametrize("size", [3.0, 30.0, 100.0, 300.0])
def test_gradients_beside_large_logits_are_as_exact_as_torchs(backend: Any, size: float) -> None:
    """A weight near 1 shows each digit that lse has lost."""
    random = torch.Generator().manual_seed(0)
    made = torch.randn(4, 4, 128, 64, generator=random)

    def gradients(dtype: torch.dtype, backend: Any) -> list[Tensor]:
        q, k, v, grad = made.clone().to(dtype)
        leaves = [x.requires_grad_() for x in (q * size, k, v)]
        return [x.double() for x in torch.autograd.grad(attention(*leaves, backend=backend), leaves, grad)]

    exact, plain = (gradients(dtype, "reference") for dtype in (torch.float64, torch.float32))
    for name, got, theirs, truth in zip("qkv", gradients(torch.float32, backend), plain, exact, strict=True):
        ours, torchs = ((x - truth).square().mean().sqrt() for x in (got, theirs))
        assert ours < 2 * torchs, f"d{name}: {ours:.3g}, torch has {torchs:.3g}"


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "reference"])
@pytest.mark.parametrize("at", [0.3, 0.7, 3.0, 6.0, 8.0])
def test_the_gradient_through_a_softcap_where_it_is_flat(backend: Any, at: float) -> None:
    """1 - tanh² has lost its digits there; relative to float64."""
    q = torch.tensor([[[at]]])
    k, v = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[[1.0], [0.0]]])

    def gradient(dtype: torch.dtype, backend: Any) -> float:
        x = q.clone().to(dtype).requires_grad_()
        attention(x, k.to(dtype), v.to(dtype), softcap=1.0, scale=1.0, backend=backend).sum().backward()
        assert x.grad is not None
        return float(x.grad)

    truth = math.exp(math.tanh(at)) / (1 + math.exp(math.tanh(at))) ** 2 / math.cosh(at) ** 2
    assert gradient(torch.float64, backend) == pytest.approx(truth, rel=1e-7)
    assert gradient(torch.float32, backend) == pytest.approx(truth, rel=3e-6)


@pytest.mark.parametrize("parts", [16, 17, 40])
def test_a_mask_of_many_parts(parts: int) -> None:
    random = torch.Generator().manual_seed(2)
    tables = [torch.rand(N, N, generator=random) < 0.97 for _ in range(parts)]
    q, k, v, _ = made()
    ours = attention(q, k, v, mask=reduce(and_, map(Dense, tables)))
    torch.testing.assert_close(ours, attention(q, k, v, mask=reduce(and_, tables), backend="reference"))


def test_more_keys_than_a_number_of_32_bits_are_refused_by_the_kernels() -> None:
    k = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**31 + 100, 1)
    call = check_call(torch.zeros(1, 1, 1, 1), k, k, None, None, Options(window(10), None, None, 0.0, False))
    assert any(reason.startswith("sizes: 2,147,483,648") for reason in native.refuses(call))
    assert select(call).name != "cpu"


def test_dropout_without_values() -> None:
    module = MultiHeadAttention(16, 4, dropout=0.1, sinks=True, device="meta")
    assert module(torch.randn(2, 5, 16, device="meta")).shape == (2, 5, 16)


# Scale and softcap at the ends of the range of float32, by 2 to the power of these.
FACTORS: dict[str, tuple[int, int | None]] = {
    "small scale": (-100, None),
    "large scale": (100, None),
    "small scale, large softcap": (-50, 50),
    "small softcap": (-100, -100),
    "large softcap": (100, 100),
    "large scale, small softcap": (50, -50),
    "small scale, softcap": (-100, 0),
    "large scale, softcap": (100, 0),
}
WIDER = 10  # the powers of float64 are so many times larger
HOLDS = (torch.float32, torch.bfloat16, torch.float64)  # float16 holds no q and k beside which these factors matter
ENDS = [(name, dtype) for name in FACTORS for dtype in HOLDS] + [("small softcap", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), ENDS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_factors_at_the_ends_of_their_range_keep_their_digits(backend: Any, name: str, dtype: torch.dtype) -> None:
    """q and k are so large, or so small, that logits before the cap are about 1, or about a smaller cap."""
    powers = [None if power is None else power * (WIDER if dtype == torch.float64 else 1) for power in FACTORS[name]]
    scale, softcap = (None if power is None else 2.0**power for power in powers)
    assert powers[0] is not None
    of_logits = powers[0] - min(powers[1] or 0, 0)
    q, k, v, _ = made(dtype)
    q, k = q * 2.0 ** (-of_logits // 2), k * 2.0 ** -(of_logits + -of_logits // 2)
    out = attention(q, k, v, scale=scale, softcap=softcap, backend=backend)
    tolerance = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), by_longdouble(q, k, v, scale, softcap), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_of_q_and_scale_that_would_overflow_meets_the_softcap_first(backend: Any, dtype: torch.dtype) -> None:
    far = 2.0**100 if dtype == torch.float32 else 2.0**1000
    v = made(dtype)[2]
    q, k = torch.zeros_like(v), torch.zeros_like(v)
    q[..., 0], k[..., 0] = 2.0**40, 2.0**-40 * torch.linspace(-1, 1, N)  # no two keys are nearly as good
    out = attention(q, k, v, scale=far, softcap=far, backend=backend)
    tolerance = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), by_longdouble(q, k, v, far, far), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("q_pos", [None, torch.arange(N)], ids=["native", "portable"])
def test_observing_beside_a_far_softcap_is_as_exact(q_pos: Tensor | None) -> None:
    """Positions that are given make the portable observer run."""
    q, k, _, _ = made(torch.float64)
    far = 2.0**1000
    near = observe(q, k, scale=1.0, softcap=1.0, q_pos=q_pos, what=Observe(keep_rows=True))
    stats = observe(q * 2.0**40, k * 2.0**-40, scale=far, softcap=far, q_pos=q_pos, what=Observe(keep_rows=True))
    torch.testing.assert_close(stats["max_logit"].mean / far, near["max_logit"].mean, rtol=1e-12, atol=0)


LIMIT = 3.4028e38 / math.log2(math.e)  # of the logits of the native kernels, which are those of exp2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_logits_are_those_of_the_documentation(backend: Any) -> None:
    zero, v = torch.zeros(1, 2, 4), torch.tensor([[[1.0], [3.0]]])
    limit = LIMIT if backend == "cpu" else 3.4028e38
    for size in (0.999 * limit, -0.999 * limit):
        out, lse, _ = attend(zero, zero, v, bias=torch.full((2, 2), size), backend=backend)
        torch.testing.assert_close(out, torch.full((1, 2, 1), 2.0))
        torch.testing.assert_close(lse, torch.full((1, 2), size))
    q, k = torch.full((1, 2, 4), 0.2 * limit**0.5), torch.full((1, 2, 4), limit**0.5)
    bias = torch.full((2, 2), 0.1 * limit)
    fits, beyond = (attend(q, k, v, scale=scale, bias=bias, backend=backend) for scale in (1.0, 1.2))
    torch.testing.assert_close(fits.out, torch.full((1, 2, 1), 2.0))
    assert beyond.out.isnan().all()
    assert beyond.lse.isnan().all()


def values_of_size(size: float, keys: int, dtype: torch.dtype) -> Tensor:
    """Values [1, keys, D] that all are this multiple of the largest number."""
    return torch.full((1, keys, D), size * torch.finfo(dtype).max, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "sdpa", None])
@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (8, 64), (40, 1000)])
def test_the_largest_values_are_those_of_the_documentation(
    backend: Any, dtype: torch.dtype, queries: int, keys: int
) -> None:
    """Without a backend: torch's own function."""
    q, k = torch.zeros(1, queries, D, dtype=dtype), torch.zeros(1, keys, D, dtype=dtype)

    def is_finite(size: float) -> bool:
        v = values_of_size(size, keys, dtype)
        out = attention(q, k, v, backend=backend) if backend else sdpa(q[None], k[None], v[None])[0]
        return bool(out.isfinite().all())

    assert is_finite(0.98 / keys)
    assert is_finite(1.02 / keys) == (backend == "reference")
    assert is_finite(0.998) == (backend == "reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "sdpa"])
def test_large_values_of_keys_that_lose_their_weight_later(backend: Any, dtype: torch.dtype) -> None:
    q, k, v = torch.ones(1, 8, D, dtype=dtype), torch.zeros(1, 1000, D, dtype=dtype), values_of_size(0.5, 1000, dtype)
    k[:, -1] = 100.0
    out = attention(q, k, v, backend=backend)
    assert bool(out.isfinite().all()) == (backend in ("blocked", "reference"))


@pytest.mark.parametrize("backend", [*BACKENDS, "sdpa"])
def test_no_values_of_float16_overflow(backend: Any) -> None:
    q, k = torch.zeros(1, 8, D, dtype=torch.float16), torch.zeros(1, 1000, D, dtype=torch.float16)
    assert attention(q, k, values_of_size(1.0, 1000, torch.float16), backend=backend).isfinite().all()


@NATIVE
def test_biases_below_the_range_of_the_kernels_are_equal_and_hide_nothing() -> None:
    zero, v = torch.zeros(1, 1, 4), torch.tensor([[[1.0], [3.0]]])
    for bias in ([1.01 * -LIMIT, 1.3 * -LIMIT], [-3.4e38, -3e38]):
        out = attention(zero, zero.expand(1, 2, 4), v, bias=torch.tensor([bias]), backend="cpu")
        torch.testing.assert_close(out, torch.full((1, 1, 1), 2.0))
        out = attention(zero, zero.expand(1, 2, 4), v, bias=torch.tensor([[bias[0], -math.inf]]), backend="cpu")
        torch.testing.assert_close(out, torch.ones(1, 1, 1))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_products_before_the_scale_have_the_range_of_the_documentation(backend: Any, queries: int) -> None:
    """Beside a softcap they matter nowhere: what overflows is far beyond the flat part of tanh."""
    pairs = backend == "cpu" and native.extension.target() == "avx512_bf16"
    k, v = torch.tensor([[[1.5e19, 1.5e19], [0.0, 0.0]]]).bfloat16(), torch.tensor([[[1.0], [3.0]]]).bfloat16()
    q = torch.full((1, queries, 2), 1.5e19).bfloat16()  # q·k is 4.5e38
    out = attention(q, k, v, scale=2.0**-100, backend=backend)
    assert out.isnan().all() if pairs or backend == "reference" else (out == 1).all()
    capped = attention(q, k, v, scale=2.0**-100, softcap=1.0, backend=backend)
    wanted = (math.e + 3) / (math.e + 1)
    torch.testing.assert_close(capped, torch.full_like(capped, wanted), rtol=0.01, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_subnormal_numbers_of_bfloat16_are_zero_by_its_instructions_alone(backend: Any) -> None:
    pairs = backend == "cpu" and native.extension.target() == "avx512_bf16"
    zero, v = torch.zeros(1, 20, 2).bfloat16(), torch.full((1, 4, 2), 1e-39).bfloat16()
    out = attention(zero, zero[:, :4], v, backend=backend)
    torch.testing.assert_close(out, torch.zeros_like(out) if pairs else v[:, :1].expand(1, 20, 2), rtol=0, atol=0)
    normal = torch.full_like(v, 1.2e-38)
    out = attention(zero, zero[:, :4], normal, backend=backend)
    torch.testing.assert_close(out, normal[:, :1].expand(1, 20, 2), rtol=0, atol=0)


def by_longdouble(q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """The definition in numbers of 80 bits, which has the exponents of all of these."""
    wide_q, wide_k, wide_v = (x.double().numpy().astype(np.longdouble) for x in (q, k, v))
    s = np.longdouble(scale) * (wide_q @ wide_k.swapaxes(-2, -1))
    if softcap is not None:
        s = np.longdouble(softcap) * np.tanh(s / np.longdouble(softcap))
    p = np.exp(s - s.max(-1, keepdims=True))
    return torch.from_numpy((p / p.sum(-1, keepdims=True) @ wide_v).astype(np.float64))


@pytest.mark.parametrize("size", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("queries", [1, 2, 5, 8])
def test_gradients_of_few_queries_are_as_exact_as_torchs(queries: int, size: float) -> None:
    """Root mean squares over many draws: single ones scatter by more than the factor of two that is allowed."""
    random = torch.Generator().manual_seed(queries)
    squares = torch.zeros(2, 3, dtype=torch.float64)  # ours and torch's, of dq, dk, dv
    for _ in range(24):
        q, k, v, along = (torch.randn(1, 4, n, 64, generator=random) for n in (queries, 9, 9, queries))
        found = []
        for run, dtype in ((attention, None), (sdpa, None), (sdpa, torch.float64)):
            leaves = [(x * y).to(dtype).detach().requires_grad_() for x, y in ((q, size), (k, size), (v, 1))]
            found.append(torch.autograd.grad(run(*leaves), leaves, along.to(leaves[0].dtype)))
        for ours_or_torchs in (0, 1):
            for n, (x, exact) in enumerate(zip(found[ours_or_torchs], found[2], strict=True)):
                squares[ours_or_torchs, n] += (x - exact).square().mean()
    ours, torchs = squares.sqrt()
    assert (ours <= 2 * torchs).all(), (ours, torchs)
