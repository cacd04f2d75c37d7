"""watch and ablate: a module that attends by a fused call that they cannot record."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import ablate, head_importance, watch
from headscope.watching import WatchError, WatchWarning
from support.watched_small import Attention

Fused = Callable[[Tensor, Tensor, Tensor], Tensor]
aten: Any = torch.ops.aten
private_torch: Any = torch


def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def as_script(function: Callable[..., Tensor]) -> Any:
    """The function as TorchScript, which torch 2.13 warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    out: Any = flex_attention(q, k, v)
    return out


FUSED: dict[str, Fused] = {
    "aten.scaled_dot_product_attention": lambda q, k, v: aten.scaled_dot_product_attention(q, k, v),
    "aten.scaled_dot_product_attention.default": lambda q, k, v: aten.scaled_dot_product_attention.default(q, k, v),
    "aten._scaled_dot_product_flash_attention_for_cpu": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    ),
    "aten._scaled_dot_product_attention_math": lambda q, k, v: aten._scaled_dot_product_attention_math(q, k, v)[0],
    "torch._scaled_dot_product_attention_math": lambda q, k, v: private_torch._scaled_dot_product_attention_math(
        q, k, v
    )[0],
    "flex_attention": flex,
    "a scripted function": lambda q, k, v: as_script(scripted)(q, k, v),
}


class Both(nn.Module):
    """Attends with two heads by SDPA (``sdpa``), and with two by a fused call."""

    def __init__(self, fused: Fused, *, sdpa: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.fused = fused
        self.sdpa = sdpa

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        second = self.fused(*(each[:, 2:].contiguous() for each in (q, k, v)))
        first = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2]) if self.sdpa else second
        return torch.cat([first, second], 1).transpose(1, 2).flatten(2)


pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile",
)


@pytest.mark.parametrize("fused", FUSED)
@torch.no_grad()
def test_a_fused_call_beside_sdpa_is_warned_of(fused: str) -> None:
    model = nn.Sequential(Both(FUSED[fused]))
    x = torch.randn(2, 9, 16)
    expected = model(x)
    name = {"a scripted function": "the TorchScript function scripted"}.get(fused, fused.removesuffix(".default"))
    message = rf"watch: 0 \(Both\) attends once more, by {name}, which"
    with pytest.warns(WatchWarning, match=message) as caught, watch(model) as seen:
        outs = [model(x) for _ in range(2)]
    assert len(caught) == 1
    assert torch.equal(outs[0], expected)
    assert seen.layers == ("0",)
    message = rf"heads: 0 \(Both\) attends once more, by {name}, whose heads cannot be reached"
    with pytest.warns(WatchWarning, match=message), ablate(model, {"*": "all"}):
        model(x)
    assert torch.equal(model(x), expected)


def test_importance_warns_of_a_fused_call() -> None:
    model = nn.Sequential(Both(FUSED["aten.scaled_dot_product_attention"]))
    with pytest.warns(WatchWarning, match="attends once more, by aten.scaled_dot_product_attention"):
        head_importance(model, lambda each: each(torch.ones(1, 3, 16)).square().mean())


@torch.no_grad()
def test_a_layer_of_any_name_that_attends_by_fused_calls_alone_is_warned_of() -> None:
    model = nn.Sequential(Attention(16, 4), Both(FUSED["aten.scaled_dot_product_attention"], sdpa=False))
    message = r"watch: 1 \(Both\) attends by aten\.scaled_dot_product_attention, which"
    with pytest.warns(WatchWarning, match=message), watch(model) as seen:
        model(torch.randn(2, 9, 16))
    assert seen.layers == ("0",)


@torch.no_grad()
def test_an_attention_layer_that_attends_by_fused_calls_alone_is_an_error() -> None:
    class FusedAttention(Both):
        pass

    model = nn.Sequential(Attention(16, 4), FusedAttention(FUSED["aten.scaled_dot_product_attention"], sdpa=False))
    with pytest.raises(WatchError, match="1 of the attention layers that ran could not be observed"), watch(model):
        model(torch.randn(2, 9, 16))


@pytest.mark.parametrize("fused", FUSED)
@torch.no_grad()
def test_fused_calls_are_not_warned_of_where_they_are_left_out(fused: str) -> None:
    layer = Both(FUSED[fused])
    x = torch.randn(2, 9, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        with watch(layer, unseen="ignore"):
            layer(x)
        pair = nn.Sequential(Attention(16, 4), layer)
        with watch(pair, layers="0"), ablate(pair, {"0": 1}):
            pair(x)


@torch.no_grad()
def test_a_scripted_function_that_does_not_attend_is_not_warned_of() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x + x

    double = as_script(doubled)

    class Doubling(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(double(x))

    model = Doubling(16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        with watch(model):
            model(torch.randn(2, 9, 16))
