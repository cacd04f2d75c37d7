"""Probes of training: the effect of dropout on the weights, and other differences from eval."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headscope.checking import _weights as weights
from headscope.checking._case import Case, WorkingMask
from headscope.checking._copies import copy_target
from headscope.checking._head_layout import Heads
from headscope.checking._hidden_logits import are_same
from headscope.checking._probes.mask_arguments import build_test_pattern, follow_with_mask
from headscope.checking._weights import Slope, visible_pairs


def probe_training(case: Case) -> None:
    """Test how training changes the weights: by dropout, or otherwise."""
    subject, heads = case.subject, case.heads
    if subject.module is None or heads is None or case.random:
        if subject.module is None:
            case.not_tested["dropout in training"] = "a function has no training mode"
        else:
            case.skip_without_heads("dropout in training")
        return
    trained = _follow_training(case, subject.module, case.x)
    if trained is None or trained.p.shape != heads.p.shape or not bool(torch.isfinite(heads.p).all()):
        case.not_tested["dropout in training"] = "the weights cannot be compared with those in eval"
        return
    if are_same(trained.p, heads.p):
        case.not_tested["dropout of weights"] = "the weights are the same in training and in eval"
    elif _have_same_products(trained, heads):
        _judge_difference(case, subject.module, trained)
    if "dropout-before-softmax" not in case.observations:  # dropped logits make masked pairs visible
        for mask in case.masks:
            _judge_mask_in_training(case, subject.module, mask, trained)


def _follow_training(case: Case, module: nn.Module, x: Tensor, seed: int = 1) -> Heads | None:
    """Return the heads of a forward pass of a new copy in training."""
    return case.subject.follow(x, target=copy_target(module).train(), seed=seed).heads


def _have_same_products(trained: Heads, heads: Heads) -> bool:
    """Return whether q·k, before its scale, is the same as in eval."""
    now, before = trained.raw / trained.factor, heads.raw / heads.factor
    return bool(((now - before).abs() < 1e-6 * before.abs().max()).all())


def _judge_difference(case: Case, module: nn.Module, trained: Heads) -> None:
    """Judge weights that differ from eval although q·k does not."""
    again = _follow_training(case, module, case.x, seed=2)
    if again is None or not are_same(again.p, trained.p):
        if bool(((trained.p.sum(-1) - 1).abs() < 1e-4).all()):
            evidence = "in training, weights change while q·k does not, and still sum to 1"
            case.report("dropout-before-softmax", evidence)
        elif again is not None:
            _judge_rescaling(case, trained, again)
        return
    case.not_tested["dropout of weights"] = "in training two seeds give the same weights"
    assert case.heads is not None
    future = visible_pairs(trained.p).triu(1) & ~visible_pairs(case.heads.p)
    if case.causal and bool(future.any()):
        case.report("looks-into-the-future", f"in training, {_describe_first(future)} is visible, but masked in eval")
        return
    if _judge_scale_in_training(case, module, trained):
        return
    off = float((trained.p - case.heads.p).abs().max())
    case.report("training-differs", f"weights in training and in eval differ by up to {off:.3g}, for every seed")


def _judge_rescaling(case: Case, trained: Heads, again: Heads) -> None:
    """Report dropout that leaves the remaining weights as in eval; the two runs differ in their seed."""
    assert case.heads is not None
    p = case.heads.p
    shown = visible_pairs(p) & (p > 1e-3)
    for run in (trained, again):
        dropped = shown & (run.p == 0)
        if not bool(dropped.any()) or not bool((shown & ~dropped).any()):
            return
        if not are_same(torch.where(dropped, p, run.p), p):
            return
    share = float((shown & (trained.p == 0)).sum() / shown.sum())
    evidence = f"in training, {share:.0%} of the weights are 0, and the others are the same as in eval"
    case.report("dropout-not-rescaled", evidence)


def _judge_scale_in_training(case: Case, module: nn.Module, trained: Heads) -> bool:
    """Report a scale that differs from eval; return whether there is one."""
    other = _follow_training(case, module, case.subject.input(2, case.size))
    if other is None or other.p.shape != trained.p.shape or case.slope is None:
        return False
    fitted, before = weights.fit_slope(trained, other, None), case.slope.total
    if not isinstance(fitted, Slope) or bool(((fitted.total - before).abs() < 1e-3 * before.abs()).all()):
        return False
    missing = bool(((fitted.total - 1).abs() < 1e-3).all()) and not fitted.biased
    now, then = (f"{float(scale.mean()):.4g} · q·k" for scale in (fitted.total, before))
    if not any(name.startswith("scale") for name in case.observations):  # then the scale in eval is wrong
        case.report("scale-missing" if missing else "scale-unusual", f"in training, logits are {now}, in eval {then}")
    return True


def _judge_mask_in_training(case: Case, module: nn.Module, mask: WorkingMask, trained: Heads) -> None:
    """Report pairs that a mask hides in eval but not in training."""
    before = follow_with_mask(case, mask).heads
    masked = follow_with_mask(case, mask, target=copy_target(module).train(), seed=1)
    now = masked.heads
    if before is None or now is None or now.p.shape != before.p.shape:
        case.not_tested[f"{mask.argument}= in training"] = "the weights cannot be compared with those in eval"
        return
    allowed, _ = build_test_pattern(mask.kind, case.subject.batch, case.subject.length)
    exposed = visible_pairs(now.p) & ~visible_pairs(before.p) & ~allowed[:, None]
    if not bool(exposed.any()):
        return
    plain = case.subject.follow(case.x, target=copy_target(module).train(), seed=1)  # so that dropout is the same
    if are_same(now.p, trained.p) and are_same(masked.out, plain.out):
        case.report("mask-ignored", f"{mask.argument}= in training: the weights are the same as without the mask")
        return
    evidence = f"{mask.argument}= in training: {_describe_first(exposed)} is visible, but masked in eval"
    case.report("mask-applied-wrong", evidence)


def _describe_first(pairs: Tensor) -> str:
    """Return the first of some pairs [B, H, Q, K] in words."""
    _, head, query, key = pairs.nonzero()[0].tolist()
    return f"key {key} of query {query} in head {head}"
