"""The native kernels of ``csrc/``: forward and backward, every option, in memory linear in the length."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from headscope._attend.call import MOST_RULES, Call
from headscope._attend.dropout import DropoutPlace, Seed, draw_seed
from headscope._attend.interface import (
    ForwardPass,
    Inputs,
    Pair,
    Repeat,
    accumulate_dtype,
    is_lazy,
    once,
    readable,
    refuse_batched,
    refuse_tangents,
)
from headscope._attend.visibility import gradients_of_bad_inputs, hides
from headscope._support.autograd import Function, outside_transforms
from headscope.masks import Plan, RuleKind

name = "cpu"  # the name that users pass; its device is the CPU, too
attend_careful = None

CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
MOST_POSITIONS = 2**31  # in a mask, positions are 32-bit numbers


def _load() -> tuple[Any, str]:
    """Return the extension, or None; and the error if it was built and cannot be loaded."""
    try:
        return import_module("headscope._native"), ""
    except ModuleNotFoundError:  # not built
        return None, ""
    except ImportError as error:
        return None, str(error)


extension, unloadable = _load()


def refuses(call: Call) -> list[str]:
    """Return why the native kernels do not support a call."""
    reasons: list[str] = []
    if call.device != "cpu":
        reasons.append(f"device: the native kernels run on the CPU, not on {call.device}")
    elif extension is None:
        why = f"cannot be loaded: {unloadable}" if unloadable else "is not installed"
        reasons.append(f"build: the native extension {why}")
    if call.in_compiled_func:
        reasons.append(
            "torch.func: within torch.compile, which does not trace the gradients of the native operators there"
        )
    if call.form == "subclass":
        reasons.append("tensors: are of a subclass of Tensor; the native kernels read plain memory")
    if call.rest == "many":
        reasons.append(f"mask: has more than {MOST_RULES} parts")
    # with symbolic sizes, the operator checks when it runs: a check here would specialise an exported program
    if call.form != "traced" and (call.queries >= MOST_POSITIONS or call.keys >= MOST_POSITIONS):
        reasons.append(f"sizes: {MOST_POSITIONS:,} or more queries or keys")
    return reasons


def attend(call: Call, plan: Plan | None, inputs: Inputs, seed: Seed | None = None) -> tuple[Tensor, Tensor | None]:
    """Return out, and lse if requested. Without ``seed``, torch's generator draws the dropout seed."""
    if seed is None:
        seed = int(draw_seed().item()) if call.dropout else 0
    with torch.no_grad():
        out, lse, _ = run_forward(call, plan, inputs, seed, need_lse=call.lse or call.grad or call.bias_grad)
    return _tied(call, plan, inputs, seed, out, lse)


def attend_finite(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor | None] | None:
    """Attend without dropout; return None if NaN or infinity may have reached rows where it is masked."""
    with torch.no_grad():
        out, lse, finite = run_forward(call, plan, inputs, 0, need_lse=call.lse or call.grad or call.bias_grad)
    if not finite and hides(call):
        return None
    return _tied(call, plan, inputs, 0, out, lse)


