"""check: what is wrong with an attention module, found from outside by what it computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headscope.checking._case import Case, MaskMeans, Observation, Options, follow_forward_passes
from headscope.checking._catalogue import CATALOGUE
from headscope.checking._copies import CODE_ERRORS, CheckError, describe_error
from headscope.checking._findings import Finding, Findings
from headscope.checking._probes.behaviour import (
    probe_batch_of_one,
    probe_dependence,
    probe_inputs,
    probe_layout,
    probe_state,
    probe_structure,
)
from headscope.checking._probes.built_in_masks import probe_built_in_mask
from headscope.checking._probes.gradients import probe_gradients
from headscope.checking._probes.invariance import probe_invariance
from headscope.checking._probes.mask_arguments import probe_empty_rows, probe_mask_arguments
from headscope.checking._probes.numerics import (
    probe_cost,
    probe_decoding,
    probe_overflow,
    probe_returned_weights,
)
from headscope.checking._probes.open_masks import probe_open_masks
from headscope.checking._probes.softmax import probe_softmax_and_scale, probe_sums
from headscope.checking._probes.training import probe_training
from headscope.checking._subject import prepare_subject

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
    reproducible: bool = False,
) -> Findings:
    """Find what is wrong with an attention module or function, by what it computes: self-attention of [B, T, E].

    A copy of the module is called some dozen times, in float64 on the CPU, with small random inputs, and each number is
    followed from the input through the operations. Neither source nor names of attributes are read; the names of the
    arguments of ``forward`` are, to call it. The module, its training mode and torch's random numbers
    stay as they were; a function is called as it is.

    Args:
        module: an ``nn.Module``, or a function that takes x and gives the output (alone or first of a tuple).
        embed_dim: E; by default what the shapes of the weights allow.
        heads: H that was meant; by default it is not tested.
        causal: whether no token may see a later one; by default it follows from the outputs, so that a mask that is
            missing altogether is found only if this is True.
        batch_first: True = input is [B, T, E], False = [T, B, E]; by default what the outputs show, with a remark.
        mask_means: of a mask that is handed over: "keep" = True may be seen, "hide" = True is hidden, "add" = numbers
            added to the logits; by default each is taken.
        scale: factor of q·k that was meant; by default 1/√D.
        length: at what length it will be used; from 1,024 on, weights of all pairs are reported as slow.
        inputs: an input of the right shape, [B, T, E], for modules that take no other length.
        call: ``call(module, x, mask)``, where the usual ways to call do not fit: x [B, T, E] and a boolean mask
            [B, 1, T, T], True = may be seen, or None.
        decode: ``decode(module, x)`` gives the output [B, T, E] made token by token with its cache.
        reproducible: whether an entry has to have the same bits in every batch. Most modules do not, and need not.

    Returns:
        Findings: the cause first. What could not be tested is listed with the reason.

    Raises:
        TypeError: ``module`` can not be called.
        CheckError: no way to call it was found.
    """
    options = Options(heads, causal, batch_first, mask_means, scale, length, decode, reproducible)
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),  # which enable_grad does not end
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),  # a probe that needs a low precision converts to it
        _use_cpu(),
    ):
        case = Case(prepare_subject(module, call, embed_dim, inputs), options)
        case.understood.append(f"called as {case.subject.pattern.text} with E = {case.subject.embed_dim}")
        for probe in PROBES:
            _run_probe(case, probe)
    name = getattr(module, "__name__", None) or type(module).__name__
    return Findings(str(name), _sort_findings(case), tuple(case.understood), case.not_tested)


def _use_cpu() -> AbstractContextManager[object]:
    """New tensors are on the CPU, whatever the default device is; where it is the CPU, without a call for each."""
    return nullcontext() if torch.empty(0).is_cpu else torch.device("cpu")


PROBES: tuple[Callable[[Case], None], ...] = (
    probe_state,
    probe_layout,
    follow_forward_passes,
    probe_structure,
    probe_softmax_and_scale,
    probe_built_in_mask,
    probe_dependence,
    probe_mask_arguments,
    probe_open_masks,
    probe_sums,
    probe_empty_rows,
    probe_inputs,
    probe_batch_of_one,
    probe_invariance,
    probe_gradients,
    probe_overflow,
    probe_training,
    probe_decoding,
    probe_cost,
    probe_returned_weights,
)


def _run_probe(case: Case, probe: Callable[[Case], None]) -> None:
    """Run a probe; an error of the subject is recorded, and the check continues."""
    try:
        probe(case)
    except CODE_ERRORS as error:  # it comes from unknown code
        subject = probe.__name__.removeprefix("probe_").replace("_", " ")
        case.not_tested[f"the rest of {subject}"] = describe_error(error)


IDLE = {"unused-parameter", "heads-dropped"}  # weights that change nothing

EXPLAINS: dict[str, set[str]] = {
    "heads-split-wrong": {"heads-merged-wrong", "batches-mixed", "cannot-see-the-past", "values-misplaced",
                          *IDLE, "looks-into-the-future", "fails-on-batch-of-one"},
    "heads-merged-wrong": {"looks-into-the-future", "batches-mixed", "fails-on-batch-of-one"},
    "heads-share-weights": {*IDLE, "kv-heads-tiled", "returned-weights-differ", "values-misplaced"},
    "heads-dropped": {"unused-parameter", "rows-do-not-sum-to-one"},
    "batches-mixed": {"fails-on-batch-of-one", "cannot-see-the-past"},
    "fails-on-batch-of-one": {"batch-variant", "place-variant"},
    "batch-variant": {"place-variant"},
    "batch-and-length-swapped": {"batches-mixed"},
    "cannot-see-itself": {"nan-on-empty-row", "rows-do-not-sum-to-one", "not-finite"},
    "mask-inverted": {"nan-on-empty-row", "rows-do-not-sum-to-one", "not-finite", "cannot-see-the-past",
                      "looks-into-the-future"},
    "softmax-over-queries": {"looks-into-the-future", "nan-on-empty-row"},
    "softmax-over-heads": {"nan-on-empty-row", "not-finite"},
    "no-softmax": {"nan-on-empty-row", "not-finite", "cannot-see-the-past"},  # a large fill stays what it is
    "softmax-twice": {"looks-into-the-future", "logits-changed"},
    "input-modified": {"state-between-calls", "fails-on-batch-of-one", "batches-mixed"},
    "state-between-calls": {"fails-on-batch-of-one", "batches-mixed"},
    "cannot-see-the-past": {"input-ignored", *IDLE},
    "input-ignored": {*IDLE},
    "values-are-keys": {*IDLE, "input-ignored"},
    "keys-are-queries": {*IDLE, "input-ignored"},
    "values-not-projected": {*IDLE},
    "no-output-projection": {*IDLE},
    "softmax-overflows": {"fp16-overflow", "nan-on-empty-row"},
    "mask-after-softmax": {"rows-do-not-sum-to-one", "nan-on-empty-row", "not-finite"},  # of infinity, filled in
    "rows-do-not-sum-to-one": {"scale-unusual"},
    "not-finite": {"cannot-see-the-past", "fails-on-batch-of-one", "input-ignored", "gradient-blocked",
                   *IDLE},
}  # fmt: skip
"""What a finding explains, so that it is not reported separately."""


def _sort_findings(case: Case) -> tuple[Finding, ...]:
    """The findings that no other one explains, the worst first."""
    observations = dict(case.observations)
    explained = {other for name in observations for other in EXPLAINS.get(name, ())}
    if len(observations) > 1:
        explained.add("decoding-differs")  # whatever is wrong with one of the two is wrong with their difference
    for name in ("no-output-projection", "values-not-projected"):
        if {name, "unused-parameter"} <= observations.keys():  # then it was not meant
            evidence = f"{observations[name].evidence}; {observations['unused-parameter'].evidence}"
            observations[name] = Observation("wrong", evidence)
    rank = {"wrong": 0, "unusual": 1, "slow": 2}
    names = [name for name in observations if name not in explained]
    findings: list[Finding] = []
    for name in sorted(names, key=lambda name: rank[observations[name].severity]):
        observation, entry = observations[name], CATALOGUE[name]
        findings.append(Finding(name, observation.severity, observation.evidence, entry.why, entry.fix, entry.code))
    return tuple(findings)
