"""What the numbers of a tensor are, on the way from a product of queries and keys to a product with values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from headscope._dataflow.axes import Axis, Source


class Constant(Enum):
    """Numbers that do not depend on the input."""

    PARAMETER = auto()
    NOISE = auto()
    """Random: they drop weights."""


PARAMETER, NOISE = Constant.PARAMETER, Constant.NOISE


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two tensors that running code has computed: perhaps of queries and keys.

    Attributes:
        rows, columns: the axes of its last two, along new sources.
        row_tokens, column_tokens: the sources of the operands' axes.
        is_folded: whether it has no axis N, so that its rows may hold a batch.
        scope: where it was computed.
    """

    rows: Axis
    columns: Axis
    row_tokens: tuple[Source, ...]
    column_tokens: tuple[Source, ...]
    is_folded: bool
    scope: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Scores:
    """A product after elementwise operations.

    Attributes:
        product: the first of those that it sums.
        unshifted: the same scores before the largest of each row, or its lse, was subtracted.
        normalized: the axis along which the exponentials of these scores sum to one.
    """

    product: Product
    unshifted: Tensor | None = None
    normalized: int | None = None


@dataclass(frozen=True, eq=False)
class RowValue:
    """A number for each row of scores: the largest one, or the lse along an axis."""

    scores: Tensor
    lse_axis: int | None = None


@dataclass(frozen=True, eq=False)
class Exponentials:
    """The exponentials of scores; ``changed``: multiplied with other numbers since."""

    product: Product
    scores: Tensor
    changed: bool = False


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums of exponentials along an axis; ``inverted``: one divided by them."""

    product: Product
    axis: int
    inverted: bool = False


@dataclass(eq=False)
class Softmax:
    """A softmax of scores, from when it is computed until it is multiplied with values.

    Attributes:
        scores: its input; None: it has been used.
        axes, offset: the axes of its result, and the place of its first number in its storage.
        axis: the axis of the keys, from 0.
    """

    product: Product
    scores: Tensor | None
    axes: list[Axis]
    offset: int
    axis: int
    scope: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Weights:
    """The result of a softmax, after elementwise operations.

    Attributes:
        changed: whether an operation other than dropout followed.
        dropped: whether dropout followed.
    """

    softmax: Softmax
    changed: bool = False
    dropped: bool = False


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """The product of weights with values; ``number`` of the attention that the follower has found."""

    number: int


Role = Constant | Scores | RowValue | Exponentials | Sums | Weights | HeadOutput
