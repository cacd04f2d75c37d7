"""The blocked backend: how a call is cut, and that its memory grows with the length and no faster."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headscope
from headscope._attend.backends import blocked
from headscope._attend.call import Options, check_call
from headscope.masks import Band, Dense, Documents, Mask, Plan, Prefix, causal, window


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors alive that operations made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage(), before)
        return result

    def _count(self, storage: Any, before: set[int]) -> None:
        if storage._cdata in self.known or storage._cdata in before:
            return
        self.known.add(storage._cdata)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


def peak_bytes(length: int, *, gradient: bool, mask: Mask | None = None, **said: Any) -> int:
    """The most that one attention of the given length holds beside its inputs."""
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=gradient) for _ in "qkv")
    if mask is not None:
        mask.plan(1, 2, length, length)
    with Memory() as memory:
        out, lse, _ = headscope.attend(q, k, v, mask=mask, backend="blocked", **said)
        if gradient:
            (out.sum() + lse.sum()).backward()
    return memory.peak


SAID: dict[str, Any] = {
    "nothing": {},
    "causal": {"mask": causal()},
    "window, sinks": {"mask": window(64) | Prefix(3), "sinks": torch.zeros(2)},
    "softcap": {"softcap": 5.0},
    "bias of keys": {"bias": torch.zeros(1, 1, 1, 1)},
    "dropout": {"dropout": 0.2},
}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize("name", SAID)
def test_memory_is_linear_in_the_length(name: str, gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK", 1 << 11)
    short, long = (peak_bytes(length, gradient=gradient, **SAID[name]) for length in (96, 384))
    assert long <= 4 * short, f"{long / short:.1f} times the memory for 4 times the length"
    assert long < 4 * 2 * 384**2, "the matrix of weights would be more"


def test_memory_is_linear_under_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK", 1 << 11)
    short, long = (
        peak_bytes(length, gradient=True, mask=Documents(torch.arange(length)[None] % 3) & causal())
        for length in (128, 512)
    )
    assert long <= 4 * short, f"{long / short:.1f} times the memory for 4 times the length"


def test_the_measure_sees_a_matrix() -> None:
    """What the tests above rest on: the reference is quadratic, and is seen to be."""
    peaks = []
    for length in (128, 512):
        q = torch.randn(1, 2, length, 8)
        with Memory() as memory:
            headscope.attend(q, q, q, backend="reference")
        peaks.append(memory.peak)
    assert peaks[1] > 8 * peaks[0]
    assert peaks[1] > 4 * 2 * 512**2


# ---------------------------------------------------------------- how a call is cut


def described(sizes: tuple[int, int, int, int], kv_heads: int, mask: Mask | None) -> tuple[Any, Plan | None]:
    batch, heads, queries, keys = sizes
    q = torch.empty(batch, heads, queries, 2, device="meta")
    k = torch.empty(batch, kv_heads, keys, 2, device="meta")
    call = check_call(q, k, k, None, None, Options(mask, None, None, 0.0, True))
    return call, None if mask is None else mask.plan(*sizes)


@pytest.mark.parametrize("block", [1, 7, 64, 1000, 1 << 19])
@pytest.mark.parametrize("mask", [None, causal(), Band(3, 1, offset=-2), Prefix(2) | window(2)], ids=str)
def test_blocks_cover_what_may_be_seen_once(mask: Mask | None, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK", block)
    sizes = (3, 6, 11, 13)
    for kv_heads in (1, 2, 6):
        call, plan = described(sizes, kv_heads, mask)
        covered = torch.zeros(sizes, dtype=torch.long)
        rows = torch.zeros(sizes[:3], dtype=torch.long)
        numbers = []
        for each in blocked.blocks(call, plan):
            covered[each.b, each.heads(call.group), each.i, each.j] += 1
            rows[each.b, each.heads(call.group), each.i] += 1
            numbers.append(each.number)
            logits = covered[each.b, each.heads(call.group), each.i].numel()
            assert logits <= max(block, call.group * sizes[3]), f"{logits} logits in a block of {block}"
        assert (rows == 1).all(), "each row in one block"
        assert covered.max() == 1
        seen = torch.ones(sizes, dtype=torch.bool) if mask is None else mask.dense(*sizes)
        assert (covered[seen] == 1).all(), "a key that may be seen was left out"
        assert numbers == list(range(len(numbers)))


def test_keys_that_nobody_sees_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the spans of its rows a block has no keys at all."""
    monkeypatch.setattr(blocked, "BLOCK", 1 << 10)
    call, plan = described((1, 1, 512, 512), 1, window(16))
    widths = [each.j.stop - each.j.start for each in blocked.blocks(call, plan)]
    rows = [each.i.stop - each.i.start for each in blocked.blocks(call, plan)]
    assert all(width <= 16 + row for width, row in zip(widths, rows, strict=True))
    call, plan = described((1, 1, 64, 512), 1, Prefix(5))
    assert {(each.j.start, each.j.stop) for each in blocked.blocks(call, plan)} == {(0, 5)}
    call, plan = described((1, 1, 64, 512), 1, Band(0, 0, offset=600))
    assert all(each.j.start == each.j.stop for each in blocked.blocks(call, plan))


@pytest.mark.parametrize("block", [1, 50, 700])
def test_the_size_of_blocks_does_not_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(2, 6, 11, 5).double(), torch.randn(2, 3, 13, 5).double(), torch.randn(2, 3, 13, 7).double()
    said: dict[str, Any] = {
        "mask": causal() & Dense(torch.rand(2, 6, 11, 13) < 0.7) | Prefix(1),
        "bias": torch.randn(2, 1, 11, 1).double(),
        "sinks": torch.randn(6).double(),
        "softcap": 3.0,
        "backend": "blocked",
    }
    leaves = [x.requires_grad_() for x in (q, k, v, said["bias"], said["sinks"])]

    def results() -> tuple[Tensor, ...]:
        out, lse, _ = headscope.attend(q, k, v, **said)
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)

    whole = results()
    monkeypatch.setattr(blocked, "BLOCK", block)
    torch.testing.assert_close(results(), whole)
