"""Small modules in the layouts of tutorials, timm and Keras, as their authors compute them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """[B, T, E] of each, split into heads already as [B, H, T, D]; the heads side by side."""
    scores = q @ k.transpose(-2, -1) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Tutorial(nn.Module):
    """Four linears; what they are called, and what scales, is for the classes below."""

    names: tuple[str, str, str, str]
    biases = (True, True, True, True)
    heads_are = "num_heads"

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        setattr(self, self.heads_are, heads)
        self.count, self.width = heads, width
        for name, bias in zip(self.names, self.biases, strict=True):
            self.add_module(name, nn.Linear(width, width, bias=bias))

    def scale(self) -> float:
        return 1 / math.sqrt(self.width // self.count)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            getattr(self, name)(x).view(batch, length, self.count, -1).transpose(1, 2) for name in self.names[:3]
        )
        return getattr(self, self.names[3])(attended(q, k, v, self.scale(), hidden))


class QLinear(Tutorial):
    names = ("q_linear", "k_linear", "v_linear", "out_proj")


class ToKeys(Tutorial):
    """No biases but the last, and the scale of the whole width."""

    names = ("toqueries", "tokeys", "tovalues", "unifyheads")
    biases = (False, False, False, True)
    heads_are = "heads"

    def scale(self) -> float:
        return 1 / self.width**0.5


class QKV(Tutorial):
    """Its linears are variables of a notebook: nothing says how many heads there are."""

    names = ("Q", "K", "V", "o_w")
    heads_are = "NUM_OF_HEADS"


class QueryKeyValue(Tutorial):
    names = ("query", "key", "value", "out")


class WQ(Tutorial):
    names = ("w_q", "w_k", "w_v", "w_o")
    heads_are = "h"


class CapitalWQ(Tutorial):
    names = ("W_q", "W_k", "W_v", "W_o")


class ShortWQ(Tutorial):
    names = ("Wq", "Wk", "Wv", "Wo")


class SmallWQ(Tutorial):
    names = ("wq", "wk", "wv", "wo")


class Timm(nn.Module):
    """One linear for all three; norms of q and k for some."""

    def __init__(self, width: int, heads: int, qkv_bias: bool = True, norm: Any = nn.Identity) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(attended(self.q_norm(q), self.k_norm(k), v, self.scale, hidden))


def keras_weights(
    width: int, heads: int, kv_heads: int, dim: int, value_dim: int, rng: np.random.Generator, *, bias: bool
) -> dict[str, Array]:
    """The weights of Keras' MultiHeadAttention (or GroupQueryAttention, with fewer key/value heads)."""
    sizes = {"query": (heads, dim), "key": (kv_heads, dim), "value": (kv_heads, value_dim)}
    weights = {f"{name}/kernel": rng.normal(size=(width, *size)) for name, size in sizes.items()}
    weights["attention_output/kernel"] = rng.normal(size=(heads, value_dim, width))
    if bias:
        weights |= {f"{name}/bias": rng.normal(size=size) for name, size in sizes.items()}
        weights["attention_output/bias"] = rng.normal(size=width)
    return weights


def keras_attention(w: dict[str, Array], query: Array, value: Array, seen: NDArray[np.bool_] | None) -> Array:
    """Keras' forward pass, einsum by einsum; ``seen``: True = attend."""
    q, k, v = (
        np.einsum("abc,cde->abde", x, w[f"{name}/kernel"]) + w.get(f"{name}/bias", 0.0)
        for name, x in (("query", query), ("key", value), ("value", value))
    )
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("aecd,abcd->acbe", k, q / math.sqrt(q.shape[-1]))
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("acbe,aecd->abcd", e / e.sum(-1, keepdims=True), v)
    return np.einsum("abcd,cde->abe", heads, w["attention_output/kernel"]) + w.get("attention_output/bias", 0.0)
