"""Attention of a tape by batch entry, head, query and key, in whatever order the code has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from headscope.tracing._written.operations import keeps_places
from headscope.tracing._written.origins import NONE, Field, Mixing, Origins, span_of
from headscope.tracing._written.places import batches_of
from headscope.tracing._written.tape import Event


class Coordinate(IntEnum):
    """Where a number belongs."""

    BATCH = 0
    HEAD = 1
    TIME = 2  # the query, or the key of keys and values
    WIDTH = 3
    KEY = 4
    PART = 5  # queries 0, keys 1, values 2


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One attention.

    Attributes:
        mixings: its products with values: one, or one for each head or batch entry of a loop.
        p: the ids of the weights that the values were multiplied by, [B, H, Q, K].
        q, k, v: those of the operands, [B, H, Q, D], [B, H, K, D], [B, H, K, Dv]; shared heads are repeated.
        out: those of the product, [B, H, Q, Dv].
        query_token, key_token: [B, Q] and [B, K].
        kv_heads, value_heads, query_heads: how many heads of keys, values and queries there are.
        is_sound: whether each head has its own part of each position. Otherwise heads and positions are only places.
    """

    mixings: tuple[Mixing, ...]
    p: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    query_token: Tensor
    key_token: Tensor
    kv_heads: int
    value_heads: int
    query_heads: int
    is_sound: bool = True


@dataclass(frozen=True, eq=False)
class Scored:
    """The operands of the product that scores belong to: ids of queries and keys for each, [N, Q, D] and [N, K, D]."""

    event: Event
    q: Tensor
    k: Tensor
    out: Tensor


def find_twins(origins: Origins) -> dict[int, Mixing]:
    """Return products whose weights an earlier product has, too, by the number of their event, with that product.

    Their results are combined place by place, as in p v + tanh(p u): they are not further heads.
    """
    twins: dict[int, Mixing] = {}
    for at, later in enumerate(origins.mixings):
        for first in origins.mixings[:at]:
            if first.event.index in twins or first.p.shape != later.p.shape:
                continue
            same = torch.equal(origins.roots(first.p), origins.roots(later.p))
            if same and _are_combined(origins, first, later):
                twins[later.event.index] = first
                break
    return twins


def _are_combined(origins: Origins, first: Mixing, later: Mixing) -> bool:
    """Return whether an operation takes the results of both, place by place."""
    for event in origins.tape.events[later.event.index + 1 :]:
        if event.is_move or len(event.inputs) < 2 or not keeps_places(event.name):
            continue
        mixed = [set(origins.of(Field.MIXED_BY, ids).unique().tolist()) for ids in event.inputs]
        if {first.event.index} in mixed and {later.event.index} in mixed:
            return True
    return False


def place_twin(table: Tensor, first: Mixing, later: Mixing) -> None:
    """Note where the results of a product belong that has the weights of an earlier one."""
    for coordinate in (Coordinate.BATCH, Coordinate.HEAD, Coordinate.TIME):
        table[coordinate, later.out] = table[coordinate, first.out][..., :1].expand(later.out.shape)
    table[Coordinate.WIDTH, later.out] = torch.arange(later.out.shape[-1]).expand(later.out.shape)


def group_mixings(origins: Origins, twins: Mapping[int, Mixing]) -> list[list[Mixing]]:
    """Return the products with values, those of one attention together: a loop over heads has several."""
    groups: list[list[Mixing]] = []
    for mixing in origins.mixings:
        if mixing.event.index in twins:
            continue
        for group in groups:
            if _belongs(origins, group, mixing):
                group.append(mixing)
                break
        else:
            groups.append([mixing])
    return groups


def _belongs(origins: Origins, group: Sequence[Mixing], mixing: Mixing) -> bool:
    """Return whether a product is of the same attention as others: of the same line and sizes, and of other rows."""
    first = group[0]
    if first.event.line != mixing.event.line or first.event.line is None or not _fit(first, mixing):
        return False
    if any(each.event.index in origins.ancestors[mixing.event.index] for each in group):
        return False
    rows = {row for each in group for row in _row_names(origins, each)}
    return rows.isdisjoint(_row_names(origins, mixing))


