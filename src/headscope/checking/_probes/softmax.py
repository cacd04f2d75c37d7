"""Probes of the softmax: sums of the weights, and the scale of the logits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from headscope.checking import _weights as weights
from headscope.checking._case import Case
from headscope.checking._copies import CODE_ERRORS
from headscope.checking._head_layout import Heads
from headscope.checking._local_slopes import fit_local_slopes, judge_local_slopes
from headscope.checking._logit_map import (
    fit_row_factors,
    have_uniform_factors,
    judge_logit_map,
    judge_row_factors,
    judge_subtracted_maximum,
)
from headscope.checking._weights import Slope, Verdict

NO_SOFTMAX = {
    "softmax-over-heads",
    "no-softmax",
    "softmax-twice",
}  # with these, a mask does not decide which keys are masked

NO_SOFTMAX_REASON = "the weights are not from one softmax over the keys"


WRONG_MAXIMUM = (
    "Subtract the maximum over the last axis, the keys; torch.softmax does.",
    "e = (scores - scores.amax(dim=-1, keepdim=True)).exp()",
)
"""The remedy of ``logits-changed`` where a maximum over the queries is subtracted."""


EXPLAINS_SUMS = {
    *("mask-after-softmax", "softmax-over-queries", "scaled-after-softmax", "cannot-see-itself"),
    *NO_SOFTMAX,
}


def probe_softmax_and_scale(case: Case) -> None:
    """Judge the sums of the weights, and the factor of the dot products."""
    heads, other = case.heads, case.other_heads
    if case.random or heads is None or other is None or heads.p.shape != other.p.shape:
        case.skip_without_heads("softmax", "scale")
        return
    tolerance = case.subject.tolerance
    tri = torch.ones(heads.p.shape[-2:], dtype=torch.bool).tril()
    fitted = weights.fit_slope(heads, other, None)
    verdict = weights.explain_sums(heads, tolerance)
    if isinstance(fitted, str) or fitted.biased:
        lower = weights.fit_slope(heads, other, tri)  # logits above the diagonal may be replaced
        if isinstance(lower, Slope) and not (isinstance(fitted, Slope) and lower.biased):
            fitted = lower
    if verdict is not None and isinstance(fitted, Slope) and weights.is_cut_late(heads, fitted, tolerance):
        verdict = Verdict("rows-do-not-sum-to-one", verdict.evidence)  # whatever number was filled in, also below 0
    elif isinstance(fitted, str) or bool((heads.p < 0).any()):
        verdict = weights.explain_missing_exp(heads, other) or verdict
    if verdict is not None and verdict.outcome == "scaled-after-softmax" and not isinstance(fitted, Slope):
        case.added = weights.find_added_number(heads, other)
    if verdict is not None and case.added:
        evidence = f"{verdict.evidence.partition(',')[0]}: {case.added:.4g} is added to each weight"
        verdict = Verdict("rows-do-not-sum-to-one", evidence)
        case.report(verdict.outcome, verdict.evidence)
        fitted = weights.fit_slope(case.without_added(heads), case.without_added(other), None)
    if verdict is not None and verdict.outcome in {"softmax-over-queries", *NO_SOFTMAX}:
        case.report(verdict.outcome, verdict.evidence, verdict.severity)
        case.skip("scale", NO_SOFTMAX_REASON, verdict.outcome)
        return
    if isinstance(fitted, str) and verdict is not None:  # the change of the weights hides the logits
        case.not_tested["scale"] = fitted
    elif isinstance(fitted, str):
        _judge_other_logits(case, heads, fitted)
    else:
        case.slope = fitted
    if verdict is not None and verdict.outcome == "scaled-after-softmax":
        case.report(verdict.outcome, verdict.evidence)
        return
    if isinstance(fitted, Slope):
        _judge_scale(case, heads, fitted)
    if isinstance(fitted, Slope) and verdict is None:
        _judge_large_logits(case)


def _judge_other_logits(case: Case, heads: Heads, reason: str) -> None:
    """Judge logits that are not a linear function of q·k."""
    if reason != weights.NOT_LINEAR:
        case.not_tested["scale"] = reason
        return
    maximum = judge_subtracted_maximum(heads)
    if maximum.outcome != "none":
        case.report(maximum.outcome, maximum.evidence, remedy=WRONG_MAXIMUM)
        case.not_tested["scale"] = reason
        return
    rows = fit_row_factors(heads, torch.ones((), dtype=torch.bool))
    if rows is not None and not have_uniform_factors(*rows):
        moved = case.x.clone()
        moved[:, 0] = -2 * moved[:, 0] + case.size
        verdict = judge_row_factors(heads, case.subject.follow(moved).heads)
    else:
        verdict = _judge_map(case, _collect_runs(case))
    if verdict.outcome == "none":
        case.not_tested["scale"] = verdict.evidence
        return
    partly = rows is not None and _are_partly_usual(case, (rows[1] * heads.factor.amax(-1))[rows[0]])
    severity = "wrong" if verdict.outcome == "scale-not-uniform" and partly else None
    case.report(verdict.outcome, verdict.evidence, severity)
    case.not_tested["scale"] = reason


def _are_partly_usual(case: Case, scales: Tensor) -> bool:
    """Return whether not all of several scales can be intended: some are the expected one, or signs differ."""
    assert case.heads is not None
    expected = case.options.scale if case.options.scale is not None else case.heads.width**-0.5
    usual = (scales - expected).abs() <= 1e-3 * abs(expected)
    return bool(usual.any()) or bool((scales > 0).any() and (scales < 0).any())


def _judge_map(case: Case, runs: list[Heads]) -> Verdict:
    """Judge the map of the logits by the order of the weights, and by its slopes where the order is inconclusive."""
    verdict = judge_logit_map(runs)
    if verdict.outcome != "none":
        return verdict
    inputs = [case.x, case.subject.input(2, case.size), 3 * case.x]
    local = fit_local_slopes(lambda x: case.subject.follow(x).heads, inputs)
    by_slopes = Verdict("none") if local is None else judge_local_slopes(local)
    return verdict if by_slopes.outcome == "none" else by_slopes


def _collect_runs(case: Case) -> list[Heads]:
    """Return the heads for two inputs and, last, for an input with logits about nine times as large."""
    followed = (case.heads, case.other_heads, case.subject.follow(3 * case.x).heads)
    runs = [heads for heads in followed if heads is not None]
    return [heads for heads in runs if heads.p.shape == runs[0].p.shape]


def _judge_large_logits(case: Case) -> None:
    """Judge large logits, where ordinary ones are a linear function of q·k."""
    runs = _collect_runs(case)
    lower = torch.ones(runs[0].p.shape[-2:], dtype=torch.bool).tril()
    if len(runs) < 3 or weights.fit_slope(runs[-1], runs[1], lower) != weights.NOT_LINEAR:
        return
    verdict = _judge_map(case, runs)
    if verdict.outcome != "none":
        case.report(verdict.outcome, verdict.evidence)


def probe_sums(case: Case) -> None:
    """Report sums of weights that are not explained by a mask."""
    heads = case.heads
    if case.random or heads is None or case.added or case.observations.keys() & EXPLAINS_SUMS:
        return
    sink = False
    for run in [heads, *_collect_runs(case)[1:]]:  # a step that drops small weights may drop none for one input
        verdict = weights.explain_sums(run, case.subject.tolerance)
        if verdict is None or verdict.outcome in case.observations:
            continue
        if case.slope is not None and not case.slope.biased:
            explained = weights.has_sink(run, case.slope.of_raw, case.subject.tolerance)
            sink = sink or explained
            if explained:
                continue
        if run is heads or verdict.outcome == "rows-do-not-sum-to-one":
            case.report(verdict.outcome, verdict.evidence if run is heads else f"for another input, {verdict.evidence}")
            return
    if sink:
        case.understood.append("each head has a sink: one more term in the softmax, without a value")


def _judge_scale(case: Case, heads: Heads, fitted: Slope) -> None:
    total, width, subject = fitted.total, heads.width, case.subject
    expected = case.options.scale if case.options.scale is not None else width**-0.5
    scale = float(total.mean())
    if float((total - scale).abs().max()) > 1e-3 * abs(scale):
        evidence = f"each head has its own scale: {', '.join(f'{float(x):.4g}' for x in total)}"
        severity = "wrong" if _are_partly_usual(case, total) else None
        case.report("scale-not-uniform", f"{evidence}; expected {expected:.4g}", severity)
        return

    def close(x: float) -> bool:
        return math.isclose(scale, x, rel_tol=1e-3)

    if close(expected):
        case.understood.append(f"scale {scale:.4g}" + (" = 1/√D" if math.isclose(expected, width**-0.5) else ""))
        return
    assert case.base is not None
    if close(expected * width) and case.base.record.operands[0].unit:  # √D · √D: of a length of √D, as by RMSNorm
        case.understood.append(f"scale {expected:.4g} for queries and keys normalised to length √D")
        return
    evidence = f"logits are {scale:.4g} · q·k, expected {expected:.4g}"
    evidence += f" (1/√{width})" if math.isclose(expected, width**-0.5) else ""
    if scale * expected < 0:
        case.report("logits-changed", f"{evidence}: they fall where q·k rises")
    elif close(1.0) and fitted.biased:
        case.understood.append("scale 1 with a bias added to the logits, as in T5")
    elif close(1.0) and math.isclose(_find_scale_before_projections(case), expected, rel_tol=1e-3):
        case.understood.append(f"scale {expected:.4g} before a projection, in its input or its weights")
    elif close(1.0):
        case.report("scale-missing", evidence)
    elif close(1 / width) and _count_scale_steps(case) >= 2:
        case.report("scaled-twice", f"{evidence}: it is 1/{width}")
    elif close(subject.embed_dim**-0.5):
        either = f", or 1/{width}" if close(1 / width) else ""  # where there are as many heads as a head is wide
        case.report("scale-sqrt-embed-dim", f"{evidence}: it is 1/√{subject.embed_dim}, the width of the model{either}")
    elif close(1 / width):
        case.report("scale-without-root", f"{evidence}: it is 1/{width}")
    elif close(width**0.5) or close(width):
        case.report("scale-multiplied", evidence)
    elif (close(subject.length**-0.5) or close(1 / subject.length)) and not _is_constant_scale(case, scale):
        case.report("scale-of-length", f"{evidence}: it depends on the length, {subject.length}")
    else:
        case.report("scale-unusual", evidence)


def _is_constant_scale(case: Case, scale: float) -> bool:
    """Return whether another length has the same scale; False where another length cannot be run."""
    subject = replace(case.subject, length=max(case.subject.length - 2, 3))
    try:
        runs = [subject.follow(subject.input(seed, case.size)).heads for seed in (1, 2)]
    except CODE_ERRORS:  # its length is fixed
        return False
    if runs[0] is None or runs[1] is None or runs[0].p.shape != runs[1].p.shape:
        return False
    fitted = weights.fit_slope(runs[0], runs[1], None)
    return isinstance(fitted, Slope) and math.isclose(float(fitted.total.mean()), scale, rel_tol=1e-3)


def _find_scale_before_projections(case: Case) -> float:
    """Return the total scale of queries and keys before their projection, in tokens or in weights."""
    assert case.base is not None
    record, scale = case.base.record, 1.0
    for ids in (record.operands[0].left, record.operands[0].right):
        features = record.feature[ids]
        projections = (each for each in record.projections if bool(torch.isin(features, each.features).any()))
        for projection in islice(projections, 1):
            scale *= projection.factor * _find_factor_of_parameter(case, projection.weights)
    return scale


def _find_factor_of_parameter(case: Case, used: Tensor) -> float:
    """Return the factor between a parameter and these weights [N, width, features]; 1 if no parameter fits."""
    module, used = case.subject.module, used[0].double()
    for matrix in () if module is None else (p.detach().double() for p in module.parameters() if p.ndim == 2):
        for p in (matrix, matrix.T):
            if p.shape == used.shape and bool(p.any()):
                factor = float((used * p).sum() / (p * p).sum())
                if bool(((used - factor * p).abs() <= 1e-5 * used.abs().max()).all()):
                    return factor
    return 1.0


def _count_scale_steps(case: Case) -> int:
    """Count the steps that scale the logits by 1/√D each."""
    assert case.base is not None
    assert case.heads is not None
    record, root = case.base.record, case.heads.width**-0.5
    by_id: dict[int, list[float]] = {}
    for number, by in record.scales:
        by_id.setdefault(number, []).append(by)
    on_scores = next(iter(by_id.values()), [])
    parts = sum(math.isclose(by, root, rel_tol=1e-3) for by in on_scores)
    before = float(case.heads.factor.amax())
    if math.isclose(before, root, rel_tol=1e-3):
        parts += 1
    elif math.isclose(before, root * root, rel_tol=1e-3):
        parts += sum(math.isclose(by, root, rel_tol=1e-3) for by in record.operands[0].factors)
    return parts
