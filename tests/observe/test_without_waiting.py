"""On a GPU no step waits for the device: no number is read, and no tensor is copied from or to the host.

Fake tensors of CUDA have no values, so reading one raises. The first call copies what does not depend on its tensors:
the spans of a mask, the sampled rows, the edges of histograms. The test looks at the second one.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import headscope
from headscope import Observe
from headscope._attend import blocks
from headscope._attend.blocks import DEVICE_BLOCK, logits_of_block
from headscope._observe import measure
from headscope._support.logits import half_products, scaled_products
from headscope.masks import Dense, Documents, KeyLengths, Mask, Prefix, causal, window
from support.fake_cuda import fake_cuda, recorded

B, H, T, D = 2, 4, 48, 16

LONG = pytest.mark.long


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def masks() -> dict[str, Mask | None]:
    lengths = KeyLengths(empty(B, dtype=torch.long))
    return {
        "no mask": None,
        "causal": causal(),
        "prefix | window": Prefix(3) | window(5),
        "prefix & window": Prefix(30) & window(5),
        "causal & lengths": causal() & lengths,
        "causal & documents": causal() & Documents(empty(B, T, dtype=torch.long)),
        "boolean tensor": Dense(empty(B, 1, T, T, dtype=torch.bool)),
    }


def waits(names: list[str]) -> set[str]:
    return {name for name in names if "between devices" in name or "_local_scalar_dense" in name or name == "equal"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0, "sinks": True, "bias": True, "kv_heads": 2}], ids=["plain", "options"]
)
def test_blocked_torch_does_not_wait(options: dict[str, Any], dtype: torch.dtype) -> None:
    with fake_cuda():
        q, k = empty(B, H, T, D, dtype=dtype), empty(B, options.get("kv_heads", H), T, D, dtype=dtype)
        given: dict[str, Any] = {"softcap": options.get("softcap")}
        given["sinks"] = empty(H) if "sinks" in options else None
        given["bias"] = empty(H, T, T, dtype=dtype) if "bias" in options else None
        for name, mask in masks().items():
            for _ in range(2):
                with recorded() as names:
                    headscope.attend(q, k, k, mask=mask, backend="blocked", **given)
            assert not waits(names), f"{name}: {waits(names)}"
            assert ("bmm.dtype" in names) == (dtype == torch.bfloat16), name


OBSERVED = {
    "default": Observe(),
    "sampled rows": Observe(rows=7),
    "everything": Observe(
        rows=7, map=5, edges=3, top=2, received_max=True, windows=(4, 9), extra=("second_weight",)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "with_lse"),  # "everything" measures what "default" does, too
    [
        *(pytest.param(name, False, marks=() if name == "everything" else LONG) for name in OBSERVED),
        ("sampled rows", True),
    ],
)
def test_the_portable_observer_does_not_wait(name: str, with_lse: bool) -> None:
    with fake_cuda(), mock.patch.object(measure, "_check_readable"):
        q, k = empty(B, H, T, D, dtype=torch.bfloat16), empty(B, 2, T, D, dtype=torch.bfloat16)
        lse = empty(B, H, T) if with_lse else None
        others = () if with_lse else ("no mask", "causal & documents")  # lse changes nothing of how a mask is read
        for of_mask in ("prefix | window", "causal & lengths", *others):
            mask = masks()[of_mask]
            for _ in range(2):
                with recorded() as names:
                    headscope.observe(q, k, k, lse=lse, mask=mask, what=OBSERVED[name])
            assert not waits(names), f"{of_mask}: {waits(names)}"
            assert "bmm.dtype" in names


def test_blocks_are_larger_on_a_gpu() -> None:
    assert logits_of_block("cuda", 7) == logits_of_block("xpu", 7) == DEVICE_BLOCK == 2**26
    assert logits_of_block("cpu", 7) == 7
    with fake_cuda():
        q = empty(1, 2, 4096, D, dtype=torch.bfloat16)
        counts = []
        for size in (DEVICE_BLOCK, 2**19):
            with mock.patch.object(blocks, "DEVICE_BLOCK", size), recorded() as names:
                headscope.attend(q, q, q, backend="blocked")
            counts.append(len(names))
    assert counts[0] * 20 < counts[1], counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_half_types_are_those_of_float32_copies(dtype: torch.dtype) -> None:
    """A CPU has no product of half types with a result in float32; the same by copies stands in for it."""

    def product(x: Tensor, y: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert out_dtype == torch.float32
        return x.float() @ y.float()

    q, k = torch.randn(2, 3, 7, 5).to(dtype), torch.randn(2, 3, 11, 5).to(dtype)
    with mock.patch.object(torch, "bmm", product):
        found = half_products(q, k, 0.3, 4.0)
    torch.testing.assert_close(found, scaled_products(q.float(), k.float(), 0.3, 4.0))
