"""Probes of number range, of training, of decoding with a cache, and of speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope.checking import _weights as weights
from headscope.checking._case import Case
from headscope.checking._subject import RAISED, duplicate, in_type, line, tensors

LONG = 1024  # from this length on, a matrix of all pairs is worth a word
PEAKED = 14.0  # exp of it is more than float16 holds, and a logit that trained models have
EXTREME = 3000.0  # exp of it is more than float64 holds


def overflow(case: Case) -> None:
    """Very large logits; and ordinary ones, in float16 and bfloat16."""
    heads, subject = case.heads, case.subject
    if case.random or heads is None or case.found.keys() & {"no-softmax", "not-finite"}:
        case.not_tested["number range"] = case.why_no_heads() if heads is None or case.random else "it is not finite"
        return
    wide = weights.spread(heads.p)
    if not wide or not bool(torch.isfinite(subject.run(case.x)).all()):
        case.not_tested["number range"] = "logits do not depend on the input"
        return
    huge = subject.input(1, case.size * (EXTREME / wide) ** 0.5)
    if not bool(torch.isfinite(subject.run(huge)).all()):
        kind = str(subject.dtype).removeprefix("torch.")
        case.find("softmax-overflows", f"logits some {EXTREME:.0f} apart give NaN in {kind}")
        return
    x = subject.input(1, min(case.size * (PEAKED / wide) ** 0.5, 100.0))
    half, brain = (_low(case, x, dtype) for dtype in (torch.float16, torch.bfloat16))
    if isinstance(brain, str):
        case.not_tested["float16"] = f"bfloat16 fails: {brain}"
    elif isinstance(half, str):
        if "overflow" in half or "Half" not in half:
            case.find("fp16-overflow", f"float16 fails where bfloat16 does not: {half}")
        else:
            case.not_tested["float16"] = half
    elif not half and brain:
        case.find("fp16-overflow", f"logits some {PEAKED:.0f} apart give NaN or infinity in float16, not in bfloat16")


def _low(case: Case, x: Tensor, dtype: torch.dtype) -> bool | str:
    """Whether outputs are finite in a type; or why it fails."""
    subject = case.subject
    if subject.module is None:
        return "a function has weights of its own, which are not converted"
    target = in_type(duplicate(subject.module), dtype)
    more: dict[str, Any] = {}
    for name, kind, make in case.masked[:1]:
        seen = torch.ones(subject.length, subject.length, dtype=torch.bool).tril()
        mask = make(seen.expand(subject.batch, 1, -1, -1) if kind == "pairs" else seen[-subject.batch :])
        if not mask.is_floating_point():  # what is minus infinity in one type is not in another
            more[name] = mask
    try:
        with torch.no_grad():
            out = subject.output(subject.results(x.to(dtype), target=target, **more), x)
    except RAISED as error:  # said by the caller
        return line(error)
    return bool(torch.isfinite(out).all())


# ---------------------------------------------------------------- training


def training(case: Case) -> None:
    """What dropout does to the weights in training."""
    subject, heads = case.subject, case.heads
    if subject.module is None or heads is None or case.random:
        case.not_tested["dropout in training"] = (
            "a function has no training mode" if subject.module is None else case.why_no_heads()
        )
        return
    target = duplicate(subject.module).train()
    run = subject.tapped(case.x, target=target, seed=1)
    if run.heads is None or run.heads.p.shape != heads.p.shape or not bool(torch.isfinite(heads.p).all()):
        case.not_tested["dropout in training"] = "the weights are not those of eval"
        return
    p, raw = run.heads.p, run.heads.raw
    if not bool(((p - heads.p).abs() > 1e-6).any()):
        case.not_tested["dropout of weights"] = "in training the weights are those of eval"
        return
    same_scores = bool(((raw - heads.raw).abs() < 1e-6 * heads.raw.abs().max()).all())
    whole = bool(((p.sum(-1) - 1).abs() < 1e-4).all())
    if same_scores and whole:
        case.find("dropout-before-softmax", "in training, weights change while q·k does not, and still sum to one")


# ---------------------------------------------------------------- decoding


def decoding(case: Case) -> None:
    """Token by token, with a cache, against all at once."""
    subject, asked = case.subject, case.asked.decode
    what = "decoding with a cache"
    if case.random or subject.stateful:
        case.not_tested[what] = "the same call gives different outputs"
        return
    if asked is None and subject.cache_name is None:
        case.not_tested[what] = "it takes no cache that is named so; give decode= if it has one"
        return
    if asked is None and not case.causal:
        case.not_tested[what] = "it is not causal"
        return
    x = case.x
    full = subject.run(x)
    try:
        if asked is not None:
            steps = tensors(asked(duplicate(subject.target), x))[0].detach().double()
        else:
            steps = _step_by_step(case, x)
    except RAISED as error:  # its protocol is not known: that is no finding
        case.not_tested[what] = line(error)
        return
    if steps is None:
        case.not_tested[what] = "it gives no cache back"
        return
    if steps.shape != full.shape:
        case.find("decoding-differs", f"token by token gives {list(steps.shape)}, all at once {list(full.shape)}")
        return
    off = (steps - full).abs().amax(-1).nan_to_num(torch.inf).amax(0)  # [T]
    worst, limit = float(off.max()), 100 * subject.tolerance * float(full.abs().max())
    if worst > limit:
        i = int((off > limit).int().argmax())
        said = f"from position {i} on, token by token and all at once are apart by up to {worst:.3g}"
        case.find("decoding-differs", said)
    else:
        case.understood.append("decoding with its cache equals the full forward pass")


def _step_by_step(case: Case, x: Tensor) -> Tensor | None:
    subject = case.subject
    assert subject.cache_name is not None
    target = duplicate(subject.target)
    cache: Any = None
    outs: list[Tensor] = []
    for t in range(x.shape[1]):
        step = x[:, t : t + 1]
        result = subject.results(step, target=target, **{subject.cache_name: cache})
        out = subject.output(result, step)
        outs.append(out.detach().double())
        cache = _cache_of(result, out)
        if cache is None:
            return None
    return torch.cat(outs, 1)


def _cache_of(result: Any, out: Tensor) -> Any:
    """What came back beside the output and is no matrix of weights."""
    if not isinstance(result, (tuple, list)):
        return None
    for part in result[1:]:
        if isinstance(part, (tuple, list, dict)) and len(tensors(part)) >= 2:
            return part
        if part is not None and not isinstance(part, (Tensor, tuple, list, dict, int, float, str)):
            return part
        if isinstance(part, Tensor) and part.ndim >= 3 and part is not out and part.shape[-1] > 1:
            return part
    return None


# ---------------------------------------------------------------- weights that come back, and speed


def _returned(case: Case, p: Tensor, returned: list[Tensor]) -> None:
    """Weights that are handed out are those that were used."""
    for tensor in returned:
        if tensor.shape == p.shape:
            used = p
        elif p.shape[1] > 1 and tensor.shape == p[:, 0].shape and tensor.ndim == 3:
            used = p.mean(1)
        else:
            continue
        off = float((tensor.detach().double() - used).abs().nan_to_num().max())
        if off > 100 * case.subject.tolerance:
            what = "averaged over heads " if used is not p else ""
            case.find("returned-weights-differ", f"weights {what}that come back are off by up to {off:.3g}")


def speed(case: Case) -> None:
    """Matrices of all pairs that nobody needs."""
    run, length = case.base, case.asked.length
    if run is None or run.heads is None:
        case.not_tested["matrices of all pairs"] = case.why_no_heads()
        return
    returned = {tensor.untyped_storage()._cdata for tensor in run.returned}
    if any(x.untyped_storage()._cdata not in returned for x in run.seen.averaged):
        case.find("weights-discarded", "weights averaged over the heads are computed and not returned")
    _returned(case, run.heads.p, run.returned)
    if length is None:
        case.not_tested["memory of all pairs"] = "length= is not given"
    elif length >= LONG and not run.seen.fused:
        size = 4 * run.heads.count * length * length
        said = f"at length {length:,} the weights take {size / 2**20:,.0f} MiB for each batch entry in float32"
        case.find("quadratic-memory", said)
