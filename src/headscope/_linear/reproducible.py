"""A linear layer of which each row is, to the bit, a function of that row alone: ``reproducible=True``.

``F.linear`` chooses the order of its sums by the number of rows, so the last bits of a token depend on the batch size.
The kernels here sum each row in one order. They support float32 and float64, and pairs of bfloat16 on targets that
multiply them; other half types are multiplied in float32 and rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.flop_counter import register_flop_formula

from headscope._attend.backends import native
from headscope._attend.interface import readable
from headscope._linear.product import multiply
from headscope._support.autograd import Function
from headscope._support.onnx_export import warn_if_untranslated
from headscope._support.tensor_classes import to_ordinary
from headscope._support.torch_state import is_traced

OPERATOR = "headscope::linear"
_library = torch.library.Library("headscope", "FRAGMENT")
_library.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def reproducible_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``F.linear`` such that rows do not depend on each other, on their number, or on the threads.

    Shapes: input [..., width], weight [outs, width], bias [outs] -> [..., outs].

    Raises:
        TypeError: a class of tensor without memory of its own.
        ValueError: a device other than the CPU, another layout, or missing native kernels.
    """
    input, weight, bias = _autocast(input, weight, bias)
    _check(input, weight)
    if is_dynamo_compiling():
        return torch.ops.headscope.linear(input, weight, bias)
    if not is_traced():
        input, weight = to_ordinary("x", input), to_ordinary("weight", weight)
    return _Linear.apply(input, weight, bias)


def reproducible_sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid, with the same bits for each number wherever it is stored.

    torch's own uses another function for the numbers at the end of a vector, and of a thread's share.
    """
    wide = x if x.dtype.itemsize >= 4 else x.float()
    least = -700.0 if wide.dtype == torch.float64 else -80.0  # exp does not overflow, also in the gradient
    return (1 / (1 + torch.exp(-wide.clamp_min(least)))).to(x.dtype)


def _autocast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the factors as autocast rounds them for ``F.linear``."""
    if not torch.is_autocast_enabled("cpu") or input.dtype == torch.float64:
        return input, weight, bias
    dtype = torch.get_autocast_dtype("cpu")
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check(input: Tensor, weight: Tensor) -> None:
    remedy = "; reproducible=False supports it"
    if native.extension is None:
        raise ValueError(
            "reproducible: requires the native kernels, which are not installed; run `headscope doctor` for "
            f"the reason{remedy}"
        )
    for name, x in (("x", input), ("weight", weight)):
        if x.device.type not in ("cpu", "meta"):
            raise ValueError(f"reproducible: {name} is on {x.device}, expected the CPU{remedy}")
        if x.layout != torch.strided:
            raise ValueError(f"reproducible: {name} has the layout {x.layout}, expected torch.strided{remedy}")
        if x.dtype not in native.CODES:
            raise TypeError(f"reproducible: {name} has the dtype {x.dtype}, expected a floating one")
    if input.dtype != weight.dtype:
        raise TypeError(f"x: dtype is {input.dtype}, the weight has {weight.dtype}")
    if input.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"x: got {list(input.shape)}, expected [..., {weight.shape[-1]}]")


class _Linear(Function[Tensor]):
    """The product with its gradients; the gradient of the input is a product of the same kind."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.headscope.linear(input, weight, bias) if is_traced() else _multiply(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _fold_batch(info, in_dims, *args)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _bias = inputs
    ctx.save_for_backward(input, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias."""
    input, weight = ctx.saved_tensors
    of_input, of_weight, of_bias = ctx.needs_input_grad
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        reproducible_linear(grad, weight.t(), None) if of_input else None,
        rows.t() @ input.reshape(-1, input.shape[-1]) if of_weight else None,
        rows.sum(0) if of_bias else None,
    )


def _fold_batch(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    """Run under vmap: with more rows if all entries share the weight; else one product for each entry."""
    input, weight, bias = args
    if in_dims[1] is None and in_dims[2] is None:
        return reproducible_linear(input.movedim(in_dims[0], 0), weight, bias), 0
    each = [
        reproducible_linear(*(x if dim is None else x.select(dim, n) for x, dim in zip(args, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    return torch.stack(each), 0


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product by the native kernels: contiguous, in the dtype of the input."""
    width, outs = input.shape[-1], weight.shape[0]
    if width == 0 or input.numel() == 0 or outs == 0:
        empty = input.new_zeros((*input.shape[:-1], outs))
        return empty if bias is None else empty + bias
    dtype = input.dtype
    if weight.stride(-1) != 1 and weight.stride(0) != 1:
        weight = weight.contiguous()
    turned = weight.stride(-1) != 1
    if dtype.itemsize == 2 and (turned or not native.extension.supports_linear(native.CODES[dtype], width)):
        wide = _multiply(input.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(dtype)
    rows, weight = readable(input.detach()).reshape(-1, width).contiguous(), readable(weight.detach())
    bias = None if bias is None else readable(bias.detach()).contiguous()
    for name, x in (("x", rows), ("weight", weight), ("bias", bias)):
        if x is not None and not x.data_ptr():
            raise ValueError(f"{name}: its storage is empty, expected a tensor that holds its data")
    out = torch.empty((len(rows), outs), dtype=dtype, device="cpu")
    strides = (1, weight.stride(1)) if turned else (weight.stride(0), 1)
    multiply(rows, (width, 1), weight, strides, bias, out, (len(rows), width, outs))
    return out.view(*input.shape[:-1], outs)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    warn_if_untranslated()
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _run(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.no_grad():
        return _multiply(input, weight, bias)


def _flops(input: tuple[int, ...], weight: tuple[int, ...], *rest: Any, **options: Any) -> int:
    return 2 * math.prod(input) * weight[0]


_library.impl("linear", _run, "CPU")
torch.library.register_fake(OPERATOR, _fake, lib=_library)
torch.library.register_autograd(OPERATOR, _differentiate, setup_context=_save, lib=_library)
torch.library.register_vmap(OPERATOR, _fold_batch, lib=_library)
_count: Any = register_flop_formula
_count([torch.ops.headscope.linear])(_flops)
