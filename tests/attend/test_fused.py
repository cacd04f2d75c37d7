"""``backend="fused"``: torch's operators for CUDA, on CPU kernels that follow their sources ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope._attend import mask_parts, prepare
from headscope._attend.backends import fused
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, causal, window
from support.fused_on_cpu import fused_on_cpu
from support.tolerance import assert_as_accurate

H, HKV, T, D = 4, 2, 19, 16
TOP_LEFT = Band(None, 0, offset=0)
LENGTHS = KeyLengths(torch.tensor([7, 0]))
PACKED = Documents.from_cu_seqlens(torch.tensor([0, 5, 5, 12, T]))
CROSSED = Documents.from_cu_seqlens(torch.tensor([0, 5, 12, T]), torch.tensor([0, 3, 3, T]))
SHOWN = Dense(torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(0)) < 0.3)

FLASH, BAND = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
EFFICIENT, EFFICIENT_BAND = "_scaled_dot_product_efficient_attention", "_efficient_attention_forward"

# mask, sizes and options, operator in half precision, operator in float32
CASES: dict[str, tuple[Mask | None, dict[str, Any], str, str]] = {
    "no mask": (None, {}, FLASH, EFFICIENT),
    "causal": (causal(), {}, FLASH, EFFICIENT),
    "causal, fewer queries": (causal(), {"queries": 11}, BAND, EFFICIENT_BAND),
    "causal, one query": (causal(), {"queries": 1}, BAND, EFFICIENT_BAND),
    "top-left causal, fewer queries": (TOP_LEFT, {"queries": 11}, FLASH, EFFICIENT),
    "top-left causal, fewer queries, & lengths": (TOP_LEFT & LENGTHS, {"queries": 11}, EFFICIENT, EFFICIENT),
    "top-left causal, fewer queries, & boolean tensor": (
        TOP_LEFT & LENGTHS & Dense(SHOWN.tensor[:, :, :11]), {"queries": 11, "sinks": True}, EFFICIENT, EFFICIENT
    ),
    "top-left causal, fewer queries, bias": (TOP_LEFT, {"queries": 11, "bias": True}, EFFICIENT, EFFICIENT),
    "top-left window, fewer queries": (Band(3, 0, offset=0), {"queries": 11}, BAND, EFFICIENT_BAND),
    "band before the diagonal": (Band(4, -2), {"queries": 11}, BAND, EFFICIENT_BAND),
    "window": (window(5), {}, BAND, EFFICIENT_BAND),
    "window & wider window": (window(5) & Band(9, 3), {}, BAND, EFFICIENT_BAND),
    "lengths": (LENGTHS, {}, EFFICIENT, EFFICIENT),
    "causal & lengths": (causal() & LENGTHS, {}, EFFICIENT, EFFICIENT),
    "window & lengths": (window(4) & LENGTHS, {}, EFFICIENT_BAND, EFFICIENT_BAND),
    "boolean tensor": (SHOWN, {}, EFFICIENT, EFFICIENT),
    "boolean tensor & causal & lengths": (SHOWN & causal() & LENGTHS, {}, EFFICIENT, EFFICIENT),
    "documents": (PACKED, {"batch": 1}, BAND, EFFICIENT_BAND),
    "documents & causal": (causal() & PACKED, {"batch": 1}, BAND, EFFICIENT_BAND),
    "documents & window": (window(3) & PACKED, {"batch": 1}, BAND, EFFICIENT_BAND),
    "documents with other keys": (CROSSED, {"batch": 1}, BAND, EFFICIENT_BAND),
    "sinks": (causal(), {"sinks": True}, FLASH, EFFICIENT),
    "sinks of empty rows": (causal() & LENGTHS, {"sinks": True}, EFFICIENT, EFFICIENT),
    "sinks of packed documents": (window(3) & PACKED, {"batch": 1, "sinks": True}, BAND, EFFICIENT_BAND),
    "bias": (None, {"bias": True}, EFFICIENT, EFFICIENT),
    "bias & causal & lengths": (causal() & LENGTHS, {"bias": True}, EFFICIENT, EFFICIENT),
    "Dv 11 with D 13": (causal(), {"head_dim": 13, "v_head_dim": 11}, FLASH, EFFICIENT),
    "D 300": (causal(), {"head_dim": 300, "v_head_dim": 300, "queries": 3}, EFFICIENT_BAND, EFFICIENT_BAND),
}  # fmt: skip
# of flash alone: a band beyond the diagonal, and rows before the first key
FLASH_ONLY: dict[str, tuple[Mask, dict[str, Any]]] = {
    "band": (Band(3, 2), {}),
    "more queries": (causal(), {"queries": 23}),
    "top-left, more queries": (TOP_LEFT, {"queries": 23}),
    "strictly causal": (Band(None, -1), {}),
}


@pytest.fixture(scope="module")
def ran() -> Iterator[list[str]]:
    with fused_on_cpu() as names:
        yield names


def check(ran: list[str], dtype: torch.dtype, mask: Mask | None, options: dict[str, Any], with_lse: bool) -> None:
    batch, queries, width = options.get("batch", 2), options.get("queries", T), options.get("head_dim", D)
    draw = torch.Generator().manual_seed(1)
    sizes = ((batch, H, queries, width), (batch, HKV, T, width), (batch, HKV, T, options.get("v_head_dim", width)))
    inputs = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    grads = [
        torch.randn(*sizes[0][:3], sizes[2][3], generator=draw).to(dtype),
        torch.randn(sizes[0][:3], generator=draw),
    ]
    sinks = torch.randn(H, generator=draw) if "sinks" in options else None
    bias = torch.randn(H, queries, T, generator=draw).to(dtype) if "bias" in options else None

    def results(backend: str, to: torch.dtype) -> list[Tensor]:
        leaves = [x.to(to).requires_grad_() for x in inputs]
        logits = None if sinks is None else sinks.to(to).requires_grad_()
        of_bias = None if bias is None else bias.to(to)
        result = headscope.attend(*leaves, mask=mask, sinks=logits, bias=of_bias, backend=backend)
        pairs = list(zip(result[:2], grads, strict=True))[: 2 if with_lse else 1]
        leaves += [] if logits is None else [logits]
        taken = torch.autograd.grad([x for x, _ in pairs], leaves, [grad.to(x.dtype) for x, grad in pairs])
        return [*result[:2], *taken]

    exact, baseline = results("reference", torch.float64), results("reference", dtype)
    ran.clear()
    found = results("fused", dtype)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, x, right, plain in zip(names[: len(found)], found, exact, baseline, strict=True):
        # δ of sinks is read from out, which has been rounded; torch's CPU kernel for half types approximates exp
        size = {"dsinks": float(queries * batch), "lse": 100.0 if FLASH in ran else 0.0}.get(name, 0.0)
        assert_as_accurate(
            x, right, plain, magnitude=size, dtype=torch.float32 if name == "lse" else dtype, message=name
        )


@pytest.mark.parametrize("with_lse", [True, False], ids=["gradient of lse", "gradient of out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(ran: list[str], name: str, dtype: torch.dtype, with_lse: bool) -> None:
    mask, options, half, single = CASES[name]
    check(ran, dtype, mask, options, with_lse)
    expected = single if dtype == torch.float32 else half
    assert ran == [expected, expected.removesuffix("_forward") + "_backward"]


@pytest.mark.parametrize("name", FLASH_ONLY)
def test_bands_that_only_flash_supports(ran: list[str], name: str) -> None:
    mask, options = FLASH_ONLY[name]
    check(ran, torch.bfloat16, mask, options, with_lse=True)
    assert ran == [BAND, "_flash_attention_backward"]
    q, k = torch.zeros(2, H, options.get("queries", T), D), torch.zeros(2, H, T, D)
    with pytest.raises(ValueError, match="backend: fused refuses this call: mask: torch's memory-efficient kernels"):
        headscope.attend(q, k, k, mask=mask, backend="fused")


def test_cudnn_runs_where_torch_prefers_it(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_prefers_cudnn", lambda call, inputs: True)
    for mask in (None, causal()):
        check(ran, torch.bfloat16, mask, {"sinks": True}, with_lse=True)
        assert ran == ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]
    check(ran, torch.bfloat16, None, {"head_dim": 128, "v_head_dim": 128}, with_lse=True)
    assert ran[1] == FLASH + "_backward", "with columns for the gradient of lse, D is above cuDNN's limit"


def test_the_gradient_of_lse_is_exact_whatever_its_size() -> None:
    grad = torch.tensor([1.0, -3.1415927, 1e-7, -1e7, 3e-5, 0.0])[:, None].expand(-1, 4)[None]  # [1, 6, 4]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        first, second = fused._columns_of_lse(grad, dtype)
        assert first.dtype == second.dtype == dtype
        products = (first.double() * second.double()).sum(-1)
        if dtype == torch.float16:  # its smallest numbers end at 6e-8
            torch.testing.assert_close(products.float(), -grad, rtol=1e-5, atol=1e-12)
        else:
            assert torch.equal(products.float(), -grad)


def test_the_gradient_of_lse_with_the_widest_heads_runs_on_another_kernel(ran: list[str]) -> None:
    check(ran, torch.bfloat16, causal(), {"head_dim": 256, "v_head_dim": 256}, with_lse=True)
    assert ran == [FLASH, EFFICIENT + "_backward"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 5.0}, "softcap: torch's fused kernels do not support it"),
    "scale": ({"scale": -1.0}, "scale: is 0 or below"),
    "or": ({"mask": causal() | window(3)}, "mask: only bands, lengths, packed documents and boolean tensors"),
    "ids of documents": ({"mask": Documents(torch.zeros(1, T, dtype=torch.long))}, "mask: only bands, lengths, packed"),
    "band after the diagonal": ({"mask": Band(-1, 3)}, "mask: a band that starts after the diagonal"),
    "band before the first key": ({"mask": Band(None, -T)}, "mask: a band that starts after the diagonal, masks every"),
    "empty band": ({"mask": Band(1, -2)}, "mask: a band that starts after the diagonal, masks every key"),
    "bias for each row": ({"bias": torch.zeros(H, T, 1)}, "bias: axis K is 1, expected 19"),
    "bias in training": ({"bias": torch.zeros(H, T, T, requires_grad=True)}, "bias: its gradient would be as large"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_option(ran: list[str], name: str) -> None:
    options, reason = REFUSED[name]
    q = torch.zeros(1, H, T, D)
    with pytest.raises(ValueError, match=f"backend: fused refuses this call: {reason}"):
        headscope.attend(q, q, q, backend="fused", **options)


def test_on_a_cpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_parts, "DEVICES", ("cuda", "meta"))
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
    q = torch.zeros(1, H, T, D)
    with pytest.raises(ValueError, match="device: torch has these operators for CUDA, not for cpu"):
        headscope.attend(q, q, q, backend="fused")


def test_ids_written_after_the_mask_was_made_are_not_packed_any_more(ran: list[str]) -> None:
    mask = Documents.from_cu_seqlens(torch.tensor([0, 5, T]))
    q = torch.randn(1, H, T, D)
    headscope.attend(q, q, q, mask=mask, backend="fused")
    mask.q_ids[0, 4] = 1
    assert mask.packing is None
    with pytest.raises(ValueError, match="mask: only bands, lengths, packed documents"):
        headscope.attend(q, q, q, mask=mask, backend="fused")
    torch.testing.assert_close(
        headscope.attention(q, q, q, mask=mask), headscope.attention(q, q, q, mask=mask, backend="reference")
    )


def test_a_mask_written_before_the_backward_pass_raises(ran: list[str]) -> None:
    visible = torch.ones(T, T, dtype=torch.bool)
    q = torch.randn(1, H, T, D, requires_grad=True)
    out = headscope.attend(q, q, q, mask=visible, backend="fused").out
    visible[3] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
