"""Probes of mask arguments, and of rows without a visible key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headscope._support.user_line import describe_error
from headscope.checking import _weights as weights
from headscope.checking._case import Case, WorkingMask
from headscope.checking._copies import CODE_ERRORS, convert_dtype, copy_target
from headscope.checking._head_layout import OUT_OF_PLACE
from headscope.checking._hidden_logits import are_same, judge_unhidden_pairs
from headscope.checking._probes.behaviour import MASK_FINDINGS
from headscope.checking._probes.softmax import NO_SOFTMAX, NO_SOFTMAX_REASON
from headscope.checking._subject import Run
from headscope.checking._weights import Verdict, differ_in_pattern, visible_pairs

LOWEST = torch.finfo(torch.float32).min  # replaces minus infinity where masks are added


UNSURE = ("mask-applied-wrong", *OUT_OF_PLACE)
WEAK = ("bool-mask-added", *UNSURE)  # a mask of another form may give these
NOT_WORKING = (
    *("mask-ignored", "mask-fill-too-small", "bool-mask-added", "mask-on-some-heads", "mask-on-some-batches"),
    *("mask-on-queries", "mask-applied-wrong"),
)  # of an argument: no mask of any form hides what it should


@dataclass(frozen=True)
class Form:
    """A shape and a meaning of a mask.

    Attributes:
        kind: "pairs", "entries" (pairs of each batch entry) or "keys".
        text: shape and values, in words.
        build: converts the visible pairs (True = attend), [B, 1, T, T] or [B, T], to the argument.
        adds: whether it holds numbers to add.
        hides: whether True = masked.
    """

    kind: str
    text: str
    build: Callable[[Tensor], Any]
    adds: bool = False
    hides: bool = False


def _list_forms(name: str, own: bool, dtype: torch.dtype, means: str | None) -> list[Form]:
    if own:
        return [Form("pairs", "[B, 1, T, T], True = attend", lambda m: m)]

    def number(m: Tensor) -> Tensor:
        return torch.where(m, 0.0, LOWEST).to(dtype)

    shapes: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
        ("pairs", "[T, T]", lambda m: m[0, 0]),
        ("entries", "[B, 1, T, T]", lambda m: m),
        ("entries", "[B, T, T]", lambda m: m[:, 0]),
        ("keys", "[B, T]", lambda m: m),
        ("keys", "[B, 1, 1, T]", lambda m: m[:, None, None]),
        ("keys", "[B, 1, T]", lambda m: m[:, None]),
    ]
    if "pad" in name or "key" in name:
        shapes = shapes[3:]
    forms: list[Form] = []
    for kind, shape, make in shapes:
        if means in (None, "keep"):
            forms.append(Form(kind, f"{shape} boolean", make))
            forms.append(Form(kind, f"{shape} of 0 and 1", lambda m, f=make: f(m).to(dtype)))
        if means in (None, "hide"):
            forms.append(Form(kind, f"{shape} boolean", lambda m, f=make: ~f(m), hides=True))
        if means in (None, "add"):
            forms.append(Form(kind, f"{shape} of 0 and -inf", lambda m, f=make: number(f(m)), adds=True))
    order = {"boolean": 0, "-inf": 2, "1": 3}
    return sorted(forms, key=lambda form: order[form.text.split()[-1]] + form.hides)


def probe_mask_arguments(case: Case) -> None:
    """Test mask arguments: the pairs that they hide, compared with those that they should hide."""
    subject = case.subject
    if not subject.mask_names:
        function = "forward()" if subject.module is not None else "the function"
        why = f"{function} has no argument with mask or pad in its name"
        case.not_tested["masks"] = f"{why}; if it takes a mask, rename it, or use headscope.check with call="
        return
    if case.random or case.heads is None:
        case.skip_without_heads("masks")
        return
    if cause := case.first_of(NO_SOFTMAX):
        case.skip("masks", NO_SOFTMAX_REASON, cause)
        return
    cause = case.first_of(MASK_FINDINGS | {"softmax-over-queries"})
    unmasked = cause == "looks-into-the-future" and case.unmasked
    if cause and not unmasked:
        case.skip("masks", "the built-in mask hides the wrong keys", cause)
        return
    for name in subject.mask_names:
        _probe_argument(case, name)
    mistaken = case.first_of({"mask-inverted", "mask-after-softmax"})
    if unmasked and not mistaken and (working := [mask.argument for mask in case.masks if mask.kind != "keys"]):
        remedy = f"{working[0]}= works: leave out causal=True (--causal) if the caller passes the causal mask"
        case.amend("looks-into-the-future", f"without a mask, {{}}; {remedy}")


def _probe_argument(case: Case, name: str) -> None:
    """Try shapes and meanings until a mask hides the pairs that it specifies."""
    means, own = case.options.mask_means, case.subject.call is not None
    first: tuple[Form, Verdict] | None = None
    ran: tuple[Form, Verdict] | None = None
    refusals: list[str] = []
    for form in _list_forms(name, own, case.subject.dtype, means):
        if form.kind == "keys" and first is not None and first[0].kind != "keys":
            continue
        verdict = _judge_form(case, name, form, refusals)
        if verdict is None:
            continue
        if verdict.outcome in ("hidden", "mask-inverted") and not (form.adds and verdict.outcome == "mask-inverted"):
            _report_working_mask(case, name, form, verdict)
            if form.adds and first is not None and first[1].outcome == "bool-mask-added":
                case.understood.append(f"{name}= boolean: added as 0 and 1, which hides nothing")
            return
        if verdict.outcome == "none":
            ran = ran or (form, verdict)
        elif first is None or (verdict.outcome not in UNSURE and first[1].outcome in WEAK):
            first = (form, verdict)
    best = first or ran
    if best is None:
        cause = f"every mask that was tried raises an error; the first was {refusals[0]}" if refusals else ""
        case.not_tested[f"{name}="] = cause or "none of the mask shapes that were tried fits"
        return
    form, verdict = best
    if own and verdict.outcome == "none":
        case.not_tested["masks"] = "call= or the module ignores the mask"
        return
    if verdict.outcome == "mask-fill-too-small" and case.slope is None and "logits-changed" in case.observations:
        case.skip(f"{name}=", "the change of the logits may also affect masked keys", "logits-changed")
        return
    # training.py tests masks that work in eval but not in training
    finding = "mask-ignored" if verdict.outcome == "none" else verdict.outcome
    case.report(finding, f"{name}= {form.text}: {verdict.evidence or 'the weights are the same as without the mask'}")


def _judge_form(case: Case, name: str, form: Form, refusals: list[str]) -> Verdict | None:
    """Judge how a mask of this form is applied; None if the module refuses it, with an error in ``refusals``."""
    subject, heads = case.subject, case.heads
    assert heads is not None
    mask, allowed = build_test_pattern(form.kind, subject.batch, subject.length)
    run = _run_with_mask(case, name, form.build(allowed), refusals)
    assert case.base is not None
    if run is None or run.out.shape != case.base.out.shape:
        return None
    if run.heads is None and run.faults:  # faults of the layout that appear only with a mask
        return Verdict(run.faults[0].name, run.faults[0].evidence)
    if run.heads is None or run.heads.p.shape != heads.p.shape:
        return None
    p, plain = case.without_added(run.heads).p, case.without_added(heads).p
    before = visible_pairs(plain)
    if case.other_heads is not None and differ_in_pattern(before, visible_pairs(case.other_heads.p)):
        before = before | visible_pairs(p)  # masked keys make room for others, as in a top-k
    if form.kind == "keys":  # the rows of padding are not used: they may be fully masked
        padding = ~mask.diagonal(dim1=-2, dim2=-1)[:, None]  # [B, 1, Q]
        before = before & ~(padding & weights.are_blank(p, before))[..., None]
    verdict = weights.judge_mask(p, case.logit, mask, before, plain, subject.tolerance)
    if verdict.outcome == "mask-applied-wrong" and case.causal:  # it may replace the built-in mask
        everything = torch.ones_like(before)
        alone = weights.judge_mask(p, None, mask, everything, None, subject.tolerance)
        if alone.outcome in ("hidden", "mask-inverted"):
            verdict = alone if form.kind != "keys" else _show_later_key(visible_pairs(p))
    if verdict.outcome == "none":
        verdict = _compare_with_plain(run, case.base, p, plain, mask, before)
    elif verdict.outcome == "mask-applied-wrong" and case.logit is None:
        unhidden = judge_unhidden_pairs(p, plain, mask, before)
        verdict = unhidden if unhidden.outcome == "mask-fill-too-small" else verdict
    unsure = form.adds and verdict.outcome == "hidden" and not verdict.after_softmax and case.options.mask_means is None
    if unsure and not _is_added(case, name, form):
        return None
    return verdict


def _compare_with_plain(run: Run, base: Run, p: Tensor, plain: Tensor, mask: Tensor, before: Tensor) -> Verdict:
    """Judge a mask that hides nothing; "none" where weights and outputs are the same as without it."""
    if not are_same(p, plain):
        verdict = judge_unhidden_pairs(p, plain, mask, before)
        return (
            verdict
            if verdict.outcome != "none"
            else Verdict("mask-applied-wrong", "weights change, but none is masked")
        )
    if are_same(run.out, base.out):
        return Verdict("none")
    return Verdict("mask-applied-wrong", "the weights are the same as without the mask, but the outputs are not")


def _show_later_key(visible: Tensor) -> Verdict:
    """Judge a key mask that replaces the causal mask: it does not mask later keys."""
    _, head, query, key = visible.triu(1).nonzero()[0].tolist()
    return Verdict(
        "looks-into-the-future", f"query {query} of head {head} attends to key {key}, but not without the mask"
    )


def _is_added(case: Case, name: str, form: Form) -> bool:
    """Return whether a mask is added: minus infinity also masks where it is not added, as in (1 - mask) * -10."""
    assert case.heads is not None
    mask, allowed = build_test_pattern(form.kind, case.subject.batch, case.subject.length)
    run = _run_with_mask(case, name, form.build(allowed).clamp_min(-0.5), [])
    if run is None or run.heads is None or run.heads.p.shape != case.heads.p.shape:
        return True
    p, plain = case.without_added(run.heads).p, case.without_added(case.heads).p
    by = weights.measure_lowering(p, plain, mask)
    if by is None or torch.equal(p, plain):  # the mask is then compared with a number, or applied in another way
        return True
    factors = [1.0] if case.slope is None else [1.0, *case.slope.of_raw.tolist()]  # before or after q·k is scaled
    return any(math.isclose(by, 0.5 * factor, rel_tol=1e-3) for factor in factors)


def _run_with_mask(case: Case, name: str, mask: Any, refusals: list[str]) -> Run | None:
    try:
        return case.subject.follow(case.x, **{name: mask})
    except CODE_ERRORS as error:  # the module refuses this form: the next one is tried
        refusals.append(describe_error(error))
        return None


def follow_with_mask(case: Case, mask: WorkingMask, target: Any = None, seed: int = 0) -> Run:
    """Follow a forward pass with a working mask that hides some keys; ``target`` replaces the subject."""
    _, allowed = build_test_pattern(mask.kind, case.subject.batch, case.subject.length)
    return case.subject.follow(case.x, target=target, seed=seed, **{mask.argument: mask.build(allowed)})


def build_test_pattern(kind: str, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the visible pairs (True = attend), [B, T, T], and the same before its form: [B, 1, T, T] or [B, T]."""
    if kind == "keys":
        allowed = torch.ones(batch, length, dtype=torch.bool)
        some = min(2, length // 2)
        allowed[0, :some] = False  # padding on the left: key 0 is masked for some queries that have other keys
        allowed[1:, length - some :] = False
        return allowed[:, None].expand(batch, length, length), allowed
    i, j = torch.arange(length)[:, None], torch.arange(length)
    # every key is masked for some query with other visible keys, and query 4 does not attend to itself
    pairs = ((3 * i + 5 * j) % 7 < 4) | ((i == j) & (i != 4))
    pairs[0, -1] = False
    pairs[-1, -3:-1] = False  # in a causal module few queries attend to these
    pairs = pairs.repeat(batch, 1, 1)
    if kind == "entries":
        pairs[1::2] = pairs[1::2].flip(1, 2)
    return pairs, pairs[:, None]


def _report_working_mask(case: Case, name: str, form: Form, verdict: Verdict) -> None:
    hides = (verdict.outcome == "mask-inverted") != form.hides
    if form.adds:
        meaning = "0 = attend" if verdict.after_softmax else "added to the logits"
    else:
        meaning = "True = masked, as in nn.MultiheadAttention" if hides else "True = attend, as in SDPA"
    case.understood.append(f"{name}= {form.text}: {meaning}")
    if verdict.after_softmax:
        case.report("mask-after-softmax", f"{name}= {form.text}: {verdict.after_softmax}")
    means, own = case.options.mask_means, case.subject.call is not None
    torch_like = case.subject.torch_like or "pad" in name
    if not form.adds and ((hides and (means == "keep" or own)) or (not hides and means == "hide")):
        evidence = f"{verdict.evidence or 'False hides'}; expected True = {'attend' if hides else 'masked'}"
        case.report("mask-inverted", f"{name}= {form.text}: {evidence}")
    elif hides and means is None and not torch_like:
        evidence = f"{name}= {form.text}: True hides; pass mask_means='hide' (--mask-means hide) if this is intended"
        case.report("mask-inverted", evidence, "unusual")

    def build(allowed: Tensor) -> Any:
        return form.build(~allowed if verdict.outcome == "mask-inverted" else allowed)

    case.masks.append(WorkingMask(name, form.kind, build))


def probe_empty_rows(case: Case) -> None:
    """Test a query without a visible key."""
    subject = case.subject
    plain = subject.run(case.x)
    if not bool(torch.isfinite(plain).all()):
        rows = (~torch.isfinite(plain)).any(-1).any(0).nonzero().flatten().tolist()
        evidence = f"without a mask, outputs at positions {', '.join(map(str, rows))} are not finite"
        heads = case.heads
        empty = heads is not None and not bool(torch.isfinite(heads.p).all())
        case.report("nan-on-empty-row" if empty else "not-finite", evidence, "wrong")  # no mask is at fault
        return
    if not case.masks:
        cause = case.causes.get("masks", "") or case.first_of(NOT_WORKING)
        case.skip("fully masked rows", "this test needs a mask argument that works", cause)
        return
    for mask in case.masks:
        batch, length, keys_only = subject.batch, subject.length, mask.kind == "keys"
        allowed = torch.ones((batch, length) if keys_only else (batch, 1, length, length), dtype=torch.bool)
        if keys_only:
            allowed[-1] = False
        else:
            allowed[..., 1, :] = False
        handed = mask.build(allowed)
        try:
            out = subject.run(case.x, **{mask.argument: handed})
        except CODE_ERRORS as error:  # the module may refuse such a mask
            case.not_tested["fully masked rows"] = describe_error(error)
            continue
        if not bool(torch.isfinite(out).all()) and not _is_finite_in_float32(case, {mask.argument: handed}):
            hidden = "all keys of a batch entry" if keys_only else "all keys of query 1"
            case.report("nan-on-empty-row", f"{mask.argument}= that hides {hidden} gives NaN")


def _is_finite_in_float32(case: Case, masks: dict[str, Any]) -> bool:
    """Return whether float32 is finite where float64 is not: in float32, the lowest float64 becomes -inf."""
    subject = case.subject
    if subject.dtype == torch.float32:
        return False
    masks = {name: x.float() if x.is_floating_point() else x for name, x in masks.items()}
    single = replace(subject, target=convert_dtype(copy_target(subject.target), torch.float32), dtype=torch.float32)
    try:
        return bool(torch.isfinite(single.run(case.x.float(), **masks)).all())
    except CODE_ERRORS:  # it computes only in float64
        return False
