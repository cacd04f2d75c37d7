"""Functions that torch.compile treats apart: those it leaves its graph for, and those whose result is a constant."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._support.compiler import disable_compiler, mark_constant

calls: list[str] = []


def answer() -> int:
    calls.append("answer")
    return 3


constant = mark_constant(answer)


def test_a_marked_function_runs_while_a_compiler_traces_and_not_again() -> None:
    def times(x: Tensor) -> Tensor:
        return x * constant()

    calls.clear()
    compiled = torch.compile(times, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert calls == ["answer"]


def test_a_disabled_function_runs_in_each_call_outside_of_the_graph() -> None:
    outside = disable_compiler(lambda x: (calls.append("outside"), x + 1)[1], "a test")
    calls.clear()
    compiled = torch.compile(lambda x: outside(x * 2), backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert calls == ["outside"] * 3
