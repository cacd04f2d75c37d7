"""Biases by distance: ALiBi, and T5's learned one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headscope._support.arguments import check_type, kind, shapes, whole
from headscope.positions._options import check_number, settle_whole, to_numbers, to_positions


@dataclass(frozen=True)
class ALiBi:
    """Attention with linear biases: the logit falls by slope_h · distance, in both directions.

    Args:
        num_heads: H, at least 1.
        slopes: one for each head, at least 0; by default the paper's, 2 ** (-8 (h + 1) / H) if H is a power of two;
            else those of the power of two below, then every second one of the power above.

    Source: Press et al. 2021, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation".

    Examples:
        >>> from headscope import positions
        >>> positions.ALiBi(4).slopes
        (0.25, 0.0625, 0.015625, 0.00390625)
    """

    num_heads: int
    slopes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        settle_whole(self, "num_heads")
        slopes = to_numbers("slopes", self.slopes) or _slopes(self.num_heads)
        if len(slopes) != self.num_heads:
            raise ValueError(f"slopes: got {len(slopes)}, expected one for each of {self.num_heads} heads")
        for slope in slopes:
            check_number("slopes", slope, least=0)
        object.__setattr__(self, "slopes", slopes)

    def of(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the bias at signed distances, key minus query, [...] -> [..., H]."""
        slopes = torch.tensor(self.slopes, dtype=dtype, device=distances.device)
        return -distances.abs().to(dtype)[..., None] * slopes


def _slopes(heads: int) -> tuple[float, ...]:
    below = 1 << (heads.bit_length() - 1)  # the largest power of two up to H
    first = [2.0 ** (-8 * (n + 1) / below) for n in range(below)]
    between = [2.0 ** (-4 * (n + 1) / below) for n in range(0, 2 * below, 2)]
    return tuple((first + between)[:heads])


@dataclass(frozen=True)
class T5Buckets:
    """T5's buckets of distance: one for each short distance, then ever wider ones.

    Args:
        num_buckets: the number of buckets, even and at least 4 if ``bidirectional``, else at least 2.
        max_distance: from this distance on, one bucket serves all; larger than the distances with their own buckets.
        bidirectional: half of the buckets are for keys after the query; otherwise those share the bucket of distance 0.

    Source: Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
    section 2.1.

    Examples:
        >>> import torch
        >>> from headscope import positions
        >>> positions.T5Buckets(8, 16).of(torch.tensor([-100, -2, -1, 0, 1, 2, 100]))
        tensor([3, 2, 1, 0, 5, 6, 7])
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        settle_whole(self, "num_buckets")
        settle_whole(self, "max_distance")
        least = 4 if self.bidirectional else 2
        if self.num_buckets < least or (self.bidirectional and self.num_buckets % 2):
            expected = "an even number from 4" if self.bidirectional else "at least 2"
            raise ValueError(f"num_buckets: got {self.num_buckets}, expected {expected}")
        if self.max_distance <= self.exact:
            raise ValueError(f"max_distance: got {self.max_distance}, expected more than {self.exact}")

    @property
    def exact(self) -> int:
        """The number of distances, from 0, that have their own bucket in each direction."""
        return self.num_buckets // (4 if self.bidirectional else 2)

    def of(self, distances: Tensor) -> Tensor:
        """Return the bucket of each signed distance, key minus query; integers of the same shape."""
        half = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        ahead = (distances > 0).long() * half if self.bidirectional else 0
        far = distances.abs() if self.bidirectional else (-distances).clamp(min=0)
        # float32, step by step as in T5: learned tables depend on its rounding at the edges of the buckets
        wide = torch.log(far.float() / self.exact) / math.log(self.max_distance / self.exact) * (half - self.exact)
        wide = torch.where(far < self.exact, 0, wide).long() + self.exact
        return ahead + torch.where(far < self.exact, far, wide.clamp(max=half - 1))


class RelativeBias(nn.Module):
    """A learned bias for each bucket of distance and each head, as in T5. Layers may share one.

    Parameters: ``weight`` [num_buckets, H], zero at the start; it has the shape and order of
    ``relative_attention_bias.weight`` in transformers' T5.

    Args:
        num_heads: H, at least 1.
        buckets: which distances share a bias.
        device, dtype: of the table.

    Examples:
        >>> import torch
        >>> from headscope import positions
        >>> bias = positions.RelativeBias(2, positions.T5Buckets(8, 16))
        >>> bias.weight.shape, bias(torch.arange(3), torch.arange(4)).shape
        (torch.Size([8, 2]), torch.Size([2, 3, 4]))
    """

    def __init__(
        self, num_heads: int, buckets: T5Buckets | None = None, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        num_heads = whole("num_heads", num_heads)
        if buckets is not None:
            check_type("buckets", buckets, T5Buckets, "T5Buckets", kind)
        self.num_heads = num_heads
        self.buckets = T5Buckets() if buckets is None else buckets
        self.weight = nn.Parameter(torch.empty(self.buckets.num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the bias to zero."""
        nn.init.zeros_(self.weight)

    def with_table(self, table: Tensor) -> RelativeBias:
        """Return a bias over another table [num_buckets, heads], which is not a parameter: of some of these heads."""
        part = RelativeBias.__new__(RelativeBias)
        nn.Module.__init__(part)
        part.num_heads, part.buckets = table.shape[1], self.buckets
        object.__setattr__(part, "weight", table)
        return part

    def of(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the bias at signed distances, key minus query, [...] -> [..., H]."""
        return self.weight[self.buckets.of(distances)].to(dtype)

    def forward(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return the bias of queries and keys at these positions, [Q] and [K] -> [H, Q, K], or with B before them."""
        return matrix(self, q_pos, k_pos)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.num_heads}, {self.buckets}"