def _fit(first: Mixing, other: Mixing) -> bool:
    """Return whether two products have as many keys and values, and are as many; chunks may differ in their queries."""
    return (first.p.shape[0], first.v.shape) == (other.p.shape[0], other.v.shape)


def _row_names(origins: Origins, mixing: Mixing) -> set[tuple[int, int, int]]:
    query, _, head, value = _names(origins, mixing)
    return set(zip(query.flatten().tolist(), head.flatten().tolist(), value.flatten().tolist(), strict=True))


def _names(origins: Origins, mixing: Mixing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the token of each query [N, Q], that of each key [N, Q, K], and the features of q and of v [N, Q]."""
    p = mixing.p
    own, other = (Field.TOKEN, Field.FEATURE), (Field.OTHER_TOKEN, Field.OTHER_FEATURE)
    q, k = (other, own) if origins.is_transposed(p) else (own, other)
    value = origins.of(Field.FEATURE, mixing.v).amin(-1).amin(-1)  # [N]
    feature = origins.of(q[1], p).amax(-1)
    return origins.query_tokens(p), origins.of(k[0], p), feature, value[:, None].expand(p.shape[:2])


def operands_of(origins: Origins, mixing: Mixing) -> Scored | None:
    """Return the product that weights come from, as [N, Q, D] and [N, K, D]; None if they come from several."""
    roots = origins.roots(mixing.p)
    events = {event.index: event for event in origins.tape.makers(roots) if event.index in _products(origins, mixing.p)}
    if len(events) != 1:
        return None
    event = next(iter(events.values()))
    left, right = (event.inputs[at] for at in _operand_places(event))
    left, right, out = (x if x.ndim == 3 else x[None] for x in (left, right, event.out))
    if origins.is_transposed(mixing.p):
        return Scored(event, right.transpose(1, 2), left, out.transpose(1, 2))
    return Scored(event, left, right.transpose(1, 2), out)


def _products(origins: Origins, ids: Tensor) -> set[int]:
    return set(origins.of(Field.PRODUCT, ids).unique().tolist()) - {NONE}


def _operand_places(event: Event) -> tuple[int, int]:
    """Return the places of the operands of a product among its inputs."""
    return (1, 2) if event.name in ("addmm", "baddbmm") else (0, 1)


@dataclass(frozen=True)
class _Row:
    """One row of weights: its product, place in it, and names."""

    mixing: int
    n: int
    i: int
    query: int
    key: int
    head: tuple[int, int, int]


def arrange(origins: Origins, mixings: Sequence[Mixing]) -> Arrangement | None:
    """Arrange one attention by batch entry, head, query and key; None where the code does not keep them together."""
    rows: list[_Row] = []
    scored: list[Scored] = []
    for number, mixing in enumerate(mixings):
        if (operands := operands_of(origins, mixing)) is None or not _fit(mixings[0], mixing):
            return None
        scored.append(operands)
        query, key, feature, value = _names(origins, mixing)
        if not _is_sound(origins, mixing, operands):
            return None
        first_key = key.amax(-1) if bool((key[..., 0] < 0).any()) else key[..., 0]
        for n in range(query.shape[0]):
            names = zip(query[n].tolist(), first_key[n].tolist(), feature[n].tolist(), value[n].tolist(), strict=True)
            rows += [_Row(number, n, i, q, k, (f, v, 0)) for i, (q, k, f, v) in enumerate(names)]
    grid = _grid(rows, _batches_of_chunks(origins, rows) if len(mixings) > 1 else None)
    return None if grid is None else _collect(origins, mixings, scored, rows, grid)


def _is_sound(origins: Origins, mixing: Mixing, scored: Scored) -> bool:
    """Return whether each query has the keys and values of one head, and each of them one token."""
    for ids in (scored.q, scored.k, mixing.v):
        tokens, features = origins.of(Field.TOKEN, ids), origins.of(Field.FEATURE, ids)
        if bool((tokens != tokens[..., :1]).any()):
            return False
        if ids is not scored.q and bool((features != features[:, :1]).any()) and bool((tokens >= 0).all()):
            known = features.amin(-1)
            if bool((known != known[:, :1]).any()) and not _is_past(origins, ids):
                return False
    return True


def _is_past(origins: Origins, ids: Tensor) -> bool:
    """Return whether some of these numbers come from outside, as keys of earlier steps do."""
    return (
        len({event.name in ("input", "outside", "constant") for event in origins.tape.makers(origins.roots(ids))}) == 2
    )


def _batches_of_chunks(origins: Origins, rows: Sequence[_Row]) -> list[int] | None:
    """Return the batch entry of each row of a loop over chunks of queries with the same keys; None for others."""
    batch = batches_of(origins, torch.tensor([[row.query] for row in rows]))
    pairs = {(entry, row.key) for entry, row in zip(batch, rows, strict=False)}
    return batch if len(pairs) == len(set(batch)) > 0 else None


def _grid(rows: Sequence[_Row], chunks: list[int] | None) -> list[list[list[int]]] | None:
    """Return the numbers of the rows by batch entry, head and query; None if some are missing or there twice.

    Rows that are there twice are heads that share queries and values; they are told apart by their order.
    ``chunks``: the batch entries of a loop over chunks of queries.
    """
    for batch in (chunks, _batches_by_queries(rows), _batches_by_keys(rows)):
        grid = None if batch is None else _fill_grid(rows, batch)
        if grid is not None:
            return grid
    batch = _batches_by_queries(rows)
    return _fill_grid(_number_copies(rows, batch), batch)


def _number_copies(rows: Sequence[_Row], batch: Sequence[int]) -> list[_Row]:
    """Return rows of which none is there twice."""
    times: dict[tuple[object, ...], int] = {}
    numbered: list[_Row] = []
    for row, entry in zip(rows, batch, strict=True):
        name = (entry, row.query, row.head)
        numbered.append(replace(row, head=(*row.head[:2], times.get(name, 0))))
        times[name] = times.get(name, 0) + 1
    return numbered


def _fill_grid(rows: Sequence[_Row], batch: Sequence[int]) -> list[list[list[int]]] | None:
    entries: dict[int, dict[tuple[int, int, int], dict[int, int]]] = {}
    for number, row in enumerate(rows):
        queries = entries.setdefault(batch[number], {}).setdefault(row.head, {})
        if row.query in queries:
            return None
        queries[row.query] = number
    heads = sorted(next(iter(entries.values())))
    if any(sorted(entry) != heads for entry in entries.values()):
        return None
    orders = [list(entry[heads[0]]) for entry in entries.values()]
    if len({len(order) for order in orders}) != 1:
        return None
    pairs = list(zip(entries.values(), orders, strict=True))
    if any(set(entry[h]) != set(order) for entry, order in pairs for h in heads):
        return None
    return [[[entry[h][q] for q in order] for h in heads] for entry, order in pairs]


def _batches_by_queries(rows: Sequence[_Row]) -> list[int]:
    """Return the batch entry of each row: products that share a query are of one entry."""
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def find(x: tuple[int, int]) -> tuple[int, int]:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    owner: dict[int, tuple[int, int]] = {}
    for row in rows:
        place = (row.mixing, row.n)
        if (other := owner.setdefault(row.query, place)) != place:
            parent[find(place)] = find(other)
    names: dict[tuple[int, int], int] = {}
    return [names.setdefault(find((row.mixing, row.n)), len(names)) for row in rows]


def _batches_by_keys(rows: Sequence[_Row]) -> list[int]:
    names: dict[int, int] = {}
    return [names.setdefault(row.key, len(names)) for row in rows]


def _collect(
    origins: Origins, mixings: Sequence[Mixing], scored: Sequence[Scored], rows: Sequence[_Row],
    grid: list[list[list[int]]],
) -> Arrangement | None:  # fmt: skip
    index = torch.tensor(grid)  # [B, H, Q]

    def by_row(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.flatten(0, 1) for x in parts])[index]

    p = by_row([each.p for each in mixings])
    place = find_places(origins.roots(p), scored)
    if place is None or bool((place[0] != place[0][..., :1]).any()):
        return None
    q = torch.cat([each.q.flatten(0, 1) for each in scored])[place[0][..., 0]]
    k = torch.cat([each.k.flatten(0, 1) for each in scored])[place[1][:, :, 0]]
    if bool((place[1] != place[1][:, :, :1]).any()):
        same = torch.cat([each.k.flatten(0, 1) for each in scored])[place[1]]  # [B, H, Q, K, D]
        if bool((same != same[:, :, :1]).any()):
            return None
    n = torch.tensor([row.mixing for row in rows]) * mixings[0].p.shape[0] + torch.tensor([row.n for row in rows])
    v = torch.cat([each.v for each in mixings])[n[index][:, :, 0]]
    out = by_row([each.out for each in mixings])
    token = torch.tensor([row.query for row in rows])[index][:, 0]
    key_token = origins.of(Field.TOKEN, k)[:, 0, :, 0]
    shared, values, queries = (_count_heads(origins, x) for x in (k, v, q))
    return Arrangement(tuple(mixings), p, q, k, v, out, token, key_token, shared, values, queries)


def find_places(ids: Tensor, scored: Sequence[Scored]) -> tuple[Tensor, Tensor] | None:
    """Return the numbers of the queries and of the keys that made these scores, among those of all products."""
    distinct = list({each.event.index: each for each in scored}.values())
    row, column = torch.full(ids.shape, -1), torch.full(ids.shape, -1)
    first_row = first_column = 0
    for each in scored:
        n, queries, keys = each.out.shape
        if each in distinct:
            span = span_of(each.out)
            if isinstance(span, slice):
                own = (ids >= span.start) & (ids < span.stop)
                where = ids[own] - span.start
            else:
                flat, order = span.sort()
                at = torch.searchsorted(flat, ids.contiguous()).clamp(max=len(flat) - 1)
                own = flat[at] == ids
                where = order[at[own]]
            row[own] = first_row + where // keys
            column[own] = first_column + where // (queries * keys) * keys + where % keys
        first_row, first_column = first_row + n * queries, first_column + n * keys
    return None if bool((row < 0).any()) else (row, column)


def number_heads(origins: Origins, ids: Tensor) -> Tensor:
    """Return the number of the head that each head of operands, [B, H, T, D], has: heads that share one have the same.

    Heads are told apart by all of their features, and are in the order of the first. Learned keys have none.
    """
    features = origins.of(Field.FEATURE, ids[0])  # [H, T, D]
    known = (features >= 0).all(-1).all(0).nonzero().flatten()
    row = features[:, int(known[-1]) if len(known) else -1]
    return torch.cat([row.amin(-1, keepdim=True), row], -1).unique(dim=0, return_inverse=True)[1]


def _count_heads(origins: Origins, ids: Tensor) -> int:
    return len(number_heads(origins, ids).unique())


def coordinates_of(origins: Origins, attention: Arrangement) -> Tensor:
    """Return where each number of an attention belongs, [6, ids]; NONE of others."""
    table = torch.full((len(Coordinate), origins.tape.count), NONE)
    batch, heads, queries, keys = attention.p.shape
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[None, :, None, None]

    def note(ids: Tensor, time: Tensor, *, part: int | None = None, is_pair: bool = False) -> None:
        last = torch.arange(ids.shape[-1])
        head = h
        if part in (1, 2):
            head = number_heads(origins, ids)[None, :, None, None]
        values: Mapping[Coordinate, Tensor | int | None] = {
            Coordinate.BATCH: b, Coordinate.HEAD: head, Coordinate.TIME: time[:, None],
            Coordinate.KEY if is_pair else Coordinate.WIDTH: last, Coordinate.PART: part,
        }  # fmt: skip
        levels = walk(origins, ids) if attention.is_sound or is_pair or part is None else []
        for level in levels:
            own = span_of(level)
            for row, value in values.items():
                if value is not None:
                    table[row, own] = torch.as_tensor(value).expand(level.shape).reshape(-1)

    note(attention.p, torch.arange(queries), is_pair=True)
    note(attention.out, torch.arange(queries), part=None)
    note(attention.v, torch.arange(keys), part=2)
    note(attention.k, torch.arange(attention.k.shape[2]), part=1)
    note(attention.q, torch.arange(queries), part=0)
    table[:, 0] = NONE
    return table


def walk(origins: Origins, ids: Tensor) -> list[Tensor]:
    """Return these numbers, those that they were made from, and so on, in the same shape."""
    levels = [ids]
    table = origins.table[Field.PARENT]
    while bool((table[levels[-1]] > 0).any()):
        parents = table[levels[-1]]
        levels.append(torch.where(parents > 0, parents, levels[-1]))
    return levels
