"""Conclusions from the weights of a forward pass: the softmax and its axis, the scale, and how a mask was applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope.checking._catalogue import Severity
from headscope.checking._head_layout import Heads

HIDDEN = 1e-20  # a weight below this part of its row's largest counts as masked


@dataclass(frozen=True)
class Verdict:
    """How a mask was applied, or what is wrong with the weights.

    Attributes:
        outcome: "hidden" where the mask works; "none" where it has no effect; or the name of a finding.
        evidence: the numbers and positions that show it.
        after_softmax: the evidence that the mask was applied after the softmax; "" if it was not.
        severity: that of the finding; None = as in the catalogue.
    """

    outcome: str
    evidence: str = ""
    after_softmax: str = ""
    severity: Severity | None = None


def visible_pairs(p: Tensor) -> Tensor:
    """Return which weights are larger than rounding; the shape is that of p."""
    p = p.nan_to_num(0.0).abs()
    return p > HIDDEN * p.amax(-1, keepdim=True).clamp_min(1e-300)


def differ_in_pattern(visible: Tensor, other: Tensor) -> bool:
    """Return whether two patterns of the same shape mask different pairs."""
    return visible.shape == other.shape and not torch.equal(visible, other)


def log_weights(p: Tensor) -> Tensor:
    """Return log p, and 0 for masked pairs."""
    return torch.where(visible_pairs(p), p.clamp_min(1e-300).log(), 0.0).nan_to_num(0.0)


def largest_difference(p: Tensor) -> float:
    """Return the largest difference between two visible logits of a row; only positive weights have a logit."""
    visible, log = visible_pairs(p) & (p > 0), log_weights(p)
    high = torch.where(visible, log, -math.inf).amax(-1)
    low = torch.where(visible, log, math.inf).amin(-1)
    differences = (high - low)[torch.isfinite(high - low)]
    return float(differences.max()) if len(differences) else 0.0


# ---------------------------------------------------------------- sums


def explain_sums(heads: Heads, tolerance: float) -> Verdict | None:
    """Return the mistake that explains why the weights of a query do not sum to 1; None if they do."""
    p = heads.p
    rows = visible_pairs(p).any(-1) & torch.isfinite(p).all(-1)
    totals = (p.sum(-1) + heads.unattributed)[rows]

    def are_ones(x: Tensor) -> bool:
        return bool(((x - 1).abs() < 10 * tolerance).all())

    if not len(totals) or are_ones(totals):
        return None
    low, high = float(totals.min()), float(totals.max())
    evidence = f"the weights of a query sum to {low:.4g}" + (f" … {high:.4g}" if high - low > tolerance else "")
    finite = p[torch.isfinite(p)]
    if float(finite.min()) < -tolerance * float(finite.abs().max()):  # no softmax gives these
        if low > tolerance and high - low < tolerance * 10 and not are_ones(p.exp().sum(-1)[rows]):
            same = f"{evidence}, the same for all queries; the lowest is {float(finite.min()):.4g}"
            return Verdict("no-softmax", f"{same}: as the difference of two softmaxes", severity="unusual")
        log = ", and their exp sums to 1: they are logarithms" if are_ones(p.exp().sum(-1)[rows]) else ""
        return Verdict("no-softmax", f"{evidence}{log}; the lowest is {float(finite.min()):.4g}")
    if are_ones(p.sum(-2)):
        return Verdict("softmax-over-queries", f"{evidence}; the weights of a key sum to 1 over the queries")
    over_heads = p.sum(1)
    over_heads = over_heads[torch.isfinite(over_heads)]  # where all heads mask a pair there is NaN
    if heads.count > 1 and are_ones(over_heads):
        return Verdict("softmax-over-heads", f"{evidence}; the weights of a pair of tokens sum to 1 over the heads")
    if high - low < min(tolerance * 10, 0.1 * abs(1 - low)):
        return Verdict(
            "scaled-after-softmax", f"{evidence}, the same for all queries (1/√D is {heads.width**-0.5:.4g})"
        )
    return Verdict("rows-do-not-sum-to-one", evidence)


def find_added_number(one: Heads, two: Heads) -> float:
    """Return the number that was added to each weight after a softmax of a linear function of q·k; 0.0 if none was."""
    keys = one.p.shape[-1]
    missing = ((one.p.sum(-1) + one.unattributed - 1) / keys).flatten()
    number = float(missing.mean())
    if not 0 < number < math.inf or float((missing - number).abs().max()) > 1e-6 * number:
        return 0.0
    plain = [replace(heads, p=remove_added_number(heads.p, number)) for heads in (one, two)]
    positive = all(bool((heads.p >= 0).all()) for heads in plain)
    return number if positive and isinstance(fit_slope(plain[0], plain[1], None), Slope) else 0.0


def remove_added_number(p: Tensor, number: float) -> Tensor:
    """Return the weights without a number that was added to each; 0 where only rounding is left."""
    rest = p - number
    return torch.where(rest.abs() > 1e-9 * number, rest, 0.0) if number else p


def explain_missing_exp(one: Heads, two: Heads) -> Verdict | None:
    """Return the mistake that explains why the weights are not exp of a linear function of q·k, if any."""
    plain = one.raw * one.factor
    scaled = plain * one.width**-0.5
    for text, functions in {
        "q·k": (plain,), "|q·k|": (plain.abs(),), "(q·k)²": (plain**2,),
        "the sigmoid of q·k": (plain.sigmoid(), scaled.sigmoid()),
        "the softplus of q·k": (F.softplus(plain), F.softplus(scaled)),
    }.items():  # fmt: skip
        if any(_is_proportional(one.p, x) for x in functions):
            return Verdict("no-softmax", f"the nonzero weights of a query are proportional to {text}")
    if _are_inner_weights_of_softmax(one, two, all_rows=True) or _are_inner_weights_of_softmax(
        one, two, all_rows=False
    ):
        ratio = float((one.p / one.p.amin(-1, keepdim=True)).nan_to_num(1.0, 1.0).max())
        return Verdict("softmax-twice", f"log p is a softmax of q·k: no weight is more than {ratio:.3g} times another")
    return None


def _are_inner_weights_of_softmax(one: Heads, two: Heads, *, all_rows: bool) -> bool:
    """Return whether p is a softmax of a softmax of q·k, in all rows or in those where every key is visible.

    In the other rows, a mask between the two may have removed some of the inner weights.
    """
    inner = [_inner_weights(heads.p) for heads in (one, two)]
    if not all_rows:
        full = visible_pairs(one.p).all(-1, keepdim=True) & visible_pairs(two.p).all(-1, keepdim=True)
        inner = [p * full for p in inner]
    if any(bool((p < 0).any()) for p in inner):
        return False
    return isinstance(fit_slope(replace(one, p=inner[0]), replace(two, p=inner[1]), None), Slope)


def _is_proportional(p: Tensor, x: Tensor) -> bool:
    """Return whether the nonzero weights of each query are x times a number, and x is not the same for all keys."""
    at = visible_pairs(p) & (x.abs() > 1e-12)
    at = at & (at.sum(-1, keepdim=True) >= 2)
    ratio = torch.where(at, p / x, 0.0)
    middle = ratio.sum(-1, keepdim=True) / at.sum(-1, keepdim=True).clamp_min(1)
    mean = torch.where(at, x, 0.0).sum(-1, keepdim=True) / at.sum(-1, keepdim=True).clamp_min(1)
    if not bool((torch.where(at, x - mean, 0.0).abs() > 1e-9 * mean.abs()).any()):
        return False
    return bool((torch.where(at, ratio - middle, 0.0).abs() <= 1e-4 * middle.abs()).all())


def _inner_weights(p: Tensor) -> Tensor:
    """Return the weights whose softmax is p: log p plus a number so that they sum to 1; negative if p is not one."""
    visible, log = visible_pairs(p), log_weights(p)
    missing = (1 - log.sum(-1, keepdim=True)) / visible.sum(-1, keepdim=True).clamp_min(1)
    inner = torch.where(visible, log + missing, 0.0)
    return torch.where(inner.abs() > 1e-5, inner, 0.0)


def is_cut_late(heads: Heads, slope: Slope, tolerance: float) -> bool:
    """Return whether a causal mask, or its inverse, changed weights after a softmax of q·k over all keys."""
    if slope.biased:
        return False
    full = (heads.raw * slope.of_raw[:, None, None]).softmax(-1)
    changed = (heads.p - full).abs() > 10 * tolerance
    tri = torch.ones(full.shape[-2:], dtype=torch.bool).tril()
    return bool(changed.any()) and any(not bool(changed[..., retained].any()) for retained in (tri, ~tri))


def has_sink(heads: Heads, slope: Tensor, tolerance: float) -> bool:
    """Return whether one more term in each head's softmax explains why the sums are below 1."""
    s = heads.raw * slope[:, None, None]
    visible = visible_pairs(heads.p)
    shifts = torch.where(visible, log_weights(heads.p) - s, 0)
    constant = shifts.sum(-1) / visible.sum(-1).clamp_min(1)  # -log of the whole sum
    whole = (-constant).exp()
    rest = whole - torch.where(visible, s.exp(), 0.0).sum(-1)  # [B, H, Q]
    one_row = whole.transpose(0, 1).flatten(1).argmin(1, keepdim=True)  # of each head, the one with the least rounding
    sink = rest.transpose(0, 1).flatten(1).gather(1, one_row)  # [H, 1]
    return bool((sink > 0).all()) and bool(((rest - sink).abs() < 1e-3 * sink + tolerance * whole).all())