def _tied(
    call: Call, plan: Plan | None, inputs: Inputs, seed: Seed, out: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return out and lse with their gradients, if the call has any."""
    if not (call.grad or call.bias_grad) or lse is None:
        return out, lse
    tied = _Differentiable.apply((ForwardPass(call, plan, seed), call.lse, out, lse), *inputs)
    return tied if isinstance(tied, tuple) else (tied, None)


def repeater(call: Call, plan: Plan | None, inputs: Inputs) -> Repeat | None:
    """Return a fast path for repeated calls with other tensors of the same sizes, dtypes and strides.

    It takes q, k, v, and bias and sinks if there are any, and returns out, and lse if the call requests it. It returns
    None if NaN or infinity may have reached rows where it is masked. It also returns None if a tensor has no memory:
    the full path then materialises a ZeroTensor, and raises for a freed storage. Calls with dropout, with rules in
    addition to the spans of a mask, or with tensors that must be copied first, do not have a fast path.
    """
    dtype, (q, k, v, bias, sinks) = accumulate_dtype(call.dtype), inputs
    copied = not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 or any(
        x is not None and (x.dtype != dtype or x.stride()[-1:] not in ((), (1,))) for x in (bias, sinks)
    )
    copied = copied or any(x is not None and is_lazy(x) for x in (q, k, v, bias, sinks))
    if copied or call.dropout or (plan is not None and plan.rest is not None):
        return None
    kernel_call = to_kernel_call(call, plan, Inputs(q, k, v, four_axes(bias), sinks), 0)
    kernel_call.held = kernel_call.held[5:6]  # the spans; all other tensors change from call to call
    repeat, threads, empty = extension.repeat, torch.get_num_threads, torch.empty_like
    like = without_memory(rows_like(call, call.queries, call.heads, call.v_head_dim))
    lse_like = without_memory(torch.empty((call.batch, call.heads, call.queries), dtype=dtype, device="cpu"))
    hidden = hides(call)
    forward, grad, returns_lse = ForwardPass(call, plan, 0), call.grad or call.bias_grad, call.lse
    need_lse, beside = grad or returns_lse, bias is not None or sinks is not None

    def repeat_call(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        out, lse = empty(like), empty(lse_like) if need_lse else None
        bias_at = 0 if bias is None else bias.data_ptr()
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        if beside and ((bias is not None and not bias_at) or (sinks is not None and not sinks_at)):
            return None
        try:
            finite = repeat(
                kernel_call.call, q.data_ptr(), k.data_ptr(), v.data_ptr(), bias_at, sinks_at, out.data_ptr(),
                0 if lse is None else lse.data_ptr(), threads(),
            )  # fmt: skip
        except ValueError:  # q, k or v has no memory
            return None
        if not finite and hidden:
            return None
        if not grad or lse is None:
            return out, lse
        results = (forward, returns_lse, out, lse)
        tied = _tie(results, q, k, v, bias, sinks) if beside else _tie(results, q, k, v)
        return tied if isinstance(tied, tuple) else (tied, None)

    return repeat_call


def without_memory(tensor: Tensor) -> Tensor:
    """Return the tensor without its memory: ``empty_like`` of the result is faster than ``empty_strided``."""
    tensor.untyped_storage().resize_(0)
    return tensor


class _Differentiable(Function[Tensor | tuple[Tensor, Tensor]]):
    """An autograd node that connects computed out and lse to their inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        results: tuple[ForwardPass, bool, Tensor, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *beside: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.forward_pass, returns_lse, out, lse = results
        masks = () if ctx.forward_pass.plan is None else ctx.forward_pass.plan.read_again()
        ctx.save_for_backward(q, k, v, out, lse, *beside, *masks)  # beside: bias and sinks, if any
        if not returns_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        refuse_batched(grad_out, grad_lse)
        refuse_tangents(grad_out, grad_lse)
        saved = ctx.saved_tensors  # to be asked for once: checkpointing makes them anew
        q, k, v, out, lse, *rest = saved
        beside = rest[: len(ctx.needs_input_grad) - 4]
        bias, sinks = beside or (None, None)
        inputs, needed = Inputs(q, k, v, four_axes(bias), sinks), ctx.needs_input_grad[4:] or (False, False)
        with torch.no_grad():
            dq, dk, dv, dbias, dsinks = gradients(ctx.forward_pass, inputs, (out, lse), (grad_out, grad_lse), needed)
        dbias = dbias.reshape(bias.shape) if dbias is not None and bias is not None else None  # the caller's axes
        gradients_of_inputs = (dq, dk, dv, dbias, dsinks)[: 3 + len(beside)]
        return None, *once(gradients_of_inputs, grad_out, grad_lse, *saved)


_tie = outside_transforms(_Differentiable)


def four_axes(bias: Tensor | None) -> Tensor | None:
    """Return a bias as backends expect it: [B, H, Q, K], each axis of its size or 1."""
    return bias if bias is None or bias.ndim == 4 else bias[(None,) * (4 - bias.ndim)]


def gradients(
    forward: ForwardPass, inputs: Inputs, results: tuple[Tensor, Tensor], grads: Pair, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, and of bias and sinks where they are needed.

    Args:
        forward: the forward pass.
        inputs: its inputs; see ``gradients_of_bad_inputs`` where q, k or v hold NaN or infinity.
        results: its out and lse.
        grads: those of out and lse, or None.
        needed: whether those of bias and sinks are.
    """
    gradients_of_inputs, finite = compute_gradients(forward, inputs, results, grads, needed)
    if finite:  # a NaN multiplied by anything, even a weight of 0, would be in one of them
        return gradients_of_inputs

    def again(clean: Inputs, grads: Pair) -> tuple[Tensor | None, ...]:
        out, lse, _ = run_forward(forward.call, forward.plan, clean, forward.seed, need_lse=True)
        assert lse is not None  # requested
        return compute_gradients(forward, clean, (out, lse), grads, needed)[0]

    return gradients_of_bad_inputs(forward, inputs, grads, again) or gradients_of_inputs


def compute_gradients(
    forward: ForwardPass,
    inputs: Inputs,
    results: tuple[Tensor, Tensor],
    grads: Pair,
    needed: tuple[bool, ...],
    entropy: tuple[Tensor, Tensor] | None = None,
) -> tuple[tuple[Tensor | None, ...], bool]:
    """Return the gradients, and whether all of dq, dk and dv is finite.

    Args:
        forward, inputs, results, grads, needed: as for ``gradients``.
        entropy: the gradient of the entropy of each row, and its product with entropy - mass, contiguous [B, H, Q] as
            lse; or None. It excludes dropout.
    """
    call = forward.call
    out, lse = (
        unit_stride(results[0]),
        readable(results[1]).contiguous(),
    )  # hooks on saved tensors may have changed their strides
    grad_out = torch.zeros_like(out) if grads[0] is None else unit_stride(grads[0])
    grad_lse = readable(grads[1]).contiguous() if grads[1] is not None else None
    dq = rows_like(call, call.queries, call.heads, call.head_dim)
    dk = rows_like(call, call.keys, call.kv_heads, call.head_dim)
    dv = rows_like(call, call.keys, call.kv_heads, call.v_head_dim)
    dbias = None
    if inputs.bias is not None and needed[0]:
        repeats = tuple(inputs.bias.shape) != (call.batch, call.heads, call.queries, call.keys)
        dbias = torch.zeros(inputs.bias.shape, dtype=torch.float64 if repeats else lse.dtype, device="cpu")
    sink_gradients = torch.empty_like(lse) if inputs.sinks is not None and needed[1] else None
    kernel_call = to_kernel_call(
        call, forward.plan, inputs, forward.seed
    )  # a name, so the tensors behind its addresses stay alive
    finite = extension.backward(
        kernel_call.call, out.data_ptr(), out.stride(), lse.data_ptr(),
        grad_out.data_ptr(), grad_out.stride(), address(grad_lse), dq.data_ptr(), dq.stride(),
        dk.data_ptr(), dk.stride(), dv.data_ptr(), dv.stride(), address(dbias), _strides(dbias),
        dbias is not None and dbias.dtype == torch.float64, address(sink_gradients),
        *((0, 0) if entropy is None else (x.data_ptr() for x in entropy)), torch.get_num_threads(),
    )  # fmt: skip
    dsinks = None
    if inputs.sinks is not None and sink_gradients is not None:
        dsinks = sink_gradients.sum((0, 2)).to(inputs.sinks.dtype)
    if dbias is not None and inputs.bias is not None:
        dbias = dbias.to(inputs.bias.dtype)
    return (dq, dk, dv, dbias, dsinks), finite


class _KernelCall:
    """A call of the extension, and the tensors that its addresses point to."""

    def __init__(self, call: Any, held: tuple[Tensor | None, ...]) -> None:
        self.call = call
        self.held = held


def run_forward(
    call: Call, plan: Plan | None, inputs: Inputs, seed: Seed, need_lse: bool
) -> tuple[Tensor, Tensor | None, bool]:
    """Return out, lse, and whether all of out is finite."""
    out = rows_like(call, call.queries, call.heads, call.v_head_dim)
    lse = None
    if need_lse:
        rows = (call.batch, call.heads, call.queries)
        make = torch.empty if call.needed is None else torch.zeros
        lse = make(rows, dtype=accumulate_dtype(call.dtype), device="cpu")
    kernel_call = to_kernel_call(call, plan, inputs, seed)  # a name, so the tensors behind its addresses stay alive
    finite = extension.forward(kernel_call.call, out.data_ptr(), address(lse), torch.get_num_threads())
    return out, lse, finite


def rows_like(call: Call, length: int, heads: int, width: int) -> Tensor:
    """Return an empty [B, heads, length, width] strided as [B, length, heads, width], so merging heads is free."""
    sizes = (call.batch, heads, length, width)
    if call.needed is not None:  # pages of zeros that nobody writes take no memory
        return torch.zeros((call.batch, length, heads, width), dtype=call.dtype, device="cpu").transpose(1, 2)
    return torch.empty_strided(sizes, row_strides(length, heads, width), dtype=call.dtype, device="cpu")


def row_strides(length: int, heads: int, width: int) -> tuple[int, int, int, int]:
    """Return the strides of ``rows_like``."""
    return (length * heads * width, width, heads * width, 1)


def to_kernel_call(call: Call, plan: Plan | None, inputs: Inputs, seed: Seed = 0) -> _KernelCall:
    """Return a call in the form of the extension."""
    q, k, v = (unit_stride(x) for x in inputs[:3])
    dtype = accumulate_dtype(call.dtype)
    bias = readable(inputs.bias.detach().to(dtype)) if inputs.bias is not None else None
    sinks = readable(inputs.sinks.detach().to(dtype)).contiguous() if inputs.sinks is not None else None
    for name, x in (("bias", bias), ("sinks", sinks)):
        if x is not None and x.numel() and not x.data_ptr():  # address 0 would mean that the tensor is absent
            raise ValueError(f"{name}: its storage is empty, expected a tensor that holds its data")
    spans, spans_at, rules = None, (0, 0, 0), _Rules()
    if plan is not None and not plan.everything:
        spans = readable(plan.spans.to(torch.int32)).contiguous()
        spans_at = _reach(spans)
        if plan.rest is not None:
            plan.rest.write_rules(rules, (call.batch, call.heads, call.queries, call.keys))
    sizes = (call.batch, call.heads, call.kv_heads, call.queries, call.keys, call.head_dim, call.v_head_dim)
    needed = None if call.needed is None else torch.tensor(call.needed, dtype=torch.int64, device="cpu")
    number, place = (seed.seed, seed[1:]) if isinstance(seed, DropoutPlace) else (seed, (0, 0, 0, 0, 0))
    call_of_kernels = extension.Forward(
        sizes, CODES[call.dtype], q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride(),
        address(bias), _strides(bias), address(sinks), address(spans), spans_at, rules.program,
        call.scale, call.softcap or 0.0, call.dropout, number, place,
        row_strides(call.queries, call.heads, call.v_head_dim), call.uniform, address(needed),
        0 if needed is None else len(needed),
    )  # fmt: skip
    return _KernelCall(call_of_kernels, (q, k, v, bias, sinks, spans, needed, *rules.tensors))


class _Rules:
    """The rest of a plan as the extension's program: postfix, each rule with up to two tensors.

    Attributes:
        program: kind, address and strides of the first tensor, and those of the second.
        tensors: the tensors that the addresses point to.
    """

    def __init__(self) -> None:
        self.program: list[tuple[int, int, tuple[int, ...], int, tuple[int, ...]]] = []
        self.tensors: list[Tensor] = []

    def add_spans(self, spans: Tensor) -> None:
        spans = readable(spans.to(torch.int32)).contiguous()
        self._add(RuleKind.SPANS, spans, (*_reach(spans), 0))

    def add_ids(self, q_ids: Tensor, k_ids: Tensor) -> None:
        q_ids, k_ids = readable(q_ids.long()), readable(k_ids.long())
        self._add(RuleKind.SAME_ID, q_ids, (*_strides(q_ids), 0, 0), k_ids, (*_strides(k_ids), 0, 0))

    def add_table(self, table: Tensor) -> None:
        table = readable(table)[(None,) * (4 - table.ndim)]
        self._add(RuleKind.BYTES, table, _strides(table))

    def join(self, kind: RuleKind) -> None:
        self.program.append((int(kind), 0, (0, 0, 0, 0), 0, (0, 0, 0, 0)))

    def _add(
        self, kind: RuleKind, first: Tensor, strides: tuple[int, ...],
        second: Tensor | None = None, second_strides: tuple[int, ...] = (0, 0, 0, 0),
    ) -> None:  # fmt: skip
        self.tensors += [first] if second is None else [first, second]
        self.program.append((int(kind), first.data_ptr(), strides, address(second), second_strides))


def _reach(spans: Tensor) -> tuple[int, int, int]:
    """Return strides over batch and queries, and the number of spans of a row."""
    batch, queries, _, _ = _strides(spans)
    return batch, queries, spans.shape[2]


def unit_stride(x: Tensor) -> Tensor:
    """Return x, or a copy, as a kernel reads it: ``readable``, with a last stride of 1."""
    x = readable(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def address(x: Tensor | None) -> int:
    """Return the address of its data; 0 for None."""
    return 0 if x is None else x.data_ptr()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Return strides with 0 along axes of size 1, so that these repeat."""
    return (
        tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)) if x is not None else (0, 0, 0, 0)
    )
