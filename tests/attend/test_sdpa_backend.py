"""``backend="sdpa"``: what torch's kernels get wrong, and headscope copies or refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import headscope
from headscope._attend.backends import sdpa
from headscope._attend.call import Call, Options, check_call
from headscope._attend.select import select
from headscope.masks import Dense, KeyLengths, causal

B, H, T, D = 2, 3, 19, 16
MEMORY = torch.arange(4000, dtype=torch.float32).sin()


def rows(dtype: torch.dtype = torch.float32, seed: int = 0, keys: int = T) -> Tensor:
    return torch.randn(B, H, keys, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


OVERLAPPING = {
    "rows, unfolded": lambda: MEMORY.view(2, 2000)[:, None, : 3 * 60].expand(2, 3, -1).unfold(-1, D, 1)[:, :, :T],
    "rows, a stride of 1": lambda: MEMORY.as_strided((B, H, T, D), (700, 200, 1, 1)),
    "rows, a stride below D": lambda: MEMORY.as_strided((B, H, T, D), (1900, 600, D - 1, 1)),
    "rows, repeated": lambda: MEMORY.as_strided((B, H, T, D), (100, 30, 0, 1)),
    "heads": lambda: MEMORY.as_strided((B, H, T, D), (700, 1, D, 1)),
    "heads, repeated": lambda: MEMORY.as_strided((B, H, T, D), (700, 0, D, 1)),
    "batch entries": lambda: MEMORY.as_strided((B, H, T, D), (1, 600, D, 1)),
    "batch entries, repeated": lambda: MEMORY.as_strided((B, H, T, D), (0, 600, D, 1)),
    "everything": lambda: MEMORY.as_strided((B, H, T, D), (1, 1, 1, 1)),
    "columns, repeated": lambda: MEMORY.as_strided((B, H, T, D), (100, 30, 2, 0)),
}


@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("layout", OVERLAPPING)
def test_rows_that_share_memory_attend_as_their_copies(layout: str, name: str, mask: Any) -> None:
    tensors = {each: rows(seed=seed) for seed, each in enumerate("qkv")}
    tensors[name] = OVERLAPPING[layout]()
    expected = headscope.attention(
        **{n: x.double().contiguous() for n, x in tensors.items()}, mask=mask, backend="reference"
    )
    for _ in range(2):  # prepared, then repeated
        found = headscope.attention(**tensors, mask=mask, backend="sdpa")
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, within torch
@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_forward_mode_raises_with_the_remedy(name: str, mask: Any) -> None:
    tensors = {**{each: rows(seed=seed) for seed, each in enumerate("qkv")}, "bias": torch.zeros(T, T)}
    mask, tensors = (None, tensors) if name == "bias" else (mask, {each: tensors[each] for each in "qkv"})
    refused = pytest.raises(
        RuntimeError,
        match=r'does not support forward-mode gradients.*; backend="reference" does',
    )
    with forward_ad.dual_level(), refused:
        dual = {name: forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))}
        headscope.attention(**{**tensors, **dual}, mask=mask, backend="sdpa")

    def run(x: Tensor) -> Tensor:
        return headscope.attention(**{**tensors, name: x}, mask=mask, backend="sdpa")

    for transform in (torch.func.jacfwd(run), lambda x: torch.func.jvp(run, (x,), (x,))):
        with pytest.raises(RuntimeError, match="does not support forward-mode gradients"):
            transform(tensors[name])
    with forward_ad.dual_level():  # nothing has a tangent
        torch.testing.assert_close(run(tensors[name]), headscope.attention(**tensors, mask=mask))


def test_gradients_of_rows_that_share_memory() -> None:
    tensors = {each: rows(seed=seed) for seed, each in enumerate("qkv")}
    tensors["q"] = MEMORY.as_strided((B, H, T, D), (700, 1, 1, 1))
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    copies = {n: x.detach().contiguous().clone().requires_grad_() for n, x in tensors.items()}
    grad = torch.linspace(-1, 1, B * H * T * D).view(B, H, T, D)
    found = torch.autograd.grad(headscope.attention(**leaves, backend="sdpa"), list(leaves.values()), grad)
    expected = torch.autograd.grad(headscope.attention(**copies, backend="reference"), list(copies.values()), grad)
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


def test_grouped_heads_that_repeat_by_a_stride_of_0_are_not_copied() -> None:
    kept = rows()[:, :1].expand(B, H, T, D)
    assert sdpa._without_overlap(kept) is kept


LARGE = {
    "an infinite q": lambda q, k, bias: (q.fill_(torch.inf), k.abs_()),
    "one infinite key": lambda q, k, bias: (q.abs_(), k[:, :, 3].fill_(torch.inf)),
    "one key of NaN": lambda q, k, bias: k[:, :, 3].fill_(torch.nan),
    "products beyond float32": lambda q, k, bias: (q.abs_().add_(0.1).mul_(1e30), k.abs_().add_(0.1).mul_(1e30)),
    "an infinite bias": lambda q, k, bias: bias.fill_(torch.inf),
    "a bias of NaN": lambda q, k, bias: bias[..., 3].fill_(torch.nan),
}


@pytest.mark.parametrize("keys", [5, 16, 17, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", LARGE)
def test_rows_with_an_infinite_logit_are_nan(what: str, dtype: torch.dtype, keys: int) -> None:
    """exp(inf - inf) is NaN; torch's kernels for a CPU return 0 or finite numbers for some of these rows."""
    if dtype == torch.float16 and "beyond" in what:
        pytest.skip("no product of float16 numbers is so large")
    q, k, v = rows(dtype, 0, 4), rows(dtype, 1, keys), rows(dtype, 2, keys)
    bias = torch.zeros(4, keys, dtype=dtype)
    LARGE[what](q, k, bias)
    options = {"bias": bias} if "bias" in what else {}
    for _ in range(2):
        found = headscope.attention(q, k, v, backend="sdpa", **options)
        assert bool(found.isnan().all()), found


