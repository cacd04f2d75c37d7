"""Arbitrary masks as boolean tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._support.arguments import check_broadcast, narrow
from headscope.masks._base import Index, Mask, Sizes
from headscope.masks._codes import Code, RuleWriter
from headscope.masks._parameters import describe_wrong_dtype, to_tensor


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean tensor that broadcasts to [B, H, Q, K], True = attend.

    ``nn.MultiheadAttention`` uses True for *masked* keys: pass ``Dense(~attn_mask)``.

    Examples:
        >>> import torch
        >>> from headscope import masks
        >>> visible = masks.Dense(torch.tensor([True, False, True]))
        >>> (visible & masks.causal()).dense(1, 1, 3, 3)[0, 0].long()
        tensor([[1, 0, 0],
                [1, 0, 0],
                [1, 0, 1]])
    """

    tensor: Tensor

    _spans_all_keys = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", to_tensor("tensor", self.tensor))

    @property
    def is_of_keys(self) -> bool:
        """Whether it is the same for every head and query."""
        return self._four_axes().shape[1:3] == (1, 1)

    def allows(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        full = self._four_axes()
        return full[tuple(0 if size == 1 else index for size, index in zip(full.shape, (b, h, i, j), strict=True))]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def tile(self, b: slice, h: slice, i: slice, j: slice, device: torch.device) -> Tensor:
        full = self._four_axes()
        return full[tuple(slice(None) if n == 1 else at for n, at in zip(full.shape, (b, h, i, j), strict=True))]

    def part(self, entries: range, heads: range, whole: tuple[int, int]) -> Mask:
        full = self._four_axes()
        check_broadcast("mask", self.tensor, whole[:1], (whole[1], full.shape[2], full.shape[3]))
        return Dense(narrow(narrow(full, 0, entries), 1, heads))

    def reverse_queries(self, queries: int, keys: int) -> Mask:
        return Dense(self.tensor.flip(-2)) if self.tensor.ndim > 1 else self

    def block(self, i: slice, j: slice, h: slice | None = None) -> Mask:
        return Dense(cut(self.tensor, i, j, h))

    def encode(self, sizes: Sizes, device: torch.device, codes: list[int], parts: list[Tensor]) -> None:
        codes += [Code.DENSE]
        parts += [self.tensor]

    def write_rules(self, writer: RuleWriter, sizes: Sizes) -> None:
        writer.add_table(self.tensor)

    def check_sizes(self, sizes: Sizes) -> None:
        if self.tensor.dtype != torch.bool:
            raise TypeError(f"mask: Dense holds {describe_wrong_dtype(self.tensor)}")
        batch, heads, queries, keys = sizes
        check_broadcast("mask", self.tensor, (batch,), (heads, queries, keys))

    def _four_axes(self) -> Tensor:
        return self.tensor[(None,) * (4 - self.tensor.ndim)]


def cut(tensor: Tensor, i: slice, j: slice, h: slice | None = None) -> Tensor:
    """Return some queries, keys and heads of a tensor that broadcasts to [B, H, Q, K]; axes of size 1 stay."""
    for axis, part in ((-3, h), (-2, i), (-1, j)):
        if part is not None and tensor.ndim >= -axis and tensor.shape[axis] != 1:
            tensor = tensor.narrow(axis, part.start, part.stop - part.start)
    return tensor


Dense.__module__ = "headscope.masks"  # its public path
