"""What stands in the place of the logits that a mask is to hide, where the logits themselves are not known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope.checking._head_layout import Heads
from headscope.checking._logit_map import past_pairs
from headscope.checking._weights import Verdict, log_weights, visible_pairs

SAME = 1e-6  # weights and outputs that differ by less are the same
ALIKE = 1e-3  # logits that differ by less are alike
FIXED = 1e-4  # parts of what the logits of earlier keys change from one input to another; less is no change


def are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether weights, or outputs, are the same; NaN equals NaN."""
    if a.shape != b.shape:
        return False
    size = max(1.0, float(a.nan_to_num(0, 0, 0).abs().max()))
    apart = (a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)).abs() > SAME * size
    return not bool((apart | (torch.isfinite(a) != torch.isfinite(b))).any())


def judge_unhidden_pairs(p: Tensor, plain: Tensor, mask: Tensor, before: Tensor) -> Verdict:
    """Judge a mask that moves the weights, where what it is to hide is seen; "none" where it hides some.

    Args:
        p: the weights with the mask, [B, H, Q, K].
        plain: those without it.
        mask: what may be seen, [B, Q, K].
        before: what was visible without it, [B, H, Q, K].
    """
    allowed, visible = mask[:, None], visible_pairs(p)
    rows = ((before & allowed).any(-1) & (before & ~allowed).any(-1))[..., None]
    retained, filled = before & allowed & rows, visible & ~allowed & rows
    if not bool(filled.any()) or not bool(visible[before & rows].all()):
        return Verdict("none")
    if bool((visible & ~before & allowed & rows).any()):
        return Verdict("none")
    if _is_softmax_of(p, retained, filled):
        return Verdict("softmax-twice", "log p of the keys that are left, less that of hidden ones, sums to 1")
    count = retained.sum(-1, keepdim=True)
    shift = log_weights(p) - log_weights(plain)
    level = torch.where(retained, shift, 0.0).sum(-1, keepdim=True) / count.clamp_min(1)
    if bool((count >= 2).any()) and bool((shift - level)[retained].abs().max() < ALIKE):
        share = float(torch.where(filled, p, 0.0).sum(-1).max())
        return Verdict("mask-fill-too-small", f"hidden keys have up to {share:.3g} of a query's weight")
    _, head, query, key = filled.nonzero()[0].tolist()
    evidence = f"key {key} of query {query} in head {head} is seen, and the weights of other keys change"
    return Verdict("mask-applied-wrong", f"{evidence} by more than a factor of each query")


def _is_softmax_of(p: Tensor, retained: Tensor, filled: Tensor) -> bool:
    """Return whether log p is itself made of weights that sum to one, and are 0 where ``filled``."""
    log = log_weights(p)
    zero = torch.where(filled, log, 0.0).sum(-1, keepdim=True) / filled.sum(-1, keepdim=True).clamp_min(1)
    inner, rows = log - zero, filled.any(-1)
    if bool((inner[filled].abs() > SAME).any()) or bool((inner[retained] < -SAME).any()):
        return False
    return bool(((torch.where(retained, inner, 0.0).sum(-1) - 1)[rows].abs() < ALIKE).all())


def are_later_logits_fixed(one: Heads, two: Heads) -> bool:
    """Return whether the logits of later keys are those of another input, up to a number for each query.

    Those of earlier keys must not be. Then something stands in the place of q·k, also beside a bias or below a cap. A
    number that was added to q·k does not show: it may be part of a bias.
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
    """Return the largest part of a query's weight that later keys have."""
    return float(p.triu(1).sum(-1).max())
