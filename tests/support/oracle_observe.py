"""What is observed, by its definition: float64, dense, one pair at a time. Nothing of headscope is imported here.

It starts from dense weights, ``oracle.attention(...).weights`` say, and goes through the tables of
docs/concepts/statistics.md line by line, in loops over numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAN = math.nan
Place = tuple[float, ...]
"""A position: one number, or two on a grid; NaN = has none."""


@dataclass
class Asked:
    """What is observed, and of what.

    Attributes:
        p: weights [B, H, Q, K]; lse: [B, H, Q]; seen: boolean, as p.
        q_at, k_at: positions of each batch entry, or None in cross-attention.
        line: the place of each query of each batch entry among the keys 0, 1, 2, …
        tokens: of the keys of each batch entry, or None.
        rows: which rows may count, boolean [B, H, Q]; sampled: which queries are looked at.
        values: lengths of the value vectors [B, H, K], or None.
    """

    p: Tensor
    lse: Tensor
    seen: Tensor
    q_at: Sequence[Sequence[Place]] | None
    k_at: Sequence[Sequence[Place]] | None
    line: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]] | None = None
    rows: Tensor | None = None
    sampled: Sequence[int] | None = None
    values: Tensor | None = None
    windows: Sequence[float] = ()
    first: int = 1


@dataclass
class Seen:
    """All that should come out: rows by name, [B, H, Q] with NaN where there is nothing, and all else by head."""

    rows: dict[str, Tensor]
    counted: Tensor
    broken: Tensor
    received: Tensor
    eligible: Tensor
    order: list[list[tuple[float, int, int, int]]] = field(default_factory=list)
    """Of each head all (p, b, i, j) that counted rows may see, the largest first, of equal ones the first."""
    own: dict[tuple[int, int], int] = field(default_factory=dict)
    """(b, i) -> the query's own key, where it has one."""


def own_key(asked: Asked, b: int, i: int, real: Sequence[int]) -> int | None:
    """The key at the query's position; of several the one at its place on the line, else the first real one."""
    if asked.q_at is None or asked.k_at is None:
        return None
    at, line = asked.q_at[b][i], asked.line[b][i]
    keys = asked.k_at[b]
    if any(map(math.isnan, at)):
        there = 0 <= line < len(keys) and any(map(math.isnan, keys[line]))
        return line if there else None
    same = [j for j, place in enumerate(keys) if place == at]
    if line in same:
        return line
    return next((j for j in same if j in real), same[0] if same else None)


def observe_by_definition(asked: Asked) -> Seen:
    """Every quantity of every row, every key and every head."""
    B, H, Q, K = asked.p.shape
    p, seen = asked.p.double().tolist(), asked.seen.tolist()
    shape = (B, H, Q)
    found = Seen(
        {},
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(H, K, dtype=torch.float64),
        torch.zeros(H, K, dtype=torch.int64),
        [[] for _ in range(H)],
    )
    rows: dict[tuple[int, int, int], dict[str, float]] = {}
    for b in range(B):
        real = [j for j in range(K) if any(seen[b][h][i][j] for h in range(H) for i in range(Q))]
        for i in range(Q) if asked.sampled is None else asked.sampled:
            own = own_key(asked, b, i, real)
            if own is not None:
                found.own[b, i] = own
            if own is not None and own not in real:
                continue  # padding
            for h in range(H):
                keys = [j for j in range(K) if seen[b][h][i][j]]
                if not keys or not (asked.rows is None or bool(asked.rows[b, h, i])):
                    continue
                row = {j: p[b][h][i][j] for j in keys}
                if not all(map(math.isfinite, row.values())):
                    found.broken[b, h, i] = True
                    continue
                found.counted[b, h, i] = True
                rows[b, h, i] = quantities(asked, (b, h, i), row, own, real)
                for j, weight in row.items():
                    found.received[h, j] += weight
                    found.eligible[h, j] += 1
                    found.order[h].append((weight, b, i, j))
    for order in found.order:
        order.sort(key=lambda each: (-each[0], *each[1:]))
    names = dict.fromkeys(name for values in rows.values() for name in values)
    for name in names:
        table = torch.full(shape, NAN, dtype=torch.float64)
        for place, values in rows.items():
            table[place] = values.get(name, NAN)
        found.rows[name] = table
    return found


