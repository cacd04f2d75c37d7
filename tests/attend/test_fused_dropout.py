"""Dropout of ``backend="fused"``: both passes drop the same weights, whoever seeds the generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import headscope
from headscope._attend import dropout as seeds
from headscope._attend.backends import fused, fused_operators
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, causal, window
from support.fused_on_cpu import dropped, fused_on_cpu
from support.tolerance import assert_as_accurate

B, H, HKV, T, D, RATE = 2, 4, 2, 19, 16, 0.3
FLASH, BAND = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
EFFICIENT, EFFICIENT_BAND = "_scaled_dot_product_efficient_attention", "_efficient_attention_forward"
ENDS = (0, 5, 5, 12, T)

# mask, options, operator in half precision, operator in float32 ("" = refused)
CASES: dict[str, tuple[Mask | None, dict[str, Any], str, str]] = {
    "no mask": (None, {}, FLASH, EFFICIENT),
    "causal, sinks": (causal(), {"sinks": True}, FLASH, EFFICIENT),
    "window, sinks": (window(5), {"sinks": True}, BAND, EFFICIENT_BAND),
    "top-left causal, fewer queries": (Band(None, 0, offset=0), {"queries": 11}, FLASH, EFFICIENT),
    "causal, fewer queries": (causal(), {"queries": 11}, BAND, EFFICIENT_BAND),
    "causal & lengths": (causal() & KeyLengths(torch.tensor([7, T])), {}, EFFICIENT, EFFICIENT),
    "boolean tensor, bias": (Dense(torch.ones(T, T).tril(3) > 0), {"bias": True}, EFFICIENT, EFFICIENT),
    "documents & causal, sinks": (
        causal() & Documents.from_cu_seqlens(torch.tensor(ENDS)), {"batch": 1, "sinks": True}, BAND, ""
    ),
    "heads of 192": (causal(), {"head_dim": 192}, EFFICIENT, EFFICIENT),  # with dropout flash is narrower
}  # fmt: skip


@pytest.fixture(scope="module")
def ran() -> Iterator[list[str]]:
    with fused_on_cpu() as names:
        yield names


class Task:
    """The tensors of a case, and its results by ``attend`` and by the definition."""

    def __init__(self, mask: Mask | None, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        batch, queries, width = options.get("batch", B), options.get("queries", T), options.get("head_dim", D)
        draw = torch.Generator().manual_seed(1)
        sizes = (batch, H, queries, width), (batch, HKV, T, width), (batch, HKV, T, width)
        self.mask, self.dtype = mask, dtype
        self.qkv = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
        self.grads = [torch.randn(sizes[0], generator=draw).to(dtype), torch.randn(sizes[0][:3], generator=draw)]
        self.sinks = torch.randn(H, generator=draw) if "sinks" in options else None
        self.bias = torch.randn(H, queries, T, generator=draw).to(dtype) if "bias" in options else None

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        given = [*self.qkv] if self.sinks is None else [*self.qkv, self.sinks]
        return [(x if dtype is None else x.to(dtype)).clone().requires_grad_() for x in given]

    def attend(self, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        sinks = leaves[3] if len(leaves) > 3 else None
        given = {"mask": self.mask, "bias": self.bias, "sinks": sinks, "dropout": RATE, "backend": "fused"}
        return headscope.attend(*leaves[:3], **given)[:2]

    def differentiated(self, results: tuple[Tensor, Tensor], leaves: list[Tensor], with_lse: bool) -> list[Tensor]:
        count = 2 if with_lse else 1
        grads = [grad.to(x.dtype) for x, grad in zip(results, self.grads, strict=True)]
        taken = torch.autograd.grad(results[:count], leaves, grads[:count])
        return [*(x.detach() for x in results), *taken]

    def fused(self, with_lse: bool = True) -> list[Tensor]:
        leaves = self.leaves()
        return self.differentiated(self.attend(*leaves), leaves, with_lse)

    def defined(self, factors: Tensor, with_lse: bool, dtype: torch.dtype) -> list[Tensor]:
        """Return the results in the arithmetic of a dtype, with the factors of the weights given."""
        leaves = self.leaves(dtype)
        q, k, v = leaves[0], *(x.repeat_interleave(H // HKV, 1) for x in leaves[1:3])
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s if self.bias is None else s + self.bias.to(dtype)
        if self.mask is not None:
            s = s.masked_fill(~self.mask.dense(q.shape[0], H, q.shape[2], T), -torch.inf)
        sinks = s.new_full((H,), -torch.inf) if self.sinks is None else leaves[3]
        lse = torch.cat((s, sinks[:, None, None].expand(*s.shape[:3], 1)), -1).logsumexp(-1)
        out = ((s - lse[..., None]).exp() * factors.to(dtype)) @ v
        return self.differentiated((out, lse), leaves, with_lse)

    def factors(self) -> Tensor:
        """Return the factors of the last forward pass, [B, H, Q, K], 0 where keys were not passed to the kernel."""
        whole = torch.zeros(self.qkv[0].shape[0], H, self.qkv[0].shape[2], T)
        starts = ENDS if len(dropped) > 1 else (0,)
        for start, each in zip(starts, dropped, strict=False):
            whole[:, :, start : start + each.shape[2], start : start + each.shape[3]] = each
        return whole

    def check(self, found: list[Tensor], with_lse: bool = True) -> None:
        exact, plain = (self.defined(self.factors(), with_lse, dtype) for dtype in (torch.float64, torch.float32))
        rows = self.qkv[0].shape[0] * self.qkv[0].shape[2]
        for name, x, right, single in zip(
            ("out", "lse", "dq", "dk", "dv", "dsinks"), found, exact, plain, strict=False
        ):
            of = torch.float32 if name in ("lse", "dsinks") else self.dtype
            # δ of sinks is read from out, which has been rounded
            size = float(rows) if name == "dsinks" else 0.0
            assert_as_accurate(x, right, single.to(of), magnitude=size, dtype=self.dtype, message=name)


@pytest.mark.parametrize("with_lse", [True, False], ids=["gradient of lse", "gradient of out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(ran: list[str], name: str, dtype: torch.dtype, with_lse: bool) -> None:
    mask, options, half, single = CASES[name]
    task, expected = Task(mask, options, dtype), single if dtype == torch.float32 else half
    if not expected:
        with pytest.raises(ValueError, match="dropout: torch's memory-efficient kernels drop other weights of packed"):
            task.fused()
        return
    ran.clear()
    dropped.clear()
    task.check(task.fused(with_lse), with_lse)
    assert ran == [expected, expected.removesuffix("_forward") + "_backward"]
    kept = task.factors()[task.factors() > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - RATE)))


def test_lse_is_that_of_all_weights(ran: list[str]) -> None:
    q = torch.randn(B, H, T, D)
    out, lse, _ = headscope.attend(q, q, q, dropout=RATE, backend="fused")
    all_weights = headscope.attend(q, q, q, backend="fused")
    torch.testing.assert_close(lse, all_weights.lse)
    assert not torch.allclose(out, all_weights.out)


@contextmanager
def as_operator() -> Iterator[None]:
    """A dispatch mode: calls within it run as an operator of headscope's, as in a compiled graph."""
    with FlopCounterMode(display=False):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal, sinks", "window, sinks", "top-left causal, fewer queries"])