PositionBias: TypeAlias = "ALiBi | RelativeBias"


def matrix(bias: PositionBias, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a bias by distance in the form that ``attention`` expects.

    Shapes: q_pos [Q] and k_pos [K] -> [H, Q, K]; q_pos [B, Q] and k_pos [B, K] -> [B, H, Q, K].

    Raises:
        TypeError: positions that are not integers.
        ValueError: their axes do not fit.

    Examples:
        >>> import torch
        >>> from headscope import positions
        >>> positions.matrix(positions.ALiBi(1, slopes=(0.5,)), torch.tensor([2, 3]), torch.tensor([0, 1]))
        tensor([[[-1.0000, -0.5000],
                 [-1.5000, -1.0000]]])
    """
    q_pos, k_pos = to_positions("q_pos", q_pos, "[Q] or [B, Q]"), to_positions("k_pos", k_pos, "[K] or [B, K]")
    both = q_pos.ndim == k_pos.ndim == 2
    apart = both and q_pos.shape[0] != 1 and k_pos.shape[0] != 1 and q_pos.shape[0] != k_pos.shape[0]
    if q_pos.ndim not in (1, 2) or k_pos.ndim not in (1, 2) or apart:
        raise ValueError(
            f"k_pos: {shapes(q_pos=q_pos, k_pos=k_pos)}, expected q_pos [Q] and k_pos [K], or [B, Q] and [B, K]"
        )
    between = k_pos[..., None, :] - q_pos[..., None]  # [..., Q, K]
    return bias.of(between, dtype).movedim(-1, -3)  # [..., H, Q, K]


def turned_matrix(bias: PositionBias, queries: int, keys: int, first: int, like: Tensor) -> Tensor:
    """Return ``matrix`` for queries in reverse order, [H, Q, K]: a view of H x (Q + K - 1) numbers.

    Query i of the result is at position first + queries - 1 - i, key j at j. The distance depends only on i + j, so
    each row is the previous row shifted by one, and the matrix is a strided view. (In the usual order it depends on j -
    i, and a tensor's strides cannot be negative.)
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distances = torch.arange(queries + keys - 1, device=like.device) - (first + queries - 1)
    table = bias.of(distances, dtype).T.contiguous()  # [H, Q + K - 1]
    return table.as_strided((len(table), queries, keys), (table.shape[1], 1, 1))


def bias_of(option: object, num_heads: int, factory: dict[str, Any]) -> PositionBias | None:
    """Return the bias that ``MultiHeadAttention(position_bias=...)`` stores; ``T5Buckets`` get their own table.

    Raises:
        TypeError: something else.
        ValueError: its number of heads differs.
    """
    if option is None:
        return None
    if isinstance(option, T5Buckets):
        return RelativeBias(num_heads, option, **factory)
    if not isinstance(option, (ALiBi, RelativeBias)):
        got = f"the class {option.__name__}" if isinstance(option, type) else kind(option)
        raise TypeError(f"position_bias: got {got}, expected ALiBi, T5Buckets, RelativeBias or None")
    if option.num_heads != num_heads:
        raise ValueError(f"position_bias: has {option.num_heads} heads, expected num_heads {num_heads}")
    return option


for _class in (ALiBi, T5Buckets, RelativeBias):
    _class.__module__ = "headscope.positions"  # their public path
