"""An attention that running code has written out, with its tensors brought into the order of headscope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope._dataflow.axes import Axis, Piece, size_of, sources
from headscope._dataflow.roles import Tokens


@dataclass(frozen=True, eq=False)
class WrittenAttention:
    """One call of attention that was computed as product, softmax and product.

    Shapes: scores [B, H, Q, K]; q [B, H, Q, D]; k [B, H, K, D]; v [B, H, K, Dv]; out [B, H, Q, Dv].

    Attributes:
        scores: the input of the softmax: scaled, masked, with any bias; or else the logarithms of the weights.
        q, k: the factors of the first product in the scores; None: they are not known. Whether the scores are their
            scaled product only their values show.
        v: the values of the heads in the product; None: not known.
        sinks: [H], logits beside those of the keys, whose weights were cut off; None: none.
        out: the product with the values; None if dropout changed the weights before it.
        has_logits: whether ``scores`` are the input of the softmax.
        from_weights: whether ``scores`` are the logarithms of weights.
        before: the input of a softmax whose result was changed to these weights, [B, H, Q, K]; None: not known.
        has_maximum: whether code has computed the largest of the scores, perhaps to subtract it.
        from_exponentials: whether the weights are exponentials of scores that were divided by their sum.
        query_tokens, key_tokens: which tokens the queries and the keys are.
        scope: what encloses its operations from the scores on, the outermost first.
        needed_scope: what also encloses the operations that its axes are known from.
        heads: the pieces of its axis of heads; empty: no such axis was found.
        is_whole: whether the product holds all of the weights.
        is_in_order: whether queries and keys are tokens in their order, as far as known.
        beside: the number of keys, at the end, that are not tokens, but parameters or zeros.
        may_be_heads: whether what counts as entries of a batch may be heads: tensors of three axes from outside.
    """

    scores: Tensor
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sinks: Tensor | None
    out: Tensor | None
    has_logits: bool
    from_weights: bool
    before: Tensor | None
    has_maximum: bool
    from_exponentials: bool
    query_tokens: Tokens
    key_tokens: Tokens
    scope: tuple[Any, ...]
    needed_scope: tuple[Any, ...]
    heads: Axis
    is_whole: bool
    is_in_order: bool
    beside: int
    may_be_heads: bool


@dataclass(frozen=True)
class Roles:
    """The pieces of the axes of scores by what they are; keys are one axis."""

    batch: tuple[Piece, ...]
    heads: tuple[Piece, ...]
    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]

    @property
    def outer(self) -> tuple[Piece, ...]:
        """Those that scores and values share."""
        return (*self.batch, *self.heads)


def assign_roles(axes: Sequence[Axis], key_axis: int, query_axis: Axis, folded: bool, outside: int) -> Roles | None:
    """Return which piece of the scores' axes is what; None if it is not known of one.

    Args:
        axes: of the scores.
        key_axis: which of them has the keys.
        query_axis: the product's other axis.
        folded: whether that axis may hold a batch, too: then as many of its pieces are queries as the keys have.
        outside: from how many tensors from outside queries and keys come, if they are not projected here.
    """
    keys = axes[key_axis]
    query_sources = sources(query_axis)
    has_rows = any(source.kind != "feature" for source in query_sources)  # else its tokens are features
    batch: list[Piece] = []
    heads: list[Piece] = []
    queries: list[Piece] = []
    for piece in (piece for axis in (*axes[:key_axis], *axes[key_axis + 1 :]) for piece in axis):
        source = piece.source
        if source is None or (source.kind == "joined" and source not in query_sources):
            return None
        is_feature = source.kind == "feature"
        is_projected = is_feature and piece.step in source.projected
        if source in query_sources and (not is_feature or is_projected or not has_rows):
            queries.append(piece)
        elif is_projected and not source.is_outside:
            return None  # perhaps heads, perhaps tokens that projections have made
        elif is_feature and not is_projected:
            heads.append(piece)
        else:
            batch.append(piece)
    if folded and len(queries) > max(1, len(keys)):
        cut = len(queries) - max(1, len(keys))
        batch, queries = batch + queries[:cut], queries[cut:]
    if not heads and len(axes) == 4 and len(batch) == 2:
        if outside == 1:
            return None  # perhaps heads, perhaps a second axis of a batch
        if outside > 1:
            heads = [batch.pop()]  # [B, H, Q, K] from outside, in the usual order
    if len({piece.source for piece in heads}) == 1:
        heads.sort(key=lambda piece: -piece.step)
    return Roles(tuple(batch), tuple(heads), tuple(queries), keys)


def arrange(
    x: Tensor, axes: Sequence[Axis], groups: Sequence[Sequence[Piece]], repeated: Sequence[Piece] = ()
) -> Tensor | None:
    """Return a tensor with its pieces in these groups, one axis for each; None if they are not the same pieces.

    Args:
        x, axes: the tensor and its axes.
        groups: the pieces of each axis of the result.
        repeated: pieces that the tensor may lack: it is the same along them.
    """
    own = [piece for axis in axes for piece in axis]
    ordered = [piece for group in groups for piece in group]
    places: list[int] = []
    lacking = [piece for piece in repeated if piece not in own]
    for piece in ordered:
        if piece in lacking:
            continue
        place = next((at for at, each in enumerate(own) if each == piece and at not in places), None)
        if place is None:
            return None
        places.append(place)
    if len(places) != len(own):
        return None
    split = x.reshape([piece.size for piece in own]).permute(places)
    shape = [piece.size for piece in ordered]
    for at, piece in enumerate(ordered):
        if piece in lacking:
            split = split.unsqueeze(at)
    return split.expand(shape).reshape([math.prod(piece.size for piece in group) for group in groups])


def sizes(groups: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the number of elements along each group."""
    return [size_of(tuple(group)) for group in groups]


def joined_heads(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return tensors [B, h, …] of several heads as one; None if one is missing, or their sizes differ."""
    tensors = [part for part in parts if part is not None]
    same = len(tensors) == len(parts) and len({(part.shape[0], *part.shape[2:]) for part in tensors}) == 1
    return torch.cat(tensors, 1) if same else None
