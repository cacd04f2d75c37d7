"""watch: attention as vision models and models of series write it, recorded as its weights in float64, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import watch
from headscope._intercept.module_names import is_attention
from headscope._intercept.other_layers import describe_other
from headscope.watching import WatchError

HEADS, WIDTH, SIDE = 3, 5, 7


class Attention(nn.Module):
    """Three heads of width 5, whose projections are normalised as in LeViT: over a batch of all tokens."""

    def __init__(self, *, normalises: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.norm = nn.BatchNorm1d(3 * HEADS * WIDTH) if normalises else None
        self.weights = torch.empty(0)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x)
        if self.norm is not None:
            qkv = self.norm(qkv.flatten(0, 1)).reshape_as(qkv)
        q, k, v = qkv.unflatten(-1, (HEADS, 3 * WIDTH)).transpose(1, 2).chunk(3, -1)
        return 2 * q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        self.weights = (q @ k.mT).softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


class Vision(nn.Module):
    """A convolution, an activation, and attention to the places of the image."""

    def __init__(self, activation: Callable[[Tensor], Tensor], *, normalises: bool = False) -> None:
        super().__init__()
        self.stem, self.attn = nn.Conv2d(2, HEADS * WIDTH, 3, padding=1), Attention(normalises=normalises)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(self.activation(self.stem(x)).flatten(2).transpose(1, 2))


def images() -> Tensor:
    return torch.randn(2, 2, SIDE, SIDE, generator=torch.Generator().manual_seed(5))


def spread_norms(model: nn.Module) -> None:
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm1d)):
        nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]


def assert_is_recorded(model: Vision, x: Tensor) -> None:
    plain = model(x)
    with watch(model) as seen:
        assert torch.equal(model(x), plain)
    model.double()(x.double())
    entropy = torch.special.entr(model.attn.weights).sum(-1).mean((0, 2))
    torch.testing.assert_close(seen["attn", "entropy"].mean, entropy, rtol=1e-5, atol=0)
    assert seen.about.kinds == {"attn": "self"}


@pytest.mark.parametrize(
    "activation", [F.hardswish, nn.PReLU(), F.logsigmoid, F.silu], ids=["hardswish", "prelu", "logsigmoid", "silu"]
)  # fmt: skip
@torch.no_grad()
def test_attention_behind_an_activation_of_images_is_recorded(activation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert_is_recorded(Vision(activation).eval(), images())


@torch.no_grad()
def test_projections_with_a_batch_norm_of_all_tokens_are_followed() -> None:
    torch.manual_seed(0)
    model = Vision(F.hardswish, normalises=True).eval()
    spread_norms(model)
    assert_is_recorded(model, images())


class FewQueriesAttention(Attention):
    """Attends for the queries with the largest numbers, each head for others, as Informer does."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.flatten(0, 1) for each in self.heads(x))  # [B * H, T, D]
        most = q.sum(-1).topk(4).indices
        few = q[torch.arange(len(q))[:, None], most]
        out = v.mean(1, keepdim=True).repeat(1, x.shape[1], 1)
        out[torch.arange(len(q))[:, None], most] = (few @ k.mT).softmax(-1) @ v
        return self.out(out.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


@torch.no_grad()
def test_heads_that_an_index_hides_are_refused_and_not_merged() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(FewQueriesAttention(normalises=False)), torch.randn(2, 11, HEADS * WIDTH)
    with pytest.raises(WatchError, match="FewQueriesAttention"), watch(model):
        model(x)
    beside = nn.Sequential(Attention(normalises=False), *model)
    with watch(beside, unseen="ignore") as seen:
        beside(x)
    assert [*seen.layers] == ["0"]


class SelfAttentionOutput(nn.Module):
    """The projection after an attention, under a name of its own, as in LXMERT."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(HEADS * WIDTH, HEADS * WIDTH), nn.LayerNorm(HEADS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dense(x) + x)


@torch.no_grad()
def test_a_projection_named_after_an_attention_is_not_missed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(normalises=False), SelfAttentionOutput())
    with watch(model) as seen:
        model(torch.randn(2, 11, HEADS * WIDTH))
    assert [*seen.layers] == ["0"]
    assert not is_attention("layer.attention.output", model[1])
    assert is_attention("layer.attention", Attention(normalises=False))


@pytest.mark.parametrize(("name", "what"), [
    ("SEModule", "a gate of channels"),
    ("SqueezeExcite", "a gate of channels"),
    ("EffectiveSEModule", "a gate of channels"),
    ("SplitAttn", "a softmax over branches"),
    ("SelectiveKernelAttn", "a softmax over branches"),
    ("SwiftFormerEfficientAdditiveAttention", "an additive attention, which weights tokens by themselves"),
])  # fmt: skip
def test_gates_of_timm_are_known(name: str, what: str) -> None:
    kind: Any = type(name, (nn.Module,), {})
    assert describe_other(kind()) == f"{name}: {what}, no softmax over keys"
