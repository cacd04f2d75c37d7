"""Each kind of bug, in three modules that share no code, is found by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headscope import check
from support.buggy.catalogue import BUGS, CAUSAL
from support.buggy.functional_attention import Functional
from support.buggy.head_loops import Loops
from support.buggy.packed_projection import Packed

WIDTH, HEADS = 24, 3  # D = 8


def packed(bug: str) -> tuple[Any, dict[str, Any]]:
    said: dict[str, Any] = {"mask_means": "keep", "batch_first": True}
    if bug == "padding on queries":
        said["call"] = lambda module, x, mask: module(x, mask)
    return Packed(WIDTH, HEADS, bug in CAUSAL, 0.2, bug), said


def loops(bug: str) -> tuple[Any, dict[str, Any]]:
    said: dict[str, Any] = {"mask_means": "hide", "batch_first": True, "decode": lambda module, x: module.generated(x)}
    return Loops(WIDTH, HEADS, bug in CAUSAL, 0.2, bug), {**said, **({} if bug in CAUSAL else {"decode": None})}


def functional(bug: str) -> tuple[Any, dict[str, Any]]:
    said: dict[str, Any] = {
        "mask_means": "keep",
        "batch_first": False,
        "decode": (lambda module, x: module.step_by_step(x)) if bug in CAUSAL else None,
    }
    return Functional(WIDTH, HEADS, 2, bug in CAUSAL, 0.2, bug), said


MADE: list[Callable[[str], tuple[Any, dict[str, Any]]]] = [packed, loops, functional]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_by_name(bug: str, make: Callable[[str], tuple[Any, dict[str, Any]]]) -> None:
    torch.manual_seed(3)
    module, said = make(bug)
    if bug == "one head":
        said["heads"] = HEADS
    found = check(module, causal=True if bug in CAUSAL else None, **said)
    assert found.names[:1] == (BUGS[bug],), str(found)
    assert not [what for what in found.not_tested if what.startswith("the rest of")], "a probe has raised"


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("causal", ["", "causal"])
def test_without_a_bug_nothing_is_found(causal: str, make: Callable[[str], tuple[Any, dict[str, Any]]]) -> None:
    module, said = make(causal)
    found = check(module, causal=True if causal else None, **said)
    assert found.names == (), str(found)
    assert len(found) == 0
    assert not found
