"""check: what is wrong with an attention module, found from outside by what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headscope.checking._case import Asked, Case, MaskMeans, look
from headscope.checking._catalogue import WORDS
from headscope.checking._findings import Finding, Findings
from headscope.checking._probes import behaviour as probes
from headscope.checking._probes import masks
from headscope.checking._probes import numerics as ranges
from headscope.checking._subject import RAISED, CheckError, line, subject

__all__ = ["CheckError", "Finding", "Findings", "check"]


def check(
    module: Any,
    *,
    embed_dim: int | None = None,
    heads: int | None = None,
    causal: bool | None = None,
    batch_first: bool | None = None,
    mask_means: MaskMeans | None = None,
    scale: float | None = None,
    length: int | None = None,
    inputs: Tensor | None = None,
    call: Callable[..., Any] | None = None,
    decode: Callable[..., Any] | None = None,
) -> Findings:
    """Find what is wrong with an attention module or function, by what it computes: self-attention of [B, T, E].

    A copy of the module is called some dozen times, in float64 on the CPU, with small random inputs, and with a tap
    that follows each number from the input through the operations. Neither source nor names of attributes are read;
    the names of the arguments of ``forward`` are, to call it. The module, its training mode and torch's random numbers
    stay as they were; a function is called as it is.

    Args:
        module: an ``nn.Module``, or a function that takes x and gives the output (alone or first of a tuple).
        embed_dim: E; by default what the shapes of the weights allow.
        heads: H that was meant; by default it is not tested.
        causal: whether no token may see a later one; by default it follows from what is seen, so that a mask that is
            missing altogether is found only if this is said.
        batch_first: True = input is [B, T, E], False = [T, B, E]; by default what is seen, with a remark.
        mask_means: of a mask that is handed over: "keep" = True may be seen, "hide" = True is hidden, "add" = numbers
            added to the logits; by default each is taken.
        scale: factor of q·k that was meant; by default 1/√D.
        length: at what length it will be used; from 1,024 on, weights of all pairs are reported as slow.
        inputs: an input of the right shape, [B, T, E], for modules that take no other length.
        call: ``call(module, x, mask)``, where the usual ways to call do not fit: x [B, T, E] and a boolean mask
            [B, 1, T, T], True = may be seen, or None.
        decode: ``decode(module, x)`` gives the output [B, T, E] made token by token with its cache.

    Returns:
        Findings: the cause first. What could not be tested is listed with the reason.

    Raises:
        TypeError: ``module`` can not be called.
        CheckError: no way to call it was found.
    """
    asked = Asked(heads, causal, batch_first, mask_means, scale, length, decode)
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),  # which enable_grad does not end
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),  # a probe that rounds says so itself
        torch.device("cpu"),  # whatever the default device is
    ):
        case = Case(subject(module, call, embed_dim, inputs), asked)
        case.understood.append(f"called as {case.subject.way.said} with E = {case.subject.embed_dim}")
        for probe in PROBES:
            _try(case, probe)
    name = getattr(module, "__name__", None) or type(module).__name__
    return Findings(str(name), _sorted(case), tuple(case.understood), case.not_tested)


PROBES: tuple[Callable[[Case], None], ...] = (
    probes.state,
    probes.layout,
    look,
    probes.structure,
    masks.softmax_and_scale,
    masks.built_in,
    probes.dependence,
    masks.given,
    masks.late_sums,
    masks.empty_rows,
    probes.inputs,
    probes.one,
    probes.gradients,
    ranges.overflow,
    ranges.training,
    ranges.decoding,
    ranges.speed,
)


def _try(case: Case, probe: Callable[[Case], None]) -> None:
    """Run a probe; what the subject raises there is told, and no reason to stop."""
    try:
        probe(case)
    except RAISED as error:  # it comes from code that nobody knows
        case.not_tested[f"the rest of {probe.__name__}"] = line(error)


FOLLOWS: dict[str, set[str]] = {
    "heads-split-wrong": {"heads-merged-wrong", "batches-mixed", "cannot-see-the-past", "values-misplaced",
                          "unused-parameter", "looks-into-the-future", "fails-on-batch-of-one"},
    "heads-merged-wrong": {"looks-into-the-future", "batches-mixed", "fails-on-batch-of-one"},
    "batches-mixed": {"fails-on-batch-of-one", "cannot-see-the-past"},
    "batch-and-length-swapped": {"batches-mixed"},
    "cannot-see-itself": {"nan-on-empty-row", "rows-do-not-sum-to-one", "not-finite"},
    "mask-inverted": {"nan-on-empty-row", "rows-do-not-sum-to-one", "not-finite", "cannot-see-the-past",
                      "looks-into-the-future"},
    "softmax-over-queries": {"looks-into-the-future", "nan-on-empty-row"},
    "softmax-over-heads": {"nan-on-empty-row", "not-finite"},
    "no-softmax": {"nan-on-empty-row", "not-finite"},  # minus infinity stays what it is
    "softmax-twice": {"looks-into-the-future"},
    "input-modified": {"state-between-calls", "fails-on-batch-of-one", "batches-mixed"},
    "state-between-calls": {"fails-on-batch-of-one", "batches-mixed"},
    "cannot-see-the-past": {"input-ignored", "unused-parameter"},
    "input-ignored": {"unused-parameter"},
    "values-are-keys": {"unused-parameter", "input-ignored"},
    "keys-are-queries": {"unused-parameter", "input-ignored"},
    "values-not-projected": {"unused-parameter"},
    "no-output-projection": {"unused-parameter"},
    "softmax-overflows": {"fp16-overflow", "nan-on-empty-row"},
    "mask-after-softmax": {"rows-do-not-sum-to-one"},
    "rows-do-not-sum-to-one": {"scale-unusual"},
    "not-finite": {"cannot-see-the-past", "fails-on-batch-of-one", "input-ignored", "gradient-blocked",
                   "unused-parameter"},
}  # fmt: skip
"""What a finding explains, so that it is not told by itself."""


def _sorted(case: Case) -> tuple[Finding, ...]:
    found = dict(case.found)
    explained = {other for name in found for other in FOLLOWS.get(name, ())}
    if len(found) > 1:
        explained.add("decoding-differs")  # whatever is wrong with one of the two is wrong with their difference
    for name in ("no-output-projection", "values-not-projected"):
        if {name, "unused-parameter"} <= found.keys():  # then it was not meant
            found[name] = ("wrong", f"{found[name][1]}; {found['unused-parameter'][1]}")
    rank = {"wrong": 0, "unusual": 1, "slow": 2}
    names = sorted((name for name in found if name not in explained), key=lambda name: rank[found[name][0]])
    made: list[Finding] = []
    for name in names:
        severity, seen = found[name]
        words = WORDS[name]
        made.append(Finding(name, severity, seen, words.why, words.fix, words.code))
    return tuple(made)