def quantities(
    asked: Asked, at: tuple[int, int, int], row: dict[int, float], own: int | None, real: Sequence[int]
) -> dict[str, float]:
    """name -> value of one row; a quantity that it does not have is left out."""
    b, h, i = at
    lse = float(asked.lse[b, h, i])
    values = {
        "lse": lse,
        "entropy": -math.fsum(w * math.log(w) for w in row.values() if w > 0),
        "max_weight": max(row.values()),
        "argmax": float(min(j for j, w in row.items() if w == max(row.values()))),
        "mass": math.fsum(row.values()),
        "first": math.fsum(row.get(j, 0.0) for j in real[: asked.first]),
        "chance": 1 / len(row),
    }
    if values["max_weight"] > 0:
        values["max_logit"] = lse + math.log(values["max_weight"])
        values["effective_keys"] = 1 / math.fsum(w * w for w in row.values())
    if len(row) >= 2:
        values["normalized_entropy"] = values["entropy"] / math.log(len(row))
    if asked.q_at is not None and asked.k_at is not None:
        values |= _by_place(asked.q_at[b][i], asked.k_at[b], row, asked.windows, real[: asked.first])
        if asked.tokens is not None and own is not None:
            values |= _by_token(asked.tokens[b], row, own)
    if asked.values is not None:
        length = math.fsum(w * float(asked.values[b, h, j]) for j, w in row.items())
        values |= {"value_norm": length} if math.isfinite(length) else {}
    return values


def _by_place(
    at: Place, keys: Sequence[Place], row: dict[int, float], windows: Sequence[float], first: Sequence[int]
) -> dict[str, float]:
    values: dict[str, float] = {}
    placed = [j for j, place in enumerate(keys) if not any(map(math.isnan, place))]
    if any(map(math.isnan, at)):
        return values
    if placed:
        far = {j: math.dist(at, keys[j]) for j in row if j in placed}
        values["distance"] = math.fsum(row[j] * d for j, d in far.items())
        for w in windows:
            values[f"window_{w:g}"] = math.fsum(row[j] for j, d in far.items() if d <= w)
            kept = {j for j, d in far.items() if d <= w} | {*first}
            values[f"streaming_{w:g}"] = math.fsum(row.get(j, 0.0) for j in kept)
    for name, step in (("self", 0), ("previous", -1), ("next", 1)):
        if len(at) == 1 or name == "self":
            there = [j for j in row if all(k - q == step for k, q in zip(keys[j], at, strict=True))]
            values |= {name: math.fsum(row[j] for j in there)} if there else {}
    return values


def _by_token(tokens: Sequence[int], row: dict[int, float], own: int) -> dict[str, float]:
    duplicate = [j for j in row if tokens[j] == tokens[own] and j != own]
    induction = [j for j in row if j > 0 and tokens[j - 1] == tokens[own]]
    found = {"duplicate": duplicate, "induction": induction}
    return {name: math.fsum(row[j] for j in keys) for name, keys in found.items() if keys}


def head(values: Tensor) -> dict[str, Tensor]:
    """count, mean, M2, min, max of [B, H, Q] over the rows that are not NaN, each [H]."""
    found: dict[str, list[float]] = {name: [] for name in ("count", "mean", "M2", "min", "max")}
    for h in range(values.shape[1]):
        kept = [x for x in values[:, h].flatten().tolist() if not math.isnan(x)]
        mean = math.fsum(kept) / len(kept) if kept else NAN
        found["count"].append(len(kept))
        found["mean"].append(mean)
        found["M2"].append(math.fsum((x - mean) ** 2 for x in kept) if kept else NAN)
        found["min"].append(min(kept, default=NAN))
        found["max"].append(max(kept, default=NAN))
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in found.items()}


def bin_of(place: int, length: int, n: int) -> int:
    """The bin b with ⌊b·length/n⌋ <= place < ⌊(b+1)·length/n⌋."""
    return next(b for b in range(n) if b * length // n <= place < (b + 1) * length // n)


def head_map(seen: Seen, n: int, queries: int, keys: int) -> dict[str, Any]:
    """sum, count, max and the first place (b, i, j) of the max of each bin, [H, n, n] each, the places as lists."""
    H = len(seen.order)
    total = torch.zeros(H, n, n, dtype=torch.float64)
    count = torch.zeros(H, n, n, dtype=torch.int64)
    most = torch.full((H, n, n), NAN, dtype=torch.float64)
    for h, order in enumerate(seen.order):
        for weight, _, i, j in order:  # the largest comes first
            cell = (h, bin_of(i, queries, n), bin_of(j, keys, n))
            total[cell] += weight
            count[cell] += 1
            if most[cell].isnan():
                most[cell] = weight
    return {"sum": total, "count": count, "max": most}
