"""MultiHeadAttention: the projections around ``attention``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import functional
from headscope._call import check_dropout, check_scale, check_softcap, kind
from headscope._linear import Linear
from headscope.masks import Mask

__all__ = ["MultiHeadAttention"]

PROJECTIONS = ("q", "k", "v")


class MultiHeadAttention(nn.Module):
    """Multi-head attention: project to queries, keys and values, attend in each head, concatenate, project.

    Shapes: x [B, Q, embed_dim] (or [Q, embed_dim]) -> [B, Q, embed_dim]; with ``context`` the keys and values come from
    there, [B, K, kdim] and [B, K, vdim].

    Args:
        embed_dim: width E of the input and the output, at least 1.
        num_heads: number of query heads H.
        kv_heads: number of key/value heads, a divisor of ``num_heads``; by default ``num_heads``. Fewer make
            grouped-query attention, one makes multi-query attention.
        head_dim: width D of each query and key head; by default embed_dim / num_heads, which must then be whole.
        v_head_dim: width Dv of each value head; by default ``head_dim``.
        kdim: width of what the keys are projected from; by default ``embed_dim``.
        vdim: width of what the values are projected from; by default ``kdim`` if that is given, else ``embed_dim``.
        bias: whether the projections to q, k and v have a bias: True, False, or the names of those that do, as
            ("q", "v").
        out_bias: whether the output projection has one; by default, whether any of the others has.
        scale: factor of the dot products; by default head_dim ** -0.5. ``embed_dim ** -0.5`` is seen in some tutorials:
            it is smaller by sqrt(num_heads), which flattens the weights.
        softcap: c > 0 bounds the logits to (-c, c) by c · tanh(s / c).
        sinks: learn one logit a head that takes part in the softmax and has no value.
        dropout: probability with which a weight is dropped in training, in [0, 1).
        device: where the parameters are made, "meta" included.
        dtype: of the parameters.

    Parameters: where q, k and v may all be projected from one input and their biases are alike, one packed
    ``qkv_proj``; else ``q_proj``, ``k_proj``, ``v_proj``; always ``out_proj``. ``load_state_dict`` takes either form.
    Rows of a projection are ordered by head. Weights start as ``xavier_uniform_`` of each projection by itself, biases
    and sinks as zero.

    Raises:
        TypeError: a size or number of the wrong kind.
        ValueError: a size that is not positive or does not divide, an option out of range; the message says which.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool | Collection[str] = True,
        out_bias: bool | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads, kv_heads=kv_heads)
        _check_heads(embed_dim, num_heads, kv_heads, head_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kv_heads = kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.v_head_dim = self.head_dim if v_head_dim is None else v_head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = self.kdim if vdim is None else vdim
        _check_sizes(head_dim=self.head_dim, v_head_dim=self.v_head_dim, kdim=self.kdim, vdim=self.vdim)
        self.scale = check_scale(scale, self.head_dim)
        self.softcap = check_softcap(softcap)
        self.dropout = check_dropout(dropout)

        biased = _biased(bias)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.splits = (num_heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.v_head_dim)
        self.packed = self.kdim == self.vdim == embed_dim and len(biased) in (0, 3)
        if self.packed:
            self.qkv_proj = Linear(embed_dim, sum(self.splits), bias=bool(biased), **made)
        else:
            for name, width, rows in zip(PROJECTIONS, (embed_dim, self.kdim, self.vdim), self.splits, strict=True):
                self.add_module(f"{name}_proj", Linear(width, rows, bias=name in biased, **made))
        out_bias = bool(biased) if out_bias is None else out_bias
        self.out_proj = Linear(num_heads * self.v_head_dim, embed_dim, bias=out_bias, **made)
        self.sinks = nn.Parameter(torch.empty(num_heads, **made)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: Xavier-uniform weights for each projection by itself, zero biases and sinks."""
        for name in PROJECTIONS:
            weight, bias = self.projection(name)
            nn.init.xavier_uniform_(weight)
            if bias is not None:
                nn.init.zeros_(bias)
        nn.init.xavier_uniform_(self.out_proj.weight)
        for rest in (self.out_proj.bias, self.sinks):
            if rest is not None:
                nn.init.zeros_(rest)

    def projection(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Weight [rows, width] and bias [rows] of the projection "q", "k", "v" or "out"; views, if they are packed."""
        if not self.packed or name == "out":
            linear: nn.Linear = getattr(self, f"{name}_proj")
            return linear.weight, linear.bias
        at = PROJECTIONS.index(name)
        start = sum(self.splits[:at])
        rows = slice(start, start + self.splits[at])
        bias = self.qkv_proj.bias
        return self.qkv_proj.weight[rows], None if bias is None else bias[rows]  # pyright: ignore[reportUnnecessaryComparison]

    @overload
    def forward(
        self, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None, *, mask: Mask | Tensor | None = None,
        bias: Tensor | None = None, need_weights: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None, *, mask: Mask | Tensor | None = None,
        bias: Tensor | None = None, need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None, *, mask: Mask | Tensor | None = None,
        bias: Tensor | None = None, need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend from ``x`` to itself, or to ``context``.

        Args:
            x: what the queries are projected from, [B, Q, embed_dim] or [Q, embed_dim].
            context: what keys and values are projected from, [B, K, kdim]; or a pair, for the keys [B, K, kdim] and for
                the values [B, K, vdim]; by default ``x``.
            mask: what may be seen, a mask of ``headscope.masks`` or a boolean tensor that broadcasts to [B, H, Q, K];
                True = attend, the opposite of ``nn.MultiheadAttention``.
            bias: added to the logits, broadcasts to [B, H, Q, K].
            need_weights: also return the weights of every head, [B, H, Q, K], without dropout: memory is then
                quadratic. The output stays the same to the bit.

        Returns:
            out [B, Q, embed_dim], or (out, weights).

        Raises:
            TypeError, ValueError: an input, mask or bias that does not fit; it names argument, axis, got and wanted.
        """
        q, k, v = self.project(x, context)
        scale, softcap, sinks, dropout = self.scale, self.softcap, self.sinks, self.dropout if self.training else 0.0
        heads = functional.attention(
            q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout
        )
        out = self.out_proj(merge_heads(heads))
        if not need_weights:
            return out
        return out, functional.weights(q, k, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks)

    def project(
        self, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The heads' queries [B, H, Q, D], keys [B, Hkv, K, D] and values [B, Hkv, K, Dv]."""
        k_from, v_from = self._sources(x, context)
        self._check_inputs(x, k_from, v_from)
        if context is None and self.packed and self.splits[0] == self.splits[1] == self.splits[2]:  # one cut for all
            packed = self.qkv_proj(x).view(*x.shape[:-1], 3, self.num_heads, self.head_dim)  # [B, Q, 3, H, D]
            q, k, v = packed.permute(_PARTS_FIRST[x.ndim]).unbind(0)  # each [B, H, Q, D]
            return q, k, v
        if context is None and self.packed:
            q, k, v = self.qkv_proj(x).split(self.splits, -1)  # each [B, Q, H * D]
        else:
            q, k, v = (
                F.linear(source, *self.projection(name))
                for name, source in zip(PROJECTIONS, (x, k_from, v_from), strict=True)
            )
        return (
            split_heads(q, self.num_heads, self.head_dim),
            split_heads(k, self.kv_heads, self.head_dim),
            split_heads(v, self.kv_heads, self.v_head_dim),
        )

    @staticmethod
    def _sources(x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """What keys and values are projected from."""
        if context is None:
            return x, x
        if isinstance(context, Tensor):
            return context, context
        if isinstance(context, tuple) and len(context) == 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            return context
        got = f"{len(context)} of them" if isinstance(context, tuple) else kind(context)  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "; a mask goes by its name, mask=" if isinstance(context, Mask) else ""
        raise TypeError(f"context: got {got}, wanted a torch.Tensor, or a pair (for the keys, for the values){hint}")

    def _check_inputs(self, x: Tensor, k_from: Tensor, v_from: Tensor) -> None:
        if k_from is x and self.packed and isinstance(x, Tensor) and x.ndim in (2, 3) and x.shape[-1] == self.embed_dim:  # pyright: ignore[reportUnnecessaryIsInstance]
            return
        wanted = (("x", x, self.embed_dim), ("context", k_from, self.kdim), ("context", v_from, self.vdim))
        for name, tensor, width in wanted:
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
                raise TypeError(f"{name}: got {kind(tensor)}, wanted a torch.Tensor")
            if tensor.shape[-1:] != (width,) or tensor.ndim not in (2, 3) or tensor.ndim != x.ndim:
                self._refuse(name, tensor, width, x)

    def _refuse(self, name: str, tensor: Tensor, width: int, x: Tensor) -> None:
        got = f"{name} {list(tensor.shape)}" + ("" if name == "x" else f", x {list(x.shape)}")
        if tensor.ndim not in (2, 3) or tensor.ndim != x.ndim:
            axes = "2 or 3" if name == "x" else f"{x.ndim}, as x"
            raise ValueError(f"{name}: has {tensor.ndim} axes, wanted {axes} ([B, length, E]); {got}")
        hint = "; without context, keys and values are projected from x" if tensor is x and name != "x" else ""
        raise ValueError(f"{name}: axis {tensor.ndim - 1} (E) is {tensor.shape[-1]}, wanted {width}{hint}; {got}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take packed and separate projections alike."""
        for part in ("weight", "bias"):
            packed = f"{prefix}qkv_proj.{part}"
            separate = [f"{prefix}{name}_proj.{part}" for name in PROJECTIONS]
            if self.packed and packed not in state_dict and self._fit([state_dict.get(key) for key in separate]):
                state_dict[packed] = torch.cat([state_dict.pop(key) for key in separate])
            elif not self.packed and packed in state_dict and state_dict[packed].shape[0] == sum(self.splits):
                state_dict.update(zip(separate, state_dict.pop(packed).split(self.splits), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _fit(self, parts: list[Tensor | None]) -> bool:
        """Whether these are the three parts of the packed projection; where not, loading says what is amiss."""
        widths = {part.shape[1:] for part in parts if part is not None}
        return tuple(0 if part is None else len(part) for part in parts) == self.splits and len(widths) == 1

    def extra_repr(self) -> str:
        """The sizes, and the options that are not at their default."""
        parts = [f"{self.embed_dim}, {self.num_heads}"]
        defaults = {
            "kv_heads": self.num_heads, "head_dim": self.embed_dim // self.num_heads, "v_head_dim": self.head_dim,
            "kdim": self.embed_dim, "vdim": self.kdim, "scale": self.head_dim**-0.5, "softcap": None, "dropout": 0.0,
        }  # fmt: skip
        parts += [f"{name}={getattr(self, name)}" for name, usual in defaults.items() if getattr(self, name) != usual]
        return ", ".join(parts + (["sinks=True"] if self.sinks is not None else []))


_PARTS_FIRST = {2: (1, 2, 0, 3), 3: (2, 0, 3, 1, 4)}  # [B, Q, 3, H, D] -> [3, B, H, Q, D], without and with B


def split_heads(x: Tensor, heads: int, head_dim: int) -> Tensor:
    """[B, length, heads * head_dim] -> [B, heads, length, head_dim]: cut the width, then move the heads forward."""
    return x.unflatten(-1, (heads, head_dim)).transpose(-3, -2)  # [B, heads, length, head_dim]


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, length, head_dim] -> [B, length, heads * head_dim]: the inverse of ``split_heads``."""
    return x.transpose(-3, -2).flatten(-2)  # [B, length, heads * head_dim]


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name}: got {type(size).__name__}, wanted a whole number")
        if size < 1:
            raise ValueError(f"{name}: got {size}, wanted at least 1")


def _check_heads(embed_dim: int, num_heads: int, kv_heads: int, head_dim: int | None) -> None:
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"num_heads: embed_dim {embed_dim} is not divisible by num_heads {num_heads}, so that d_k = d_model / h is "
            f"not a whole number; choose a divisor of {embed_dim}, or give head_dim"
        )
    if num_heads % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads}, wanted a divisor of num_heads {num_heads}")


def _biased(bias: bool | Collection[str]) -> frozenset[str]:
    """The names of the projections that have a bias."""
    if isinstance(bias, bool):
        return frozenset(PROJECTIONS if bias else ())
    if not isinstance(bias, Collection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"bias: got {kind(bias)}, wanted True, False, or names among {', '.join(PROJECTIONS)}")
    names = frozenset(bias)
    if not names <= set(PROJECTIONS):
        raise ValueError(
            f"bias: got {sorted(map(str, names))}, wanted True, False, or names among {', '.join(PROJECTIONS)}"
        )
    return names
