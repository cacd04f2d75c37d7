"""Sums and gathers over the ranks of a group, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headscope._support.autograd import Function

Group = Any  # a dist.ProcessGroup, whose class some builds of torch lack


def sum_gradients(x: Tensor, group: Group) -> Tensor:
    """Return x, which all ranks hold and each uses in part; its gradient is the sum of theirs."""
    return _SumGradients.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of every rank's x; each rank's gradient is the sum of theirs, because all use the result."""
    return _Sum.apply(x, group)


def gather_axis(x: Tensor, axis: int, group: Group) -> Tensor:
    """Return every rank's x, of one shape, concatenated along an axis, for an equal computation on every rank."""
    return _Gather.apply(x, axis % x.ndim, group)


def _reduced(x: Tensor, group: Group) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumGradients(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduced(grad, ctx.group), None


class _Sum(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduced(grad, ctx.group), None


class _Gather(Function[Tensor]):
    """The gradient is this rank's part of its own: every rank computes the same from the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: Group) -> Tensor:
        ctx.axis, ctx.start, ctx.length = axis, dist.get_rank(group) * x.shape[axis], x.shape[axis]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.detach().contiguous(), group=group)
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.axis, ctx.start, ctx.length), None, None
