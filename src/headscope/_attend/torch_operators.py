"""Attention as operators, ``headscope::attend_forward`` and ``headscope::attend_backward``.

A compiler cannot trace the native kernels, because they take raw pointers, and would unroll the blocks of blocked torch
for one length. It traces an operator instead: its schema, the sizes and strides of its results (the fake kernels below)
and its gradient. The operator runs the same as a call without a compiler.
``_attend.torch_operator_kernels``, which is above this module, registers what it runs: see ``implement``.

An operator takes tensors and numbers, so a mask is passed as codes (a small program in postfix order) and the tensors
it reads. The operator makes the plan when it runs, so the graph does not depend on symbolic lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from headscope._attend.backends import blocked, fused, native, reproducible
from headscope._attend.call import Call
from headscope._attend.dropout import draw_seed
from headscope._attend.interface import (
    NO_BATCHED_GRADIENTS,
    NO_FORWARD_MODE,
    NO_SECOND_DERIVATIVE,
    Inputs,
    OperatorBackend,
    accumulate_dtype,
    refuse_tangents,
)
from headscope._attend.vmap import run_each_entry
from headscope._support.autograd import Function
from headscope._support.onnx_export import warn_if_untranslated
from headscope.masks import Mask

FORWARD, BACKWARD = "headscope::attend_forward", "headscope::attend_backward"
# softcap 0 = none; seed: one int64, required with dropout; backend: the name of the backend that runs
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, SymInt[] codes, Tensor[] parts"
_NUMBERS = "float scale, float softcap, float dropout, Tensor? seed, str backend"
_RESULTS = "Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse"


class _Library(torch.library.Library):
    """A library whose operators raise for tangents, which torch would otherwise ignore."""

    def impl(self, op_name: str, fn: Callable[..., Any], dispatch_key: str = "", **how: Any) -> None:
        """``register_autograd`` calls this too: torch shows the tangents that it would drop only above its kernel."""
        if dispatch_key != "Autograd":
            return super().impl(op_name, fn, dispatch_key, **how)

        def checked(*args: Any) -> Any:
            refuse_tangents(*(x for x in args if isinstance(x, Tensor)))
            return fn(*args)

        return super().impl(op_name, checked, dispatch_key, **how)


_library = _Library("headscope", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"attend_forward({_INPUTS}, {_NUMBERS}) -> (Tensor out, Tensor lse)", tags=_tags)
_library.define(
    f"attend_backward({_INPUTS}, {_NUMBERS}, {_RESULTS}, bool dbias, bool dsinks)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)


def implement(forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., tuple[Tensor, ...]]) -> None:
    """Register what the operators run, on any device; the arguments are those of their schemas."""
    _library.impl("attend_forward", forward, "CompositeExplicitAutograd")
    _library.impl("attend_backward", backward, "CompositeExplicitAutograd")
    _library.impl("attend_backward", _refuse_batches, "Batched")  # torch's key for batches of autograd, not of vmap


AS_OPERATORS: dict[str, OperatorBackend] = {
    native.name: native,
    fused.name: fused,
    blocked.name: blocked,
    reproducible.name: reproducible,
}
"""Backends that run as operators: a compiler cannot trace the native one, and would unroll the blocked one for one
length. The fused one chooses a kernel by the GPU, when it runs.
"""

OPERATOR_BACKENDS = tuple(AS_OPERATORS)  # a compiler treats a tuple of names as a constant


def attend(call: Call, mask: Mask | None, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """Return out and lse of a call, by the operator.

    The dropout seed is a tensor: each run of a graph draws another.
    """
    codes: list[int] = []
    parts: list[Tensor] = []
    if mask is not None:
        mask.encode((call.batch, call.heads, call.queries, call.keys), inputs.q.device, codes, parts)
    seed = draw_seed() if call.dropout else None
    numbers = (call.scale, call.softcap or 0.0, call.dropout)
    args = (*inputs, codes, parts, *numbers, seed, backend)
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return _Forward.apply(*_spread(args))
    return torch.ops.headscope.attend_forward(*args)


# ---------------------------------------------------------------- sizes and strides of the results


def _rows(like: Tensor, heads: int, length: int, width: int, backend: str) -> Tensor:
    """Return an empty [B, heads, length, width]; the native backend lays it out as [B, length, heads, width]."""
    sizes = (like.shape[0], heads, length, width)
    if backend == blocked.name:
        return like.new_empty(sizes)
    return like.new_empty_strided(sizes, native.row_strides(length, heads, width))


def lay_out(x: Tensor, backend: str) -> Tensor:
    """Return a result [B, heads, length, width] with the strides of ``_rows``, which compiled programs contain.

    With NaN or infinity, a result comes from torch's operators, which choose their own strides.
    """
    if backend == blocked.name:
        return x.contiguous()
    heads, length, width = x.shape[1:]
    strides = native.row_strides(length, heads, width)
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    warn_if_untranslated()
    batch, heads, queries, _width = q.shape
    lse = q.new_empty((batch, heads, queries), dtype=accumulate_dtype(q.dtype))
    return _rows(q, heads, queries, v.shape[3], rest[-1]), lse


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    backend, dbias, dsinks = rest[6], *rest[-2:]
    rows = (_rows(q, x.shape[1], x.shape[2], x.shape[3], backend) for x in (q, k, v))
    return (
        *rows,
        q.new_empty(0) if bias is None or not dbias else bias.new_empty(bias.shape),
        q.new_empty(0) if sinks is None or not dsinks else sinks.new_empty(sinks.shape),
    )


# ---------------------------------------------------------------- gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, sinks, codes, parts, *numbers, seed, backend = inputs
    ctx.codes, ctx.numbers, ctx.parts, ctx.backend = codes, numbers, len(parts), backend
    ctx.save_for_backward(q, k, v, bias, sinks, seed, *output, *parts)
    ctx.set_materialize_grads(False)


def _for_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the backward operator, and whether bias and sinks require a gradient."""
    q, k, v, bias, sinks, seed, out, lse, *parts = ctx.saved_tensors
    needed = (bias is not None and ctx.needs_input_grad[3], sinks is not None and ctx.needs_input_grad[4])
    inputs = (q, k, v, bias, sinks, ctx.codes, parts, *ctx.numbers, seed, ctx.backend)
    return (*inputs, out, lse, grad_out, grad_lse, *needed), needed


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    args, needed = _for_backward(ctx, grad_out, grad_lse)
    dq, dk, dv, dbias, dsinks = torch.ops.headscope.attend_backward(*args)
    beside = (dbias if needed[0] else None, dsinks if needed[1] else None)
    no_codes = None if ctx.codes else []  # torch treats an empty list as a list of tensors, and requires a list back
    return dq, dk, dv, *beside, no_codes, [None] * ctx.parts, None, None, None, None, None


