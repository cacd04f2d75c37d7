"""The notes of a trace on scores, masks and weights."""

from __future__ import annotations

import math

import torch

from headscope.masks import Band, Mask, Prefix
from headscope.module import MultiHeadAttention
from headscope.tracing._explanations import memory, quantity
from headscope.tracing._invariants import VisiblePairs
from headscope.tracing._setup import Setting, is_causal

LARGE = 1 << 30  # bytes of weights; from here on the trace notes that fused kernels do not store them
TRUE = "True = attend"


def is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def is_scaled_by_width(module: MultiHeadAttention) -> bool:
    """Return whether the scores are divided by √E although the heads are narrower than E."""
    by_width = is_close(module.scale, module.embed_dim**-0.5)
    return module.embed_dim != module.head_dim and module.num_heads > 1 and by_width


def note_scale(s: Setting) -> str | None:
    m = s.module
    usual = m.head_dim**-0.5
    if is_close(m.scale, usual):
        return None
    if is_scaled_by_width(m):
        return (
            f"unusual: divided by √E = {m.embed_dim**0.5:.4g} (√embed_dim) instead of √D = {m.head_dim**0.5:.4g} "
            f"(√head_dim); scores are {(m.embed_dim / m.head_dim) ** 0.5:.3g} times smaller, and weights flatter"
        )
    return f"this module scales by {m.scale:.4g}; the usual scale is 1 / √D = {usual:.4g}"


def describe_mask(mask: Mask) -> str:
    """Return a mask in a few words: "causal", "window(5)", "Prefix(n=3)", "causal and KeyLengths, combined"."""
    if is_causal(mask):
        return "causal"
    if isinstance(mask, Band) and mask.right == 0 and mask.left is not None and mask.offset is None:
        return f"window({mask.left + 1})"
    parts = list(mask.leaves())
    if len(parts) == 1:
        return repr(mask) if mask.is_constant() else type(mask).__name__
    return f"{' and '.join(dict.fromkeys(describe_mask(part) for part in parts))}, combined"


def note_mask(mask: Mask, counted: VisiblePairs | None, s: Setting) -> str:
    batch, heads, queries, keys = s.sizes
    if counted is None:
        return f"{describe_mask(mask)}, {TRUE}: visible pairs were not counted"
    pairs, total, each = counted.pairs, batch * heads * queries * keys, ""
    if batch * heads and all(_is_shared_by_all(leaf) for leaf in mask.leaves()):
        pairs, total, each = pairs // (batch * heads), queries * keys, " in each head"
    share = 100 * pairs / max(1, total)
    text = f"{describe_mask(mask)}, {TRUE}: {quantity(pairs)} of {quantity(total)} pairs{each} ({share:.3g}%)"
    if counted.empty_rows:
        rows = f"{quantity(counted.empty_rows)} of {quantity(batch * heads * queries)} rows"
        result = "give 0" if s.module.bias_k is None else "see only the key of bias_kv"
        text += f"; {rows} have no visible key and {result}"
    return text


def _is_shared_by_all(leaf: Mask) -> bool:
    """Return whether a mask is the same for every batch entry and head."""
    return isinstance(leaf, Prefix) or (
        isinstance(leaf, Band) and (leaf.offset is None or isinstance(leaf.offset, int))
    )


def note_weights(s: Setting, dtype: torch.dtype) -> str | None:
    notes: list[str] = []
    elements = math.prod(s.sizes)
    if elements * dtype.itemsize >= LARGE:
        notes.append(
            f"stored whole, these {quantity(elements)} numbers would take {memory(elements * dtype.itemsize)}; fused "
            "kernels compute them block by block and store none, so memory grows with Q + K instead of Q · K"
        )
    if s.module.dropout:
        chance = f"{s.module.dropout:g}"
        notes.append(f"in training, dropout would set each to 0 with probability {chance}; a trace omits it")
    return "; ".join(notes) or None