def test_as_an_operator_the_seed_determines_what_is_dropped(ran: list[str], name: str, dtype: torch.dtype) -> None:
    mask, options, half, single = CASES[name]
    task = Task(mask, options, dtype)
    torch.manual_seed(3)
    seeds.draw_seed()
    after_one_seed = torch.get_rng_state()
    torch.manual_seed(3)
    ran.clear()
    dropped.clear()
    with as_operator():
        found = task.fused()
    assert torch.equal(torch.get_rng_state(), after_one_seed), "the kernel's own draw has been undone"
    task.check(found)
    forward = single if dtype == torch.float32 else half
    assert ran == [forward, forward.removesuffix("_forward") + "_backward"]
    torch.manual_seed(3)
    with as_operator():
        again = task.fused()
    other = task.fused()
    torch.manual_seed(3)
    eager = task.fused()
    for x, same, too in zip(found, again, eager, strict=True):
        assert torch.equal(x, same)
        torch.testing.assert_close(x, too, rtol=0, atol=0)
    assert not torch.equal(other[0], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_capture_draws_from_the_generator_as_it_is(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(fused_operators, "can_seed", lambda device: False)
    task = Task(window(5), {"sinks": True}, dtype)
    torch.manual_seed(3)
    torch.rand(())
    dropped.clear()
    task.check(first := task.fused())
    assert not torch.equal(task.fused()[0], first[0])


def test_compiled_and_exported(ran: list[str]) -> None:
    task = Task(window(5), {"sinks": True}, torch.bfloat16)
    dropped.clear()
    leaves = task.leaves()
    results = torch.compile(task.attend, backend="aot_eager", fullgraph=True)(*leaves)
    task.check(task.differentiated(results, leaves, True))

    class Attending(torch.nn.Module):
        def forward(self, *leaves: Tensor) -> tuple[Tensor, Tensor]:
            return task.attend(*leaves)

    program = torch.export.export(Attending(), tuple(task.leaves()), strict=False)
    dropped.clear()
    leaves = task.leaves()
    task.check(task.differentiated(program.module()(*leaves), leaves, True))
    assert "seed" in str(torch.ops.headscope.attend_forward.default._schema)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("operator", [False, True])
def test_checkpointing_drops_the_same_again(ran: list[str], reentrant: bool, operator: bool) -> None:
    task = Task(window(5), {"sinks": True})

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        if not operator:
            return task.attend(*leaves)
        with as_operator():
            return task.attend(*leaves)

    torch.manual_seed(5)
    usual = task.fused() if not operator else task.differentiated(run(*(leaves := task.leaves())), leaves, True)
    torch.manual_seed(5)
    leaves = task.leaves()
    out, lse = checkpoint(run, *leaves, use_reentrant=reentrant)
    ((out * task.grads[0]).sum() + (lse * task.grads[1]).sum()).backward()
    for x, right in zip([out, lse, *(leaf.grad for leaf in leaves)], usual, strict=True):
        assert x is not None
        torch.testing.assert_close(x.detach(), right, rtol=0, atol=0)


def test_a_draw_of_another_thread_is_noticed(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def disturbed(generator: torch.Generator, seed: int) -> Iterator[None]:
        with seeds.seeded(generator, seed):
            torch.rand(())
            yield

    monkeypatch.setattr(fused_operators, "seeded", disturbed)
    dropped.clear()
    task = Task(window(5), {}, torch.bfloat16)
    task.check(task.fused())  # in eager mode the state that was drawn is saved
    for dtype in (torch.float32, torch.bfloat16):
        with as_operator(), pytest.raises(RuntimeError, match="dropout: another thread drew"):
            Task(None, {}, dtype).fused()


def test_no_setting_of_torch_changes_the_kernel(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_prefers_cudnn", lambda call, inputs: True)
    ran.clear()
    Task(None, {}, torch.bfloat16).fused()
    assert ran == [FLASH, FLASH + "_backward"]


def test_more_weights_than_the_kernels_can_number_are_refused(ran: list[str]) -> None:
    q = torch.zeros(1).expand(1, 2, 1 << 15, 8)
    with pytest.raises(ValueError, match="dropout: torch's memory-efficient kernels number the weights in 32 bits; B"):
        headscope.attend(q, q, q, dropout=RATE, backend="fused")


def test_a_part_of_a_larger_call_is_refused(ran: list[str]) -> None:
    task = Task(None, {})
    prepared = headscope._attend.prepare.prepare(*task.qkv, None, None, None, None, None, RATE, True, "fused")
    inputs = headscope._attend.interface.Inputs(*task.qkv, None, None)
    with pytest.raises(ValueError, match="backend: fused cannot drop the weights that a larger call would drop"):
        fused.attend(prepared.call, None, inputs, seeds.DropoutPlace(1, H, T))
