"""What the weights of a forward pass say: softmax and its axis, the scale, and how a mask was applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope.checking._head_layout import Heads

HIDDEN = 1e-20  # a weight below this part of its row's largest is hidden


@dataclass(frozen=True)
class Applied:
    """How a mask was applied.

    Attributes:
        how: "hidden", as it should be; "none"; or the name of what is wrong.
        seen: what shows it.
        late: what shows that it was applied after the softmax; "" if it was not.
    """

    how: str
    seen: str = ""
    late: str = ""


def visible(p: Tensor) -> Tensor:
    """Which weights are more than rounding, as p."""
    p = p.nan_to_num(0.0).abs()
    return p > HIDDEN * p.amax(-1, keepdim=True).clamp_min(1e-300)


def logs(p: Tensor) -> Tensor:
    """log p, 0 where it is hidden."""
    return torch.where(visible(p), p.clamp_min(1e-300).log(), 0.0).nan_to_num(0.0)


def spread(p: Tensor) -> float:
    """The largest difference of two visible logits of a row."""
    seen, log = visible(p), logs(p)
    high = torch.where(seen, log, -math.inf).amax(-1)
    low = torch.where(seen, log, math.inf).amin(-1)
    found = (high - low)[torch.isfinite(high - low)]
    return float(found.max()) if len(found) else 0.0


# ---------------------------------------------------------------- sums


def sums(heads: Heads, tolerance: float) -> Applied | None:
    """Whether the weights of each query sum to one; if not, which mistake explains it."""
    p = heads.p
    seen = visible(p).any(-1) & torch.isfinite(p).all(-1)
    rows = (p.sum(-1) + heads.beside)[seen]

    def ones(x: Tensor) -> bool:
        return bool(((x - 1).abs() < 10 * tolerance).all())

    if not len(rows) or ones(rows):
        return None
    low, high = float(rows.min()), float(rows.max())
    said = f"the weights of a query sum to {low:.4g}" + (f" … {high:.4g}" if high - low > tolerance else "")
    finite = p[torch.isfinite(p)]
    if float(finite.min()) < -tolerance * float(finite.abs().max()):  # no softmax gives these
        log = ", and their exp to 1: they are logarithms" if ones(p.exp().sum(-1)[seen]) else ""
        return Applied("no-softmax", f"{said}{log}; the lowest is {float(finite.min()):.4g}")
    if ones(p.sum(-2)):
        return Applied("softmax-over-queries", f"{said}; those of a key, over the queries, to 1")
    over_heads = p.sum(1)
    over_heads = over_heads[torch.isfinite(over_heads)]  # where all heads hide a pair there is NaN
    if heads.count > 1 and ones(over_heads):
        return Applied("softmax-over-heads", f"{said}; those of a pair of tokens, over the heads, to 1")
    if high - low < tolerance * 10:
        return Applied("scaled-after-softmax", f"{said}, all alike (1/√D is {heads.width**-0.5:.4g})")
    return Applied("rows-do-not-sum-to-one", said)


def no_exp(one: Heads, two: Heads) -> Applied | None:
    """Which mistake explains weights of two inputs that are no exp of a linear function of q·k, if one does."""
    plain = one.raw * one.factor
    scaled = plain * one.width**-0.5
    for said, functions in {
        "q·k": (plain,), "|q·k|": (plain.abs(),), "(q·k)²": (plain**2,),
        "the sigmoid of q·k": (plain.sigmoid(), scaled.sigmoid()),
        "the softplus of q·k": (F.softplus(plain), F.softplus(scaled)),
    }.items():  # fmt: skip
        if any(_proportional(one.p, x) for x in functions):
            return Applied("no-softmax", f"the weights of a query that are not 0 are proportional to {said}")
    inner = [replace(heads, p=_inner(heads.p)) for heads in (one, two)]
    if all(bool((heads.p >= 0).all()) for heads in inner) and isinstance(slope(inner[0], inner[1], None), Slope):
        ratio = float((one.p / one.p.amin(-1, keepdim=True)).nan_to_num(1.0, 1.0).max())
        return Applied("softmax-twice", f"log p is a softmax of q·k: no weight is more than {ratio:.3g} times another")
    return None


def _proportional(p: Tensor, x: Tensor) -> bool:
    """Whether the weights of each query are x times a number, where they are not 0."""
    at = visible(p) & (x.abs() > 1e-12)
    at = at & (at.sum(-1, keepdim=True) >= 2)
    ratio = torch.where(at, p / x, 0.0)
    middle = ratio.sum(-1, keepdim=True) / at.sum(-1, keepdim=True).clamp_min(1)
    return bool(at.any()) and bool((torch.where(at, ratio - middle, 0.0).abs() <= 1e-4 * middle.abs()).all())


def _inner(p: Tensor) -> Tensor:
    """The weights that p is a softmax of, if it is one: log p, raised so that it sums to one. Negative if it is not."""
    seen, log = visible(p), logs(p)
    inner = torch.where(seen, log + (1 - log.sum(-1, keepdim=True)) / seen.sum(-1, keepdim=True).clamp_min(1), 0.0)
    return torch.where(inner.abs() > 1e-5, inner, 0.0)


def has_sink(heads: Heads, slope: Tensor, tolerance: float) -> bool:
    """Whether what is missing from the sums is one more term of each head's softmax."""
    s = heads.raw * slope[:, None, None]
    seen = visible(heads.p)
    constant = torch.where(seen, logs(heads.p) - s, 0).sum(-1) / seen.sum(-1).clamp_min(1)  # -log of the whole sum
    rest = (-constant).exp() - torch.where(seen, s.exp(), 0.0).sum(-1)  # [B, H, Q]
    middle = rest.mean((0, 2), keepdim=True)
    return bool((middle > 0).all()) and bool(((rest - middle).abs() < 1e3 * tolerance * (1 + middle)).all())


