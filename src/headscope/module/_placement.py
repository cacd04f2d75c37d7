"""Queries and keys with positions: the inputs of ``attention`` after rotary, the cache and the bias by distance."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope._attend import context
from headscope._support.torch_state import is_traced
from headscope.cache import Cache, Staged
from headscope.masks import Band, Mask, ReversedBand, as_mask
from headscope.module._inputs import check_place
from headscope.positions import ALiBi, RelativeBias, check_positions, matrix, turned_matrix


class Placement(NamedTuple):
    """The inputs of ``attention``. A named tuple, which torch.compile can trace.

    Attributes:
        q: [B, H, Q, D].
        k: [B, Hkv, K, D], with the keys of the cache.
        v: [B, Hkv, K, Dv], with the values of the cache.
        mask: that of the caller, and of the cache.
        bias: that of the caller, plus the one by distance.
        q_of_own: q for the own key of ``bias_kv``, which has no position: not rotated; None = no such key.
        reversed: the queries, and the rows of mask and bias, are in reverse order; see ``positions.turned_matrix``.
        staged: the state of the cache after the call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | Tensor | None
    bias: Tensor | None
    q_of_own: Tensor | None
    reversed: bool = False
    staged: Staged | None = None


def prepare_heads(
    self: Any, heads: tuple[Tensor, Tensor, Tensor], mask: Mask | Tensor | None, bias: Tensor | None,
    positions: Tensor | None, cache: Cache | None, *, cross: bool, parts: Any = None,
) -> Placement:  # fmt: skip
    """Normalise q and k, rotate them to their positions, add the cache, and the bias by distance."""
    q, k, v = heads
    staged = None
    parts = self if parts is None else parts
    if self.q_norm is not None and self.k_norm is not None and parts is self:  # those of a rank are normalised
        q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
    q_of_own = None if self.bias_k is None else q
    check_place(self.rotary, self.position_bias, positions, cache, cross=cross)
    start, first = (0, 0) if cache is None else (cache.length, 0)
    positions = None if positions is None else check_positions(positions, q)
    places = slice(start, start + q.shape[-2]) if positions is None else positions
    if self.rotary is not None:
        cos, sin = self.rotary.shared_cos_sin(places, q)
        q, k = self.rotary.turn(q, cos, sin), self.rotary.turn(k, cos, sin)
    if cache is not None:
        (k, v, first, mask), staged = cache._stage(k, v, mask, start)
    placement = Placement(q, k, v, mask, bias, q_of_own, staged=staged)
    if parts.position_bias is None:
        return placement
    places = (positions, start, first)
    in_order = self.reproducible or self._headscope_sums is not None
    return add_distance_bias(placement, parts.position_bias, *places, in_order=in_order)


def add_distance_bias(
    placement: Placement, position_bias: ALiBi | RelativeBias, positions: Tensor | None, start: int, first: int,
    *, in_order: bool,
) -> Placement:  # fmt: skip
    """Return a placement with a bias by distance.

    Args:
        placement: without this bias.
        position_bias: the bias.
        positions: those of the queries and keys; None = whole numbers from ``start`` and from ``first``.
        start: the position of the first query.
        first: that of the first key.
        in_order: whether the queries must stay in order; the bias is then a matrix [H, Q, K].
    """
    q, mask, bias = placement.q, placement.mask, placement.bias
    queries, keys = q.shape[-2], placement.k.shape[-2]
    if positions is None and bias is None and not in_order and _may_be_turned(position_bias, q):
        request = as_mask(mask)
        known = (Band() if request is None else request).reverse_queries(queries, keys)
        if known is not None:
            if not any(
                isinstance(leaf, ReversedBand) for leaf in known.leaves()
            ):  # it marks the order for interceptors
                known = known & ReversedBand(Band(offset=keys - queries), queries)
            bias = turned_matrix(position_bias, queries, keys, start - first, q)
            of_own = None if placement.q_of_own is None else placement.q_of_own.flip(-2)
            return placement._replace(q=q.flip(-2), q_of_own=of_own, mask=known, bias=bias, reversed=True)
    q_at = k_at = positions
    if context.active is not None and positions is not None:  # q are this rank's part, and the keys those of all ranks
        k_at = context.active.positions_of_keys(positions)
    if q_at is None or k_at is None:
        k_at = torch.arange(first, start + queries, device=q.device)
        q_at = k_at[start - first :]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    by_distance = matrix(position_bias, q_at, k_at, dtype)  # [H, Q, K] or [B, H, Q, K]
    return placement._replace(bias=by_distance if bias is None else bias + by_distance)


def _may_be_turned(bias: ALiBi | RelativeBias, q: Tensor) -> bool:
    """Return whether the kernels can read a bias with overlapping rows: without gradient or compiler."""
    trained = isinstance(bias, RelativeBias) and bias.weight.requires_grad and torch.is_grad_enabled()
    return q.shape[-2] > 1 and q.device.type == "cpu" and not trained and not is_traced()
