"""The product of the native kernels, ``x @ weight.T + bias``: the only module that calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import functional as F

from headscope._attend.backends import native
from headscope._support.autograd import Function
from headscope._support.torch_state import is_traced


def multiply(
    x: Tensor, x_strides: tuple[int, int], weight: Tensor, weight_strides: tuple[int, int], bias: Tensor | None,
    out: Tensor, sizes: tuple[int, int, int], blocks: tuple[int, int, tuple[int, int, int]] | None = None,
) -> None:  # fmt: skip
    """Write ``x @ weight.T + bias`` into out. Each row is summed in one order, whatever the other rows and threads.

    Args:
        x: read with ``x_strides``.
        x_strides: of x over rows and depth.
        weight: read with ``weight_strides``.
        weight_strides: of weight over columns and depth.
        bias: contiguous, a number for each column.
        out: of the same dtype as the others.
        sizes: rows, depth, columns.
        blocks: rows and columns of the contiguous blocks in out, and its strides over blocks of rows, blocks of columns
            and rows; by default one block, contiguous.
    """
    rows, _, columns = sizes
    length, width, strides = blocks or (rows, columns, (0, 0, columns))
    native.extension.linear(
        sizes, native.CODES[out.dtype], x.data_ptr(), x_strides, weight.data_ptr(), weight_strides,
        0 if bias is None else bias.data_ptr(), out.data_ptr(), length, width, strides, torch.get_num_threads(),
    )  # fmt: skip


def lies_plainly(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether its numbers are contiguous in memory that has not been freed, so kernels can read them."""
    return (
        x.is_cpu
        and x.dtype == dtype
        and x.layout == torch.strided
        and not (x.is_neg() or x._is_zerotensor())
        and x.is_contiguous()
        and x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * x.element_size()
    )


class Native:
    """The product of the native kernels.

    A row is summed in one order, whatever the other rows and the number of threads.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.code = dtype, native.CODES[dtype]

    def takes(self, weight: Tensor) -> bool:
        """Return whether the kernels support this width: pairs of bf16 require an even one."""
        return weight.shape[1] > 0 and native.extension.supports_linear(self.code, weight.shape[1])

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., width], [outs, width] -> [..., outs]."""
        if not self.takes(weight):
            return F.linear(x, weight, bias)
        outs = weight.shape[0]
        out = torch.empty((*x.shape[:-1], outs), dtype=self.dtype, device="cpu")
        rows, depth = x.numel() // x.shape[-1], x.shape[-1]
        multiply(x, (depth, 1), weight, (depth, 1), bias, out, (rows, depth, outs))
        return out

    def trained(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with gradients."""
        out: Any = _Trained.apply(self, x.reshape(-1, x.shape[-1]), weight.t(), bias)
        return out.view(*x.shape[:-1], weight.shape[0])

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return ``grad @ weight``: [rows, outs], [outs, width] -> [rows, width]."""
        (rows, outs), width = grad.shape, weight.shape[1]
        out = torch.empty((rows, width), dtype=self.dtype, device="cpu")
        multiply(grad, (outs, 1), weight, (1, width), None, out, (rows, outs, width))
        return out

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return ``grad.T @ x``: [rows, outs], [rows, width] -> [outs, width]."""
        (rows, outs), width = grad.shape, x.shape[1]
        out = torch.empty((outs, width), dtype=self.dtype, device="cpu")
        multiply(grad, (1, outs), x, (1, width), None, out, (outs, rows, width))
        return out

    def heads(self, x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
        """Project to heads of a multiple of 16: [..., T, E], [count * width, E] -> [..., count, T, width]."""
        *batch, length, _ = x.shape
        outs = weight.shape[0]
        out = torch.empty((*batch, outs // width, length, width), dtype=self.dtype, device="cpu")
        rows, depth = x.numel() // x.shape[-1], x.shape[-1]
        blocks = (length, width, (length * outs, length * width, width))
        multiply(x, (depth, 1), weight, (depth, 1), bias, out, (rows, depth, outs), blocks)
        return out


class _Trained(Function[Tensor]):
    """The native product and its gradients; torch's if they are differentiated again, or batched.

    It takes and saves the same tensors as ``torch.addmm`` (without bias ``torch.mm``) in ``F.linear``, so tools that
    count, change or replace saved tensors behave the same: x [rows, width] and the transposed weight, [width, outs],
    each if the other requires a gradient.
    """

    @staticmethod
    def forward(ctx: Any, product: Native, x: Tensor, turned: Tensor, bias: Tensor | None) -> Tensor:
        _, of_x, of_turned, _ = ctx.needs_input_grad
        ctx.product = product
        saved = (x if of_turned else None, turned if of_x else None)  # in torch's order, by its argument names
        ctx.biased = bias is not None
        ctx.save_for_backward(*(saved if ctx.biased else saved[::-1]))
        return product(x, turned.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, turned = ctx.saved_tensors if ctx.biased else ctx.saved_tensors[::-1]
        product: Native = ctx.product
        of_x = of_turned = None
        if turned is not None:
            own = _own(grad, turned.t())
            of_x = product.of_input(*own) if own and grad.shape[1] == turned.shape[1] else grad @ turned.t()
        if x is not None:
            own = _own(grad, x)
            of_turned = product.of_weight(*own).t() if own and len(grad) == len(x) else (grad.t() @ x).t()
        return None, of_x, of_turned, grad.sum(0) if ctx.needs_input_grad[3] else None


def _own(*factors: Tensor) -> tuple[Tensor, ...] | None:
    """Return factors as the native product reads them in a backward pass, or None: hooks may have returned anything."""
    if torch.is_grad_enabled() or is_traced() or any(is_legacy_batchedtensor(x) for x in factors):
        return None
    dense = tuple(x.contiguous() if x.layout == torch.strided else x for x in factors)
    plain = (type(x) in (Tensor, nn.Parameter) and x.ndim == 2 and lies_plainly(x, torch.float32) for x in dense)
    return dense if all(plain) else None
