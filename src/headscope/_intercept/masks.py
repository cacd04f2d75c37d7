"""Conversion of SDPA masks, [B, H, Q, K] tensors, to masks and biases of headscope."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from headscope._attend.blocks import slices
from headscope._support.tensor_classes import ORDINARY, has_own_functions, is_causal_bias
from headscope.masks import Band, Dense, Documents, Mask, causal

HIDDEN = -1e9
"""At or below this number an additive mask masks a key: -inf, the smallest number of a dtype, -1e9, -1e30 are all in
use.
"""

AT_ONCE = 1 << 20  # entries of a mask that are compared at once


def split(mask: Tensor) -> tuple[Mask | None, Tensor | None]:
    """Convert a mask of SDPA (True = attend, or numbers to add) to a mask or a bias.

    A row whose keys are all masked by numbers is empty here and does not count; the model's own softmax spreads it
    evenly, because all its logits are equally low.

    Raises:
        TypeError: ``check_class``.
    """
    check_class("attn_mask", mask)
    if mask.dtype == torch.bool:
        return to_rule(mask), None
    bias = additive(mask)
    if bias.requires_grad:  # it may be all 0 and yet be learned
        return None, bias
    hidden = bias == -math.inf
    if _is_readable(mask) and bool((hidden | (bias == 0)).all()):
        return to_rule(~hidden), None
    return None, bias


def check_class(name: str, mask: object) -> None:
    """Raise if the numbers of a mask may not determine the masked keys.

    Raises:
        TypeError: it is not a tensor, or its class changes torch's functions, attention among them.
    """
    if type(mask) in ORDINARY:
        return
    if not isinstance(mask, Tensor) or has_own_functions(mask):
        raise TypeError(
            f"{name}: got {type(mask).__name__}, which watch cannot read; expected a boolean or float tensor, or "
            "exclude the layer with layers="
        )


def causal_rule(mask: object, queries: int, keys: int) -> Mask | None:
    """Return the mask that a ``torch.nn.attention.bias.CausalBias`` represents; None if ``mask`` is not one.

    A square one is top-left in torch, whatever its variant and the sizes of the call.

    Raises:
        ValueError: a lower-right one has other sizes than the call; what torch then computes depends on the device.
    """
    if not is_causal_bias(mask):
        return None
    bias: Any = mask
    own = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or own[0] == own[1]:
        return Band(None, 0, offset=0)
    if own != (queries, keys):
        raise ValueError(
            f"attn_mask: CausalBias does not fit the call; expected [Q, K] = {[queries, keys]}, got {list(own)}"
        )
    return causal()


def additive(mask: Tensor) -> Tensor:
    """Return a bias from an additive mask: numbers as low as a mask's "minus infinity" become -inf."""
    limit = max(HIDDEN, torch.finfo(mask.dtype).min / 2)
    return mask.masked_fill(mask <= limit, -math.inf)


def to_rule(visible: Tensor) -> Mask:
    """Return the mask as a rule if it has a common form, else as the tensor.

    The common rules are causal or not, with or without a window, and with some keys masked for every query. Every layer
    would read a tensor again; a rule is not read at all.
    """
    dense = Dense(visible)
    if not _is_readable(visible) or visible.ndim != 4:
        return dense
    if visible.shape[1] != 1 or 0 in visible.shape or visible.shape[2] == 1:
        return dense
    visible = visible[:, 0]  # [B, Q, K]
    keys = visible.any(1)  # [B, K]
    if torch.equal(visible, keys[:, None].expand_as(visible)):
        return dense if bool(keys.all()) else keys_mask(keys, visible.shape[1])
    queries, length = visible.shape[1:]
    first = int(visible[:, -1].byte().argmax(-1).amin())  # the first key visible to the last query
    band = causal() if first == 0 else Band(length - 1 - first, 0)
    rule = band if bool(keys.all()) else band & keys_mask(keys, queries)
    return rule if _same(rule, visible) else dense


def _is_readable(mask: Tensor) -> bool:
    """Return whether code may depend on the numbers: a GPU would be waited for, and a graph has no numbers."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(mask, FakeTensor)


def _same(rule: Mask, visible: Tensor) -> bool:
    """Return whether a rule equals this, [B, Q, K]; a few rows at a time, because the tensor may be large."""
    batch, queries, length = visible.shape
    rule = rule.at(queries, length)
    for i in slices(queries, AT_ONCE // (batch * length)):
        allowed = rule.tile(slice(0, batch), slice(0, 1), i, slice(0, length), visible.device)
        allowed = allowed.expand(batch, 1, i.stop - i.start, length)[:, 0]
        if not torch.equal(visible[:, i], allowed):
            return False
    return True


def keys_mask(keys: Tensor, queries: int) -> Mask:
    """Return a mask from visible keys, boolean [B, K], the same for every query."""
    return Documents(keys.new_ones(len(keys), queries, dtype=torch.long), keys.long())
