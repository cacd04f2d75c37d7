"""torch's own attention modules: their attention calls, made again from their arguments.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` have a fast path that calls no function which a mode could
see, and leave it where a mode or a hook is about. So they run as they are, and what they attended with is computed
beside them: the same projections of the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope._watch_calls import Call, Kind, additive
from headscope.masks import Band, Dense, KeyLengths, Mask

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def is_fused(module: nn.Module) -> bool:
    """Whether a module looks for function modes before it chooses its path."""
    return any(type(module).forward is kind.forward for kind in _FUSED)


def is_attention(module: nn.Module) -> bool:
    """Whether ``module_call`` says what this module attended with."""
    return type(module).forward is nn.MultiheadAttention.forward


def is_encoder_layer(module: nn.Module) -> bool:
    """Whether this is torch's encoder layer, which may attend without calling its ``self_attn``."""
    return type(module).forward is nn.TransformerEncoderLayer.forward


def module_call(module: nn.MultiheadAttention, given: Mapping[str, Any]) -> Call:
    """The attention of an ``nn.MultiheadAttention`` by the arguments of its ``forward``."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    kind: Kind = "self" if _same(query, key) else "cross"
    if query.is_nested:  # on the fast path alone, where all three are one
        padded, mask = unnested(query)
        return _of_module(module, (padded, padded, padded), {"mask": mask, "kind": kind})
    if query.ndim == 2:
        sources = tuple(x[None] for x in (query, key, value))  # [B, length, E]
    elif module.batch_first:
        sources = (query, key, value)
    else:
        sources = tuple(x.transpose(0, 1) for x in (query, key, value))  # [B, length, E]
    hinted = (
        bool(given.get("is_causal")) and given.get("key_padding_mask") is None and not given.get("need_weights", True)
    )
    said = _masks(
        None if hinted else given.get("attn_mask"),
        given.get("key_padding_mask"),
        (sources[0].shape[0], module.num_heads),
    )
    if hinted:
        said["mask"] = Band(None, 0, offset=0)
    return _of_module(module, sources, {**said, "kind": kind})


def encoder_layer_call(layer: nn.TransformerEncoderLayer, given: Mapping[str, Any]) -> Call:
    """The attention of an encoder layer that took its fast path.

    That path takes any mask as a boolean one: a float mask hides where it is not 0, whatever else was meant.
    """
    x: Tensor = given["src"]
    mask: Mask | None = None
    if x.is_nested:
        x, mask = unnested(x)
    if layer.norm_first:
        x = layer.norm1.forward(x)
    hidden, padding = (given.get(name) for name in ("src_mask", "src_key_padding_mask"))
    said = _masks(
        None if hidden is None else hidden != 0,
        None if padding is None else padding != 0,
        (x.shape[0], layer.self_attn.num_heads),
    )
    if mask is not None:
        said["mask"] = mask
    return _of_module(layer.self_attn, (x, x, x), {**said, "kind": "self"})


def functional_call(given: Mapping[str, Any]) -> Call:
    """The attention of ``torch.nn.functional.multi_head_attention_forward`` by its arguments."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    kind: Kind = "self" if _same(query, key) else "cross"
    sources = tuple(x[None] if x.ndim == 2 else x.transpose(0, 1) for x in (query, key, value))  # [B, length, E]
    padding, mask = given.get("key_padding_mask"), given.get("attn_mask")
    hinted = bool(given.get("is_causal")) and padding is None and not given.get("need_weights", True)
    said = _masks(None if hinted else mask, padding, (sources[0].shape[0], given["num_heads"]))
    if hinted:
        said["mask"] = Band(None, 0, offset=0)
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    extra = (given.get("bias_k"), given.get("bias_v"), bool(given.get("add_zero_attn")))
    fixed = (given.get("static_k"), given.get("static_v"))
    return _packed(sources, weights, given["in_proj_bias"], given["num_heads"], extra, fixed, {**said, "kind": kind})


def unnested(x: Tensor) -> tuple[Tensor, Mask]:
    """A nested tensor as a padded one [B, T, E], and what of it is there."""
    lengths = torch.tensor([len(part) for part in x.unbind()], device=x.device)
    return x.to_padded_tensor(0.0), KeyLengths(lengths)


def _of_module(module: nn.MultiheadAttention, sources: tuple[Tensor, ...], said: dict[str, Any]) -> Call:
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = [getattr(module, f"{name}_proj_weight") for name in "qkv"]
    extra = (module.bias_k, module.bias_v, module.add_zero_attn)
    return _packed(sources, weights, module.in_proj_bias, module.num_heads, extra, (None, None), said)


def _packed(
    sources: tuple[Tensor, ...], weights: Any, bias: Tensor | None, heads: int,
    extra: tuple[Tensor | None, Tensor | None, bool], fixed: tuple[Tensor | None, Tensor | None], said: dict[str, Any],
) -> Call:  # fmt: skip
    """Project [B, length, E] each, cut into heads, and add the keys that belong to no token."""
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(sources, weights, biases, strict=True))
    batch, queries, keys = len(q), q.shape[1], k.shape[1]
    if extra[0] is not None and extra[1] is not None:
        k, v = (torch.cat([x, more.expand(batch, 1, -1)], 1) for x, more in ((k, extra[0]), (v, extra[1])))
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # [B, H, length, D]
    k, v = (x if one is None else one.unflatten(0, (batch, heads)) for x, one in ((k, fixed[0]), (v, fixed[1])))
    if extra[2]:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    if added := k.shape[-2] - keys:
        said = {**said, **_beside(said, queries, keys, added, q.device)}
    return Call(q=q, k=k, v=v, **said)


def _beside(said: dict[str, Any], queries: int, keys: int, added: int, device: torch.device) -> dict[str, Any]:
    """Masks and positions where keys follow that belong to no token: all rows may see them, and they stand nowhere."""
    changed: dict[str, Any] = {}
    if isinstance(said.get("mask"), Dense):
        changed["mask"] = Dense(F.pad(said["mask"].tensor, (0, added), value=True))
    if said.get("bias") is not None:
        changed["bias"] = F.pad(said["bias"], (0, added))
    place = torch.arange(keys, dtype=torch.float64, device=device)
    nowhere = place.new_full((added,), math.nan)
    return {
        **changed,
        "q_pos": place[keys - queries :] if queries <= keys else None,
        "k_pos": torch.cat([place, nowhere]),
    }


def _masks(attn_mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int]) -> dict[str, Any]:
    """The masks of ``nn.MultiheadAttention`` (True = hidden, or numbers to add) as mask and bias of headscope.

    Args:
        attn_mask: [Q, K] or [B * H, Q, K]; padding: [B, K], or [K].
        sizes: B and H.
    """
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, sizes)  # [B, H, Q, K]
    if padding is not None:
        padding = (padding[None] if padding.ndim == 1 else padding)[:, None, None]  # [B, 1, 1, K]
    seen: Tensor | None = None
    bias: Tensor | None = None
    for mask in (attn_mask, padding):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            seen = ~mask if seen is None else seen & ~mask
        else:
            bias = additive(mask) if bias is None else bias + additive(mask)
    return {"mask": None if seen is None else Dense(seen), "bias": bias}


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether these are one tensor, or two views of it that are alike."""
    if a is b:
        return True
    if a.is_nested or b.is_nested or a.shape != b.shape:
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