# ---------------------------------------------------------------- scale


@dataclass(frozen=True)
class Slope:
    """log p as a function of q·k.

    Attributes:
        of_raw: [H], the factor between the operands' bare product and the logit.
        total: [H], the factor between the projections' product and the logit.
        biased: something else is added to the logits, which does not depend on the input.
    """

    of_raw: Tensor
    total: Tensor
    biased: bool


def slope(one: Heads, two: Heads, allowed: Tensor | None) -> Slope | str:
    """Fit differences between two inputs, so that what is added to the logits cancels; or say why that fails.

    Args:
        allowed: pairs that are counted, broadcasting to [B, H, Q, K]; None = those that are visible.
    """
    at = visible(one.p) & visible(two.p)
    if allowed is not None:
        at = at & allowed
    at = at & (at.sum(-1, keepdim=True) >= 2) & ~(_even(one.p, at) & _even(two.p, at))
    if not bool(at.any((0, 2, 3)).all()):
        return "no query sees two keys"

    def centred(x: Tensor) -> Tensor:
        mean = torch.where(at, x, 0.0).sum(-1, keepdim=True) / at.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(at, x - mean, 0.0)

    log, raw = centred(logs(one.p) - logs(two.p)), centred(one.raw - two.raw)
    found = (log * raw).sum((0, 2, 3)) / (raw * raw).sum((0, 2, 3)).clamp_min(1e-300)  # [H]
    off = (log - found[:, None, None] * raw).abs().max()
    if float(off) > 1e-3 * max(1e-3, float(log.abs().max())):
        return "logits are no linear function of q·k: they are capped, or not made by a plain product"
    alone = centred(logs(one.p)) - found[:, None, None] * centred(one.raw)
    biased = float(alone.abs().max()) > 1e-3 * max(1e-3, float(log.abs().max()))
    factor = one.factor.amax((0, 2, 3))
    return Slope(found, found * factor, biased)


def _even(p: Tensor, at: Tensor) -> Tensor:
    """Rows whose weights are all alike: all keys were hidden by the same number."""
    high, low = (torch.where(at, p, other) for other in (-math.inf, math.inf))
    return high.amax(-1, keepdim=True) - low.amin(-1, keepdim=True) < 1e-9


# ---------------------------------------------------------------- masks


def applied(
    p: Tensor, logit: Tensor | None, mask: Tensor, before: Tensor, plain: Tensor | None, tolerance: float
) -> Applied:
    """How a mask shows in the weights.

    Args:
        p: [B, H, Q, K].
        logit: what the logits are without it, up to a number for each row, or None where that is not known.
        mask: what may be seen, [B, Q, K].
        before: what was visible without it, [B, H, Q, K].
        plain: the weights without it, or None.
    """
    seen = visible(p)
    wanted, turned = before & mask[:, None], before & ~mask[:, None]
    rows = wanted.any(-1) & turned.any(-1)  # rows where something is hidden and something is not

    def same(pattern: Tensor, where: Tensor) -> Tensor:
        return (seen == pattern).all(-1) | ~where  # [B, H, Q]

    right, full = same(wanted, rows), logit.softmax(-1) if plain is None and logit is not None else plain
    late = _late(p, full, wanted, turned, rows, tolerance)
    if bool(right.all()) or late:
        return Applied("hidden", late=late)
    late = _late(p, full, turned, wanted, rows, tolerance)
    if bool(same(turned, rows).all()) or late:
        said = f"{_pair(turned & rows[..., None])} is seen, {_pair(wanted & rows[..., None])} is hidden"
        return Applied("mask-inverted", said, late)
    across, unmasked = before & mask.transpose(-2, -1)[:, None], same(before, rows)
    if not bool(unmasked.all()) and not torch.equal(across, wanted) and bool(same(across, across.any(-1)).all()):
        said = f"{_pair(wanted & ~seen)} is hidden: the mask is applied with its axes swapped"
        return Applied("mask-on-queries", said)
    by_head, by_entry = right.all(2).all(0), right.all(2).all(1)
    if bool(by_head.any()) and bool((by_head | unmasked.all(2).all(0)).all()):
        said = ", ".join(str(h) for h in range(len(by_head)) if not by_head[h])
        return Applied("mask-on-some-heads", f"heads that see what is hidden: {said}, of {len(by_head)}")
    if bool(by_entry.any()) and bool((by_entry | unmasked.all(2).all(1)).all()) and bool((rows.any(2).any(1)).all()):
        said = ", ".join(str(b) for b in range(len(by_entry)) if not by_entry[b])
        return Applied("mask-on-some-batches", f"batch entries that see what is hidden: {said}, of {len(by_entry)}")
    return _soft(p, logit, wanted, before, plain)


