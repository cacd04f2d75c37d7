"""benchmarks/gpu_dropout.py: its comparison, on the CPU and on torch's operators for CUDA as emulated there."""

from __future__ import annotations

import sys

import pytest
import torch

from headscope._attend import select
from headscope._attend.backends import fused_operators
from support.fused_on_cpu import fused_on_cpu
from support.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import gpu_dropout as driver  # pyright: ignore[reportMissingImports]

sys.path.remove(str(BENCHMARKS))

CPU = torch.device("cpu")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("operator", [False, True])
def test_passes_that_drop_the_same_have_small_errors(monkeypatch: pytest.MonkeyPatch, operator: bool) -> None:
    for dtype, mask in driver.cases(CPU).values():
        ran, error = driver.compare(dtype, mask, CPU, operator)
        assert not ran.startswith("fused")
        assert error < LIMITS[dtype]
    with fused_on_cpu():
        monkeypatch.setitem(select.ORDER, "cpu", ("fused", "blocked"))
        for dtype, mask in driver.cases(CPU).values():
            ran, error = driver.compare(dtype, mask, CPU, False)
            assert ran.startswith("fused: ")
            assert error < LIMITS[dtype], ran


def test_a_backward_pass_with_another_state_has_large_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fused_operators.state_of_seed
    monkeypatch.setattr(fused_operators, "state_of_seed", lambda kernel, q, seed: right(kernel, q, seed + 1))
    with fused_on_cpu():
        monkeypatch.setitem(select.ORDER, "cpu", ("fused", "blocked"))
        with pytest.raises(RuntimeError, match="dropout: another thread drew"):
            driver.compare(torch.float32, None, CPU, True)
        monkeypatch.setattr(fused_operators, "_checked", lambda kernel, q, state: right(kernel, q, 1))
        assert driver.compare(torch.float32, None, CPU, False)[1] > 0.1
