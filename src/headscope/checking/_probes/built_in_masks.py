"""The probe of the built-in mask: the keys that are visible to each query without a mask argument."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.checking import _weights as weights
from headscope.checking._case import Case
from headscope.checking._causal_patterns import name_causal_pattern
from headscope.checking._head_layout import Heads
from headscope.checking._hidden_logits import are_later_logits_fixed, measure_later_weight
from headscope.checking._probes.softmax import NO_SOFTMAX, NO_SOFTMAX_REASON
from headscope.checking._weights import differ_in_pattern, visible_pairs

LOCAL = (
    "Leave the pattern if it is intended; otherwise let each query see every earlier key.",
    "visible = torch.ones(T, T, dtype=torch.bool).tril()",
)
"""The remedy of ``cannot-see-the-past`` where the visible keys have a pattern."""


def probe_built_in_mask(case: Case) -> None:
    """Find the keys that are visible to each query without a mask argument."""
    heads = case.heads
    if case.random or heads is None:
        case.skip_without_heads("built-in mask")
        return
    if case.observations.keys() & NO_SOFTMAX:
        case.skip("built-in mask", NO_SOFTMAX_REASON, case.first_of(NO_SOFTMAX))
        return
    visible = visible_pairs(heads.p)
    size = visible.shape[-1]
    tri = torch.ones(size, size, dtype=torch.bool).tril()
    everything = torch.ones_like(visible)
    mask, tolerance = tri.expand(len(visible), -1, -1), case.subject.tolerance
    verdict = weights.judge_mask(heads.p, case.logit, mask, everything, None, tolerance)
    inverted = verdict.outcome == "mask-inverted"
    if verdict.after_softmax and not _is_late_mask_fixed(case, tri, inverted=inverted):
        verdict = weights.judge_mask(heads.p, None, mask, everything, None, tolerance)
    if verdict.after_softmax:
        case.allowed = tri[None]
        case.report("mask-after-softmax", f"built-in mask: {verdict.after_softmax}")
        if verdict.outcome != "hidden":
            case.report(verdict.outcome, f"built-in mask: {verdict.evidence}")
        return
    if verdict.outcome == "hidden" or (
        size > 1 and bool((visible <= tri).all()) and verdict.outcome == "mask-applied-wrong"
    ):
        case.causal = True
        case.allowed = tri[None]
        _judge_causal_pattern(case, visible, tri)
        return
    if verdict.outcome in ("none", "mask-applied-wrong", "mask-on-queries"):  # there is no padding
        if _is_fill_reported(case, heads, tri):
            return
        _judge_other_pattern(case, visible, tri)
        return
    case.allowed = tri[None]
    case.report(verdict.outcome, f"built-in mask: {verdict.evidence}")


def _is_late_mask_fixed(case: Case, tri: Tensor, *, inverted: bool) -> bool:
    """Return whether each input has the same weights cut after the softmax, all of them if the mask is inverted."""
    assert case.slope is not None
    runs = (case.heads, case.other_heads, case.subject.follow(case.subject.input(3, case.size)).heads)
    cut, retained = torch.zeros_like(tri), torch.zeros_like(tri)
    for heads in (heads for heads in runs if heads is not None):
        full = (heads.raw * case.slope.of_raw[:, None, None]).softmax(-1)
        changed = (heads.p - full).abs() > 10 * case.subject.tolerance
        cut, retained = cut | changed, retained | (~changed & (full > 1e-3))  # a change of smaller weights may not show
    return not bool((cut & retained).any()) and not (inverted and bool((retained & tri).any()))


def _is_fill_reported(case: Case, heads: Heads, tri: Tensor) -> bool:
    """Report later keys whose q·k is replaced; record as not tested where that cannot be distinguished from a bias."""
    other = case.other_heads
    if other is not None and other.p.shape == heads.p.shape:
        one, two = case.without_added(heads), case.without_added(other)
        if are_later_logits_fixed(one, two):
            case.allowed = tri[None]
            weight = f"later keys get up to {measure_later_weight(one.p):.3g} of a query's weight"
            case.report("mask-fill-too-small", f"built-in mask: {weight}, whatever their q·k")
            return True
    if case.logit is None and case.options.causal is None:
        why = "it may be an intended bias" if case.slope is not None else "the logits are not known"
        cause = case.causes.get("scale", "")
        case.skip("a number added to the logits of later keys", why, cause)
    return False


def _judge_causal_pattern(case: Case, visible: Tensor, tri: Tensor) -> None:
    """Test whether each query attends to the past, where none attends to the future."""
    size = len(tri)
    for j in range(2, size):  # a window of j keys
        if bool((visible == tri.triu(1 - j)).all()):
            case.understood.append(f"causal, with a window of {j} keys")
            return
    if bool((visible[..., 1:, :] == tri.tril(-1)[1:]).all()):
        first = "attends only to key 0" if bool(visible[..., 0, :].any()) else "has no visible key"
        case.report("cannot-see-itself", f"query 1 attends to key 0 and not to key 1; query 0 {first}")
    elif bool((visible == torch.eye(size, dtype=torch.bool)).all()):
        case.report("cannot-see-the-past", "each query attends only to its own key")
    elif case.other_heads is not None and differ_in_pattern(visible, visible_pairs(case.other_heads.p)):
        case.understood.append("causal; which earlier keys are visible depends on the input")
    elif not bool((visible == tri)[..., 1:, :].all()):
        b, h, i, j = (~visible & tri).nonzero()[0].tolist()
        evidence = f"query {i} of head {h} of batch entry {b} does not attend to key {j}"
        names = [name_causal_pattern(each) for each in visible.flatten(0, 1)]
        if any(name == "" for name in names):
            case.report("cannot-see-the-past", evidence)
        elif len(set(names)) == 1 and names[0].startswith("chunks"):
            case.understood.append(f"causal, with {names[0]}")
        else:
            pattern = " or ".join(sorted(set(names)))
            case.report("cannot-see-the-past", f"{evidence}: causal, with {pattern}", "unusual", LOCAL)
    else:
        case.understood.append("causal: no query attends to a later key")


def _judge_other_pattern(case: Case, visible: Tensor, tri: Tensor) -> None:
    size = len(tri)
    if bool(visible[..., 1:, :].all()):
        case.causal, case.unmasked = False, True
        case.understood.append("not causal: every query attends to every key")
        if case.options.causal:
            case.report("looks-into-the-future", "query 0 attends to key 1, and every query to every key")
    elif bool((visible == torch.ones_like(tri).tril(1)).all()) and size > 2:
        case.report("sees-one-ahead", "query 0 attends to keys 0 and 1, query 1 to keys 0 to 2, and so on")
    elif bool((visible[..., 1:, :] == tri.tril(-1)[1:]).all()):
        case.report("cannot-see-itself", "query 1 attends to key 0 and not to key 1")
    elif bool((visible == tri.T).all()):
        pattern = "each query attends to its own and later keys, and to none before, as with triu instead of tril"
        severity = None if case.options.causal else "unusual"  # from right to left is right for such a model
        case.report("looks-into-the-future", f"built-in mask: {pattern}", severity)
    elif bool((visible[..., :-1, :] == tri.T.triu(1)[:-1]).all()):
        case.report("mask-inverted", "built-in mask: each query attends only to later keys")
    else:
        case.causal = False
        later = bool((visible & ~tri).any())
        b, h, i, j = ((visible & ~tri) if later else ~visible).nonzero()[0].tolist()
        if case.options.causal:
            case.report("looks-into-the-future", f"query {i} of head {h} of batch entry {b} attends to key {j}")
        share = f"{float((~visible).double().mean()):.0%} of the pairs"
        other = case.other_heads
        depends = other is not None and differ_in_pattern(visible, visible_pairs(other.p))
        text = (
            f"{share} are masked; which ones depends on the input" if depends else f"a built-in pattern masks {share}"
        )
        case.understood.append(text)
