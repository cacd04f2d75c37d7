"""watch: what is seen of torch's and headscope's own modules, under which name, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headscope
from headscope import Observe, Recording, watch
from headscope.masks import causal
from headscope.watching import WatchError


class Attention(nn.Module):
    """Causal self-attention by SDPA, with as many heads as are asked for."""

    def __init__(self, width: int = 15, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Small(nn.Module):
    """Three layers, each of another make."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Attention()
        self.ours = headscope.MultiHeadAttention(15, 5)
        self.theirs = nn.MultiheadAttention(15, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ours(self.plain(x), mask=causal())
        return self.theirs(x, x, x, need_weights=False)[0]


def input_of(model: nn.Module, width: int = 15) -> Tensor:
    return torch.randn(2, 7, width, dtype=next(model.parameters()).dtype)


def test_layers_are_named_by_path_in_the_order_of_the_model() -> None:
    model = Small().eval()
    x = input_of(model)
    with torch.no_grad(), watch(model) as seen:
        out = model(x)
    with torch.no_grad():
        assert torch.equal(out, model(x))
    assert seen.layers == ("plain", "ours", "theirs")
    assert seen.kinds == dict.fromkeys(seen.layers, "self")
    assert [seen[layer, "entropy"].count.tolist() for layer in range(3)] == [[14] * 3, [14] * 5, [14] * 3]
    assert seen["plain", 1, "entropy"].mean == pytest.approx(seen[0, 1, "entropy"].mean)
    assert (seen.forwards, seen.about.ran) == (1, 1)


def test_a_recording_is_saved_and_loaded(tmp_path: Path) -> None:
    model = Small()
    with watch(model, what=Observe(map=3), rows=4, texts="abcdefg") as seen:
        model(input_of(model))
    path = seen.save(tmp_path / "seen.safetensors")
    again = Recording.load(path)
    assert again.about == seen.about
    assert again.about.options["rows"] == 4
    assert again.to_dict() == seen.to_dict()
    assert again.texts == tuple("abcdefg")
    assert headscope.HeadStats.load(path).to_dict() == seen.stats.to_dict()
    bare = seen.stats.save(tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="holds statistics, but is no recording"):
        Recording.load(bare)


def test_nothing_seen_is_an_error() -> None:
    watching = watch(Small())
    with pytest.raises(WatchError, match="no forward pass"), watching:
        pass
    with pytest.raises(WatchError, match="nothing has been seen so far"):
        _ = watching.recording.stats
    model: Any = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(WatchError, match="no attention call was seen in Sequential"), watch(model):
        model(torch.randn(2, 3))
