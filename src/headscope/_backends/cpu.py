"""The native kernels of ``csrc/``: forward and backward, every option, in memory linear in the length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headscope._backends import Inputs, accumulate_dtype, once
from headscope._call import Call
from headscope.masks import And, Dense, Documents, Mask, Or, Plan

name = "cpu"

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
TASKS = 8  # of the backward pass, where there are fewer heads: enough for eight threads


def _load() -> Any:
    try:
        from headscope import _native  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    except ImportError:
        return None
    return _native


native = _load()
"""The extension, or None where it was not built."""


def refuses(call: Call) -> list[str]:
    """What the native kernels cannot do."""
    reasons: list[str] = []
    if call.device != "cpu":
        reasons.append(f"device: these kernels run on the CPU, not on {call.device}")
    elif native is None:
        reasons.append("build: the native extension is not installed")
    if call.opaque:
        reasons.append("tensors: of a subclass, or under torch.compile or torch.func; these kernels read plain memory")
    return reasons


def attend(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """out, and lse if it is asked for."""
    seed = int(torch.randint(2**62, (), device="cpu").item()) if call.dropout else 0
    if not (call.grad or call.bias_grad):
        return _forward(_describe(call, plan, inputs, seed), call, call.lse)
    return _Attend.apply(call, plan, seed, *inputs)  # pyright: ignore[reportReturnType]


def repeater(call: Call, plan: Plan | None, q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Tensor | None] | None:
    """A short way for a call that will come again with other tensors of the same sizes, dtypes and strides.

    It takes q, k, v and returns out; or None where NaN or infinity may have reached what must not see it. There is none
    for calls with gradients, lse, or tensors beside q, k, v.
    """
    if (
        call.grad
        or call.lse
        or call.dropout
        or call.sinks
        or call.bias is not None
        or (plan is not None and plan.rest is not None)
    ):
        return None
    if (plan is not None and plan.rest is not None) or not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return None
    described = _describe(call, plan, Inputs(q, k, v, None, None), 0)
    described.held = described.held[5:6]  # the spans; q, k and v will be others
    repeat, hides, dtype = native.repeat, call.spans != "all", call.dtype
    sizes, strides = (
        (call.batch, call.heads, call.queries, call.v_head_dim),
        _row_strides(call.queries, call.heads, call.v_head_dim),
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        out = torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")  # whatever the default device
        finite = repeat(
            described.native, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), torch.get_num_threads()
        )
        return out if finite or not hides else None

    return run


class _Attend(torch.autograd.Function):
    """The kernels with their gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, plan: Plan | None, seed: int, *tensors: Any) -> tuple[Tensor, Tensor]:
        out, lse = _forward(_describe(call, plan, Inputs(*tensors), seed), call, need_lse=True)
        assert lse is not None
        ctx.call, ctx.plan, ctx.seed = call, plan, seed
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors  # to be asked for once: checkpointing makes them anew
        with torch.no_grad():
            found = _Attend.gradients(ctx, saved, grad_out, grad_lse)
        return None, None, None, *once(found, grad_out, grad_lse, *saved)

    @staticmethod
    def gradients(
        ctx: Any, saved: tuple[Any, ...], grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Of q, k, v, bias and sinks."""
        call = ctx.call
        *tensors, out, lse = saved
        inputs = Inputs(*tensors)
        grad_out = torch.zeros_like(out) if grad_out is None else _unit_stride(grad_out)
        grad_lse = grad_lse.contiguous() if grad_lse is not None else None
        dq = _rows(call, call.queries, call.heads, call.head_dim)
        dk = _rows(call, call.keys, call.kv_heads, call.head_dim)
        dv = _rows(call, call.keys, call.kv_heads, call.v_head_dim)
        dbias = None
        if inputs.bias is not None and ctx.needs_input_grad[6]:
            dbias = torch.zeros(inputs.bias.shape, dtype=lse.dtype, device="cpu")
        described = _describe(call, ctx.plan, inputs, ctx.seed)  # a name of its own: it keeps alive what it points into
        native.backward(
            described.native, out.data_ptr(), out.stride(), lse.data_ptr(),
            grad_out.data_ptr(), grad_out.stride(), _address(grad_lse), dq.data_ptr(), dq.stride(),
            dk.data_ptr(), dk.stride(), dv.data_ptr(), dv.stride(), _address(dbias), _strides(dbias),
            _shares(call), torch.get_num_threads(),
        )  # fmt: skip
        dsinks = None
        if inputs.sinks is not None and ctx.needs_input_grad[7]:
            dsinks = _sinks_gradient(inputs.sinks, out, lse, grad_out, grad_lse)
        if dbias is not None and inputs.bias is not None:
            dbias = dbias.to(inputs.bias.dtype)
        return dq, dk, dv, dbias, dsinks


def _shares(call: Call) -> int:
    """How many tasks one key/value head is cut into: enough for ``TASKS`` in all, each of some rows."""
    heads = max(1, call.batch * call.kv_heads)
    return max(1, min(TASKS // heads, call.queries * call.group // 64))


def _sinks_gradient(sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Σ p_sink (dlse - out · dout) over batch and rows, [H]."""
    rows = -(out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)  # [B, H, Q]
    rows = rows if grad_lse is None else rows + grad_lse
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -torch.inf, 0)
    return (p * rows).sum((0, 2)).to(sinks.dtype)


