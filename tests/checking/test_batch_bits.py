"""check(reproducible=True): bits that depend on the batch, planted in three styles, and none in our own module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import MultiHeadAttention, check
from headscope._attend.backends import native
from headscope._linear import Linear
from headscope.masks import causal
from headscope.positions import Rotary

if native.extension is None:
    pytest.skip("the native extension was not built: no C++ compiler", allow_module_level=True)

WIDTH, HEADS = 24, 3


class Attention(nn.Module):
    """Attention of which each row is summed in one order, but for what ``fault`` says."""

    def __init__(self, style: str, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style, self.fault = style, fault
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        for each in (self.qkv, self.out):
            each.reproducible = True

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, 24] -> [B, T, 24]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = torch.cat([self.attend(q[n], k[n], v[n], n, len(x)) for n in range(len(x))])  # [B, H, T, D]
        return self.out(heads.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: int, batch: int) -> Tensor:
        """[H, T, D] -> [1, H, T, D]."""
        other = (self.fault == "batch" and batch > 4) or (self.fault == "place" and place == 5)
        if self.style == "fused":
            scale = q.shape[-1] ** -0.5
            q, scale = (q * scale, 1.0) if other else (q, scale)
            return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)
        if self.style == "by hand":
            s = (q / 8**0.5) @ k.mT if other else (q @ k.mT) / 8**0.5
            return (s.softmax(-1) @ v)[None]
        s = torch.einsum("htd,hsd->hts", q, k) * 8**-0.5
        p = (s.exp() / s.exp().sum(-1, keepdim=True)) if other else s.softmax(-1)
        return torch.einsum("hts,hsd->htd", p, v)[None]


@pytest.mark.parametrize("style", ["fused", "by hand", "einsum"])
@pytest.mark.parametrize("fault", ["batch", "place"])
def test_planted_variance_is_found_by_name(style: str, fault: str) -> None:
    module = Attention(style, fault)
    assert f"{fault}-variant" in check(module, reproducible=True).names
    assert not {"batch-variant", "place-variant"} & {*check(module).names}, "only where it was asked for"


@pytest.mark.parametrize("style", ["fused", "by hand", "einsum"])
def test_the_same_without_it_has_no_finding(style: str) -> None:
    assert not {"batch-variant", "place-variant"} & {*check(Attention(style, "none"), reproducible=True).names}


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_heads": 1}, {"rotary": Rotary(8)}, {"qk_norm": "rms", "gate": True}, {"sinks": True, "softcap": 5.0}],
    ids=str,
)
def test_our_own_has_no_finding(options: dict[str, object]) -> None:
    module = MultiHeadAttention(64, 4, reproducible=True, **options)  # type: ignore[arg-type]
    for mask in (None, causal()):
        found = check(module, embed_dim=64, call=lambda m, x, _mask, own=mask: m(x, mask=own), reproducible=True)
        assert not {"batch-variant", "place-variant"} & {*found.names}, found
        assert "bits" not in found.not_tested


def test_evidence_is_a_number() -> None:
    found = check(Attention("by hand", "batch"), reproducible=True)["batch-variant"]
    assert found.seen.startswith("entry 0 differs by up to ")
    assert found.seen.endswith("between a batch of 5 and a batch of one")


def test_what_changes_by_itself_is_not_compared() -> None:
    module = nn.Sequential(Attention("by hand", "batch"), nn.Dropout(0.5))
    module.eval = lambda: module  # type: ignore[method-assign]  # always in training
    assert "bits" in check(module, embed_dim=WIDTH, reproducible=True).not_tested
