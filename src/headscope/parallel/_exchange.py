"""The exchanges between the ranks of a group: parts of a sequence, and heads for rows. Each is differentiable."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headscope._support.autograd import Function
from headscope._support.ranks import Ranks


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return the number of this process in a group, from 0.

    Raises:
        ValueError: it does not belong to the group.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    if rank < 0:
        raise ValueError("group: this process does not belong to it; call within the processes of the group only")
    return rank


def finish(start: Callable[[], Any], group: dist.ProcessGroup | None) -> None:
    """Start a collective operation and wait for it; if a rank has ended, raise an error that names it.

    Args:
        start: starts the operation, and returns its work.
        group: the ranks.

    Raises:
        RuntimeError: a rank did not answer within the timeout of the group.
    """
    ranks = Ranks(group)
    try:
        ranks.finish(start())
    except RuntimeError as error:
        raise ranks.failure("context parallelism", error) from error


def join_parts(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the parts of all ranks along axis 0, in the order of the ranks."""
    if len(lengths) == 1:
        return x
    return _Join.apply(x, tuple(lengths), group)


class _Join(Function[Tensor]):
    """``join_parts``; the gradient of a part is the sum over ranks, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup | None) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return gather(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_parts(grad, ctx.lengths, ctx.group), None, None


def gather(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the parts of all ranks along axis 0, without a gradient."""
    if len(lengths) == 1:
        return x
    longest = max(lengths)
    mine = x.contiguous()
    if len(x) < longest:  # parts of one size, as every backend can gather
        mine = torch.cat([mine, mine.new_zeros(longest - len(x), *x.shape[1:])])
    parts = [torch.empty_like(mine) for _ in lengths]
    gather_into(parts, mine, group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def gather_into(parts: list[Tensor], own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather tensors of one size from all ranks."""
    finish(partial(dist.all_gather, parts, own, group, async_op=True), group)


def sum_parts(whole: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over ranks of this rank's part along axis 0, summed in the order of the ranks."""
    own, rest = lengths[group_rank(group)], whole.shape[1:]
    row = math.prod(rest)
    got = swap(whole, [length * row for length in lengths], [own * row] * len(lengths), group)
    return got.view(len(lengths), own, *rest).sum(0)


def swap(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send so many numbers of x to each rank, and return those of each rank, on one axis."""
    flat, got = x.contiguous().view(-1), x.new_empty(sum(received))
    if len(sent) == 1:
        return flat
    finish(partial(dist.all_to_all_single, got, flat, received, sent, group, async_op=True), group)
    return got


class Transfer:
    """Tensors on their way around the ring: to the next rank, and from the one before, of these shapes."""

    def __init__(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup | None
    ) -> None:
        rank, ranks = group_rank(group), group_size(group)
        into, after = ((rank + step) % ranks for step in (-1, 1))
        self.group = group
        self.sent = [x.contiguous() for x in tensors]  # alive until they have been sent
        self.got = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=after) for x in self.sent]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=into) for x in self.got]
        self.works: list[Any] = []
        try:
            self.works = dist.batch_isend_irecv([*sends, *receives])
        except RuntimeError as error:
            raise Ranks(group).failure("context parallelism", error) from error

    def wait(self) -> list[Tensor]:
        """Return the tensors of the rank before.

        Raises:
            RuntimeError: a rank did not answer within the timeout of the group.
        """
        try:
            for work in self.works:
                work.wait()  # gloo completes it in this call only
        except RuntimeError as error:
            raise Ranks(self.group).failure("context parallelism", error) from error
        return self.got


class HeadsForRows(Function[Tensor]):
    """Rows [B, H, own, D] of every head -> all rows [B, H / ranks, total, D] of a part of the heads, by rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup | None) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return heads_for_rows(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rows_for_heads(grad, ctx.lengths, ctx.group), None, None


class RowsForHeads(Function[Tensor]):
    """The inverse of ``HeadsForRows``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup | None) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return rows_for_heads(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return heads_for_rows(grad, ctx.lengths, ctx.group), None, None


def heads_for_rows(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return all rows, those of rank 0 first, of this rank's heads."""
    batch, heads, own, width = x.shape
    part = heads // len(lengths)
    sent = x.transpose(0, 1)  # [H, B, own, D]: the heads of each rank together
    sizes = [part * batch * length * width for length in lengths]
    got = swap(sent, [part * batch * own * width] * len(lengths), sizes, group)
    rows = [each.view(part, batch, length, width) for each, length in zip(got.split(sizes), lengths, strict=True)]
    return torch.cat(rows, 2).transpose(0, 1)  # [B, H / ranks, total, D]


def rows_for_heads(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's rows of all heads, from all rows of its heads."""
    batch, part, _, width = x.shape
    own = lengths[group_rank(group)]
    pieces = [piece.transpose(0, 1).reshape(-1) for piece in x.split(list(lengths), 2)]
    sizes = [part * batch * length * width for length in lengths]
    got = swap(torch.cat(pieces), sizes, [part * batch * own * width] * len(lengths), group)
    return got.view(len(lengths) * part, batch, own, width).transpose(0, 1)  # [B, H, own, D]
