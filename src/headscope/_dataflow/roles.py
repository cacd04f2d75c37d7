"""What the numbers of a tensor are, on the way from a product of queries and keys to a product with values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headscope._dataflow.axes import Axis, Piece, Source

Tokens = frozenset[Piece | tuple[Source, int]]
"""The pieces of row axes that a tensor's rows run along, and what was selected along others."""


class Constant(Enum):
    """Numbers that do not depend on the input."""

    PARAMETER = auto()
    NOISE = auto()
    """Random: they drop weights."""


PARAMETER, NOISE = Constant.PARAMETER, Constant.NOISE


@dataclass(frozen=True, eq=False)
class Factors:
    """The two tensors that a product multiplies: left, [N, R, D] or [R, D], and right, [N, C, D] or [C, D].

    Attributes:
        left, right: the tensors.
        outer: the axis N of the product, in a list; empty: it has none.
    """

    left: Tensor
    right: Tensor
    outer: list[Axis]


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two tensors that running code has computed: perhaps of queries and keys.

    Attributes:
        rows, columns: the axes of its last two, along sources of their own.
        row_tokens, column_tokens: which tokens they are.
        is_folded: whether it has no axis N, so that its rows may hold a batch.
        is_other: whether it cannot be that of an attention: it sums over rows, or each row has columns of its own.
        outside: from how many tensors from outside its factors come; 0: a projection was applied, or it is not known.
        scope: where it was computed.
        scopes: where the features come from that it sums over.
        factors: its tensors; None: it stands for several products that were joined.
        reduced: the names of reductions of the scores, such as "amax", that code has computed so far.
    """

    rows: Axis
    columns: Axis
    row_tokens: Tokens
    column_tokens: Tokens
    is_folded: bool
    is_other: bool
    outside: int
    scope: tuple[Any, ...]
    scopes: tuple[tuple[Any, ...], ...]
    factors: Factors | None
    reduced: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, eq=False)
class Scores:
    """A product after elementwise operations; ``product``: the first of those that it sums."""

    product: Product


@dataclass(frozen=True, eq=False)
class Part:
    """Weights of some heads that were multiplied with values.

    Attributes:
        size: the number of weights.
        v, out: the values, [B, h, K, Dv], and the product, [B, h, Q, Dv]; None: not known.
    """

    size: int
    v: Tensor | None
    out: Tensor | None


@dataclass(eq=False)
class Softmax:
    """The result of a softmax of scores, from when it is computed until it is multiplied with values.

    Attributes:
        product: the first one of the scores.
        storage, address: that of its result.
        scores: its input; None: it has been used, or overwritten.
        axes, offset: the axes of its result, and the place of its first number in its storage.
        axis: the axis of the keys, from 0.
        scope: where it was computed.
        parts: those parts of its result that were multiplied with values, by their places.
    """

    product: Product
    storage: StorageWeakRef
    address: int
    scores: Tensor | None
    axes: list[Axis]
    offset: int
    axis: int
    scope: tuple[Any, ...]
    parts: dict[int, Part] = field(default_factory=dict[int, Any])


@dataclass(eq=False)
class Use:
    """Whether weights have been multiplied with values, in an attention that was reported."""

    is_done: bool = False


@dataclass(frozen=True, eq=False)
class Weights:
    """The exponentials of scores or their softmax, perhaps after other operations.

    Attributes:
        product: the first one of the scores.
        softmax: that of which they are the result; None: only their values show whether they sum to one.
        over: the sources of the axis of the softmax; None: of exponentials.
        use: shared by weights with the same numbers.
        changed: whether an operation other than dropout followed.
        dropped: whether dropout followed.
    """

    product: Product
    softmax: Softmax | None
    over: frozenset[Source] | None
    changed: bool = False
    dropped: bool = False
    use: Use = field(default_factory=Use)

    def altered(self) -> Weights:
        """Return the role of weights after an operation that changes them."""
        return Weights(self.product, None, self.over, True, self.dropped)


@dataclass(frozen=True, eq=False)
class Lost:
    """Numbers that were computed from scores or weights in a way that is not followed."""

    product: Product


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """The product of weights with values; ``number`` of the attention that the follower has found."""

    number: int


Role = Constant | Scores | Weights | Lost | HeadOutput
