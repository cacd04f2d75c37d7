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


# ---------------------------------------------------------------- how accurate its gradients are


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm())


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 5.0}, {"bias": True}, {"group": 2}, {"sinks": -20.0}, {"lse": 1e-3}],
    ids=["plain", "softcap", "bias", "groups", "sinks", "gradient of lse"],
)
@pytest.mark.parametrize("keys", [2, 3])
def test_gradients_of_rows_with_few_keys_are_as_accurate_as_torch(keys: int, options: dict[str, Any]) -> None:
    """The rounding of dP must cancel in dP - δ: the gradients of a row are small where it sees few keys."""
    visible = torch.ones(64, keys, dtype=torch.bool).tril()
    visible[1:] = True  # row 0 sees key 0 alone
    group, softcap = options.get("group", 1), options.get("softcap")

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s if softcap is None else softcap * (s / softcap).tanh()
        s = (s + bias).masked_fill(~visible, -torch.inf)
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
        return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        extras = {name: x for name, x in (("bias", bias), ("sinks", sinks)) if name in options}
        result = headscope.attend(q, k, v, mask=visible, softcap=softcap, backend="blocked", **extras)
        return result.out, result.lse

    def gradients(compute: Any, inputs: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(compute(*leaves), leaves[:4] if "bias" in options else leaves[:3], grads)

    ratios = []
    for seed in range(15):
        torch.manual_seed(seed)
        q, k, v = (
            torch.randn(1, heads, length, 64) for heads, length in ((2, 64), (2 // group, keys), (2 // group, keys))
        )
        bias = torch.randn(1, 1, 64, keys) * ("bias" in options)
        inputs = [q, k, v, bias, torch.full((2,), options.get("sinks", -torch.inf))]
        grads = [torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64) * options.get("lse", 0)]
        grads[0][:, :, 1:] *= 0.01  # else the other rows would hide the first
        exact = gradients(plain, *([x.double() for x in tensors] for tensors in (inputs, grads)))
        theirs, mine = gradients(plain, inputs, grads), gradients(ours, inputs, grads)
        ratios.append([error(x, z) / error(y, z) for x, y, z in zip(mine, theirs, exact, strict=True)])
    median = torch.tensor(ratios).median(0)[0]
    assert (median <= 2).all(), f"errors of dq, dk, dv and dbias are {median.tolist()} times plain torch's"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_row_of_one_key_gives_q_and_k_no_gradient(dtype: torch.dtype, dropout: float) -> None:
    """Its weight is 1 whatever q and k are; so exactly 0, as on the native kernels."""
    leaves = [torch.randn(2, heads, 9, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    for mask in (Band(0, 0), Documents(torch.arange(9)[None]), Prefix(1)):
        out = headscope.attention(*leaves, mask=mask, dropout=dropout, backend="blocked")
        dq, dk, dv = torch.autograd.grad(out, leaves, torch.randn_like(out))
        assert not dq.any(), f"{mask}: dq up to {float(dq.abs().max()):.1e}"
        assert not dk.any(), f"{mask}: dk up to {float(dk.abs().max()):.1e}"
        assert dv.any()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_hidden_values_whose_products_overflow_change_no_gradient(dropout: float) -> None:
    """dP is infinite there, and 0 · inf would be NaN in the sum of a row."""
    q, k, v, grad = torch.randn(4, 1, 2, 9, 8).unbind()
    visible = torch.ones(9, 9, dtype=torch.bool)
    visible[:, 4] = False
    sinks = torch.zeros(2)
    results: list[tuple[Tensor, ...]] = []
    for hidden in (3e38, 0.0):
        v[:, :, 4] = hidden
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        torch.manual_seed(0)
        out = headscope.attention(*leaves[:3], mask=visible, sinks=leaves[3], dropout=dropout, backend="blocked")
        results.append(torch.autograd.grad(out, leaves, grad * 8))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert all(x.isfinite().all() for x in results[0])


@pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(8, 1, 1), (6, 3, 2), (6, 3, 3)])
def test_few_queries_of_a_group_are_as_accurate_as_torch(heads: int, kv_heads: int, queries: int) -> None:
    """In one product of all query heads of a group the errors were up to three times torch's."""
    ratios: list[float] = []
    for seed in range(9):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, h, n, 128) for h, n in ((heads, queries), (kv_heads, 65), (kv_heads, 65)))
        exact = plain(q.double(), k.double(), v.double())
        errors = [
            (out - exact).square().mean().sqrt()
            for out in (headscope.attention(q, k, v, scale=2.0, backend="blocked"), plain(q, k, v))
        ]
        ratios.append(float(errors[0] / errors[1]))
    assert sorted(ratios)[4] < 1.5


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.softmax(q @ k.mT * 2.0, -1) @ v


@pytest.mark.parametrize(("power", "size"), [(-100, 1e-20), (-100, 1e-12), (100, 1e8)])
def test_gradients_of_extreme_scales_stay_in_range(power: int, size: float) -> None:
    """Ordinary logits: the gradient of a logit times the scale would be 0 or infinite, that of q and k is neither."""
    torch.manual_seed(0)
    scale = 2.0**power
    q, k, v = (torch.randn(1, 2, 20, 16) * factor for factor in (scale**-0.5, scale**-0.5, 1.0))
    grad_out = torch.randn(1, 2, 20, 16) * size

    def gradients(q: Tensor, k: Tensor, backend: str) -> tuple[Tensor, ...]:
        q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
        out = headscope.attention(q, k, v.to(q.dtype), scale=scale, backend=backend)
        return torch.autograd.grad(out, (q, k), grad_out.to(q.dtype))

    exact = gradients(q.double(), k.double(), "reference")
    for got, right in zip(gradients(q, k, "blocked"), exact, strict=True):
        assert float((got - right).abs().max() / right.abs().max()) < 2e-6
