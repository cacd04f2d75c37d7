"""The parts of a mask that fused kernels for a GPU express: a band, lengths, packed documents and a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headscope.masks import UNBOUNDED, And, Band, Dense, Documents, KeyLengths, Mask, Prefix

Matrix = Literal["none", "keys", "full"]
DEVICES = ("cuda", "meta")
"""The types of devices for which torch has such kernels; tensors without memory are described for them."""

BOUNDED = UNBOUNDED // 2  # a reach of more is the same as none


@dataclass(frozen=True, slots=True)
class MaskParts:
    """What a mask that joins bands, lengths, packed documents and boolean tensors by ``&`` allows.

    Attributes:
        left, right: how many keys before and after its own are visible to a query, counted from the bottom-right
            diagonal, j = i + K - Q; None = all.
        lengths: keys beyond the length of each batch entry, or beyond a prefix, are masked.
        packed: the longest sequence of queries and of keys, of packed documents; None = there are none.
        matrix: whether boolean tensors mask keys: "keys": the same ones for every query and head of a batch entry.
    """

    left: int | None = None
    right: int | None = None
    lengths: bool = False
    packed: tuple[int, int] | None = None
    matrix: Matrix = "none"

    @property
    def has_band(self) -> bool:
        """Whether keys far from the diagonal are masked."""
        return self.left is not None or self.right is not None


def parts_of(mask: Mask | None, batch: int, queries: int, keys: int) -> MaskParts | None:
    """Return the parts of a mask, without reading its tensors; None if fused kernels cannot express it.

    Examples:
        >>> from headscope import masks
        >>> parts_of(masks.window(4), 1, 8, 8)
        MaskParts(left=3, right=0, lengths=False, packed=None, matrix='none')
        >>> parts_of(masks.window(4) | masks.Prefix(1), 1, 8, 8) is None
        True
    """
    left: int | None = None
    right: int | None = None
    matrix: Matrix = "none"
    packed: tuple[int, int] | None = None
    lengths = alike = False
    for leaf in conjuncts(mask):
        if isinstance(leaf, Band):
            reach = _reach(leaf, queries, keys)
            if reach is None:
                return None
            left, right = _least(left, reach[0]), _least(right, reach[1])
        elif isinstance(leaf, (KeyLengths, Prefix)):
            lengths = True
        elif isinstance(leaf, Dense):
            matrix = "keys" if leaf.is_of_keys and matrix != "full" else "full"
        elif isinstance(leaf, Documents):
            packing = leaf.packing
            if packing is None or packed is not None or batch != 1:
                return None
            packed, alike = (packing.max_q, packing.max_k), packing.same
        else:
            return None
    if packed is not None and not alike and (left is not None or right is not None):
        return None  # kernels align a band with each document, and masks with the whole
    return MaskParts(left, right, lengths, packed, matrix)


def is_indexable(mask: Mask | None) -> bool:
    """Return whether all parts of a mask compute ``allows`` from indices by operators alone."""
    if mask is None:
        return True
    for leaf in mask.leaves():
        if not isinstance(leaf, (Band, Dense, Documents, KeyLengths, Prefix)):
            return False
        if isinstance(leaf, Band) and isinstance(leaf.offset, tuple):
            return False
    return True


def conjuncts(mask: Mask | None) -> list[Mask]:
    """Return the masks that all have to allow a key."""
    if isinstance(mask, And):
        return [*conjuncts(mask.first), *conjuncts(mask.second)]
    return [] if mask is None else [mask]


def lengths_of(mask: Mask | None, device: torch.device) -> Tensor | None:
    """Return the number of keys of each batch entry before its padding, int64 [B or 1]; None if no part limits it."""
    least: Tensor | None = None
    for leaf in conjuncts(mask):
        if isinstance(leaf, (KeyLengths, Prefix)):
            limited = isinstance(leaf, Prefix)
            lengths = torch.full((1,), leaf.n, device=device) if limited else leaf.lengths.long()
            least = lengths if least is None else torch.minimum(least, lengths)
    return least


def matrix_of(mask: Mask | None) -> Tensor | None:
    """Return the join of the boolean tensors, [B or 1, H or 1, Q or 1, K or 1]; None if there are none."""
    joined: Tensor | None = None
    for leaf in conjuncts(mask):
        if isinstance(leaf, Dense):
            tensor = leaf.tensor[(None,) * (4 - leaf.tensor.ndim)]
            joined = tensor if joined is None else joined & tensor
    return joined


def packing_of(mask: Mask | None) -> tuple[Tensor, Tensor] | None:
    """Return the cumulative lengths of the packed queries and keys, int32 [n + 1]; None if they are not packed."""
    for leaf in conjuncts(mask):
        if isinstance(leaf, Documents) and leaf.packing is not None:
            return leaf.packing.q, leaf.packing.k
    return None


def _reach(band: Band, queries: int, keys: int) -> tuple[int | None, int | None] | None:
    """Return the reach to both sides, counted from the bottom-right diagonal; None if it depends on tensors."""
    offset, shift = band.offset, 0
    if offset is not None:
        if isinstance(offset, (tuple, Tensor)):
            return None
        shift = offset - (keys - queries)
    left = None if band.left is None or band.left >= BOUNDED else band.left - shift
    right = None if band.right is None or band.right >= BOUNDED else band.right + shift
    return left, right


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
