"""Probes that look at inputs and outputs, and at the layout of heads, batch and length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headscope._provenance.tap import HEADS
from headscope.checking._case import Case
from headscope.checking._subject import RAISED, Subject, duplicate, line, takes_input

TELLS_MASK = {
    *("sees-one-ahead", "mask-inverted", "mask-fill-too-small", "bool-mask-added", "mask-on-some-heads"),
    *("mask-on-some-batches", "cannot-see-itself", "looks-into-the-future", "heads-split-wrong", "heads-merged-wrong"),
    *("softmax-over-queries", "cannot-see-the-past", "mask-after-softmax"),
}
"""Findings that say already who sees whom wrongly."""


def _differs(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> Tensor:
    """Where two outputs differ; NaN equals NaN. Over the last axis."""
    scale = max(1e-30, float(a.nan_to_num(0, 0, 0).abs().max()))
    apart = (a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)).abs() > tolerance * scale
    return (apart | (torch.isfinite(a) != torch.isfinite(b))).any(-1)


# ---------------------------------------------------------------- what stays between calls


def state(case: Case) -> None:
    """The same call again: same seed, another seed, after another input; and the input itself afterwards."""
    subject = case.subject
    x, y = subject.input(1), subject.input(2)
    target = duplicate(subject.target) if subject.module is not None else subject.target
    given = x.clone()
    first = subject.output(subject.results(given, target=target), given).detach().double()
    if not torch.equal(given, x):
        changed = float((given - x).abs().max())
        case.find("input-modified", f"after the call the input differs from before by up to {changed:.3g}")
    try:
        subject.results(y.clone(), target=target)
        again = subject.output(subject.results(x.clone(), target=target), x).detach().double()
    except RAISED as error:  # the first call went well
        case.find("state-between-calls", f"another call after the first fails: {line(error)}")
        subject.stateful = True
        return
    if bool(_differs(first, again).any()):
        off = float((first - again).abs().nan_to_num().max())
        case.find("state-between-calls", f"the same input with the same seed gives outputs that are apart by {off:.3g}")
        subject.stateful = True
        return
    other = subject.run(x, seed=7)
    if bool(_differs(first, other).any()):
        share = float(_differs(first, other).double().mean())
        case.find("dropout-in-eval", f"in eval, two seeds give different outputs at {share:.0%} of the positions")


def layout(case: Case) -> None:
    """Which axis is the batch: changing one entry of the input changes the outputs along the length."""
    subject = case.subject
    if case.random:
        case.not_tested["which axis is the batch"] = "dropout is active"
        return
    changed = [_reach(subject, at) for at in ((0, 0), (-1, -1))]
    inside = changed[0][0, 1:].any() or changed[1][-1, :-1].any()
    across = changed[0][1:, 0].any() or changed[1][:-1, -1].any()
    elsewhere = changed[0][1:, 1:].any() or changed[1][:-1, :-1].any()
    unknown = not across and not inside and not elsewhere  # each output depends on its own token alone
    if (across and not inside and not elsewhere) or (unknown and case.asked.batch_first is False):
        subject.swapped = True
        said = "changing a token changes outputs at its place in other batch entries, and none of its own sequence"
        if unknown:
            pass
        elif case.asked.batch_first:
            case.find("batch-and-length-swapped", said)
        elif case.asked.batch_first is None and not subject.torch_like:
            case.find("batch-and-length-swapped", f"{said}; say batch_first=False if it is meant to", "unusual")
        case.understood.append("its input is [T, B, E], length first")
        return
    case.understood.append("its input is [B, T, E], batch first")
    if case.asked.batch_first is False and inside and not across and not elsewhere:
        said = "changing a token changes outputs along axis 1, which was to be the batch"
        case.find("batch-and-length-swapped", said)
    if (across or elsewhere) and inside:
        where = (changed[0][1:].any(0) | changed[1][:-1].any(0)).nonzero().flatten().tolist()
        case.find("batches-mixed", f"changing batch entry 0 changes others at positions {', '.join(map(str, where))}")


def _reach(subject: Subject, at: tuple[int, int]) -> Tensor:
    """Where outputs change if one token does, [B, T]."""
    x = subject.input(1)
    moved = x.clone()
    moved[at] = -2 * moved[at] + 1
    return _differs(subject.run(x), subject.run(moved))


# ---------------------------------------------------------------- layout


def structure(case: Case) -> None:
    """What the tap says of the layout."""
    run = case.base
    if case.random or run is None:
        case.not_tested["heads"] = case.why_no_heads()
        return
    for fault in run.faults:
        case.find(fault.name, fault.seen)
    if run.heads is None:
        case.not_tested["weights"] = run.why
        return
    asked, heads = case.asked.heads, run.heads
    case.understood.append(f"{heads.count} heads of width {heads.width}")
    if asked is not None and heads.count != asked:
        said = f"{heads.count} {'head' if heads.count == 1 else 'heads'} of width {heads.width}, wanted {asked}"
        case.find("heads-not-split", said)
    ids = run.seen.out_ids
    if ids is not None and heads.count > 1 and bool((run.seen.kind[ids] == HEADS).all()):
        case.find("no-output-projection", "the output is the heads' results side by side")


def dependence(case: Case) -> None:
    """Which outputs change with which token, where the weights were not seen or something else may leak."""
    subject, known = case.subject, case.heads is not None
    if case.random:
        case.not_tested["which token an output depends on"] = "dropout is active"
        return
    x = case.x
    length = subject.length
    if length > 64:
        case.not_tested["which token an output depends on"] = f"the length is {length}, more than 64"
        return
    plain = subject.run(x)
    reach = torch.zeros(length, length, dtype=torch.bool)  # [Q, K]
    for j in range(length):
        moved = x.clone()
        moved[0, j] = -2 * moved[0, j] + case.size
        changed = _differs(plain, subject.run(moved))
        reach[:, j] = changed[0]
        if bool(changed[1:].any()) and not case.found.keys() & {"batches-mixed", "heads-split-wrong"}:
            other = 1 + int(changed[1:].any(1).nonzero()[0])
            said = f"changing position {j} of batch entry 0 changes batch entry {other}"
            case.find("batches-mixed", said)
    past, future = reach.tril(-1), reach.triu(1)
    told = case.found.keys() & TELLS_MASK
    if case.causal or case.asked.causal:
        if bool(future.any()) and not told:
            i, j = future.nonzero()[0].tolist()
            case.find("looks-into-the-future", f"changing position {j} changes the output at position {i}")
    elif not known and not bool(future.any()):
        case.causal = True
        case.understood.append("causal: no output depends on a later position")
    if not bool(past.any()) and not told and length > 1:
        case.find("cannot-see-the-past", "no output depends on an earlier position")
    if not known and not case.causal and not case.found:
        _equivariance(case, plain)


def _equivariance(case: Case, plain: Tensor) -> None:
    order = torch.arange(case.subject.length).flip(0)
    turned = case.subject.run(case.x[:, order])
    if bool(_differs(plain[:, order], turned, case.subject.tolerance).any()):
        off = float((plain[:, order] - turned).abs().max())
        case.find("not-permutation-equivariant", f"for tokens in reverse order the outputs are off by up to {off:.3g}")


def inputs(case: Case) -> None:
    """Modules that take queries, keys and values each: does each of them count?"""
    subject = case.subject
    names = dict(enumerate(subject.names))
    at = [
        n for n, each in enumerate(subject.way.positional) if each is ... and (not n or takes_input(names.get(n, "x")))
    ]
    if len(at) < 2 or subject.call is not None or case.random:
        return
    plain = subject.run(case.x)
    for n in at:
        other = subject.input(3, case.size)
        given = other.transpose(0, 1).contiguous() if subject.swapped else other
        if not bool(_differs(plain, _with(subject, n, given, case.x)).any()):
            case.find("input-ignored", f"argument {n} of ({', '.join('x' for _ in at)}) changes nothing")


def _with(subject: Subject, n: int, value: Tensor, x: Tensor) -> Tensor:
    positional = tuple(value if k == n else each for k, each in enumerate(subject.way.positional))
    return replace(subject, way=replace(subject.way, positional=positional)).run(x)


def one(case: Case) -> None:
    """A batch of one gives what it gives in a larger batch."""
    subject = case.subject
    if case.random or "batches-mixed" in case.found:
        return
    x = case.x
    whole = subject.run(x)[:1]
    try:
        alone = subject.run(x[:1])
    except RAISED as error:  # whatever it raises is what was found
        case.find("fails-on-batch-of-one", line(error))
        return
    if alone.shape != whole.shape or bool(_differs(whole, alone, subject.tolerance).any()):
        case.find("fails-on-batch-of-one", f"alone, batch entry 0 gives {list(alone.shape)} with other numbers")


# ---------------------------------------------------------------- gradients


def gradients(case: Case) -> None:
    """Weights that change the output get a gradient; weights that do not are not used."""
    subject = case.subject
    module = subject.module
    if module is None:
        case.not_tested["gradients of weights"] = "a function has no parameters"
        return
    if case.random:
        case.not_tested["gradients of weights"] = "dropout is active"
        return
    made = duplicate(module)
    weights = [(name, p) for name, p in made.named_parameters() if p.ndim >= 2 and p.is_floating_point()]
    out = subject.output(subject.results(case.x, target=made), case.x)
    plain = out.detach().double()
    if out.requires_grad:
        factor = torch.linspace(1, 2, out.numel(), dtype=out.dtype).sin().view(out.shape)
        (out * factor).nan_to_num().sum().backward()
    blocked, unused = list[str](), list[str]()
    for name, p in weights:
        rows = torch.ones(len(p), dtype=torch.bool) if p.grad is None else (p.grad.flatten(1) == 0).all(1)
        if not bool(rows.any()):
            continue
        if bool(_moved(subject, made, p, rows, plain, case.x)):
            blocked.append(f"{name} ({int(rows.sum())} of {len(rows)} rows)")
        elif bool(rows.all()):
            unused.append(f"{name} {list(p.shape)}")
    if blocked:
        case.find("gradient-blocked", f"the output depends on {', '.join(blocked)}, and no gradient reaches it")
    if unused:
        case.find("unused-parameter", f"changing {', '.join(unused)} changes nothing")


def _moved(subject: Subject, made: torch.nn.Module, p: Tensor, rows: Tensor, plain: Tensor, x: Tensor) -> bool:
    """Whether the output changes with these rows of a parameter."""
    before = p.detach().clone()
    with torch.no_grad():
        # a small step: a large one would wake what ReLU has put to sleep
        p[rows] += 1e-3 * (1e-3 + before.abs().mean()) * torch.randn(before[rows].shape).to(p.dtype)
    try:
        out = subject.output(subject.results(x, target=made), x).detach().double()
    finally:
        with torch.no_grad():
            p.copy_(before)
    return bool(_differs(plain, out).any())
