"""Calls of scaled_dot_product_attention whose heads torch broadcasts or repeats are seen as torch computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import ablate, watch

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {  # q, k, v, options
    "one query head": ((2, 1, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8), {}),
    "one query and key head": ((2, 1, 6, 8), (2, 1, 6, 8), (2, 3, 6, 8), {}),
    "one query and value head": ((2, 1, 6, 8), (2, 3, 6, 8), (2, 1, 6, 8), {}),
    "queries without axes": ((6, 8), (2, 3, 6, 8), (2, 3, 6, 8), {}),
    "a mask": ((2, 1, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8), {"attn_mask": torch.ones(2, 3, 6, 6).bool().tril()}),
    "two groupings": ((2, 8, 6, 8), (2, 4, 6, 8), (2, 2, 6, 8), {"enable_gqa": True}),
}


class Calls(nn.Module):
    """Attention, of tensors that it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_heads_are_seen_as_torch_computes_them(name: str, accelerate: bool) -> None:
    *shapes, options = SHAPES[name]
    q, k, v = (torch.randn(shape) for shape in shapes)
    model = Calls()
    plain = model(q, k, v, **options)
    with watch(model, accelerate=accelerate) as seen:
        torch.testing.assert_close(model(q, k, v, **options), plain)
    heads = plain.shape[-3]
    whole = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (q if q.ndim > 2 else q[None], k, v))
    with watch(model) as expected:
        torch.testing.assert_close(model(*whole, attn_mask=options.get("attn_mask")), plain)
    assert seen.heads == heads
    for quantity in ("entropy", "max_logit", "first"):
        torch.testing.assert_close(seen[quantity].mean, expected[quantity].mean)
        torch.testing.assert_close(seen[quantity].count, expected[quantity].count)


def test_each_of_the_broadcast_heads_can_be_ablated() -> None:
    q, k, v = torch.randn(2, 1, 6, 8), *torch.randn(2, 2, 3, 6, 8)
    model = Calls()
    expected = model(q, k, v)
    expected[:, 2] = 0
    with ablate(model, {"*": 2}):
        torch.testing.assert_close(model(q, k, v), expected)


def test_an_accelerated_call_without_an_axis_of_heads_returns_none() -> None:
    x = torch.randn(6, 8)
    model = Calls()
    with watch(model, accelerate=True) as seen:
        torch.testing.assert_close(model(x, x, x), F.scaled_dot_product_attention(x, x, x))
    assert seen.heads == 1
