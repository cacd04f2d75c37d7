"""Attention of this rank's heads over the whole sequence: rows are exchanged for heads, and back."""

from __future__ import annotations

from torch import Tensor

from headscope.masks import cut
from headscope.parallel._exchange import HeadsForRows, RowsForHeads, join_parts
from headscope.parallel._pairs import Options, Pair, attend_pair, prepare_pair
from headscope.parallel._places import Places
from headscope.parallel._whole_rows import Local


def attend_heads(options: Options, places: Places, local: Local) -> tuple[Tensor, Tensor]:
    """Return out [B, H, own, Dv] and lse [B, H, own] of this rank's queries over all keys; differentiable once.

    Raises:
        ValueError: the number of ranks does not divide the heads.
    """
    ranks, rank, everything = len(places.parts), places.rank, slice(0, options.length)
    part = options.heads // ranks
    h = slice(rank * part, (rank + 1) * part)
    kv = (_with_heads(x, options.heads, ranks) for x in (local.k, local.v))
    q, k, v = (_whole_sequence(x, places) for x in (local.q, *kv))
    bias = local.bias
    if bias is not None:
        if bias.shape[2] > 1:  # a bias without an axis of rows is that of every rank
            rows = join_parts(bias.movedim(2, 0), places.lengths, places.group)
            bias = places.in_order(rows, 0).movedim(0, 2)
        bias = cut(bias, slice(0, bias.shape[2]), everything, h)
    sinks = None if local.sinks is None else local.sinks[h]
    out, lse = attend_pair(prepare_pair(options, Pair(q, k, v, bias, sinks, everything, everything, h)))
    return _own_rows(out, places), _own_rows(lse[..., None], places)[..., 0]


def _with_heads(x: Tensor, heads: int, ranks: int) -> Tensor:
    """Return keys or values with a number of heads that the ranks divide: each head once for each rank that uses it."""
    kv_heads = x.shape[1]
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f'how: "heads" gives each rank a part of the heads, but {ranks} ranks do not divide {heads} query heads '
            f'and {kv_heads} key/value heads; use how="gather" or "ring"'
        )
    return x if kv_heads % ranks == 0 else x.repeat_interleave(ranks // kv_heads, 1)


def _whole_sequence(x: Tensor, places: Places) -> Tensor:
    return places.in_order(HeadsForRows.apply(x, places.lengths, places.group), 2)


def _own_rows(x: Tensor, places: Places) -> Tensor:
    return RowsForHeads.apply(places.by_rank(x, 2), places.lengths, places.group)
