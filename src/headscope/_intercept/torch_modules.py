"""torch's own multi-head attention: its calls as arguments of headscope, from those of torch's functions.

``nn.MultiheadAttention`` calls ``multi_head_attention_forward``, or, on its fast path, one operator that projects,
attends and projects back; ``nn.TransformerEncoderLayer`` has an operator for all of itself. headscope recomputes q, k
and v separately: the same projections of the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._intercept.intercepted_call import InterceptedCall, Kind, WatchError, rounded
from headscope._intercept.masks import additive, check_class
from headscope.masks import Band, Dense, KeyLengths, Mask

FAST_PATH = {
    "_native_multi_head_attention": (
        *("query", "key", "value", "embed_dim", "num_heads", "weight", "bias", "out_weight", "out_bias", "mask"),
        *("need_weights", "average", "mask_type"),
    ),
    "_transformer_encoder_layer_fwd": (
        *("query", "embed_dim", "num_heads", "weight", "bias", "out_weight", "out_bias", "gelu", "norm_first", "eps"),
        *("norm_weight", "norm_bias", "norm2_weight", "norm2_bias", "w1", "b1", "w2", "b2", "mask", "mask_type"),
    ),
}
"""The operators of the fast path, and the names of their arguments."""


def native_call(operator: str, args: tuple[Any, ...]) -> InterceptedCall:
    """Return the attention of an operator of the fast path: self-attention, batch first, sometimes of a nested tensor.

    It treats any mask as boolean: a float mask masks all keys where it is not 0.
    """
    arguments = dict(zip(FAST_PATH[operator], args, strict=False))
    x: Tensor = arguments["query"]
    hidden: Tensor | None = arguments.get("mask")
    mask: Mask | None = None
    if x.is_nested:
        lengths = torch.tensor([len(part) for part in x.unbind()], device=x.device)
        x, mask = x.to_padded_tensor(0.0), KeyLengths(lengths)
    elif hidden is not None:
        hidden = hidden != 0
        mask = Dense(~(hidden[:, None, None] if arguments.get("mask_type") == 1 else hidden))  # 1: [B, K], of padding
    if arguments.get("norm_first"):
        x = F.layer_norm(x, x.shape[-1:], arguments["norm_weight"], arguments["norm_bias"], arguments["eps"])
    options: dict[str, Any] = {"mask": mask, "kind": "self"}
    none = (None, None)
    return _packed(
        (x, x, x),
        arguments["weight"].chunk(3),
        arguments["bias"],
        arguments["num_heads"],
        (*none, False),
        none,
        options,
    )


def native_call_with_output(operator: str, args: tuple[Any, ...], changed: Sequence[Any], out: Any) -> InterceptedCall:
    """Return ``native_call`` with its projected output, if that is an output of attention alone.

    Args:
        operator, args: as for ``native_call``.
        changed: the arguments with which the operator ran.
        out: its result.
    """
    call = native_call(operator, args)
    arguments = dict(zip(FAST_PATH[operator], changed, strict=False))
    if operator != "_native_multi_head_attention" or out[0].is_nested:
        return call
    return replace(call, attended=out[0], projection=(arguments["out_weight"], arguments["out_bias"]))


def with_output(call: InterceptedCall, arguments: Mapping[str, Any], out: Tensor) -> InterceptedCall:
    """Return a call of ``multi_head_attention_forward`` with its projected output [Q, B, E] or [Q, E].

    Under dropout in training the output is random.
    """
    if arguments.get("dropout_p") and arguments.get("training", True):
        return call
    attended = out[None] if out.ndim == 2 else out.transpose(0, 1)
    return replace(call, attended=attended, projection=(arguments["out_proj_weight"], arguments.get("out_proj_bias")))


def of_heads(weight: Tensor, factors: Tensor) -> Tensor:
    """Return an output projection [E, H * Dv] whose columns of each head are multiplied by its factor, [H]."""
    factors = factors.to(weight.device, weight.dtype)
    return weight * factors.repeat_interleave(weight.shape[1] // len(factors))


def widths(heads: int, out_weight: Tensor) -> tuple[int, int]:
    """Return the head widths of q and k and of v, equal in torch's own modules, from the output projection."""
    width = out_weight.shape[1] // heads if heads else 0
    return width, width


def heads_of_fast_path(operator: str, args: tuple[Any, ...]) -> tuple[int, tuple[int, int]]:
    """Return the number of heads of an operator of the fast path, and their widths."""
    heads, out_weight = (args[FAST_PATH[operator].index(name)] for name in ("num_heads", "out_weight"))
    return heads, widths(heads, out_weight)