# ---------------------------------------------------------------- scale


@dataclass(frozen=True)
class Slope:
    """log p as a function of q·k.

    Attributes:
        of_raw: [H], the factor between the operands' bare product and the logit.
        total: [H], the factor between the projections' product and the logit.
        biased: whether a bias that does not depend on the input is added to the logits.
    """

    of_raw: Tensor
    total: Tensor
    biased: bool


NOT_LINEAR = "logits are not a linear function of q·k"  # why a fit fails


def fit_slope(one: Heads, two: Heads, allowed: Tensor | None) -> Slope | str:
    """Fit the difference between two inputs, in which a bias cancels; or return why the fit fails.

    Args:
        one, two: the heads for each input.
        allowed: pairs that are counted, broadcasting to [B, H, Q, K]; None = those that are visible.
    """
    both = visible_pairs(one.p) & visible_pairs(two.p)
    if allowed is not None:
        both = both & allowed
    rows = both.sum(-1, keepdim=True) >= 2
    at = both & rows & ~(_are_even(one.p, both & rows) & _are_even(two.p, both & rows))
    if not bool(at.any((0, 2, 3)).all()):
        return _explain_empty_fit(one, two, both)

    def centred(x: Tensor) -> Tensor:
        mean = torch.where(at, x, 0.0).sum(-1, keepdim=True) / at.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(at, x - mean, 0.0)

    log, raw = centred(log_weights(one.p) - log_weights(two.p)), centred(one.raw - two.raw)
    factors = (log * raw).sum((0, 2, 3)) / (raw * raw).sum((0, 2, 3)).clamp_min(1e-300)  # [H]
    off = (log - factors[:, None, None] * raw).abs().max()
    if float(off) > 1e-3 * max(1e-3, float(log.abs().max())):
        return NOT_LINEAR
    alone = centred(log_weights(one.p)) - factors[:, None, None] * centred(one.raw)
    biased = float(alone.abs().max()) > 1e-3 * max(1e-3, float(log.abs().max()))
    factor = one.factor.amax((0, 2, 3))
    return Slope(factors, factors * factor, biased)