def _refuse_second(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


def _refuse_batches(*args: Any) -> NoReturn:
    raise RuntimeError(NO_BATCHED_GRADIENTS)


def _refuse_forward_mode(ctx: Any, *tangents: Tensor | None) -> NoReturn:
    raise RuntimeError(NO_FORWARD_MODE)


# ---------------------------------------------------------------- torch.func


class _Forward(Function[tuple[Tensor, Tensor]]):
    """The forward operator under torch.func, which ignores the gradient registered with an operator."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.headscope.attend_forward(*_gathered(args, 11))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, _gathered(inputs, 11), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        args, needed = _for_backward(ctx, *grads)
        dq, dk, dv, dbias, dsinks = _Backward.apply(*_spread(args))
        rest = (None,) * (6 + ctx.parts)
        return dq, dk, dv, dbias if needed[0] else None, dsinks if needed[1] else None, *rest

    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return _run_each_entry(_Forward.apply, info, in_dims, args)


class _Backward(Function[tuple[Tensor, ...]]):
    """The backward operator under torch.func."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.headscope.attend_backward(*_gathered(args, 17))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, because a second derivative is not supported."""

    backward = staticmethod(_refuse_second)
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return _run_each_entry(_Backward.apply, info, in_dims, args)


def _spread(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an operator's arguments with the mask's tensors last, separately: torch.func ignores lists."""
    return *args[:6], *args[7:], *args[6]


def _gathered(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Invert ``_spread``: the first ``count`` are an operator's own arguments, the rest are the mask's tensors."""
    return *args[:6], list(args[count:]), *args[6:count]


def _run_each_entry(
    run: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Run ``run_each_entry``; in a function compiled within vmap, torch skips this function, but not its callees."""
    if is_dynamo_compiling():
        from headscope._attend import eager  # this import loads torch's compiler

        return eager.run_each_entry(run, info, in_dims, args)
    return run_each_entry(run, info, in_dims, args)


torch.library.register_fake(FORWARD, _fake_forward, lib=_library)
torch.library.register_fake(BACKWARD, _fake_backward, lib=_library)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd(BACKWARD, _refuse_second, lib=_library)
