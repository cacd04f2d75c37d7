"""MultiHeadAttention: the projections around ``attention``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast, overload

import torch
from torch import Tensor, nn

from headscope import functional
from headscope._attend import context as parallel
from headscope._layouts import convert_module, convert_state, export_state
from headscope._linear import QKV, Linear, merge_heads, weight_and_bias
from headscope._observe import LayerSums
from headscope._support.scalar_options import check_dropout, check_scale, check_softcap
from headscope.cache import Cache
from headscope.masks import Mask
from headscope.module._bias_kv import add_own_value, own_share
from headscope.module._inputs import (
    check_inputs,
    check_kinds,
    check_no_weights,
    check_self_attention,
    input_sources,
    positions_in_part,
)
from headscope.module._local_heads import LocalHeads, check_not_split
from headscope.module._nested import forward_nested
from headscope.module._options import (
    QKNorm,
    biased_parts,
    check_flags,
    check_heads,
    check_rotary,
    gate_of,
    norm_of,
    normed,
    set_reproducible,
    whole_sizes,
)
from headscope.module._placement import prepare_heads
from headscope.module._projection import project
from headscope.module._pruning import prune
from headscope.module._state import describe, to_own_form, to_parts
from headscope.module._unpacking import unpack
from headscope.positions import ALiBi, RelativeBias, Rotary, T5Buckets, bias_of

__all__ = ["MultiHeadAttention"]


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
        kdim: width of the input of the keys; by default ``embed_dim``.
        vdim: width of the input of the values; by default ``kdim`` if that is not None, else ``embed_dim``.
        bias: which of the projections to q, k and v have a bias: True, False, or names such as ("q", "v").
        out_bias: whether the output projection has a bias; by default, whether any of the others has.
        scale: factor of the dot products; by default head_dim ** -0.5. Some tutorials use ``embed_dim ** -0.5``: it is
            smaller by sqrt(num_heads), which flattens the weights.
        softcap: c > 0 bounds the logits to (-c, c) by c · tanh(s / c).
        sinks: learn one logit for each head that takes part in the softmax and has no value.
        dropout: probability with which a weight is dropped in training, in [0, 1).
        device: of the parameters, "meta" included.
        dtype: of the parameters.
        rotary: rotate q and k to their positions, ``positions.Rotary``; its ``dim`` is at most ``head_dim``.
        position_bias: a bias by distance: ``positions.ALiBi``, ``positions.T5Buckets`` (with a learned table), or a
            ``positions.RelativeBias`` that layers may share.
        qk_norm: normalise q and k before they are rotated: "rms" or "layer", each head over ``head_dim``, with weights
            (and "layer" biases) that all heads share, as in Qwen 3; "rms_all", all heads together, as in OLMo 2.
        qk_norm_eps: added to the mean square, or the variance, above 0.
        gate: multiply the heads' outputs elementwise by sigmoid(gate_proj(x)), before ``out_proj``.
        bias_kv: learn a key and a value for each head that belong to no token: visible to every query, whatever the
            mask, as ``add_bias_kv`` of ``nn.MultiheadAttention``; without ``rotary``. ``watch`` records tokens only.
        reproducible: each row of the output, and of the gradient of x, has the same bits whatever else is in the batch;
            on a CPU, with the native kernels, without dropout. docs/concepts/semantics.md has its limits and its cost.

    Parameters: one packed ``qkv_proj`` if q, k and v can share one input and all or none have a bias; else ``q_proj``,
    ``k_proj``, ``v_proj``; always ``out_proj``. ``load_state_dict`` accepts either form. Rows of a projection are
    ordered by head. Weights start as ``xavier_uniform_`` of each projection separately, biases and sinks as zero. With
    the options: ``q_norm`` and ``k_norm``; ``gate_proj``, with a bias where q has one; ``position_bias.weight``;
    ``bias_k`` [kv_heads, head_dim], ``bias_v`` [kv_heads, v_head_dim].

    Hooks on projections and replaced projections run; cross-attention requires ``qkv_proj`` to be a plain linear.

    Raises:
        TypeError: a size or number of the wrong kind.
        ValueError: a size that is not positive or does not divide, an option out of range; the message names it.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; the norms: Henry et al. 2020, "Query-Key
    Normalization for Transformers", and Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters";
    the gate: Qiu et al. 2025, "Gated Attention for Large Language Models", equation 5.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, masks
        >>> out, weights = MultiHeadAttention(8, 2)(torch.randn(1, 3, 8), mask=masks.causal(), need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([1, 3, 8]), torch.Size([1, 2, 3, 3]))
    """

    is_split = False
    """Whether ``headscope.parallel.tensor_parallel`` has split it over ranks by head."""

    def __init__(
        self, embed_dim: int, num_heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        v_head_dim: int | None = None, kdim: int | None = None, vdim: int | None = None,
        bias: bool | Collection[str] = True, out_bias: bool | None = None, scale: float | None = None,
        softcap: float | None = None, sinks: bool = False, dropout: float = 0.0,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, rotary: Rotary | None = None,
        position_bias: ALiBi | RelativeBias | T5Buckets | None = None, qk_norm: QKNorm | None = None,
        qk_norm_eps: float = 1e-6, gate: bool = False, bias_kv: bool = False, reproducible: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._set_sizes(embed_dim, num_heads, kv_heads, head_dim, v_head_dim, kdim, vdim)
        embed_dim, num_heads, kv_heads = self.embed_dim, self.num_heads, self.kv_heads
        self.scale = check_scale(scale, self.head_dim)
        self.softcap = check_softcap(softcap)
        self.dropout = check_dropout(dropout)

        biased = biased_parts(bias)
        check_flags(sinks=sinks, gate=gate, bias_kv=bias_kv, **({} if out_bias is None else {"out_bias": out_bias}))
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype: got {str(dtype).removeprefix('torch.')}, expected a floating one")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.splits = (num_heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.v_head_dim)
        self._add_projections(biased, place)
        out_bias = bool(biased) if out_bias is None else out_bias
        self.out_proj = Linear(num_heads * self.v_head_dim, embed_dim, bias=out_bias, **place)
        self.sinks = nn.Parameter(torch.empty(num_heads, **place)) if sinks else None
        self.rotary = check_rotary(rotary, self.head_dim)
        self.position_bias = bias_of(position_bias, num_heads, place)
        if rotary is not None or position_bias is not None:
            option = "position_bias" if rotary is None else "rotary"
            check_self_attention(option, self.embed_dim, kdim=self.kdim, vdim=self.vdim)
        self.qk_norm: QKNorm | None = qk_norm
        self.q_norm = norm_of(qk_norm, num_heads, self.head_dim, qk_norm_eps, place)
        self.k_norm = norm_of(qk_norm, kv_heads, self.head_dim, qk_norm_eps, place)
        self.gate_proj = Linear(embed_dim, num_heads * self.v_head_dim, bias="q" in biased, **place) if gate else None
        self.bias_k = nn.Parameter(torch.empty(kv_heads, self.head_dim, **place)) if bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(kv_heads, self.v_head_dim, **place)) if bias_kv else None
        self.plain = rotary is None and position_bias is None and qk_norm is None  # q and k attend as projected
        self.reproducible = set_reproducible(self, reproducible)
        self.reset_parameters()

    def _set_sizes(
        self, embed_dim: int, num_heads: int, kv_heads: int | None, head_dim: int | None, v_head_dim: int | None,
        kdim: int | None, vdim: int | None,
    ) -> None:  # fmt: skip
        """Check the sizes, and set them with their defaults."""
        kv_heads = num_heads if kv_heads is None else kv_heads
        embed_dim, num_heads, kv_heads = whole_sizes(embed_dim=embed_dim, num_heads=num_heads, kv_heads=kv_heads)
        check_heads(embed_dim, num_heads, kv_heads, head_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kv_heads = kv_heads
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        kdim = embed_dim if kdim is None else kdim
        vdim = kdim if vdim is None else vdim
        widths = whole_sizes(head_dim=head_dim, v_head_dim=v_head_dim, kdim=kdim, vdim=vdim)
        self.head_dim, self.v_head_dim, self.kdim, self.vdim = widths

    def _add_projections(self, biased: frozenset[str], place: dict[str, Any]) -> None:
        """Add one projection for queries, keys and values, or three."""
        self.packed = self.kdim == self.vdim == self.embed_dim and len(biased) in (0, 3)
        if self.packed:
            self.qkv_proj = Linear(self.embed_dim, sum(self.splits), bias=bool(biased), **place)
        else:
            for name, width, rows in zip(QKV, (self.embed_dim, self.kdim, self.vdim), self.splits, strict=True):
                self.add_module(f"{name}_proj", Linear(width, rows, bias=name in biased, **place))

    def reset_parameters(self) -> None:
        """Reset the parameters: Xavier-uniform for each projection separately, zero biases and sinks, norm weights one.

        A ``position_bias`` does not change, because other layers may share it: it has its own ``reset_parameters``.
        """
        for name in QKV:
            weight, bias = self.projection(name)
            nn.init.xavier_uniform_(weight)
            if bias is not None:
                nn.init.zeros_(bias)
        for linear in (self.out_proj, self.gate_proj):
            if linear is not None:
                weight, bias = weight_and_bias(linear)
                nn.init.xavier_uniform_(weight)
                if bias is not None:
                    nn.init.zeros_(bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for own in (self.bias_k, self.bias_v):
            if own is not None:
                nn.init.xavier_uniform_(own)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    @classmethod
    def from_module(cls, module: nn.Module, layout: str | None = None, **options: Any) -> Self:
        """Build a module with copies of another module's weights. See ``layouts.from_module``."""
        return convert_module(module, layout, cls, MultiHeadAttention, options)

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any] | str | Path, layout: str, *, prefix: str = "", **options: Any
    ) -> Self:
        """Build a module with copies of the weights in a state dict or file. See ``layouts.from_state_dict``."""
        return convert_state(state, layout, prefix, cls, options)

    def to_state_dict(self, layout: str, *, prefix: str = "") -> dict[str, Tensor]:
        """Return copies of the weights under the keys of a layout. See ``layouts.to_state_dict``."""
        check_not_split(self)
        return export_state(self, layout, prefix, MultiHeadAttention)

    def projection(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return weight [rows, width] and bias [rows] of the projection "q", "k", "v" or "out"; views, if packed."""
        if name not in (*QKV, "out"):
            raise ValueError(f"name: got {name!r}, expected {', '.join(QKV)} or out")
        packed = self.packed and name != "out"
        path = "qkv_proj" if packed else f"{name}_proj"
        linear: nn.Linear = getattr(self, path)
        weight, bias = weight_and_bias(linear)
        if not isinstance(cast("object", weight), Tensor):
            raise TypeError(f"{path}: expected nn.Linear, got {type(linear).__name__}, whose weight is not a tensor")
        if not packed:
            return weight, bias
        at = QKV.index(name)
        start = sum(self.splits[:at])
        rows = slice(start, start + self.splits[at])
        return weight[rows], None if bias is None else bias[rows]

    def unpack(self) -> Self:
        """Replace a packed ``qkv_proj`` by ``q_proj``, ``k_proj`` and ``v_proj``, in place; return this module.

        The output stays the same to rounding. torch's ``parallelize_module`` then splits the heads: ``ColwiseParallel``
        for the three, ``RowwiseParallel`` for ``out_proj``. Build the optimizer after it: the parameters are new.

        Raises:
            ValueError: ``qkv_proj`` has hooks, or another class than a linear.
        """
        return unpack(self)

    def prune_heads(self, heads: Collection[int]) -> Self:
        """Return a smaller module that computes the same without these heads; this module does not change.

        Its output is that of this module with the heads' columns of ``out_proj`` set to zero. The remaining heads stay
        in order and are renumbered; a key/value head is removed with the last query head that uses it.

        Args:
            heads: numbers of query heads, from 0.

        Raises:
            TypeError: they are not whole numbers.
            ValueError: such a head does not exist, none would remain, or the remaining key/value heads would serve
                different numbers of query heads; ``qk_norm="rms_all"``, which normalises all heads together; a pruning
                mask or a parametrization recomputes a weight in each call; a projection is not an ``nn.Linear``.
        """
        return prune(self, heads)

    @overload
    def forward(
        self, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None, *, mask: Mask | Tensor | None = None,
        bias: Tensor | None = None, need_weights: Literal[False] = False, positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None, *, mask: Mask | Tensor | None = None,
        bias: Tensor | None = None, need_weights: Literal[True], positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None = None, *, mask: Mask | Tensor | None = None,
        bias: Tensor | None = None, need_weights: bool = False, positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend from ``x`` to itself, or to ``context``.

        Args:
            x: the input of the queries, [B, Q, embed_dim] or [Q, embed_dim]; or a nested tensor of layout torch.jagged,
                [B, ragged, embed_dim], each of whose rows attends to itself: the output is nested likewise.
            context: the input of keys and values, [B, K, kdim]; or a pair, for the keys [B, K, kdim] and for the values
                [B, K, vdim]; by default ``x``.
            mask: which keys are visible, a mask of ``headscope.masks`` or a boolean tensor that broadcasts to [B, H, Q,
                K]; True = attend, the opposite of ``nn.MultiheadAttention``.
            bias: added to the logits, broadcasts to [B, H, Q, K].
            need_weights: also return the weights of every head, [B, H, Q, K], without dropout: memory is then
                quadratic. The output stays the same to the bit.
            positions: of the tokens of x, integers [Q] or [B, Q], for ``rotary`` and ``position_bias``; by default 0,
                1, 2, … It does not move the mask.
            cache: the tokens before x, of ``headscope.cache``; x is appended to it. Attention is then causal, positions
                continue from the cached ones, and K counts the cached tokens, those of x at the end.

        Returns:
            out [B, Q, embed_dim], or (out, weights).

        Raises:
            TypeError, ValueError: an input, mask or bias that does not fit; the message names it and its axis.
        """
        if parallel.active is not None:
            if not parallel.active.entered:
                others = {"mask": mask, "bias": bias, "need_weights": need_weights, "positions": positions}
                return parallel.active.share(partial(self.forward, x, context, cache=cache, **others))
            check_no_weights(need_weights)
            positions = positions_in_part(parallel.active, self, x, positions, {"context": context, "cache": cache})
        if getattr(x, "is_nested", False) is True:
            return self._of_nested(
                x, context, mask, bias=bias, need_weights=need_weights, positions=positions, cache=cache
            )
        q, k, v = self.project(x, context)
        parts: Any = self  # or those of this rank
        if self.is_split or q.shape[-3] != self.num_heads:
            parts = LocalHeads.of(self, q)
            q, k, v, mask, bias = parts.select(self, (q, k, v), mask, bias)
        q_of_own, reverse, staged = None, False, None
        if cache is not None or positions is not None or not self.plain:
            options = (mask, bias, positions, cache)
            placement = self._prepare_heads((q, k, v), *options, cross=context is not None, parts=parts)
            q, k, v, mask, bias, q_of_own, reverse, staged = placement
        scale, softcap, sinks, dropout = self.scale, self.softcap, parts.sinks, self.dropout if self.training else 0.0
        own: Tensor | None = None
        if dropout and parts is not self:
            parts.skip_seeds(after=False)
        if self._headscope_sums is not None:
            cross = context is not None and context is not x
            self._headscope_sums.add(q, k, v, mask, bias, sinks, scale, softcap, cross=cross)
        if parts.bias_k is None or parts.bias_v is None:
            heads = functional.attention(
                q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout,
                backend="reproducible" if self.reproducible else None,
            )  # fmt: skip
        else:
            rest = functional.attend(
                q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout
            )
            own = own_share(q if q_of_own is None else q_of_own, parts.bias_k, rest.lse, scale, softcap)
            heads = add_own_value(rest.out, own, parts.bias_v, dropout)
        if dropout and parts is not self:
            parts.skip_seeds(after=True)
        merged = merge_heads(heads.flip(-2) if reverse else heads)
        if self.gate_proj is not None:
            numbers = self.gate_proj(x)
            merged = merged * gate_of(numbers if parts is self else parts.gate(numbers), self.reproducible)
        out, weights = self.out_proj(merged), None
        if need_weights:
            weights = functional.weights(q, k, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
            weights = weights if own is None else weights * (1 - own)
            weights = weights.flip(-2) if reverse else weights
            weights = weights if parts is self else parts.gather(weights)
        if cache is not None and staged is not None:
            cache._commit(staged)
        return out if weights is None else (out, weights)

    def _of_nested(self, x: Tensor, context: Any, mask: Mask | Tensor | None, **others: object) -> Tensor:
        restart = self.rotary is not None and self.rotary.dynamic  # else only distances count
        return forward_nested(self.forward, x, context, mask, restart, **others)

    project = project
    _prepare_heads = prepare_heads
    _normed = normed
    _sources = staticmethod(input_sources)
    _check_inputs = check_inputs
    _check_kinds = check_kinds
    _headscope_sums: LayerSums | None = None  # while a watch of compiled code is open: an instance has its own

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load packed or separate projections, whole or in parts."""
        to_own_form(state_dict, prefix, self.splits, packed=self.packed)
        if self.is_split:
            to_parts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Return the sizes, and the options that are not at their default."""
        return describe(self)