def test_large_numbers_whose_products_fit_stay_finite() -> None:
    q, k, v = rows() * 1e15, rows(seed=1) * 1e15, rows(seed=2)
    for _ in range(2):
        found = headscope.attention(q, k, v, backend="sdpa")
        torch.testing.assert_close(found, headscope.attention(q, k, v, backend="reference"), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- what torch has no fused kernel for on CUDA


def cuda_call(dtype: torch.dtype = torch.float32, head_dim: int = 64, **options: Any) -> Call:
    q = torch.empty(2, 4, 7, head_dim, dtype=dtype, device="meta")
    bias = options.pop("bias", None)
    described = check_call(q, q, q, bias, None, Options(options.get("mask"), None, None, 0.0, False))
    return replace(described, device="cuda")


QUADRATIC = {
    "float64": ({"dtype": torch.float64}, "dtype: torch has no fused kernel for float64 on CUDA"),
    "float32, D 66": ({"head_dim": 66}, "D: torch's memory-efficient kernel requires a multiple of 4, got 66"),
    "bfloat16, D 264": ({"dtype": torch.bfloat16, "head_dim": 264}, "D: 264 is above 256"),
    "float32, D 320": ({"head_dim": 320}, "D: 320 is above 256"),
    "bfloat16, D 60, a bias": (
        {"dtype": torch.bfloat16, "head_dim": 60, "bias": torch.zeros(7, 7, dtype=torch.bfloat16, device="meta")},
        "D: torch's memory-efficient kernel requires a multiple of 8, got 60",
    ),
    "bfloat16, D 60, a mask": (
        {"dtype": torch.bfloat16, "head_dim": 60, "mask": Dense(torch.eye(7, dtype=torch.bool, device="meta"))},
        "D: torch's memory-efficient kernel requires a multiple of 8, got 60",
    ),
    "bfloat16, D 60, lengths": (
        {"dtype": torch.bfloat16, "head_dim": 60, "mask": KeyLengths(torch.tensor([3, 7], device="meta"))},
        "D: torch's memory-efficient kernel requires a multiple of 8, got 60",
    ),
}


@pytest.mark.parametrize("name", QUADRATIC)
def test_on_cuda_others_take_what_torch_computes_by_matrices(name: str) -> None:
    options, reason = QUADRATIC[name]
    call = cuda_call(**options)
    reasons = sdpa.refuses(call)
    assert len(reasons) == 1, reasons
    assert reasons[0].startswith(reason)
    assert select(call).name == ("blocked" if call.dtype == torch.float64 else "fused")
    assert sdpa.refuses(replace(call, device="cpu")) == [], "on a CPU, torch has a fused kernel"


@pytest.mark.parametrize(
    "options",
    [{}, {"head_dim": 256}, {"head_dim": 36}, {"dtype": torch.bfloat16, "head_dim": 61}, {"dtype": torch.float16}],
    ids=str,
)
def test_on_cuda_torch_takes_what_its_fused_kernels_do(options: dict[str, Any]) -> None:
    assert select(cuda_call(**options)).name == "sdpa"
