"""Attention whose heads do not belong to positions: arranged by the places that the code gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headscope.tracing._invariants import Check
from headscope.tracing._written.arrangement import Arrangement, Coordinate, find_places, operands_of, walk
from headscope.tracing._written.origins import MIXED, Field, Mixing, Origins
from headscope.tracing._written.places import batches_of, places_of
from headscope.tracing._written.rows import unusual
from headscope.tracing._written.sides import Side, columns_of

SAME = ((slice(None), slice(None), slice(1)), (slice(None), slice(1)))
"""Of scores, [N, Q, K]: the first key of each query, and the first query of each key."""


def arrange_slots(origins: Origins, mixings: Sequence[Mixing]) -> Arrangement | None:
    """Return an attention in the order of its products: [B, H, Q, K] where B and H are those of the code."""
    scored = [operands_of(origins, mixing) for mixing in mixings]
    n, queries, keys = mixings[0].p.shape
    parts: list[tuple[Tensor, ...]] = []
    for mixing, each in zip(mixings, scored, strict=True):
        if each is None or mixing.p.shape != (n, queries, keys):
            return None
        place = find_places(origins.roots(mixing.p), [each])
        if place is None or any(bool((x != x[first]).any()) for x, first in zip(place, SAME, strict=True)):
            return None
        if any(_mixes_without_projection(origins, x) for x in (each.q, each.k)):
            return None
        q, k = each.q.flatten(0, 1)[place[0][:, :, 0]], each.k.flatten(0, 1)[place[1][:, 0]]
        parts.append((mixing.p, q, k, mixing.v, mixing.out))
    if len(parts) > 1:  # a loop over heads
        p, q, k, v, out = (torch.stack(each, 1) for each in zip(*parts, strict=True))
    else:
        batch = batches_of(origins, origins.of(Field.TOKEN, parts[0][1]).flatten(1))
        entries = len(set(batch)) if batch else 1
        regular = batch == sorted(batch) and all(batch.count(b) * entries == n for b in set(batch))
        entries = entries if regular else 1
        p, q, k, v, out = (x.reshape(entries, n // entries, *x.shape[1:]) for x in parts[0])
    token, key_token = torch.full((len(p), queries), MIXED), torch.full((len(p), keys), MIXED)
    heads = p.shape[1]
    return Arrangement(tuple(mixings), p, q, k, v, out, token, key_token, heads, heads, heads, False)


def _mixes_without_projection(origins: Origins, ids: Tensor) -> bool:
    """Return whether a row of an operand that is not projected holds numbers of several tokens: of one feature."""
    tokens = origins.of(Field.TOKEN, ids)
    projected = any(event.index in origins.projections for event in origins.tape.makers(origins.roots(ids)))
    return not projected and bool((tokens != tokens[..., :1]).any())


def place_sides(origins: Origins, table: Tensor, sides: list[Side]) -> None:
    """Note of queries, keys and values to which position and which part of their projection they belong."""
    for side in sides:
        columns, place = columns_of(side), places_of(origins, origins.of(Field.TOKEN, side.root))
        if columns is None or place is None:
            continue
        width = side.operand.shape[-1]
        columns = columns - columns.min()
        for level in walk(origins, side.operand):
            table[Coordinate.BATCH, level], table[Coordinate.TIME, level] = place
            table[Coordinate.HEAD, level], table[Coordinate.WIDTH, level] = columns // width, columns % width
            table[Coordinate.PART, level] = "qkv".index(side.name)
    table[:, 0] = -1


def has_split_fault(origins: Origins, side: Side) -> bool:
    """Return whether a key or value holds numbers of several positions, or those of one head are several parts."""
    tokens, parts = origins.of(Field.TOKEN, side.operand), origins.of(Field.FEATURE, side.operand).amin(-1)
    if not side.projections or not _is_cut_once(origins, side):
        return False
    if bool((tokens != tokens[..., :1]).any()):
        return True
    repeated = len(tokens[0, 0, :, 0].unique()) < tokens.shape[2]
    return repeated and bool((parts != parts[:, :, :1]).any())


def _is_cut_once(origins: Origins, side: Side) -> bool:
    """Return whether each number of a projection of positions is there once.

    Windows repeat numbers, padding is not from a projection, and keys that are pooled mix positions before the split.
    """
    rows = [origins.of(Field.TOKEN, each.rows) for each in side.projections]
    if columns_of(side) is None or any(bool((tokens != tokens[..., :1]).any()) for tokens in rows):
        return False
    return len(side.root.unique()) == side.root.numel()


def check_split(origins: Origins, side: Side) -> tuple[Check, list[str]]:
    """Return the failed check of the split of a side, and the note on it."""
    name = side.name
    claim = f"joining the heads restores {name}"
    tokens, features = origins.of(Field.TOKEN, side.operand), origins.of(Field.FEATURE, side.operand)
    words = {"q": ("queries", "query"), "k": ("keys", "key"), "v": ("values", "value")}[name]
    parts = features.amin(-1)  # [B, H, T]
    distinct = len(set(tokens[0, 0].flatten().tolist()))
    if bool((tokens != tokens[..., :1]).any()):
        text = f"one {words[1]} of a head holds numbers of several positions"
    else:
        number = len(parts[0, 0].unique())
        text = f"the {tokens.shape[2]} {words[0]} of a head come from {distinct} positions and {number} parts of {name}"
    note = unusual("the heads are cut by a view without the transpose, and mix positions", "heads-split-wrong")
    return Check(claim, text, False), [note]
