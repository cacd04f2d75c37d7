"""Probes of number range, of decoding with a cache, and of speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from headscope._support.user_line import describe_error
from headscope.checking import _weights as weights
from headscope.checking._case import Case
from headscope.checking._catalogue import OVERFLOWING_SCORES
from headscope.checking._copies import CODE_ERRORS, convert_dtype, copy_target, list_tensors
from headscope.checking._probes.behaviour import differ
from headscope.checking._probes.mask_arguments import follow_with_mask
from headscope.checking._probes.softmax import NO_SOFTMAX_REASON
from headscope.checking._subject import Run

LONG = 1024  # from this length on, a matrix of all pairs is reported
PEAKED = 14.0  # its exp exceeds float16, and trained models have such logits
EXTREME = 3000.0  # its exp exceeds float64


def probe_overflow(case: Case) -> None:
    """Test very large logits, and ordinary ones in float16 and bfloat16."""
    heads, subject = case.heads, case.subject
    if case.random or heads is None:
        case.skip_without_heads("number range")
        return
    if "no-softmax" in case.observations:
        case.skip("number range", NO_SOFTMAX_REASON, "no-softmax")
        return
    if not bool(torch.isfinite(subject.run(case.x)).all()):
        cause = case.first_of(("not-finite", "nan-on-empty-row"))
        case.skip("number range", "outputs of ordinary inputs are not finite", cause)
        return
    wide = weights.largest_difference(heads.p)
    if not wide:
        case.not_tested["number range"] = "logits do not depend on the input"
        return
    huge = subject.input(1, case.size * (EXTREME / wide) ** 0.5)
    if not bool(torch.isfinite(subject.run(huge)).all()):
        kind = str(subject.dtype).removeprefix("torch.")
        case.report("softmax-overflows", f"logits that differ by about {EXTREME:.0f} give NaN in {kind}")
        return
    x = subject.input(1, min(case.size * (PEAKED / wide) ** 0.5, 100.0))
    half, brain = (_is_finite_in(case, x, dtype) for dtype in (torch.float16, torch.bfloat16))
    if isinstance(brain, str):
        case.not_tested["float16"] = f"bfloat16 fails: {brain}"
    elif isinstance(half, str):
        if "overflow" in half or "Half" not in half:
            case.report("fp16-overflow", f"float16 raises an error, bfloat16 does not: {half}")
        else:
            case.not_tested["float16"] = half
    elif not half and brain:
        evidence = f"logits that differ by about {PEAKED:.0f} give NaN or infinity in float16"
        small = subject.input(1, case.size * 1e-2)
        cause = OVERFLOWING_SCORES if _is_finite_in(case, small, torch.float16) is True else None
        case.report("fp16-overflow", f"{evidence}, but not in bfloat16", remedy=cause)


def _is_finite_in(case: Case, x: Tensor, dtype: torch.dtype) -> bool | str:
    """Return whether outputs are finite in a dtype; or why it fails."""
    subject = case.subject
    if subject.module is None:
        return "the weights of a function cannot be converted"
    target = convert_dtype(copy_target(subject.module), dtype)
    more: dict[str, Any] = {}
    for working in case.masks[:1]:
        allowed = torch.ones(subject.length, subject.length, dtype=torch.bool).tril()
        pairs = working.kind != "keys"
        mask = working.build(allowed.expand(subject.batch, 1, -1, -1) if pairs else allowed[-subject.batch :])
        if not mask.is_floating_point():  # minus infinity of one dtype is not that of another
            more[working.argument] = mask
    try:
        with torch.no_grad():
            out = subject.output(subject.call_with(x.to(dtype), target=target, **more), x)
    except CODE_ERRORS as error:  # reported by the caller
        return describe_error(error)
    return bool(torch.isfinite(out).all())


# ---------------------------------------------------------------- decoding


def probe_decoding(case: Case) -> None:
    """Compare decoding token by token with a cache to one pass over all tokens."""
    subject, decode = case.subject, case.options.decode
    what = "decoding with a cache"
    if case.random or subject.stateful:
        cause = case.first_of(("dropout-in-eval", "state-between-calls"))
        case.skip(what, "the same call gives different outputs", cause)
        return
    if decode is None and not subject.cache_names:
        function = "forward()" if subject.module is not None else "the function"
        why = f"{function} has no argument with cache or past in its name"
        case.not_tested[what] = f"{why}; if it has a cache, use headscope.check with decode="
        return
    if decode is None and not case.causal:
        case.not_tested[what] = "the module is not causal"
        return
    x = case.x
    full = subject.run(x)
    try:
        if decode is not None:
            steps = list_tensors(decode(copy_target(subject.target), x))[0].detach().double()
        else:
            steps = _decode_with_any_cache(case, x)
    except CODE_ERRORS as error:  # the protocol of the cache is unknown, so an error is not a finding
        case.not_tested[what] = describe_error(error)
        return
    if isinstance(steps, str):
        case.not_tested[what] = steps
        return
    if steps.shape != full.shape:
        case.report(
            "decoding-differs", f"token by token the output is {list(steps.shape)}, all at once {list(full.shape)}"
        )
        return
    off = (steps - full).abs().amax(-1).nan_to_num(torch.inf).amax(0)  # [T]
    worst, limit = float(off.max()), 100 * subject.tolerance * float(full.abs().max())
    if worst > limit:
        i = int((off > limit).int().argmax())
        case.report(
            "decoding-differs",
            f"from position {i} on, outputs token by token and all at once differ by up to {worst:.3g}",
        )
    else:
        case.understood.append("decoding with its cache equals the full forward pass")


def _decode_with_any_cache(case: Case, x: Tensor) -> Tensor | str:
    """Return the output token by token with the first argument that accepts the returned cache; or why none does."""
    subject = case.subject
    flags = dict.fromkeys(subject.cache_flags, True)
    tokens = [x[:, t : t + 1] for t in range(x.shape[1])]
    alone = torch.cat([subject.run(token, **flags) for token in tokens], 1)
    why = ""
    for name in subject.cache_names:
        try:
            steps = _decode_step_by_step(case, tokens, name, flags)
        except CODE_ERRORS as error:  # the returned cache does not fit this argument
            why = why or describe_error(error)
            continue
        if steps is None:
            return "the module does not return a cache"
        if steps.shape != alone.shape or bool(differ(steps, alone).any()):
            return steps
        why = why or f"the returned cache, passed as {name}=, changes nothing"
    return why


def _decode_step_by_step(case: Case, tokens: list[Tensor], name: str, flags: dict[str, bool]) -> Tensor | None:
    """Return the output for tokens [B, 1, E] one after another; None where no cache is returned."""
    target = copy_target(case.subject.target)
    cache: Any = None
    at: int | None = None
    outs: list[Tensor] = []
    for token in tokens:
        result = case.subject.call_with(token, target=target, **flags, **{name: cache})
        out = case.subject.output(result, token)
        outs.append(out.detach().double())
        at = _find_cache(result, out) if at is None else at  # weights of later calls can be as large as a cache
        if at is None:
            return None
        cache = result[at]
    return torch.cat(outs, 1)


def _find_cache(result: Any, out: Tensor) -> int | None:
    """Return the place of the part of the result that is neither the output nor a matrix of weights."""
    if not isinstance(result, (tuple, list)):
        return None
    for n, part in islice(enumerate(cast("Sequence[Any]", result)), 1, None):
        if isinstance(part, (tuple, list, dict)) and len(list_tensors(part)) >= 2:
            return n
        if part is not None and not isinstance(part, (Tensor, tuple, list, dict, int, float, str)):
            return n
        if isinstance(part, Tensor) and part.ndim >= 3 and part is not out and part.shape[-1] > 1:
            return n
    return None


# ---------------------------------------------------------------- returned weights, and speed


def probe_returned_weights(case: Case) -> None:
    """Compare returned weights with those that were used, without a mask and with each working mask."""
    if case.base is None:
        return
    _compare_returned_weights(case, case.base, "")
    for mask in case.masks if case.base.returned else ():
        _compare_returned_weights(case, follow_with_mask(case, mask), f"with {mask.argument}=, ")


def _compare_returned_weights(case: Case, run: Run, when: str) -> None:
    if run.heads is None:
        return
    p = run.heads.p
    for tensor in run.returned:
        if tensor.shape == p.shape:
            used = p
        elif p.shape[1] > 1 and tensor.shape == p[:, 0].shape and tensor.ndim == 3:
            used = p.mean(1)
        else:
            continue
        limit, returned = 100 * case.subject.tolerance, tensor.detach().double()
        off = float((returned - used).abs().nan_to_num().max())
        if off > limit and used is p and float((returned.softmax(-1) - p).abs().nan_to_num().max()) <= limit:
            evidence = f"{when}logits are returned: the weights are their softmax"
            case.report("returned-weights-differ", evidence, "unusual")
        elif off > limit:
            what = "averaged over heads " if used is not p else ""
            case.report(
                "returned-weights-differ", f"{when}returned weights {what}differ from those used by up to {off:.3g}"
            )


def probe_cost(case: Case) -> None:
    """Report unnecessary matrices of all pairs."""
    run, length = case.base, case.options.length
    if run is None or run.heads is None:
        case.skip_without_heads("matrices of all pairs")
        return
    returned = {tensor.untyped_storage()._cdata for tensor in run.returned}
    if any(x.untyped_storage()._cdata not in returned for x in run.record.averaged_weights):
        case.report("weights-discarded", "weights averaged over the heads are computed but not returned")
    if length is None:
        case.not_tested["memory"] = "pass length=4096, or --length 4096, to test it"
    elif length >= LONG and not run.record.fused_calls:
        size = 4 * run.heads.count * length * length
        evidence = f"at length {length:,} the weights take {size / 2**20:,.0f} MiB per batch entry in float32"
        case.report("quadratic-memory", evidence)
