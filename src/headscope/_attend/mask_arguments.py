"""Checks of the mask of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._attend.tensor_arguments import check_broadcast, check_sizes, fold
from headscope._support.arguments import check_layout, kind
from headscope._support.tensor_classes import check_no_causal_bias
from headscope.masks import FAR, Band, Dense, Documents, KeyLengths, Mask, Prefix, Turned, is_integral, not_boolean


def fold_mask(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A boolean tensor that broadcasts to [*lead, H, Q, K] as one that broadcasts to [B, H, Q, K]."""
    check_no_causal_bias("mask", mask)
    lead = check_sizes(q, k, v)
    check_broadcast("mask", mask, lead, (q.shape[-3], q.shape[-2], k.shape[-2]))
    return fold(mask, lead)


def check_mask(mask: Mask, sizes: tuple[int, int, int, int], device: torch.device) -> None:
    """Whether every part of a mask fits the sizes [B, H, Q, K] and lies where q is."""
    batch, heads, queries, keys = sizes
    for leaf in mask.leaves():
        for tensor in leaf.tensors():
            check_layout(f"mask: a tensor of {type(leaf).__name__}", tensor)
            if tensor.device != device:
                raise ValueError(f"mask: a tensor of {type(leaf).__name__} is on {tensor.device}, q is on {device}")
        # no match: the compiler of older versions of torch cannot read one with classes
        if isinstance(leaf, Band):
            _check_band(leaf, batch)
        elif isinstance(leaf, Turned):
            _check_band(leaf.band, batch)
        elif isinstance(leaf, Prefix):
            if not _is_whole(leaf.n) or leaf.n < 0:
                got = kind(leaf.n) if isinstance(leaf.n, Tensor) else repr(leaf.n)
                raise ValueError(f"mask: Prefix(n) wants a whole number from 0, got {got}")
            if leaf.n > FAR:
                raise ValueError(f"mask: Prefix(n) wants a whole number up to {FAR}, got {leaf.n}")
        elif isinstance(leaf, KeyLengths):
            _check_ids("KeyLengths.lengths", leaf.lengths, {"B": batch})
        elif isinstance(leaf, Documents):
            _check_ids("Documents.q_ids", leaf.q_ids, {"B": batch, "Q": queries})
            _check_ids("Documents.k_ids", leaf.k_ids, {"B": batch, "K": keys})
        elif isinstance(leaf, Dense):
            if leaf.tensor.dtype != torch.bool:
                raise TypeError(f"mask: Dense holds {not_boolean(leaf.tensor)}")
            check_broadcast("mask", leaf.tensor, (batch,), (heads, queries, keys))
        elif type(leaf).__hash__ is None and not leaf.tensors():  # pyright: ignore[reportUnnecessaryComparison]
            hint = "masks without tensors compare and hash by value, as of a @dataclass(frozen=True)"
            raise TypeError(f"mask: {type(leaf).__name__} cannot be hashed; {hint}")


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _check_band(band: Band, batch: int) -> None:
    for name, reach in (("left", band.left), ("right", band.right)):
        if reach is not None and not _is_whole(reach):
            raise TypeError(f"mask: Band({name}=...) wants a whole number or None, got {kind(reach)}")
    offset = band.offset
    if isinstance(offset, Tensor):
        _check_ids("Band.offset", offset, {"B": batch} if offset.ndim else {})  # a single number serves the whole batch
        return
    each = offset if isinstance(offset, tuple) else () if offset is None else (offset,)
    if not all(map(_is_whole, each)):
        raise TypeError(f"mask: Band(offset=...) wants a whole number, or one for each batch entry, got {offset!r}")
    if any(abs(number) > FAR for number in each):
        raise ValueError(f"mask: Band(offset=...) wants numbers from {-FAR} to {FAR}, got {offset!r}")
    if isinstance(offset, tuple) and len(offset) != batch:
        raise ValueError(f"mask: Band.offset has {len(offset)} numbers, wanted {batch}, one for each batch entry (B)")


def _check_ids(name: str, ids: Tensor, wanted: dict[str, int]) -> None:
    if not is_integral(ids):
        raise TypeError(f"mask: {name} is {kind(ids)}, wanted integers")
    letters, size = ", ".join(wanted), list(wanted.values())
    if ids.ndim != len(wanted):
        raise ValueError(f"mask: {name} is {list(ids.shape)}, wanted [{letters}] = {size}")
    for axis, (letter, number) in enumerate(wanted.items()):
        allowed = (1, number) if letter == "B" and len(wanted) == 2 else (number,)
        if ids.shape[axis] not in allowed:
            raise ValueError(
                f"mask: {name} axis {axis} ({letter}) is {ids.shape[axis]}, wanted {number}; it is {list(ids.shape)}"
            )
