"""The values that replace the logits of masked keys, where the logits themselves are not known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope.checking._head_layout import Heads
from headscope.checking._logit_map import past_pairs
from headscope.checking._weights import Verdict, log_weights, visible_pairs

SAME = 1e-6  # weights and outputs that differ by less are equal
ALIKE = 1e-3  # logits that differ by less are alike
FIXED = 1e-4  # as a part of the change of earlier keys' logits between two inputs: a smaller change counts as none


def are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of weights or outputs are equal to ``SAME``; NaN equals NaN."""
    if a.shape != b.shape:
        return False
    size = max(1.0, float(a.nan_to_num(0, 0, 0).abs().max()))
    unequal = (a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)).abs() > SAME * size
    return not bool((unequal | (torch.isfinite(a) != torch.isfinite(b))).any())


def judge_unhidden_pairs(p: Tensor, plain: Tensor, mask: Tensor, before: Tensor) -> Verdict:
    """Judge a mask that changes the weights and leaves visible what it should hide; "none" where it hides some keys.

    Args:
        p: the weights with the mask, [B, H, Q, K].
        plain: the weights without it.
        mask: the pairs that it leaves visible (True = attend), [B, Q, K].
        before: the pairs that are visible without it, [B, H, Q, K].
    """
    allowed, visible = mask[:, None], visible_pairs(p)
    rows = ((before & allowed).any(-1) & (before & ~allowed).any(-1))[..., None]
    retained, filled = before & allowed & rows, visible & ~allowed & rows
    if not bool(filled.any()) or not bool(visible[before & rows].all()):
        return Verdict("none")
    if bool((visible & ~before & allowed & rows).any()):
        return Verdict("none")
    if _is_softmax_of(p, retained, filled):
        return Verdict("softmax-twice", "log p of the visible keys, minus log p of the masked ones, sums to 1")
    count = retained.sum(-1, keepdim=True)
    shift = log_weights(p) - log_weights(plain)
    level = torch.where(retained, shift, 0.0).sum(-1, keepdim=True) / count.clamp_min(1)
    if bool((count >= 2).any()) and bool((shift - level)[retained].abs().max() < ALIKE):
        share = float(torch.where(filled, p, 0.0).sum(-1).max())
        return Verdict("mask-fill-too-small", f"masked keys get up to {share:.3g} of a query's weight")
    _, head, query, key = filled.nonzero()[0].tolist()
    evidence = f"key {key} of query {query} in head {head} stays visible, and the weights of other keys change"
    return Verdict("mask-applied-wrong", f"{evidence} by more than one factor per query")


def _is_softmax_of(p: Tensor, retained: Tensor, filled: Tensor) -> bool:
    """Return whether log p, up to a number per row, is itself weights that sum to 1 and are 0 where ``filled``."""
    log = log_weights(p)
    zero = torch.where(filled, log, 0.0).sum(-1, keepdim=True) / filled.sum(-1, keepdim=True).clamp_min(1)
    inner, rows = log - zero, filled.any(-1)
    if bool((inner[filled].abs() > SAME).any()) or bool((inner[retained] < -SAME).any()):
        return False
    return bool(((torch.where(retained, inner, 0.0).sum(-1) - 1)[rows].abs() < ALIKE).all())


def are_later_logits_fixed(one: Heads, two: Heads) -> bool:
    """Return whether two inputs give later keys the same logits, up to a number per query, and earlier keys others.

    Then something replaces q·k, with or without a bias or a cap. A number that was added to q·k does not show: it may
    be part of a bias.
    """
    later = torch.ones(one.p.shape[-2:], dtype=torch.bool).triu(1).expand(one.p.shape)
    if one.p.shape[-1] < 3 or not bool((visible_pairs(one.p) & visible_pairs(two.p))[later].all()):
        return False
    change = log_weights(one.p) - log_weights(two.p)

    def spread(at: Tensor) -> float:  # the largest of a row
        high, low = (torch.where(at, change, other) for other in (-math.inf, math.inf))
        return float(torch.where(at.any(-1), high.amax(-1) - low.amin(-1), 0.0).max())

    return spread(later) < FIXED * spread(past_pairs(one) & past_pairs(two))


def measure_later_weight(p: Tensor) -> float:
    """Return the largest part of a query's weight that later keys get."""
    return float(p.triu(1).sum(-1).max())
