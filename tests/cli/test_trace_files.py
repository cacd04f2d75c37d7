"""The trace of a class of a file: the input that is tried, and the call that ``check.toml`` states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headscope.cli._shared.traces import parse_trace, trace_subject


class Masked(nn.Module):
    """Attention of three heads that requires a mask, True = visible."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (3, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT / 8**0.5).masked_fill(mask == 0, -1e9).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def test_a_required_mask_is_causal_in_the_call_that_was_stated() -> None:
    def call(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return module(x, mask)

    found = parse_trace(trace_subject(Masked(), {}, {"call": call}, 0))
    row = found.row("mask")
    assert (list(found.missing), list(row.shape)) == ([], [2, 3, 10, 10])
    assert row.note == "causal: 330 of 600 pairs are visible (55%)"
    assert all(each.held for each in found.rows)


def test_a_call_that_works_without_a_mask_gets_none() -> None:
    masks: list[Tensor | None] = []

    def call(module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        masks.append(mask)
        return module(x, torch.ones(x.shape[1], x.shape[1]))

    found = parse_trace(trace_subject(Masked(), {"seq": 5}, {"call": call}, 0))
    assert masks == [None]
    assert list(found.row("weights").shape) == [2, 3, 5, 5]


def test_a_call_that_fails_is_reported_as_the_first_that_had_a_mask() -> None:
    def call(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return module(x, mask[:, 0])

    message = (
        r"module: the call with x \[2, 10, 24\] and a causal mask failed: test_trace_files.py, line 21: .* raises R"
    )
    with pytest.raises(ValueError, match=message):
        trace_subject(Masked(), {}, {"call": call}, 0)