def _explain_empty_fit(one: Heads, two: Heads, both: Tensor) -> str:
    """Return why a head has no query with two keys to fit; ``both`` are the pairs that are visible for both inputs."""
    if bool((both.sum(-1) >= 2).any((0, 2)).all()):
        return "in some head, all weights of each query are equal"
    if differ_in_pattern(visible_pairs(one.p), visible_pairs(two.p)):
        reason = "in some head, no query has the same two visible keys for two inputs"
        return f"{reason}: which keys are visible depends on the input"
    return "in some head, no query has two visible keys"


def _are_even(p: Tensor, at: Tensor) -> Tensor:
    """Return the rows whose weights are all equal: the same number masks all their keys."""
    high, low = (torch.where(at, p, other) for other in (-math.inf, math.inf))
    return high.amax(-1, keepdim=True) - low.amin(-1, keepdim=True) < 1e-9


# ---------------------------------------------------------------- masks


def are_blank(p: Tensor, at: Tensor) -> Tensor:
    """Return the rows [B, H, Q] that do not choose among their keys: NaN, all zero, or all equal where ``at``."""
    return ~torch.isfinite(p).all(-1) | ~visible_pairs(p).any(-1) | _are_even(p, at)[..., 0]


def judge_mask(
    p: Tensor, logit: Tensor | None, mask: Tensor, before: Tensor, plain: Tensor | None, tolerance: float
) -> Verdict:
    """Judge from the weights how a mask was applied.

    Args:
        p: [B, H, Q, K].
        logit: the logits without it, up to a number for each row, or None where they are not known.
        mask: the pairs that it leaves visible (True = attend), [B, Q, K].
        before: the pairs that are visible without it, [B, H, Q, K].
        plain: the weights without it, or None.
        tolerance: the relative error of a weight; ten times as much counts as a difference.
    """
    visible = visible_pairs(p)
    expected, inverted = before & mask[:, None], before & ~mask[:, None]
    rows = expected.any(-1) & inverted.any(-1)  # rows with both a masked and a visible key

    def same(pattern: Tensor, where: Tensor) -> Tensor:
        return (visible == pattern).all(-1) | ~where  # [B, H, Q]

    right, full = same(expected, rows), logit.softmax(-1) if plain is None and logit is not None else plain
    after_softmax = _show_late_mask(p, full, expected, inverted, rows, tolerance)
    if bool(right.all()) or after_softmax:
        return Verdict("hidden", after_softmax=after_softmax)
    after_softmax = _show_late_mask(p, full, inverted, expected, rows, tolerance)
    if bool(same(inverted, rows).all()) or after_softmax:
        visible_pair, masked_pair = (_describe_pair(pattern & rows[..., None]) for pattern in (inverted, expected))
        evidence = f"{visible_pair} is visible, {masked_pair} is masked"
        return Verdict("mask-inverted", evidence, after_softmax)
    across, unmasked = before & mask.transpose(-2, -1)[:, None], same(before, rows)
    if not bool(unmasked.all()) and not torch.equal(across, expected) and bool(same(across, across.any(-1)).all()):
        evidence = f"{_describe_pair(expected & ~visible)} is masked: the mask is applied with its axes swapped"
        return Verdict("mask-on-queries", evidence)
    by_head, by_entry = right.all(2).all(0), right.all(2).all(1)
    if bool(by_head.any()) and bool((by_head | unmasked.all(2).all(0)).all()):
        leaking = ", ".join(str(h) for h in range(len(by_head)) if not by_head[h])
        return Verdict("mask-on-some-heads", f"heads that attend to masked keys: {leaking} (of {len(by_head)})")
    if bool(by_entry.any()) and bool((by_entry | unmasked.all(2).all(1)).all()) and bool((rows.any(2).any(1)).all()):
        leaking = ", ".join(str(b) for b in range(len(by_entry)) if not by_entry[b])
        return Verdict(
            "mask-on-some-batches", f"batch entries that attend to masked keys: {leaking} (of {len(by_entry)})"
        )
    if logit is not None and (evidence := _find_number_filled(p, logit, expected, ~mask[:, None] & rows[..., None])):
        return Verdict("mask-fill-too-small", evidence)
    return _judge_visible_mask(p, logit, expected, before, plain)