def _late(p: Tensor, full: Tensor | None, kept: Tensor, cut: Tensor, rows: Tensor, tolerance: float) -> str:
    """What shows that pairs were cut after the softmax, which gave the weights ``full``; "" if they were not."""
    if full is None:
        return ""
    kept, cut, total = kept & rows[..., None], cut & rows[..., None], p.sum(-1)[rows]
    off = (p - full).abs()
    alike = bool((off[kept] <= 10 * tolerance * full[kept]).all())
    if not alike or not bool((off[cut] > 10 * tolerance).any()) or not bool((total < 1 - 10 * tolerance).any()):
        return ""
    low, high = float(total.min()), float(total.max())
    return f"keys that are left weigh what they do without it, and the weights of a query sum to {low:.3g} … {high:.3g}"


def _soft(p: Tensor, logit: Tensor | None, wanted: Tensor, before: Tensor, plain: Tensor | None) -> Applied:
    """Nothing is hidden, or other keys than it says: what became of the logits instead?"""
    seen = visible(p)
    hidden = before & ~wanted
    rows = (wanted.any(-1) & hidden.any(-1))[..., None]
    if plain is not None and _on_queries(p, plain, wanted, before):
        return Applied("mask-on-queries", "real tokens see padding as without the mask; its own rows have changed")
    if not bool((seen == before)[rows.expand(seen.shape)].all()):
        said = _pair(hidden & seen), _pair(wanted & ~seen)
        return Applied(
            "mask-applied-wrong",
            " and ".join(f"{pair} is {what}" for pair, what in zip(said, ("seen", "hidden"), strict=True) if pair),
        )
    log = logs(p)
    base = logit if logit is not None else logs(plain) if plain is not None else None
    if base is None:
        return Applied("none")
    level = torch.where(wanted, log - base, 0.0).sum(-1, keepdim=True) / wanted.sum(-1, keepdim=True).clamp_min(1)
    at = hidden & rows
    loose = (torch.where(wanted & rows, log - base - level, 0.0)).abs().max()
    if float(loose) > 1e-3:
        return Applied("none")
    gap, fill = (log - base - level)[at], (log - level)[at]
    if float(gap.abs().max()) < 1e-3:
        return Applied("none")
    if float(gap.max() - gap.min()) < 1e-3:
        said = f"logits of hidden pairs are {'lower' if gap[0] < 0 else 'higher'} by {abs(float(gap[0])):.4g}"
        return Applied("bool-mask-added" if abs(abs(float(gap[0])) - 1) < 1e-2 else "mask-fill-too-small", said)
    if logit is not None and float(fill.max() - fill.min()) < 1e-3:
        value = float(fill.mean())
        return Applied("mask-fill-too-small", f"logits of hidden pairs are {0.0 if abs(value) < 1e-6 else value:.4g}")
    return Applied("none")


def _on_queries(p: Tensor, plain: Tensor, wanted: Tensor, before: Tensor) -> bool:
    """Whether rows of tokens that are themselves hidden have changed, and no others."""
    padding = before.any(-2) & ~wanted.any(-2)  # [B, H, K], as they stand as keys
    changed = (p.nan_to_num(-1) - plain).abs().amax(-1) > 1e-6  # [B, H, Q]
    if padding.shape != changed.shape or not bool(padding.any()):
        return False
    return bool((changed & padding).any()) and not bool((changed & ~padding).any())


def _pair(at: Tensor) -> str:
    """The first pair of a pattern [B, H, Q, K], in words; "" if there is none."""
    found = at.nonzero()
    return f"key {int(found[0, 3])} of query {int(found[0, 2])}" if len(found) else ""


def lowered(p: Tensor, plain: Tensor, mask: Tensor) -> float | None:
    """By how much the logits of hidden pairs are lower than without a mask [B, Q, K]; None if by no one number."""
    both, shift = visible(p) & visible(plain), logs(p) - logs(plain)
    kept = both & mask[:, None]
    level = torch.where(kept, shift, 0.0).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp_min(1)
    gap = (level - shift)[both & ~kept & kept.any(-1, keepdim=True)]
    loose = float(torch.where(kept, shift - level, 0.0).abs().max())
    if loose > 1e-3 or not len(gap) or float(gap.max() - gap.min()) > 1e-3:
        return None
    return float(gap.mean())
