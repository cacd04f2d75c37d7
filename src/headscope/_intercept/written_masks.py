"""Which keys an attention that a module writes out hides, as its scores or its weights show."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope._intercept import frames
from headscope._intercept.masks import HIDDEN, to_rule
from headscope.masks import Dense, Mask

ROUNDING = 0.9
"""A mask of -1e9 added to a score may be rounded to a little more."""
LEAST = -1000.0
"""The logarithm of a weight of 0 whose key is visible: its exponential is 0 in float64, too."""


def mask_of(scores: Tensor) -> tuple[Mask | None, Tensor]:
    """Return the mask that scores show, and which keys are visible to some query, boolean [B or 1, K].

    Masked is what is at or below -1e9, or below half of the dtype's least number.
    """
    limit = _limit(scores.dtype)
    least = math.inf if 0 in scores.shape else float(scores.amin())
    if least > limit:
        return None, torch.ones(1, scores.shape[-1], dtype=torch.bool, device=scores.device)
    visible = scores.amax(1, keepdim=True) > limit  # to some head; two reductions are faster than comparing all
    if math.isnan(least) or not torch.equal(visible, scores.amin(1, keepdim=True) > limit):
        visible = scores > limit
    key = visible.shape, visible.device
    known = frames.thread.written_masks.get(key)  # most layers have the mask of the one before
    if known is None or not torch.equal(known[0], visible):
        known = frames.thread.written_masks[key] = (visible, to_rule(visible), visible.any(2).any(1))
    return known[1:]


def with_visible_zeros(scores: Tensor, before: Tensor | None) -> tuple[Tensor, bool]:
    """Return logarithms of weights with ``LEAST`` for each visible key of weight 0, and whether these are known.

    Code may have masked a key of weight 0, or rounded or thresholded its weight. It is masked if the scores hide it. It
    is also masked if the zeros are the same in all heads, or the usual mask of a single head, unless a threshold of the
    scores explains them. It is not masked if such a threshold explains zeros that differ between heads.

    Args:
        scores: the logarithms, [B, H, Q, K].
        before: the input of the softmax from which the weights were computed; None: not known.
    """
    zero = scores == -math.inf
    if not bool(zero.any()):
        return scores, True
    hidden = zero & ~_shown(before) if before is not None else zero & zero.all(-1, keepdim=True)
    other = zero & ~hidden
    if not bool(other.any()):
        return scores, True
    is_by_threshold = before is not None and _is_by_threshold(before, other, zero)
    if _is_mask(zero, other) and not is_by_threshold:
        return scores, True
    is_known = is_by_threshold and not _is_mask(zero, other)
    return scores.masked_fill(other, LEAST), is_known


def _limit(dtype: torch.dtype) -> float:
    """Return the number at or below which a score is masked."""
    return max(ROUNDING * HIDDEN, torch.finfo(dtype).min / 2)


def _shown(scores: Tensor) -> Tensor:
    return scores > _limit(scores.dtype)


def _is_by_threshold(before: Tensor, other: Tensor, zero: Tensor) -> bool:
    """Return whether in each row the scores of visible keys of weight 0 are below those of the other keys."""
    most = before.masked_fill(~other, -math.inf).amax(-1)
    least = before.masked_fill(zero, math.inf).amin(-1)
    return bool((most < least).all())


def _is_mask(zero: Tensor, other: Tensor) -> bool:
    """Return whether zeros are the same in all heads; of a single head, whether they are those of a usual mask."""
    if zero.shape[1] > 1:
        return bool((other == other[:, :1]).all())
    return not isinstance(to_rule(~zero), Dense)
