"""Random combinations of every option, on every backend that takes them, against the float64 oracle; gradients too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from torch import Tensor

import headscope
from headscope._attend.backends import blocked
from headscope._attend.interface import accumulate_dtype
from headscope._attend.select import BACKENDS
from support import oracle
from support.attention_fuzz import Case, cases
from support.tolerance import assert_as_accurate

# ---------------------------------------------------------------- drawing


# ---------------------------------------------------------------- checking


@contextmanager
def _blocks_of(logits: int) -> Iterator[None]:
    """Blocks so small that there are many of them."""
    usual, blocked.BLOCK = blocked.BLOCK, logits
    try:
        yield
    finally:
        blocked.BLOCK = usual


def check(case: Case) -> set[str | None]:
    """Every backend that takes the case, and the choice by default, against the oracle; which these were."""
    ran: set[str | None] = set()
    inputs = case.tensors()
    seen = {**case.numbers, "seen": case.seen}
    double = {name: x.double() for name, x in inputs.items()}
    exact = {lse: _outcome(oracle.attention, double, seen, case, lse) for lse in (False, True)}
    case.gradients = case.gradients and not exact[True]["lse"].isnan().any() and not exact[True]["out"].isnan().any()
    plain = {lse: _outcome(oracle.plain, inputs, seen, case, lse) for lse in (False, True)}
    wide = {name: x.to(accumulate_dtype(case.q.dtype)) for name, x in inputs.items()}
    plain[True]["lse"] = oracle.plain(**wide, **seen).lse
    said = {**case.numbers, "mask": case.mask}
    for name in (*BACKENDS, None):
        for lse in (False, True):
            run = headscope.attend if lse else headscope.attention
            try:
                with _blocks_of(case.block):
                    got = _outcome(run, inputs, {**said, "backend": name}, case, lse)
            except ValueError as error:
                if name is None or f"{name} refuses this call" not in str(error):
                    raise
                continue
            event(f"{run.__name__} by {name}")
            ran.add(name)
            for what, value in got.items():
                message = f"{what} of {run.__name__} by {name}"
                size, dtype = _magnitude(what, case), None if what == "lse" else case.q.dtype
                assert_as_accurate(
                    value, exact[lse][what], plain[lse][what], magnitude=size, dtype=dtype, message=message
                )
    return ran


def _outcome(run: Any, inputs: dict[str, Tensor], options: dict[str, Any], case: Case, lse: bool) -> dict[str, Tensor]:
    """out, lse and, if the case asks for them, the gradients of a fixed random sum of out (and lse)."""
    leaves = {name: x.detach().requires_grad_(case.gradients) for name, x in inputs.items()}
    result = run(**leaves, **options)
    made = {"out": result if isinstance(result, Tensor) else result[0]}
    if lse:
        made["lse"] = result[1]
    found = {name: x.detach() for name, x in made.items()}
    if case.gradients and made["out"].requires_grad:
        random = torch.Generator().manual_seed(1)
        along = [torch.randn(x.shape, generator=random).to(case.q.dtype).to(x.dtype) for x in made.values()]
        gradients = torch.autograd.grad(list(made.values()), list(leaves.values()), along, allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
            assert found[f"gradient of {name}"].dtype == leaf.dtype
    return found


def _magnitude(what: str, case: Case) -> float:
    """The size of the terms that a result is a sum of, times what a rounding of the logits does to them."""
    q, k, v, bias = (_largest(x) for x in (case.q, case.k, case.v, case.bias))
    scale = abs(case.q.shape[-1] ** -0.5 if case.scale is None else case.scale)
    logits = 1 + min(scale * q * k * case.q.shape[-1] ** 0.5, case.softcap or math.inf) + bias
    cotangent = 3.0  # of a normal distribution
    on_logits = cotangent * (1 + 2 * v * case.v.shape[-1] ** 0.5)
    return (
        logits
        * {
            "out": v,
            "lse": 1.0,
            "gradient of q": scale * k * on_logits,
            "gradient of k": scale * q * on_logits,
            "gradient of v": cotangent,
            "gradient of bias": on_logits,
            "gradient of sinks": on_logits,
        }[what]
    )


def _largest(x: Tensor | None) -> float:
    return 0.0 if x is None or not x.numel() else float(x.double().nan_to_num(0, 0, 0).abs().max())


@given(cases())
@settings(max_examples=50)
def test_against_the_oracle(case: Case) -> None:
    assert check(case) >= {None, "reference", "blocked"}


@pytest.mark.long
@given(cases())
@settings(settings.get_profile("long"), max_examples=10_000)
def test_against_the_oracle_at_length(case: Case) -> None:
    assert check(case) >= {None, "reference", "blocked"}
