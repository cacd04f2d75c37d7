"""check: find mistakes in an attention module from outside, by what it computes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headscope._support.user_line import describe_error
from headscope.checking._arguments import check_options
from headscope.checking._case import Case, MaskMeans, Observation, Options, follow_forward_passes
from headscope.checking._catalogue import CATALOGUE
from headscope.checking._choice import Choice
from headscope.checking._copies import CODE_ERRORS, CheckError
from headscope.checking._findings import SEVERITIES, Finding, Findings
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
from headscope.checking._zero_weights import move_weights_off_zero

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
    strict: bool = False,
    ignore: str | Iterable[str] = (),
    only: str | Iterable[str] | None = None,
    refuse: str | Iterable[str] = (),
) -> Findings:
    """Find mistakes in an attention module or function, by what it computes for self-attention of [B, T, E].

    ``check`` calls a copy of the module some dozens of times, in float64 on the CPU, with small random inputs, and
    follows each number from the input through the operations. It does not read source or attribute names; it reads the
    argument names of ``forward`` to call it. The module, its training mode and torch's random state do not change.
    A function is called as it is, without a copy.

    Args:
        module: an ``nn.Module``, or a function from x to the output (alone or first in a tuple).
        embed_dim: E; by default, derived from the shapes of the weights.
        heads: the intended number of heads H; by default, not tested.
        causal: whether later tokens must be masked; by default, derived from the outputs. A causal mask that is
            missing altogether is reported only if this is True.
        batch_first: True = input is [B, T, E], False = [T, B, E]; by default, derived from the outputs and stated.
        mask_means: the meaning of a mask argument: "keep" = True means attend, "hide" = True means masked, "add" =
            numbers added to the logits; by default, any of these.
        scale: the intended factor of q·k; by default 1/√D.
        length: the length at which it will be used; from 1,024 on, stored weights of all pairs are reported as slow.
        inputs: an input of the right shape, [B, T, E], for modules with a fixed length.
        call: ``call(module, x, mask)``, where the usual call patterns do not fit: x is [B, T, E], mask is boolean
            [B, 1, T, T], True = attend, or None.
        decode: ``decode(module, x)`` returns the output [B, T, E], computed token by token with its cache.
        reproducible: whether an entry must have the same bits in every batch, which most modules do not guarantee.
        strict: whether a fragile finding counts as well: the result is then true where anything is wrong or fragile.
        ignore: names of findings that are not reported, nor is what follows from them.
        only: names of the findings to report; by default, all.
        refuse: names of findings that count whatever their severity.

    Returns:
        The findings, causes first, and the tests that could not be run with their reasons.

    Raises:
        TypeError: ``module`` is not callable, or an argument is of the wrong type.
        ValueError: an argument has an impossible value, such as a name in ``ignore`` that no finding has.
        CheckError: no call pattern works.

    Examples:
        >>> import torch
        >>> from headscope import check
        >>> print(check(torch.nn.MultiheadAttention(24, 3), heads=4)["heads-not-split"].seen)
        3 heads of width 8, expected 4
    """
    check_options(
        embed_dim=embed_dim, heads=heads, causal=causal, batch_first=batch_first, mask_means=mask_means, scale=scale,
        length=length, inputs=inputs, call=call, decode=decode, reproducible=reproducible, strict=strict,
        ignore=ignore, only=only, refuse=refuse,
    )  # fmt: skip
    choice = Choice.of(ignore, only, refuse)
    options = Options(heads, causal, batch_first, mask_means, scale, length, decode, reproducible)
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),  # enable_grad does not end inference mode
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),  # probes of low precision convert explicitly
        _use_cpu(),
    ):
        case = Case(prepare_subject(module, call, embed_dim, inputs), options)
        case.understood.append(f"called as {case.subject.pattern.text} with E = {case.subject.embed_dim}")
        if moved := move_weights_off_zero(case.subject):
            case.understood.append(moved)
        for probe in PROBES:
            _run_probe(case, probe)
    name = getattr(module, "__name__", None) or type(module).__name__
    every = _sort_findings(case, case.observations)
    findings = choice.apply(every, lambda names: _sort_findings(case, names))
    omitted = tuple(f.name for f in every if f not in findings)
    rest = _list_not_tested(case, every)
    refused, missing = tuple(sorted(choice.refuse)), _list_missing(case, rest)
    return Findings(str(name), findings, tuple(case.understood), rest, strict, omitted, refused, missing)


def _use_cpu() -> AbstractContextManager[object]:
    """Return a context that puts new tensors on the CPU; without overhead where that is the default device."""
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
    """Run a probe; record an error of the subject and continue."""
    try:
        probe(case)
    except CODE_ERRORS as error:  # raised by unknown code
        subject = probe.__name__.removeprefix("probe_").replace("_", " ")
        case.not_tested[f"the rest of {subject}"] = describe_error(error)


IDLE = {"unused-parameter", "heads-dropped"}  # weights that do not affect the output

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
    "no-softmax": {"nan-on-empty-row", "not-finite", "cannot-see-the-past"},  # a large fill stays large
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
    "mask-after-softmax": {"rows-do-not-sum-to-one", "nan-on-empty-row", "not-finite"},  # where infinity was filled in
    "rows-do-not-sum-to-one": {"scale-unusual"},
    "not-finite": {"cannot-see-the-past", "fails-on-batch-of-one", "input-ignored", "gradient-blocked",
                   *IDLE},
}  # fmt: skip
"""Finding -> findings that follow from it and are not reported separately."""
EXPLAINS_DECODING = {"batch-and-length-swapped"}
"""Findings from which ``decoding-differs`` can follow, besides all that are wrong."""


def _sort_findings(case: Case, names: Container[str]) -> tuple[Finding, ...]:
    """Return the findings with one of the names that do not follow from another of them, the most severe first."""
    observations = dict(case.observations)
    for name in ("no-output-projection", "values-not-projected", "values-are-keys"):
        if {name, "unused-parameter"} <= observations.keys():  # then it was not intended
            evidence = f"{observations[name].evidence}; {observations['unused-parameter'].evidence}"
            observations[name] = Observation("wrong", evidence)
    observations = {name: each for name, each in observations.items() if name in names}
    explained = {other for name in observations for other in EXPLAINS.get(name, ())}
    if any(name in EXPLAINS_DECODING or each.severity == "wrong" for name, each in observations.items()
           if name != "decoding-differs"):  # fmt: skip
        explained.add("decoding-differs")
    findings: list[Finding] = []
    for name in sorted(observations, key=lambda name: SEVERITIES.index(observations[name].severity)):
        if name in explained:
            continue
        observation, entry = observations[name], CATALOGUE[name]
        fix, code = observation.remedy or (entry.fix, entry.code)
        condition = entry.condition if observation.severity == "fragile" else ""
        findings.append(Finding(name, observation.severity, observation.evidence, entry.why, fix, code, condition))
    return tuple(findings)


def _list_missing(case: Case, reasons: dict[str, str]) -> tuple[str, ...]:
    """Return the tests of masks that did not run although ``mask_means`` requires a mask, except those that wait."""
    if case.options.mask_means is None or case.masks:
        return ()
    tests = {"masks", "fully masked rows", *(f"{name}=" for name in case.subject.mask_names)}
    return tuple(test for test, why in reasons.items() if test in tests and why == case.not_tested[test])


def _list_not_tested(case: Case, findings: tuple[Finding, ...]) -> dict[str, str]:
    """Return the tests that could not be run, each with its reason and the reported finding that it follows from."""
    names = [finding.name for finding in findings]
    reasons = dict(case.not_tested)
    for test, cause in case.causes.items():
        reported = (name for name in names if name == cause or cause in EXPLAINS.get(name, ()))
        if test in reasons and (name := next(reported, "")):
            reasons[test] += f" ({name})"
    return reasons
