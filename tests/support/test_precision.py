"""Logits are exact whatever ``torch.set_float32_matmul_precision`` says; torch's own products are not touched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import headscope
from headscope import MultiHeadAttention, Observe, observe
from headscope._support import precision
from headscope._support.precision import exact_products
from headscope.module._bias_kv import own_share

OF_CPU, OF_GPU = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def usual_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


class Products(torch.overrides.TorchFunctionMode):
    """Notes what precision products are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.precisions: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.__name__ in ("matmul", "__matmul__", "bmm", "baddbmm", "linear", "addmm", "mm"):
            self.precisions.add(OF_CPU.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_logits_are_exact_whatever_torch_was_told(setting: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    exact = compute(q, k, v)
    torch.set_float32_matmul_precision(setting)
    told = OF_CPU.fp32_precision
    with Products() as products:
        for got, expected in zip(compute(q, k, v), exact, strict=True):
            assert torch.equal(got, expected)
    assert products.precisions <= {"ieee", "none"}
    assert products.precisions
    assert OF_CPU.fp32_precision == told, "and it is as it was"
    assert torch.get_float32_matmul_precision() == setting


def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """All that the portable code makes of logits."""
    what, places = Observe(keep_rows=True, keep_qk=True), torch.arange(9)
    stats = observe(q, k, v, what=what, q_pos=places)  # places: not by the native kernels
    x = q.clone().requires_grad_()
    blocked = headscope.attend(x, k, v, backend="blocked")
    return [
        stats[0, "entropy"].mean, stats.tile(0, 4, 0, 4), blocked.lse.detach(),
        torch.autograd.grad(blocked.out.sum(), x)[0],
        headscope.attention(q, k, v, backend="reference"),
        headscope.functional.weights(q, k),
        own_share(q, k[0, :, 0], blocked.lse.detach(), 0.3, None),
    ]  # fmt: skip


def test_torch_keeps_its_own() -> None:
    torch.set_float32_matmul_precision("medium")
    with Products() as products:
        MultiHeadAttention(8, 2, kdim=4, vdim=4)(torch.randn(1, 3, 8), torch.randn(1, 3, 4))
    assert products.precisions == {"bf16"}


@pytest.mark.parametrize(("device", "setting"), [("cpu", OF_CPU), ("cuda", OF_GPU)])
def test_the_last_one_to_leave_restores_the_setting(device: str, setting: object) -> None:
    torch.set_float32_matmul_precision("medium")
    told = setting.fp32_precision  # type: ignore[attr-defined]
    first, second = exact_products(device), exact_products(device)
    with first:
        second.__enter__()
        assert setting.fp32_precision == "ieee"  # type: ignore[attr-defined]
    assert setting.fp32_precision == "ieee"  # type: ignore[attr-defined]
    second.__exit__(None, None, None)
    assert setting.fp32_precision == told  # type: ignore[attr-defined]


def test_threads_leave_it_as_it_was() -> None:
    torch.set_float32_matmul_precision("medium")
    wrong: list[str] = []

    def work() -> None:
        for _ in range(200):
            with exact_products("cpu"):
                if OF_CPU.fp32_precision != "ieee":
                    wrong.append(OF_CPU.fp32_precision)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (wrong, OF_CPU.fp32_precision, precision._inside) == ([], "bf16", {"cpu": 0, "cuda": 0})


def test_where_nothing_is_set_nothing_changes() -> None:
    before = OF_CPU.fp32_precision
    with exact_products("cpu"), exact_products("meta"):
        assert OF_CPU.fp32_precision == before
