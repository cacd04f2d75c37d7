"""What changes the logits between the product q·k and the softmax, where log p is not linear in q·k."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.checking._head_layout import Heads
from headscope.checking._weights import Verdict, log_weights, visible_pairs

ALIKE, DIFFERENT = (
    1e-6,
    1e-3,
)  # parts of the largest difference: up to the first two logits are equal, from the second on they differ
MOST_KEYS = 48  # of a row, because all pairs of keys are compared
FEWEST = 20  # comparisons that a rule needs


@dataclass(frozen=True)
class _KeyPairs:
    """All pairs of visible keys of a row of one head, [N] each: their products, and the difference of their logits.

    Attributes:
        lower, higher: q·k of the two keys.
        rise: by how much the logit of the key with the higher product is larger, in parts of the largest difference.
    """

    lower: Tensor
    higher: Tensor
    rise: Tensor

    def rises_with(self, lower: Tensor, higher: Tensor) -> bool:
        """Return whether no logit falls where a function of q·k rises."""
        return not bool((self.rise * (higher - lower).sign() < -DIFFERENT).any())


def judge_logit_map(runs: list[Heads]) -> Verdict:
    """Return "logits-changed" where the map is even, or flat on one side only; else "none" and the observation.

    Args:
        runs: the heads for several inputs.
    """
    pairs = [_compare_keys(runs, h) for h in range(runs[0].count)]
    pairs = [each for each in pairs if len(each.rise) >= FEWEST]
    if not pairs:
        return Verdict("none", "too few keys of a query have logits that differ")
    falls = [_KeyPairs(each.lower, each.higher, -each.rise) for each in pairs]
    for word, all_pairs in (("rise", pairs), ("fall", falls)):
        if any(_is_even(each) for each in all_pairs):
            evidence = f"logits {word} with the magnitude of q·k, whatever its sign"
            return Verdict("logits-changed", evidence)
    for all_pairs in (pairs, falls):
        for each in all_pairs:
            if evidence := _find_one_sided_cut(each):
                return Verdict("logits-changed", evidence)
    for word, all_pairs in (("rise", pairs), ("fall", falls)):
        if all(each.rises_with(each.lower, each.higher) for each in all_pairs):
            text = f"logits {word} with q·k but are not a linear function of it, as with a cap"
            return Verdict("none", text)
    share = float((torch.cat([each.rise for each in pairs]) < -DIFFERENT).double().mean())
    text = f"of two keys of a query, the one with the larger q·k has the smaller logit in {share:.1%} of the cases"
    return Verdict("none", f"{text}: something is added or divided, or the logits are not a monotone function of q·k")


def _compare_keys(runs: list[Heads], head: int) -> _KeyPairs:
    lower, higher, rise = list[Tensor](), list[Tensor](), list[Tensor]()
    for heads in runs:
        at, raw, log = (
            x[:, head, :MOST_KEYS, :MOST_KEYS] for x in (past_pairs(heads), heads.raw, log_weights(heads.p))
        )
        difference = raw[..., :, None] - raw[..., None, :]  # [B, Q, K, K]
        both = at[..., :, None] & at[..., None, :] & (difference > DIFFERENT * raw.abs().max())
        lower.append(raw[..., None, :].expand(both.shape)[both])
        higher.append(raw[..., :, None].expand(both.shape)[both])
        rise.append((log[..., :, None] - log[..., None, :])[both])
    size = max([1e-300, *(float(x.abs().max()) for x in rise if len(x))])
    return _KeyPairs(torch.cat(lower), torch.cat(higher), torch.cat(rise) / size)


def past_pairs(heads: Heads) -> Tensor:
    """Return the visible keys that are not later than the query; later keys may have other logits than q·k."""
    return visible_pairs(heads.p) & torch.ones(heads.p.shape[-2:], dtype=torch.bool).tril()


def _is_even(pairs: _KeyPairs) -> bool:
    """Return whether logits rise with |q·k|, and not with q·k."""
    low, high = pairs.lower.abs(), pairs.higher.abs()
    against = ((high < low) & (pairs.rise < -DIFFERENT)).sum()
    return int(against) >= FEWEST // 2 and pairs.rises_with(low, high)


def _find_one_sided_cut(pairs: _KeyPairs) -> str:
    """Describe the evidence that logits that rise with q·k are clipped on one side; "" without any."""
    if not pairs.rises_with(pairs.lower, pairs.higher):
        return ""
    flat = pairs.rise.abs() <= ALIKE
    if not bool(flat.any()):
        return ""
    widest = int(torch.where(flat, pairs.higher - pairs.lower, -1.0).argmax())
    low, high = float(pairs.lower[widest]), float(pairs.higher[widest])
    mirrored = (pairs.lower >= -high) & (pairs.higher <= -low) & (pairs.rise > DIFFERENT)
    if not bool(mirrored.any()):
        return ""
    return (
        f"logits are equal for q·k from {low:.3g} to {high:.3g} "
        f"but differ from {-high:.3g} to {-low:.3g}: they are clipped on one side"
    )


# ---------------------------------------------------------------- other logits of the row


def fit_row_factors(heads: Heads, keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """Fit log p of each row as a linear function of q·k.

    Args:
        heads: the weights and q·k of all heads.
        keys: the keys that are counted, broadcasting to [B, H, Q, K].

    Returns:
        (the rows with three keys or more, the factor of q·k), [B, H, Q] each; None where a row is not linear.
    """
    at = past_pairs(heads) & keys
    rows = at.sum(-1) >= 3

    def centred(x: Tensor) -> Tensor:
        mean = torch.where(at, x, 0.0).sum(-1, keepdim=True) / at.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(at & rows[..., None], x - mean, 0.0)

    log, raw = centred(log_weights(heads.p)), centred(heads.raw)
    factors = (log * raw).sum(-1) / raw.square().sum(-1).clamp_min(1e-300)
    off = (log - factors[..., None] * raw).abs().amax()
    linear = bool(rows.any()) and float(off) <= 1e-5 * float(log.abs().max())
    return (rows, factors) if linear else None


def have_uniform_factors(rows: Tensor, factors: Tensor) -> bool:
    """Return whether the fitted rows of each head have the same factor; other rows have too few keys for a fit."""
    high, low = (torch.where(rows, factors, other) for other in (-math.inf, math.inf))
    spread = (high.amax((0, 2)) - low.amin((0, 2))).clamp_min(0.0)
    return bool((spread <= DIFFERENT * torch.where(rows, factors, 0.0).abs().amax((0, 2))).all())


def judge_row_factors(heads: Heads, moved: Heads | None) -> Verdict:
    """Judge rows that are linear in q·k with different factors.

    Args:
        heads: the heads.
        moved: the heads after token 0 was changed.
    """
    others = torch.arange(heads.p.shape[-1]) > 0
    fitted = fit_row_factors(heads, torch.ones((), dtype=torch.bool))
    own = "each query has its own factor of q·k"
    if fitted is not None:
        own += f", from {float(fitted[1][fitted[0]].min()):.4g} to {float(fitted[1][fitted[0]].max()):.4g}"
    if moved is None or moved.p.shape != heads.p.shape:
        return Verdict("scale-not-uniform", own)
    before, after = fit_row_factors(heads, others), fit_row_factors(moved, others)
    retained = torch.isclose(heads.raw, moved.raw, rtol=1e-6)[..., 1:, 1:]
    if before is None or after is None or not bool(retained.all()):
        return Verdict("scale-not-uniform", own)
    rows = before[0] & after[0] & (torch.arange(heads.p.shape[-2]) > 0)
    change = ((after[1] - before[1]) / before[1]).abs()[rows]
    if not len(change) or float(change.max()) < 1e-2:
        return Verdict("scale-not-uniform", f"{own}, which does not change with another key")
    evidence = f"a query's factor of q·k changes by up to {float(change.max()):.0%} when token 0 changes"
    return Verdict("logits-changed", f"{evidence}, although its q·k do not: it depends on the other logits of the row")


# ---------------------------------------------------------------- a maximum of the wrong axis


def judge_subtracted_maximum(heads: Heads) -> Verdict:
    """Return "logits-changed" where each key's largest logit is subtracted, instead of each query's; else "none".

    What is subtracted from all logits of a query cancels in the softmax; what is subtracted from those of a key does
    not. Keys that are masked for some queries are not judged.
    """
    if not bool(visible_pairs(heads.p).all()):
        return Verdict("none")

    def centred(x: Tensor, *axes: int) -> Tensor:
        for axis in axes:
            x = x - x.mean(axis, keepdim=True)
        return x

    log, raw = log_weights(heads.p), heads.raw
    both, own = centred(log, -1, -2), centred(raw, -1, -2)
    slope = (both * own).sum((0, 2, 3), keepdim=True) / own.square().sum((0, 2, 3), keepdim=True).clamp_min(1e-300)
    logits = slope * raw
    off = (centred(log, -1) - centred(logits - logits.amax(-2, keepdim=True), -1)).abs().amax()
    if float(off) > 1e-5 * float(log.abs().max()) or not bool((slope != 0).all()):
        return Verdict("none")
    return Verdict("logits-changed", "the largest logit of each key is subtracted, not that of each query")
