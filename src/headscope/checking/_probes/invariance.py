"""Probes of bits: whether an entry's output depends on the size of the batch or on its position in it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headscope.checking._case import Case
from headscope.checking._copies import convert_dtype, copy_target
from headscope.checking._subject import Subject

SIZES = (1, 2, 3, 5, 17, 33)  # of batches; a product of many rows may use another kernel than one of few
VARYING = ("dropout-in-eval", "state-between-calls")  # findings of outputs that vary between equal calls
BATCH = 8  # the batch in which an entry changes its place


def probe_invariance(case: Case) -> None:
    """Compare in float32 the bits of one entry in batches of several sizes, and at each position of one batch."""
    subject = case.subject
    if not case.options.reproducible:
        return
    if case.first_of(VARYING):
        case.skip("bits", "the same call gives different outputs", case.first_of(VARYING))
        return
    if "batches-mixed" in case.observations:
        case.skip("bits", "batch entries affect each other", "batches-mixed")
        return
    if subject.module is not None:
        target = convert_dtype(copy_target(subject.module), torch.float32)
        subject = replace(subject, target=target, dtype=torch.float32, batch=max(SIZES))
    else:
        subject = replace(subject, batch=max(SIZES))
    x = subject.input(1, case.size)
    alone = subject.run(x[:1])[0]
    _report_sizes(case, subject, x, alone)
    _report_places(case, subject, x)


def _report_sizes(case: Case, subject: Subject, x: Tensor, alone: Tensor) -> None:
    for size in SIZES:
        inside = subject.run(x[:size])[0]
        if not torch.equal(inside, alone):
            case.report(
                "batch-variant", f"entry 0 {_difference(inside, alone)} between a batch of {size} and a batch of one"
            )
            return


def _report_places(case: Case, subject: Subject, x: Tensor) -> None:
    whole = subject.run(x[:BATCH])
    for shift in range(1, BATCH):
        turned = subject.run(x[:BATCH].roll(shift, 0)).roll(-shift, 0)
        for entry in range(BATCH):
            if not torch.equal(turned[entry], whole[entry]):
                place = (entry + shift) % BATCH
                difference = _difference(turned[entry], whole[entry])
                case.report("place-variant", f"entry {entry} of {BATCH} {difference} when it moves to position {place}")
                return


def _difference(one: Tensor, other: Tensor) -> str:
    return f"differs by up to {float((one - other).abs().max()):.2g}"