class _Described:
    """A call of the extension, and the tensors its addresses point into."""

    def __init__(self, native_call: Any, held: tuple[Tensor | None, ...]) -> None:
        self.native = native_call
        self.held = held


def _forward(described: _Described, call: Call, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    out = _rows(call, call.queries, call.heads, call.v_head_dim)
    lse = (
        torch.empty((call.batch, call.heads, call.queries), dtype=accumulate_dtype(call.dtype), device="cpu")
        if need_lse
        else None
    )
    native.forward(described.native, out.data_ptr(), _address(lse), torch.get_num_threads())
    return out, lse


def _rows(call: Call, length: int, heads: int, width: int) -> Tensor:
    """An empty [B, heads, length, width], laid out as [B, length, heads, width]: merging heads then costs nothing."""
    sizes = (call.batch, heads, length, width)
    return torch.empty_strided(sizes, _row_strides(length, heads, width), dtype=call.dtype, device="cpu")


def _row_strides(length: int, heads: int, width: int) -> tuple[int, int, int, int]:
    return (length * heads * width, width, heads * width, 1)


def _describe(call: Call, plan: Plan | None, inputs: Inputs, seed: int) -> _Described:
    q, k, v = (_unit_stride(x) for x in inputs[:3])
    dtype = accumulate_dtype(call.dtype)
    bias = inputs.bias.detach().to(dtype) if inputs.bias is not None else None
    sinks = inputs.sinks.detach().to(dtype).contiguous() if inputs.sinks is not None else None
    spans, spans_at, rules = None, (0, 0, 0), _Rules()
    if plan is not None and not plan.everything:
        spans = plan.spans.to(torch.int32).contiguous()
        spans_at = _reach(spans)
        if plan.rest is not None:
            rules.add(plan.rest, (call.batch, call.heads, call.queries, call.keys))
    sizes = (call.batch, call.heads, call.kv_heads, call.queries, call.keys, call.head_dim, call.v_head_dim)
    made = native.Call(
        sizes, _DTYPES[call.dtype], q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride(),
        _address(bias), _strides(bias), _address(sinks), _address(spans), spans_at, rules.made,
        call.scale, call.softcap or 0.0, call.dropout, seed, _row_strides(call.queries, call.heads, call.v_head_dim),
    )  # fmt: skip
    return _Described(made, (q, k, v, bias, sinks, spans, *rules.held))


class _Rules:
    """The rest of a plan as the extension's program: postfix, each rule with up to two tensors."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, tuple[int, ...], int, tuple[int, ...]]] = []
        self.held: list[Tensor] = []

    def add(self, mask: Mask, sizes: tuple[int, int, int, int]) -> None:
        """Append a mask and, before it, its parts."""
        none = (0, 0, 0, 0)
        match mask:
            case Dense():
                seen = mask.tensor[(None,) * (4 - mask.tensor.ndim)]
                self._rule(2, seen, _strides(seen))
            case Documents():
                q_ids, k_ids = mask.q_ids.long(), mask.k_ids.long()
                self._rule(1, q_ids, (*_strides(q_ids), 0, 0), k_ids, (*_strides(k_ids), 0, 0))
            case And() | Or():
                self.add(mask.first, sizes)
                self.add(mask.second, sizes)
                self.made.append((3 if isinstance(mask, And) else 4, 0, none, 0, none))
            case _:
                spans = mask.plan(*sizes).spans.to(torch.int32).contiguous()
                self._rule(0, spans, (*_reach(spans), 0))

    def _rule(self, kind: int, first: Tensor, stride: tuple[int, ...], second: Tensor | None = None,
              second_stride: tuple[int, ...] = (0, 0, 0, 0)) -> None:  # fmt: skip
        self.held += [first] if second is None else [first, second]
        self.made.append((kind, first.data_ptr(), stride, _address(second), second_stride))


def _reach(spans: Tensor) -> tuple[int, int, int]:
    """Strides over batch and queries, and how many spans a row has."""
    batch, queries, _, _ = _strides(spans)
    return batch, queries, spans.shape[2]


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides with 0 along axes of size 1, so that these repeat."""
    return (
        tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)) if x is not None else (0, 0, 0, 0)
    )