def _show_late_mask(
    p: Tensor, full: Tensor | None, retained: Tensor, cut: Tensor, rows: Tensor, tolerance: float
) -> str:
    """Describe the evidence that pairs were cut after the softmax with the weights ``full``; "" if they were not."""
    if full is None:
        return ""
    retained, cut, total = retained & rows[..., None], cut & rows[..., None], p.sum(-1)[rows]
    off = (p - full).abs()
    alike = bool((off[retained] <= 10 * tolerance * full[retained]).all())
    if not alike or not bool((off[cut] > 10 * tolerance).any()) or not bool((total < 1 - 10 * tolerance).any()):
        return ""
    low, high = float(total.min()), float(total.max())
    sums = f"the weights of a query sum to {low:.3g} … {high:.3g}"
    return f"visible keys have the same weights as without the mask, and {sums}"


def _judge_visible_mask(
    p: Tensor, logit: Tensor | None, expected: Tensor, before: Tensor, plain: Tensor | None
) -> Verdict:
    """Judge from the logits a mask that hides nothing, or other keys than it specifies."""
    visible = visible_pairs(p)
    hidden = before & ~expected
    rows = (expected.any(-1) & hidden.any(-1))[..., None]
    if plain is not None and _is_on_queries(p, plain, expected, before):
        return Verdict(
            "mask-on-queries",
            "real tokens attend to padding as without the mask; only the rows of padding have changed",
        )
    if not bool((visible == before)[rows.expand(visible.shape)].all()):
        pairs = _describe_pair(hidden & visible & rows), _describe_pair(expected & ~visible & rows)
        return Verdict(
            "mask-applied-wrong",
            " and ".join(f"{pair} is {what}" for pair, what in zip(pairs, ("visible", "masked"), strict=True) if pair),
        )
    log = log_weights(p)
    base = logit if logit is not None else log_weights(plain) if plain is not None else None
    if base is None:
        return Verdict("none")
    level = torch.where(expected, log - base, 0.0).sum(-1, keepdim=True) / expected.sum(-1, keepdim=True).clamp_min(1)
    at = hidden & rows
    residual = (torch.where(expected & rows, log - base - level, 0.0)).abs().max()
    if float(residual) > 1e-3:
        return Verdict("none")
    gap, fill = (log - base - level)[at], (log - level)[at]
    if float(gap.abs().max()) < 1e-3:
        return Verdict("none")
    if float(gap.max() - gap.min()) < 1e-3:
        evidence = f"logits of masked pairs are {'lower' if gap[0] < 0 else 'higher'} by {abs(float(gap[0])):.4g}"
        return Verdict("bool-mask-added" if abs(abs(float(gap[0])) - 1) < 1e-2 else "mask-fill-too-small", evidence)
    if logit is not None and float(fill.max() - fill.min()) < 1e-3:
        return Verdict("mask-fill-too-small", f"logits of masked pairs are {_format_fill(float(fill.mean()))}")
    return Verdict("none")


