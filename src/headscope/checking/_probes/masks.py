"""Masks: the one that is built in, and those that are handed over; and rows that may see nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.checking import _weights as weights
from headscope.checking._case import Case
from headscope.checking._head_layout import Heads
from headscope.checking._probes.behaviour import TELLS_MASK
from headscope.checking._subject import RAISED, Run, line
from headscope.checking._weights import Applied, Slope, visible

LOWEST = torch.finfo(torch.float32).min  # what stands for minus infinity where masks are added

# ---------------------------------------------------------------- built in


def softmax_and_scale(case: Case) -> None:
    """Sums of the weights, and the factor of the dot products."""
    heads, other = case.heads, None if case.other is None else case.other.heads
    if case.random or heads is None or other is None or heads.p.shape != other.p.shape:
        for what in ("softmax", "scale"):
            case.not_tested[what] = case.why_no_heads()
        return
    tolerance = case.subject.tolerance
    tri = torch.ones(heads.p.shape[-2:], dtype=torch.bool).tril()
    found = weights.slope(heads, other, None)
    wrong = weights.sums(heads, tolerance)
    if isinstance(found, str) or found.biased:
        lower = weights.slope(heads, other, tri)  # logits above the diagonal may be something else
        if isinstance(lower, Slope) and not (isinstance(found, Slope) and lower.biased):
            found = lower
    if isinstance(found, str) or bool((heads.p < 0).any()):
        wrong = weights.no_exp(heads, other) or wrong
    if wrong is not None and wrong.how in {"softmax-over-queries", *NO_SOFTMAX}:
        case.find(wrong.how, wrong.seen)
        case.not_tested["scale"] = "the weights are not from one softmax over the keys"
        return
    if isinstance(found, str):
        case.not_tested["scale"] = found
    else:
        case.slope = found
    if wrong is not None and wrong.how == "scaled-after-softmax":
        case.find(wrong.how, wrong.seen)
        return
    if isinstance(found, Slope):
        _scale(case, heads, found)


NO_SOFTMAX = {"softmax-over-heads", "no-softmax", "softmax-twice"}  # which keys these hide says nothing of a mask


def late_sums(case: Case) -> None:
    """Sums that no mask explains."""
    heads = case.heads
    if case.random or heads is None or case.found.keys() & EXPLAINS_SUMS:
        return
    wrong = weights.sums(heads, case.subject.tolerance)
    if wrong is None or wrong.how in case.found:
        return
    if case.slope is not None and not case.slope.biased and weights.has_sink(heads, case.slope.of_raw, 1e-5):
        case.understood.append("each head has a sink: one more term in the softmax, without a value")
        return
    case.find(wrong.how, wrong.seen)


EXPLAINS_SUMS = {
    *("mask-after-softmax", "softmax-over-queries", "scaled-after-softmax", "cannot-see-itself"),
    *NO_SOFTMAX,
}


def _scale(case: Case, heads: Heads, found: Slope) -> None:
    total, width, subject = found.total, heads.width, case.subject
    wanted = case.asked.scale if case.asked.scale is not None else width**-0.5
    scale = float(total.mean())
    if float((total - scale).abs().max()) > 1e-3 * abs(scale):
        case.understood.append("heads have scales of their own: " + ", ".join(f"{float(x):.4g}" for x in total))
        return

    def close(x: float) -> bool:
        return math.isclose(scale, x, rel_tol=1e-3)

    if close(wanted):
        case.understood.append(f"scale {scale:.4g}" + (" = 1/√D" if math.isclose(wanted, width**-0.5) else ""))
        return
    assert case.base is not None
    if close(wanted * width) and case.base.seen.operands[0].unit:  # √D · √D: of a length of √D, as by RMSNorm
        case.understood.append(f"scale {wanted:.4g} of queries and keys that are brought to length √D")
        return
    said = f"logits are {scale:.4g} · q·k, wanted {wanted:.4g}"
    said += f" (1/√{width})" if math.isclose(wanted, width**-0.5) else ""
    if close(1.0) and found.biased:
        case.understood.append("scale 1 with a bias added to the logits, as in T5")
    elif close(1.0):
        case.find("scale-missing", said)
    elif close(1 / width) and _parts(case) >= 2:
        case.find("scaled-twice", f"{said}: it is 1/{width}")
    elif close(subject.embed_dim**-0.5):
        either = f", or 1/{width}" if close(1 / width) else ""  # where there are as many heads as a head is wide
        case.find("scale-sqrt-embed-dim", f"{said}: it is 1/√{subject.embed_dim}, the width of the model{either}")
    elif close(1 / width):
        case.find("scale-without-root", f"{said}: it is 1/{width}")
    elif close(width**0.5) or close(width):
        case.find("scale-multiplied", said)
    elif close(subject.length**-0.5) or close(1 / subject.length):
        case.find("scale-of-length", f"{said}: it follows from the length, {subject.length}")
    else:
        case.find("scale-unusual", said)


def _parts(case: Case) -> int:
    """In how many steps of 1/√D each the logits were scaled."""
    assert case.base is not None
    assert case.heads is not None
    seen, root = case.base.seen, case.heads.width**-0.5
    by_id: dict[int, list[float]] = {}
    for number, by in seen.scaled:
        by_id.setdefault(number, []).append(by)
    on_scores = next(iter(by_id.values()), [])
    parts = sum(math.isclose(by, root, rel_tol=1e-3) for by in on_scores)
    before = float(case.heads.factor.amax())
    if math.isclose(before, root, rel_tol=1e-3):
        parts += 1
    elif math.isclose(before, root * root, rel_tol=1e-3):
        parts += sum(math.isclose(by, root, rel_tol=1e-3) for by in seen.operands[0].factors)
    return parts


def built_in(case: Case) -> None:
    """Who sees whom if no mask is given."""
    heads = case.heads
    if case.random or heads is None:
        case.not_tested["built-in mask"] = case.why_no_heads()
        return
    if case.found.keys() & NO_SOFTMAX:
        case.not_tested["built-in mask"] = "the weights are not from one softmax over the keys"
        return
    seen = visible(heads.p)
    size = seen.shape[-1]
    tri = torch.ones(size, size, dtype=torch.bool).tril()
    everything = torch.ones_like(seen)
    mask, tolerance = tri.expand(len(seen), -1, -1), case.subject.tolerance
    found = weights.applied(heads.p, case.logit, mask, everything, None, tolerance)
    if found.late:
        case.allowed = tri[None]
        case.find("mask-after-softmax", f"built-in mask: {found.late}")
        if found.how != "hidden":
            case.find(found.how, f"built-in mask: {found.seen}")
        return
    if found.how == "hidden" or (size > 1 and bool((seen <= tri).all()) and found.how == "mask-applied-wrong"):
        case.causal = True
        case.allowed = tri[None]
        _within(case, seen, tri)
        return
    if found.how in ("none", "mask-applied-wrong", "mask-on-queries"):  # there is no padding
        _other_pattern(case, seen, tri)
        return
    case.allowed = tri[None]
    case.find(found.how, f"built-in mask: {found.seen}")


def _within(case: Case, seen: Tensor, tri: Tensor) -> None:
    """Nobody sees the future; but does everybody see the past?"""
    size = len(tri)
    for j in range(2, size):  # a window of j keys
        if bool((seen == tri.triu(1 - j)).all()):
            case.understood.append(f"causal, with a window of {j} keys")
            return
    if bool((seen[..., 1:, :] == tri.tril(-1)[1:]).all()):
        case.find("cannot-see-itself", "query 1 sees key 0 and not key 1; query 0 sees nothing")
    elif bool((seen == torch.eye(size, dtype=torch.bool)).all()):
        case.find("cannot-see-the-past", "each query sees its own key and no other")
    elif case.other is not None and case.other.heads is not None and _apart(seen, visible(case.other.heads.p)):
        case.understood.append("causal; which earlier keys a query sees depends on the input")
    elif not bool((seen == tri)[..., 1:, :].all()):
        b, h, i, j = (~seen & tri).nonzero()[0].tolist()
        case.find("cannot-see-the-past", f"query {i} of head {h} of batch entry {b} does not see key {j}")
    else:
        case.understood.append("causal: no query sees a later key")


def _apart(seen: Tensor, other: Tensor) -> bool:
    return seen.shape == other.shape and not torch.equal(seen, other)


def _other_pattern(case: Case, seen: Tensor, tri: Tensor) -> None:
    size = len(tri)
    if bool(seen[..., 1:, :].all()):
        case.causal = False
        case.understood.append("not causal: every query sees every key")
        if case.asked.causal:
            case.find("looks-into-the-future", "query 0 sees key 1, and so does every query every key")
    elif bool((seen == torch.ones_like(tri).tril(1)).all()) and size > 2:
        case.find("sees-one-ahead", "query 0 sees keys 0 and 1, query 1 sees keys 0 to 2, and so on")
    elif bool((seen[..., 1:, :] == tri.tril(-1)[1:]).all()):
        case.find("cannot-see-itself", "query 1 sees key 0 and not key 1")
    elif bool((seen == tri.T).all()):
        said = "built-in mask: each query sees its own key and later ones, and none before, as by triu instead of tril"
        case.find("looks-into-the-future", said)
    elif bool((seen[..., :-1, :] == tri.T.triu(1)[:-1]).all()):
        case.find("mask-inverted", "built-in mask: each query sees later keys alone")
    else:
        case.causal = False
        later = bool((seen & ~tri).any())
        b, h, i, j = ((seen & ~tri) if later else ~seen).nonzero()[0].tolist()
        if case.asked.causal:
            case.find("looks-into-the-future", f"query {i} of head {h} of batch entry {b} sees key {j}")
        case.understood.append(f"a built-in pattern hides {float((~seen).double().mean()):.0%} of the pairs")


# ---------------------------------------------------------------- handed over


@dataclass(frozen=True)
class Form:
    """A shape and a meaning of a mask.

    Attributes:
        kind: "pairs" or "keys".
        said: shape and values, in words.
        make: from what may be seen, [B, 1, T, T] or [B, T], to the argument.
        adds: it holds numbers to add.
        hides: True = hidden.
    """

    kind: str
    said: str
    make: Callable[[Tensor], Any]
    adds: bool = False
    hides: bool = False


def _forms(name: str, own: bool, dtype: torch.dtype, means: str | None) -> list[Form]:
    if own:
        return [Form("pairs", "[B, 1, T, T], True = may be seen", lambda m: m)]

    def number(m: Tensor) -> Tensor:
        return torch.where(m, 0.0, LOWEST).to(dtype)

    shapes: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
        ("pairs", "[T, T]", lambda m: m[0, 0]),
        ("pairs", "[B, 1, T, T]", lambda m: m),
        ("pairs", "[B, T, T]", lambda m: m[:, 0]),
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
    return sorted(forms, key=lambda form: order[form.said.split()[-1]] + form.hides)


def given(case: Case) -> None:
    """Masks that are handed over: what they hide, and what they were to hide."""
    subject = case.subject
    if not subject.mask_names:
        case.not_tested["a mask that is handed over"] = "it takes none that is named so; give call= if it takes one"
        return
    if case.random or case.heads is None or case.found.keys() & NO_SOFTMAX:
        why = case.why_no_heads() if case.heads is None or case.random else "the weights are not from one softmax"
        case.not_tested["a mask that is handed over"] = why
        return
    if case.found.keys() & (TELLS_MASK | {"softmax-over-queries"}):
        case.not_tested["a mask that is handed over"] = "what is built in hides the wrong keys"
        return
    for name in subject.mask_names:
        _one_name(case, name)


WEAK = ("mask-applied-wrong", "bool-mask-added")  # what a mask of another form than the right one may look like


def _one_name(case: Case, name: str) -> None:
    """Try shapes and meanings until one hides what it says."""
    means, own = case.asked.mask_means, case.subject.call is not None
    first: tuple[Form, Applied] | None = None
    ran: tuple[Form, Applied] | None = None
    for form in _forms(name, own, case.subject.dtype, means):
        if form.kind == "keys" and first is not None and first[0].kind == "pairs":
            continue
        found = _try(case, name, form)
        if found is None:
            continue
        if found.how in ("hidden", "mask-inverted") and not (form.adds and found.how == "mask-inverted"):
            _works(case, name, form, found)
            if form.adds and first is not None and first[1].how == "bool-mask-added":
                case.understood.append(f"{name}= boolean: added as 0 and 1, which hides nothing")
            return
        if found.how == "none":
            ran = ran or (form, found)
        elif first is None or (found.how != "mask-applied-wrong" and first[1].how in WEAK):
            first = (form, found)
    best = first or ran
    if best is None:
        case.not_tested[f"{name}="] = "no shape of a mask that was tried fits"
        return
    form, found = best
    if own and found.how == "none":
        case.not_tested["a mask that is handed over"] = "call= does nothing with it, or the module does not"
        return
    how = "mask-ignored" if found.how == "none" else found.how
    case.find(how, f"{name}= {form.said}: {found.seen or 'the weights are those without it'}")


def _try(case: Case, name: str, form: Form) -> Applied | None:
    """How a mask of this form shows; None if it is refused."""
    subject, heads = case.subject, case.heads
    assert heads is not None
    mask, seen = _pattern(form.kind, subject.batch, subject.length)
    run = _run(case, name, form.make(seen))
    if run is None or run.heads is None or run.heads.p.shape != heads.p.shape:
        return None
    assert case.base is not None
    if run.out.shape != case.base.out.shape:
        return None
    before = visible(heads.p)
    if case.other is not None and case.other.heads is not None and _apart(before, visible(case.other.heads.p)):
        before = before | visible(run.heads.p)  # hidden keys make room for others, as among the largest few
    found = weights.applied(run.heads.p, case.logit, mask, before, heads.p, subject.tolerance)
    if found.how == "mask-applied-wrong" and case.causal:  # it may take the place of the built-in one
        alone = weights.applied(run.heads.p, None, mask, torch.ones_like(visible(heads.p)), None, subject.tolerance)
        found = alone if alone.how in ("hidden", "mask-inverted") else found
    unsure = form.adds and found.how == "hidden" and not found.late and case.asked.mask_means is None
    if unsure and not _adds(case, name, form):
        return None
    return found


def _adds(case: Case, name: str, form: Form) -> bool:
    """Whether a mask is added: minus infinity also hides where it is not, as in (1 - mask) * -10."""
    assert case.heads is not None
    mask, seen = _pattern(form.kind, case.subject.batch, case.subject.length)
    run = _run(case, name, form.make(seen).clamp_min(-0.5))
    if run is None or run.heads is None or run.heads.p.shape != case.heads.p.shape:
        return True
    p, plain = run.heads.p, case.heads.p
    by = weights.lowered(p, plain, mask)
    if by is None or torch.equal(p, plain):  # then it is compared with a number, or put in otherwise
        return True
    factors = [1.0] if case.slope is None else [1.0, *case.slope.of_raw.tolist()]  # before or after q·k is scaled
    return any(math.isclose(by, 0.5 * factor, rel_tol=1e-3) for factor in factors)


def _run(case: Case, name: str, mask: Any) -> Run | None:
    try:
        return case.subject.tapped(case.x, **{name: mask})
    except RAISED:  # a mask of this form is not taken: the next one is tried, and none at all is said
        return None


def _pattern(kind: str, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """What may be seen, [B, T, T], and as it is handed over, before its form: [B, 1, T, T] or [B, T]."""
    if kind == "keys":
        seen = torch.ones(batch, length, dtype=torch.bool)
        seen[1:, -2:] = False  # padding on the right, which the first entry has not
        return seen[:, None].expand(batch, length, length), seen
    i, j = torch.arange(length)[:, None], torch.arange(length)
    pairs = ((3 * i + 5 * j) % 7 < 4) | (i == j) | (j == 0)
    pairs[0, -1] = False
    return pairs.expand(batch, length, length), pairs.expand(batch, 1, length, length)


def _works(case: Case, name: str, form: Form, found: Applied) -> None:
    hides = (found.how == "mask-inverted") != form.hides
    if form.adds:
        meaning = "0 = may be seen" if found.late else "added to the logits"
    else:
        meaning = "True = hidden, as in nn.MultiheadAttention" if hides else "True = may be seen, as in SDPA"
    case.understood.append(f"{name}= {form.said}: {meaning}")
    if found.late:
        case.find("mask-after-softmax", f"{name}= {form.said}: {found.late}")
    asked, own = case.asked.mask_means, case.subject.call is not None
    torch_like = case.subject.torch_like or "pad" in name
    if not form.adds and ((hides and (asked == "keep" or own)) or (not hides and asked == "hide")):
        wanted = "may be seen" if hides else "hidden"
        case.find("mask-inverted", f"{name}= {form.said}: {found.seen or 'False hides'}; wanted: True = {wanted}")
    elif hides and asked is None and not torch_like:
        said = f"{name}= {form.said}: True hides; say mask_means='hide' if it is meant to"
        case.find("mask-inverted", said, "unusual")

    def make(seen: Tensor) -> Any:
        return form.make(~seen if found.how == "mask-inverted" else seen)

    case.masked.append((name, form.kind, make))


def empty_rows(case: Case) -> None:
    """A query that may see nothing."""
    subject = case.subject
    plain = subject.run(case.x)
    if not bool(torch.isfinite(plain).all()):
        rows = (~torch.isfinite(plain)).any(-1).any(0).nonzero().flatten().tolist()
        said = f"without a mask, outputs at positions {', '.join(map(str, rows))} are not finite"
        heads = case.heads
        empty = heads is not None and not bool(torch.isfinite(heads.p).all())
        case.find("nan-on-empty-row" if empty else "not-finite", said)
        return
    if not case.masked:
        case.not_tested["a row that may see nothing"] = "there is no mask to hide its keys with"
        return
    for name, kind, make in case.masked:
        batch, length = subject.batch, subject.length
        seen = torch.ones((batch, length) if kind == "keys" else (batch, 1, length, length), dtype=torch.bool)
        if kind == "keys":
            seen[-1] = False
        else:
            seen[..., 1, :] = False
        try:
            out = subject.run(case.x, **{name: make(seen)})
        except RAISED as error:  # it is the module's to refuse
            case.not_tested["a row that may see nothing"] = line(error)
            continue
        if not bool(torch.isfinite(out).all()):
            what = "all keys of a batch entry" if kind == "keys" else "all keys of query 1"
            case.find("nan-on-empty-row", f"{name}= that hides {what} gives NaN")
