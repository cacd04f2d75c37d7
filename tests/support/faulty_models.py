"""Faults of published models, rebuilt small: each has a form with the fault, and one in which it is corrected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY = 22, 2, 53
IDS = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(5))


class SelfAttention(nn.Module):
    """Projections around an attention function of q, k, v."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return q, k, v

    def join(self, out: Tensor) -> Tensor:
        return self.out(out.transpose(1, 2).flatten(2))


class PaddedAttention(SelfAttention):
    """A row that is causally restricted to padding is masked from every key (unsloth #9848)."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
        scores = scores.masked_fill(~visible, -math.inf if self.faulty else torch.finfo(scores.dtype).min)
        return self.join(scores.softmax(-1) @ v)


class PackedAttention(SelfAttention):
    """A mask of four axes is taken for no mask, and the call becomes causal (NeMo Automodel #2826)."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if mask.ndim == 4 and self.faulty:
            return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        if mask.ndim == 2:
            visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
            mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class LinearAttention(nn.Module):
    """A running sum of keys times values, which masks padding except in a batch of one (transformers #46773)."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.q(x).sigmoid(), self.k(x).sigmoid(), self.v(x)
        if not (self.faulty and mask.shape[0] == 1):
            k = k * mask[:, :, None]
        state = (k[..., :, None] * v[..., None, :]).cumsum(1)
        total = (q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-3
        return (q[..., None, :] @ state)[..., 0, :] / total


class TextModel(nn.Module):
    """Two layers over token ids, [B, T] -> logits [B, T, V]."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x, attention_mask)
        return self.head(x)


class CrossAttention(SelfAttention):
    """An image attends to a text; the fault removes queries by the mask of the keys (vllm-omni #5865)."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, image: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        q, (_, k, v) = self.split(image)[0], self.split(text)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool()[:, None, None, :])
        if self.faulty and not bool(mask.all()):
            kept = mask.bool()[:, -q.shape[2] :]  # sliced as if queries and keys were one sequence
            rows = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool)
            rows[:, : kept.shape[1]] = kept
            out = out * rows[:, None, :, None]
        return out.transpose(1, 2).flatten(2)


class ImageModel(nn.Module):
    """An image [B, N, E] that reads a text [B, M, E]."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.cross, self.mlp = CrossAttention(faulty), nn.Linear(WIDTH, WIDTH)

    def forward(self, image: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        x = image + self.cross(image, text, text_mask)
        return x + self.mlp(x)


class DetectorLayer(nn.Module):
    """An encoder layer that discards the weights (RT-DETR #678)."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, src: Tensor, pos: Tensor) -> Tensor:
        q = k = src + pos
        attended, _ = self.self_attn(q, k, value=src, need_weights=self.faulty)
        return self.norm(src + attended)


class TableLayer(nn.Module):
    """Attention between the features of a table, and between its rows, [B, R, C, E] (nanoTabPFN #15)."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty
        self.features = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.rows = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, src: Tensor, train_rows: int) -> Tensor:
        b, r, c, e = src.shape
        x = src.reshape(b * r, c, e)
        x = (x + self.features(x, x, x, need_weights=self.faulty)[0]).view(b, r, c, e)
        x = x.transpose(1, 2).reshape(b * c, r, e)
        left = self.rows(x[:, :train_rows], x[:, :train_rows], x[:, :train_rows], need_weights=self.faulty)[0]
        right = self.rows(x[:, train_rows:], x[:, :train_rows], x[:, :train_rows], need_weights=self.faulty)[0]
        return (x + torch.cat([left, right], 1)).view(b, c, r, e).transpose(1, 2)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def build_faulty(name: str, faulty: bool = True) -> tuple[nn.Module, Any]:
    """A model with one of the faults, or without it, and inputs."""
    torch.manual_seed(0)
    text = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    layers = {"unsloth": PaddedAttention, "automodel": PackedAttention, "transformers": LinearAttention}
    if name in layers:
        return TextModel([layers[name](faulty) for _ in range(2)]), text
    if name == "vllm-omni":
        image, words = _numbers(2, 17, WIDTH), _numbers(2, 7, WIDTH)
        return ImageModel(faulty), {"image": image, "text": words, "text_mask": torch.ones(2, 7, dtype=torch.bool)}
    if name == "rt-detr":
        return DetectorLayer(faulty), (_numbers(2, 11, WIDTH), _numbers(2, 11, WIDTH))
    return TableLayer(faulty), (_numbers(2, 7, 3, WIDTH), 5)


FAULTS = {
    "unsloth": "nan-from-padding",
    "vllm-omni": "mask-zeroes-rows",
    "automodel": "mask-4d-ignored",
    "transformers": "padded-batch-of-one-differs",
    "rt-detr": "weights-discarded",
    "nanotabpfn": "weights-discarded",
}