def _find_number_filled(p: Tensor, logit: Tensor, expected: Tensor, filled: Tensor) -> str:
    """Describe the number that replaces the logits ``filled``, also of pairs that were masked before; or ""."""
    rows, visible = filled.any(-1, keepdim=True), visible_pairs(p)
    retained = expected & rows
    if not bool(filled.any()) or not bool((visible == retained | filled)[rows.expand(visible.shape)].all()):
        return ""
    level = torch.where(retained, log_weights(p) - logit, 0.0).sum(-1, keepdim=True)
    shift = log_weights(p) - level / retained.sum(-1, keepdim=True).clamp_min(1)  # the logits with the mask
    fill = shift[filled]
    alike = bool((shift - logit)[retained].abs().max() < 1e-3) and float(fill.max() - fill.min()) < 1e-3
    return f"logits of masked pairs are {_format_fill(float(fill.mean()))}" if alike else ""


def _format_fill(value: float) -> str:
    return f"{0.0 if abs(value) < 1e-6 else value:.4g}"


def _is_on_queries(p: Tensor, plain: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Return whether the rows of tokens that are themselves masked have changed, and no others."""
    padding = before.any(-2) & ~expected.any(-2)  # [B, H, K], by their columns
    changed = (p.nan_to_num(-1) - plain).abs().amax(-1) > 1e-6  # [B, H, Q]
    if padding.shape != changed.shape or not bool(padding.any()):
        return False
    return bool((changed & padding).any()) and not bool((changed & ~padding).any())


def _describe_pair(at: Tensor) -> str:
    """Return the first pair of a pattern [B, H, Q, K] in words; "" if it is empty."""
    pairs = at.nonzero()
    return f"key {int(pairs[0, 3])} of query {int(pairs[0, 2])}" if len(pairs) else ""


def measure_lowering(p: Tensor, plain: Tensor, mask: Tensor) -> float | None:
    """Return by how much a mask [B, Q, K] lowers the logits of masked pairs; None if not by one number."""
    both, shift = visible_pairs(p) & visible_pairs(plain), log_weights(p) - log_weights(plain)
    retained = both & mask[:, None]
    level = torch.where(retained, shift, 0.0).sum(-1, keepdim=True) / retained.sum(-1, keepdim=True).clamp_min(1)
    gap = (level - shift)[both & ~retained & retained.any(-1, keepdim=True)]
    residual = float(torch.where(retained, shift - level, 0.0).abs().max())
    if residual > 1e-3 or not len(gap) or float(gap.max() - gap.min()) > 1e-3:
        return None
    return float(gap.mean())
