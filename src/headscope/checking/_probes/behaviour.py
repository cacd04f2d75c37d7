"""Probes of inputs and outputs, and of the layout of heads, batch and length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headscope._provenance import Provenance
from headscope._support.user_line import describe_error
from headscope.checking._call_patterns import takes_input
from headscope.checking._case import Case
from headscope.checking._copies import CODE_ERRORS, copy_target
from headscope.checking._findings import ATTENTION
from headscope.checking._subject import Subject

MASK_FINDINGS = {
    *("sees-one-ahead", "mask-inverted", "mask-fill-too-small", "bool-mask-added", "mask-on-some-heads"),
    *("mask-on-some-batches", "cannot-see-itself", "looks-into-the-future", "heads-split-wrong", "heads-merged-wrong"),
    *("softmax-over-queries", "cannot-see-the-past", "mask-after-softmax"),
}
"""Findings that already explain why a query attends to the wrong keys."""


CONSTANT = (
    "Return what the tokens give; of two factors of zeros in series, neither learns: start one of them elsewhere.",
    "return self.out(out)",
)
"""The remedy of ``input-ignored`` where no token affects the output."""
SPLIT = "q = q.view(B, T, H, D).transpose(1, 2)"
ROUNDING = torch.finfo(torch.float32).eps  # parts of the largest output: float32 does not resolve less
SMALLEST = 1e-9  # parts of the largest output: float64 resolves this


def differ(a: Tensor, b: Tensor, tolerance: float = SMALLEST) -> Tensor:
    """Return where two outputs differ in any number of their last axis; NaN equals NaN."""
    scale = max(1e-30, float(a.nan_to_num(0, 0, 0).abs().max()))
    differ = (a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)).abs() > tolerance * scale
    return (differ | (torch.isfinite(a) != torch.isfinite(b))).any(-1)


# ---------------------------------------------------------------- state between calls


def probe_state(case: Case) -> None:
    """Repeat a call with the same seed, another seed, and after another input; test that the input is unchanged."""
    subject = case.subject
    x, y = subject.input(1), subject.input(2)
    target = copy_target(subject.target) if subject.module is not None else subject.target
    inputs = x.clone()
    first = subject.output(subject.call_with(inputs, target=target), inputs).detach().double()
    if not torch.equal(inputs, x):
        changed = float((inputs - x).abs().max())
        case.report("input-modified", f"the call changes its input by up to {changed:.3g}")
    try:
        subject.call_with(y.clone(), target=target)
        repeated = subject.output(subject.call_with(x.clone(), target=target), x).detach().double()
    except CODE_ERRORS as error:  # the first call succeeded
        case.report("state-between-calls", f"a later call fails, although the first succeeds: {describe_error(error)}")
        subject.stateful = True
        return
    if bool(differ(first, repeated).any()):
        off = float((first - repeated).abs().nan_to_num().max())
        evidence = f"the same input with the same seed gives outputs that differ by up to {off:.3g}"
        case.report("state-between-calls", evidence)
        subject.stateful = True
        return
    other = subject.run(x, seed=7)
    if bool(differ(first, other).any()):
        share = float(differ(first, other).double().mean())
        case.report("dropout-in-eval", f"in eval, two seeds give different outputs at {share:.0%} of the positions")


def probe_layout(case: Case) -> None:
    """Find which axis is the batch: changing one entry of the input changes the outputs along the length."""
    subject = case.subject
    if case.random:
        case.skip("which axis is the batch", "dropout is active", "dropout-in-eval")
        return
    changed = [_changed_by(subject, at) for at in ((0, 0), (-1, -1))]
    inside = changed[0][0, 1:].any() or changed[1][-1, :-1].any()
    across = changed[0][1:, 0].any() or changed[1][:-1, -1].any()
    elsewhere = changed[0][1:, 1:].any() or changed[1][:-1, :-1].any()
    unknown = not across and not inside and not elsewhere  # each output depends on its own token alone
    if (across and not inside and not elsewhere) or (unknown and case.options.batch_first is False):
        subject.swapped = True
        evidence = (
            "changing a token changes outputs at its position in other batch entries, and none in its own sequence"
        )
        if unknown:
            pass
        elif case.options.batch_first:
            case.report("batch-and-length-swapped", evidence)
        elif case.options.batch_first is None and not subject.torch_like:
            remedy = "pass batch_first=False (--length-first) if this is intended"
            case.report("batch-and-length-swapped", f"{evidence}; {remedy}", "unusual")
        case.understood.append("input is [T, B, E], length first")
        return
    case.understood.append("input is [B, T, E], batch first")
    if case.options.batch_first is False and inside and not across and not elsewhere:
        case.report(
            "batch-and-length-swapped",
            "changing a token changes outputs along axis 1, which is the batch with batch_first=False",
        )
    if (across or elsewhere) and inside:
        where = (changed[0][1:].any(0) | changed[1][:-1].any(0)).nonzero().flatten().tolist()
        case.report(
            "batches-mixed",
            f"changing the first or last batch entry changes others at positions {', '.join(map(str, where))}",
        )


def _changed_by(subject: Subject, at: tuple[int, int]) -> Tensor:
    """Return where outputs change if one token does, [B, T]."""
    x = subject.input(1)
    moved = x.clone()
    moved[at] = -2 * moved[at] + 1
    return differ(subject.run(x), subject.run(moved))


# ---------------------------------------------------------------- layout


def probe_structure(case: Case) -> None:
    """Report the faults of the layout, and the number of heads."""
    run = case.base
    if case.random or run is None:
        case.skip_without_heads("heads")
        return
    for fault in run.faults:
        case.report(fault.name, fault.evidence, fault.severity)
    if run.record.pairs_summed and run.heads is None:
        _report_sums_of_pairs(case, run.record)
    if run.heads is None:
        case.skip_without_heads("weights")
        return
    expected, heads = case.options.heads, run.heads
    split = f"{heads.count} {'head' if heads.count == 1 else 'heads'} of width {heads.width}"
    record = run.record
    in_steps = any(record.holds_heads(each.left) or record.holds_heads(each.right) for each in record.operands)
    several = heads.together < heads.count and (heads.together > 1 or in_steps)  # else a loop over the heads
    if several:
        split += f", {heads.together} in each of {heads.count // heads.together} attentions"
    case.understood.append(split)
    if expected is not None and expected != heads.count and not (several and expected == heads.together):
        _report_number_of_heads(case, split, expected)
    ids = record.out_ids
    width = record.mixings[-1].values.shape[-1]
    if ids is not None and heads.count > 1 and record.holds_heads(ids) and ids.shape[-1] > width:
        case.report("no-output-projection", "the output is the heads' outputs side by side")


def _report_sums_of_pairs(case: Case, record: Provenance) -> None:
    """Report weights that do not sum to 1 because those of several pairs of tokens were added."""
    sums = torch.cat([mixing.weights.sum(-1).flatten() for mixing in record.mixings])
    low, high = float(sums.min()), float(sums.max())
    if max(abs(low - 1), abs(high - 1)) > 10 * case.subject.tolerance:
        evidence = f"the weights of a query sum to {low:.4g} … {high:.4g}: those of several pairs of tokens are added"
        case.report("rows-do-not-sum-to-one", evidence)


def _report_number_of_heads(case: Case, split: str, expected: int) -> None:
    """Report another number of heads than expected; the remedy of the catalogue is that of a single head."""
    heads = case.heads
    assert heads is not None
    count, width = heads.count, heads.width
    if width == expected:
        evidence = f"{split}, expected {expected} heads of width {count}: number and width of heads are swapped"
        fix = "Split the width into number and width of heads, in this order."
        case.report("heads-not-split", evidence, remedy=(fix, f"{SPLIT}  # H = {expected} heads of width D = {count}"))
    elif count > 1:
        fix = "Split the width into the intended number of heads."
        case.report("heads-not-split", f"{split}, expected {expected}", remedy=(fix, f"{SPLIT}  # H = {expected}"))
    else:
        case.report("heads-not-split", f"{split}, expected {expected}")


def probe_dependence(case: Case) -> None:
    """Find which outputs change with which token; this needs no weights, and shows what leaks past them."""
    subject, known = case.subject, case.heads is not None
    if case.random:
        case.skip("which token an output depends on", "dropout is active", "dropout-in-eval")
        return
    x = case.x
    length = subject.length
    if length > 64:
        case.not_tested["which token an output depends on"] = f"the length is {length}, above the limit of 64"
        return
    plain = subject.run(x)
    reach, leaks = torch.zeros(2, length, length, dtype=torch.bool)  # [Q, K]
    least = ROUNDING if known else SMALLEST  # the weights themselves show small weights of later keys
    for j in range(length):
        moved = x.clone()
        moved[0, j] = -2 * moved[0, j] + case.size
        out = subject.run(moved)
        changed = differ(plain, out)
        reach[:, j], leaks[:, j] = changed[0], differ(plain, out, least)[0]
        if bool(changed[1:].any()) and not case.observations.keys() & {"batches-mixed", "heads-split-wrong"}:
            other = 1 + int(changed[1:].any(1).nonzero()[0])
            case.report("batches-mixed", f"changing position {j} of batch entry 0 changes batch entry {other}")
    past, future = reach.tril(-1), leaks.triu(1)
    explained = case.observations.keys() & MASK_FINDINGS
    if (case.causal or case.options.causal) and bool(future.any()) and not explained:
        i, j = future.nonzero()[0].tolist()
        case.report("looks-into-the-future", f"changing position {j} changes the output at position {i}")
    record = None if case.base is None else case.base.record
    if not known and not bool((past | future).any()) and record is not None and not record.shows_attention:
        case.understood.append("no attention was observed: no output depends on another position")
        case.not_tested[ATTENTION] = "no output depends on another position"
        return
    if not known and not bool(future.any()):
        case.causal = True
        case.understood.append("causal: no output depends on a later position")
    if not bool(reach.any()) and "batches-mixed" not in case.observations:
        case.report("input-ignored", "changing any token does not affect the output", remedy=CONSTANT)
    elif not bool(past.any()) and not explained and length > 1:
        case.report("cannot-see-the-past", "no output depends on an earlier position")
    if not known and case.causal:  # a causal mask alone makes the order matter
        case.not_tested["the order of tokens"] = "the module is causal, so each output depends on its position"
    elif not known and not case.observations:
        _test_equivariance(case, plain)


def _test_equivariance(case: Case, plain: Tensor) -> None:
    order = torch.arange(case.subject.length).flip(0)
    turned = case.subject.run(case.x[:, order])
    if not bool(differ(plain, turned, case.subject.tolerance).any()):
        case.understood.append("the output does not depend on the order of the tokens")
    elif bool(differ(plain[:, order], turned, case.subject.tolerance).any()):
        off = float((plain[:, order] - turned).abs().max())
        case.report(
            "not-permutation-equivariant", f"with the tokens in reverse order, outputs differ by up to {off:.3g}"
        )


def probe_inputs(case: Case) -> None:
    """Test that the output depends on each input, where queries, keys and values are separate arguments."""
    subject = case.subject
    names = dict(enumerate(subject.names))
    values = enumerate(subject.pattern.positional)
    at = [n for n, value in values if value is ... and (not n or takes_input(names.get(n, "x")))]
    if len(at) < 2 or subject.call is not None or case.random:
        return
    plain = subject.run(case.x)
    for n in at:
        other = subject.input(3, case.size)
        value = other.transpose(0, 1).contiguous() if subject.swapped else other
        if not bool(differ(plain, _run_with_argument(subject, n, value, case.x)).any()):
            case.report("input-ignored", f"argument {n} of ({', '.join('x' for _ in at)}) does not affect the output")


def _run_with_argument(subject: Subject, n: int, value: Tensor, x: Tensor) -> Tensor:
    positional = tuple(value if k == n else each for k, each in enumerate(subject.pattern.positional))
    return replace(subject, pattern=replace(subject.pattern, positional=positional)).run(x)


def probe_batch_of_one(case: Case) -> None:
    """Test that an entry gives the same output alone and in a larger batch."""
    subject = case.subject
    if case.random or "batches-mixed" in case.observations:
        return
    x = case.x
    whole = subject.run(x)[:1]
    try:
        alone = subject.run(x[:1])
    except CODE_ERRORS as error:  # whatever it raises is the evidence
        case.report("fails-on-batch-of-one", describe_error(error))
        return
    if alone.shape != whole.shape or bool(differ(whole, alone, subject.tolerance).any()):
        case.report(
            "fails-on-batch-of-one",
            f"alone, batch entry 0 gives {list(alone.shape)} with other numbers than in a batch",
        )