def with_factors(operator: str, args: tuple[Any, ...], factors: Tensor) -> list[Any]:
    """Return the arguments of an operator of the fast path, with its heads multiplied.

    Raises:
        WatchError: a gradient is requested; these operators do not have one.
    """
    if factors.requires_grad:
        raise WatchError(
            "torch's fast path has no gradient; torch does not use it in training, or where a parameter of the "
            "layer requires a gradient"
        )
    at = FAST_PATH[operator].index("out_weight")
    return [*args[:at], of_heads(args[at], factors), *args[at + 1 :]]


def functional_call(arguments: Mapping[str, Any]) -> InterceptedCall:
    """Return the attention of ``nn.functional.multi_head_attention_forward``; lengths come first, then the batch."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    fixed = (arguments.get("static_k"), arguments.get("static_v"))
    kind: Kind = "self" if same(query, key) and fixed[0] is None else "cross"  # fixed keys replace the tokens
    sources = tuple(x[None] if x.ndim == 2 else x.transpose(0, 1) for x in (query, key, value))  # [B, length, E]
    padding, mask = arguments.get("key_padding_mask"), arguments.get("attn_mask")
    hinted = bool(arguments.get("is_causal")) and padding is None and not arguments.get("need_weights", True)
    options = _masks(None if hinted else mask, padding, (sources[0].shape[0], arguments["num_heads"]))
    if hinted:
        options["mask"] = Band(None, 0, offset=0)
    if arguments.get("use_separate_proj_weight"):
        weights = [arguments[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = arguments["in_proj_weight"].chunk(3)
    extra = (arguments.get("bias_k"), arguments.get("bias_v"), bool(arguments.get("add_zero_attn")))
    return _packed(
        sources, weights, arguments["in_proj_bias"], arguments["num_heads"], extra, fixed, {**options, "kind": kind}
    )


def _packed(
    sources: tuple[Tensor, ...], weights: Any, bias: Tensor | None, heads: int,
    extra: tuple[Tensor | None, Tensor | None, bool], fixed: tuple[Tensor | None, Tensor | None],
    options: dict[str, Any],
) -> InterceptedCall:  # fmt: skip
    """Project [B, length, E] each, split into heads, and add the keys that belong to no token."""
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(sources, weights, biases, strict=True))
    batch, queries = len(q), q.shape[1]
    keys = k.shape[1] if fixed[0] is None else fixed[0].shape[-2]
    if extra[0] is not None and extra[1] is not None:
        k, v = (torch.cat([x, more.expand(batch, 1, -1)], 1) for x, more in ((k, extra[0]), (v, extra[1])))
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # [B, H, length, D]
    k, v = (x if one is None else one.unflatten(0, (batch, heads)) for x, one in ((k, fixed[0]), (v, fixed[1])))
    if extra[2]:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    if added := k.shape[-2] - keys:
        options = {**options, **_beside(options, queries, keys, added, q.device)}
    return rounded(InterceptedCall(q=q, k=k, v=v, **options), bias=True)


def _beside(options: dict[str, Any], queries: int, keys: int, added: int, device: torch.device) -> dict[str, Any]:
    """Return masks and positions with keys that belong to no token: visible to all rows, and without a position."""
    changed: dict[str, Any] = {}
    if isinstance(options.get("mask"), Dense):
        changed["mask"] = Dense(F.pad(options["mask"].tensor, (0, added), value=True))
    if options.get("bias") is not None:
        changed["bias"] = F.pad(options["bias"], (0, added))
    place = torch.arange(keys, dtype=torch.float64, device=device)
    nowhere = place.new_full((added,), math.nan)
    return {
        **changed,
        "q_pos": place[keys - queries :] if queries <= keys else None,
        "k_pos": torch.cat([place, nowhere]),
    }


def _masks(attn_mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int]) -> dict[str, Any]:
    """Convert the masks of ``nn.MultiheadAttention`` (True = masked, or numbers to add) to mask and bias of headscope.

    Args:
        attn_mask: [Q, K] or [B * H, Q, K].
        padding: [B, K], or [K].
        sizes: B and H.

    Raises:
        TypeError: the class of a mask is unknown.
    """
    for name, tensor in (("attn_mask", attn_mask), ("key_padding_mask", padding)):
        if tensor is not None:
            check_class(name, tensor)
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, sizes)  # [B, H, Q, K]
    if padding is not None:
        padding = (padding[None] if padding.ndim == 1 else padding)[:, None, None]  # [B, 1, 1, K]
    visible: Tensor | None = None
    bias: Tensor | None = None
    for mask in (attn_mask, padding):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            visible = ~mask if visible is None else visible & ~mask
        else:
            bias = additive(mask) if bias is None else bias + additive(mask)
    return {"mask": None if visible is None else Dense(visible), "bias": bias}


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether these are one tensor, or two equal views of it."""
    alike = a.shape == b.shape and a.stride() == b.stride() and a.is_neg() == b.is_neg()
    return a is b or (alike and a.data_ptr() == b.data_ptr())
