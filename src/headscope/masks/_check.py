"""Masks as arguments of public functions."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._support.arguments import check_layout, kind
from headscope._support.tensor_classes import check_no_causal_bias
from headscope.masks._base import Mask, Sizes
from headscope.masks._dense import Dense
from headscope.masks._parameters import describe_wrong_dtype


def as_mask(mask: object) -> Mask | None:
    """Convert an argument of a public function: a ``Mask``, a boolean tensor (taken as ``Dense``), or None.

    Raises:
        TypeError: anything else; for a float tensor the message suggests ``bias``.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: got {kind(mask)}, expected a mask of headscope.masks, a boolean tensor or None")
    check_no_causal_bias("mask", mask)
    if mask.dtype == torch.bool:
        return Dense(mask)
    raise TypeError(f"mask: dtype is {describe_wrong_dtype(mask)}")


def check_mask(mask: Mask, sizes: Sizes, device: torch.device) -> None:
    """Raise unless every part of a mask fits the sizes [B, H, Q, K] and is on q's device."""
    for leaf in mask.leaves():
        for tensor in leaf.tensors():
            check_layout(f"mask: a tensor of {type(leaf).__name__}", tensor)
            if tensor.device != device:
                raise ValueError(f"mask: a tensor of {type(leaf).__name__} is on {tensor.device}, q is on {device}")
        leaf.check_sizes(sizes)
