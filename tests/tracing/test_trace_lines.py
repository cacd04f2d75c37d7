"""trace: the lines of code that are shown, and the calls that operations belong to."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import trace
from headscope.tracing._written import tape

SOURCE = """
import torch


class Attends(torch.nn.Module):
    def forward(self, x):
        scores = x @ x.mT
        return scores.softmax(-1) @ x
"""


@pytest.fixture
def homework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "traced_homework.py").write_text(SOURCE)
    yield importlib.import_module("traced_homework")
    del sys.modules["traced_homework"]


def test_the_lines_of_a_file_that_was_edited_are_the_new_ones(homework: Any) -> None:
    x = torch.randn(1, 5, 3)
    assert "scores = x @ x.mT  #" in (trace(homework.Attends(), x).program or "")
    file = Path(homework.__file__)
    file.write_text(SOURCE.replace("x @ x.mT", "0.5 * (x @ x.mT)"))
    os.utime(file, (1, 1))
    importlib.reload(homework)
    steps = trace(homework.Attends(), x)
    assert "scale" in [row.step for row in steps.rows]
    assert "scores = 0.5 * (x @ x.mT)  #" in (steps.program or "")


def test_a_trace_does_not_hold_what_the_code_has_made(homework: Any) -> None:
    homework.loaded = torch.randn(7)
    loaded = weakref.ref(homework.loaded)
    trace(homework.Attends(), torch.randn(1, 5, 3))
    del homework.loaded
    gc.collect()
    assert loaded() is None


def test_each_call_of_a_function_has_its_own_number() -> None:
    def half(x: Tensor) -> Tensor:
        return x * 0.5  # the frame of the next call often has the address of this one

    x = torch.randn(1, 5, 3)
    reel = tape.Tape([], [x], frozenset([__file__]))
    with reel:
        for _ in range(3):
            half(x)
    assert [event.call for event in reel.events if event.name == "mul"] == [1, 2, 3]


def test_the_output_is_the_line_that_returns_it() -> None:
    class Prints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (2, 3)).transpose(1, 2) for f in (self.q, self.k, self.v))
            out = ((q @ k.mT / 3**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
            shape = self.o(out).shape  # as for a print
            return self.o(out).view(shape)

    steps = trace(Prints(), torch.randn(2, 7, 6))
    row = steps.row("output")
    assert "return self.o(out)" in (row.code or "")
    assert (row.note, row.held) == (None, True)
