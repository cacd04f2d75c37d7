"""Each kind of bug, in three modules that share no code, is found by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.buggy.functional_attention import Functional
from support.buggy.head_loops import Loops
from support.buggy.packed_projection import Packed

from headscope import check

WIDTH, HEADS = 24, 3  # D = 8
CAUSAL = {
    *("causal", "causal forgotten", "one ahead", "strict", "inverted", "only itself", "multiplied", "added as bool"),
    *("masked after", "first head", "first entry", "cache in front", "fill of -1e9"),
}  # bugs of, or beside, a causal mask
BUGS: dict[str, str] = {
    "view without transpose": "heads-split-wrong",
    "merge without transpose": "heads-merged-wrong",
    "heads summed": "heads-not-joined",
    "heads interleaved": "heads-interleaved",
    "one head": "heads-not-split",
    "keys are queries": "keys-are-queries",
    "values are keys": "values-are-keys",
    "values not projected": "values-not-projected",
    "no output projection": "no-output-projection",
    "batches mixed": "batches-mixed",
    "batch and length swapped": "batch-and-length-swapped",
    "softmax over queries": "softmax-over-queries",
    "softmax over heads": "softmax-over-heads",
    "no softmax": "no-softmax",
    "softmax by hand": "softmax-overflows",
    "scale after softmax": "scaled-after-softmax",
    "no scale": "scale-missing",
    "scale without root": "scale-without-root",
    "scaled twice": "scaled-twice",
    "scale multiplied": "scale-multiplied",
    "scale of the model": "scale-sqrt-embed-dim",
    "scale of the length": "scale-of-length",
    "causal forgotten": "looks-into-the-future",
    "one ahead": "sees-one-ahead",
    "strict": "cannot-see-itself",
    "inverted": "mask-inverted",
    "only itself": "cannot-see-the-past",
    "multiplied": "mask-fill-too-small",
    "added as bool": "bool-mask-added",
    "masked after": "mask-after-softmax",
    "first head": "mask-on-some-heads",
    "first entry": "mask-on-some-batches",
    "mask inverted": "mask-inverted",
    "mask ignored": "mask-ignored",
    "padding on queries": "mask-on-queries",
    "fill of -inf": "nan-on-empty-row",
    "fill of -1e9": "fp16-overflow",
    "dropout in eval": "dropout-in-eval",
    "dropout before softmax": "dropout-before-softmax",
    "state": "state-between-calls",
    "input in place": "input-modified",
    "detached": "gradient-blocked",
    "squeeze": "fails-on-batch-of-one",
    "cache in front": "decoding-differs",
    "heads averaged": "weights-discarded",
}


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
