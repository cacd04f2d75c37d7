"""Each kind of bug, in three modules that share no code, is found by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


# Each bug in one of the modules; in the others in the long runs.
EACH_ONCE = [(bug, MADE[at % 3]) for at, bug in enumerate(BUGS)]


@pytest.mark.parametrize(
    ("bug", "make"),
    [
        pytest.param(bug, make, marks=() if (bug, make) in EACH_ONCE else pytest.mark.long)
        for bug in BUGS
        for make in MADE
    ],
)
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


class Mixed(nn.Module):
    """Attention of [B, T, E] with one column of weights for each feature (as Conv1D), or rows; some heads go wrong."""

    q: Tensor
    k: Tensor
    v: Tensor

    def __init__(self, kv_heads: int, defect: str, *, columns: bool) -> None:
        super().__init__()
        self.kv_heads, self.defect, self.columns = kv_heads, defect, columns
        for name, width in (("q", 32), ("k", kv_heads * 8), ("v", kv_heads * 8)):
            shape = (32, width) if columns else (width, 32)
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 32**0.5))
        self.out = nn.Linear(24 if defect == "narrow" else 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q, self.k, self.v)
        q, k, v = ((x @ (w if self.columns else w.T)).unflatten(-1, (-1, 8)).transpose(1, 2) for w in weights)
        k, v = (y.repeat_interleave(4 // self.kv_heads, 1) for y in (k, v))  # [B, 4, T, 8]
        if self.defect == "scores of one head":
            out = (q[:, :1] @ k[:, :1].mT * 8**-0.5).softmax(-1) @ v
        else:
            s = q @ k.mT * 8**-0.5
            out = (s[:, [0, 1, 1, 3]] if self.defect == "third as second" else s).softmax(-1) @ v
        heads = [out[:, h] for h in range(3 if self.defect == "narrow" else 4)]
        if self.defect == "overwritten":
            heads[0] = heads[1]
        return self.out(torch.cat(heads, -1))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("defect", "name"),
    [
        ("scores of one head", "heads-share-weights"),
        ("third as second", "heads-share-weights"),
        ("narrow", "heads-dropped"),
        ("overwritten", "heads-dropped"),
        ("", None),
    ],
)
def test_heads_that_share_weights_or_are_dropped(defect: str, name: str | None, kv_heads: int, columns: bool) -> None:
    torch.manual_seed(3)
    findings = check(Mixed(kv_heads, defect, columns=columns))
    assert findings.names == (() if name is None else (name,)), str(findings)
    if name is not None:
        at = {"narrow": "24 to 31", "overwritten": "0 to 7", "third as second": "16 to 23"}.get(defect, "8 to 31")
        assert f"{'columns' if columns else 'rows'} {at} of q [32, 32]" in str(findings).replace("\n  ", " ")


class SharedHead(nn.Module):
    """Attention of three heads that all use the keys, or the values, of head 0."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.shared = shared
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (y[:, :1].expand_as(y) if name == self.shared else y for name, y in (("key", k), ("value", v)))
        return self.out(((q @ k.mT * 8**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("shared", ["key", "value"])
def test_projections_of_heads_that_share_another_head_are_unused(shared: str) -> None:
    torch.manual_seed(3)
    findings = check(SharedHead(shared))
    assert findings.names == ("heads-dropped",), str(findings)
    evidence = f"changing rows 8 to 23 of {shared[0]}.weight [24, 24] does not affect the output"
    assert findings["heads-dropped"].seen == f"{evidence}; 3 query heads share 1 {shared} head"
