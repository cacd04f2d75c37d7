"""``backend="flex"``: its masks, logits and sinks, on flex_attention without a compiler, which fills the matrix.

On a CPU flex_attention refuses gradients; the check is left out here, because its plain form has them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as module

import headscope
from headscope._attend import mask_parts, prepare
from headscope._attend.backends import flex
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Prefix, causal, window
from support.tolerance import assert_as_accurate

B, H, HKV, T, D = 2, 4, 2, 19, 16
INDEX = torch.arange(T)


class Even(Mask):
    """A caller's own mask."""

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return (i - j) % 2 == 0


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mask_parts, "DEVICES", ("cuda", "meta", "cpu"))
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
    monkeypatch.setattr(flex, "_function", lambda: module.flex_attention)
    monkeypatch.setattr(module, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()  # other sizes would be traced as symbols
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # torch's own
        yield


CASES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "bias": {"bias": torch.randn(H, T, T, generator=torch.Generator().manual_seed(5))},
    "bias of rows, softcap, causal": {"bias": torch.randn(B, 1, T, 1), "softcap": 2.0, "mask": causal()},
    "prefix | window": {"mask": Prefix(3) | window(5)},
    "prefix | causal, lengths": {"mask": (Prefix(3) | causal()) & KeyLengths(torch.tensor([7, 0]))},
    "ids of documents": {"mask": Documents((INDEX % 3)[None]) & causal()},
    "boolean tensor of heads": {"mask": Dense(torch.rand(1, H, T, T) < 0.3)},
    "band of queries before the keys": {"mask": Band(2, 1, offset=-4)},
    "sinks": {"mask": causal() & KeyLengths(torch.tensor([7, 0])), "sinks": torch.randn(H), "softcap": 1.5},
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    options = CASES[name]
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(B, heads, T, D, generator=draw) for heads in (H, HKV, HKV)]
    grads = [torch.randn(B, H, T, D, generator=draw), torch.randn(B, H, T, generator=draw)]

    def results(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        given = {n: x.to(dtype).requires_grad_() if n in ("bias", "sinks") else x for n, x in options.items()}
        out, lse, _ = headscope.attend(*leaves, backend=backend, **given)
        leaves += [given[n] for n in ("bias", "sinks") if n in given]
        lse = lse.masked_fill(lse == -torch.inf, 0)  # whose gradient flex defines as NaN
        return [out, lse, *torch.autograd.grad([out, lse], leaves, [x.to(dtype) for x in grads])]

    exact, baseline = results("reference", torch.float64), results("reference", torch.float32)
    found = results("flex", torch.float32)
    for n, (x, right, plain) in enumerate(zip(found, exact, baseline, strict=True)):
        assert_as_accurate(x, right, plain, message=f"{name}, result {n}")


def test_blocks_of_a_constant_mask_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    build = flex._build_block_mask
    monkeypatch.setattr(flex, "_block_masks", flex.BoundedTable(16))
    monkeypatch.setattr(flex, "_build_block_mask", lambda *args: built.append(args[1]) or build(*args))
    q = torch.randn(B, H, T, D)
    lengths = KeyLengths(torch.tensor([7, 9]))
    for mask in (Prefix(3) | window(5), lengths):
        for _ in range(2):
            headscope.attention(q, q, q, mask=mask, backend="flex")
    assert built[1:] == [lengths, lengths], "tensors may change"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "dropout: flex_attention does not support it"),
    "own mask": ({"mask": Even()}, "mask: a caller's own class"),
    "offsets": ({"mask": Band(2, 0, offset=(0,))}, "mask: a caller's own class, or a band with an offset for each"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_option(name: str) -> None:
    options, reason = REFUSED[name]
    q = torch.zeros(1, H, T, D)
    with pytest.raises(ValueError, match=f"backend: flex refuses this call: {reason}"):
        headscope.attend(q, q, q, backend="flex", **options)
    with pytest.raises(ValueError, match="D: flex_attention requires at least 16, got 8"):
        headscope.attend(q[..., :8], q[..., :8], q, backend="flex")
