"""The query and key that show what a head does: the largest weight among those that a pattern names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.report.fixed_keys import FIXED_KEY
from headscope.stats import HeadStats

__all__ = ["ExampleCell", "query_lengths", "recorded_cell", "weights_cell"]

REACH = 3
"""The reach of "local" on either side, in positions."""

TIED = 0.99
"""Weights of at least this share of the largest one are as good an example."""


class ExampleCell(NamedTuple):
    """A query, a key and the weight between them.

    Attributes:
        query, key: their numbers, from 0.
        weight: of the pair.
        run: the forward pass that it is from.
        entry: its batch entry.

    Examples:
        >>> from headscope.report._example_cells import ExampleCell
        >>> ExampleCell(query=5, key=4, weight=0.9).run
        0
    """

    query: int
    key: int
    weight: float
    run: int = 0
    entry: int = 0


class _Candidates(NamedTuple):
    """Single weights of a head, each with its place; all of the same length."""

    weight: NDArray[np.float64]
    run: NDArray[np.int64]
    entry: NDArray[np.int64]
    query: NDArray[np.int64]
    key: NDArray[np.int64]


def weights_cell(
    pattern: str, weights: NDArray[np.float32], tokens: Sequence[str], *, fixed: int | None = None
) -> ExampleCell | None:
    """Return the example of one head from all of its weights, [Q, K]; ``fixed``: the key of the pattern "fixed key".

    Examples:
        >>> import numpy as np
        >>> from headscope.report._example_cells import weights_cell
        >>> weights_cell("previous", np.eye(5, k=-1, dtype=np.float32), "abcde")
        ExampleCell(query=3, key=2, weight=1.0, run=0, entry=0)
    """
    query, key = np.indices(weights.shape).reshape(2, -1)
    none = np.zeros_like(query)
    candidates = _Candidates(weights.astype(np.float64).ravel(), none, none, query, key)
    return _best(candidates, _shows(pattern, candidates, weights.shape, [tokens], fixed))


def recorded_cell(
    pattern: str, stats: HeadStats, layer: str, head: int, texts: Sequence[Sequence[str]], *, fixed: int | None = None
) -> ExampleCell | None:
    """Return the example of one head from the single weights of its statistics: map, edges and retained rows.

    Args:
        pattern: its name; one whose keys depend on tokens requires ``texts``.
        stats: the statistics.
        layer, head: the head.
        texts: the text of each token of each run, or of all runs.
        fixed: the key of the pattern "fixed key".

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> from headscope.report._example_cells import recorded_cell
        >>> q = 40 * torch.eye(5)[None, None]
        >>> recorded_cell("self", observe(q, q, what=Observe(edges=3)), "0", 0, []).key
        1
    """
    part = stats.parts[layer]
    pieces: list[tuple[Any, Any]] = []  # weights [n], places [n, 4]
    if part.map is not None:
        pieces.append((part.map.max[head].reshape(-1), part.map.argmax[head].reshape(-1, 4)))
    if part.edges is not None:
        pieces.append((part.edges.p[head], part.edges.at[head]))
    for run, kept in enumerate(part.kept):
        if "argmax" in kept.values and "max_weight" in kept.values:
            weight, key = kept.values["max_weight"][:, head], kept.values["argmax"][:, head]  # [B, R]
            entry = torch.arange(len(key), device=key.device)[:, None].expand_as(key)
            query = kept.queries.to(key.device).expand_as(key)
            at = torch.stack([torch.full_like(key, run), entry, query, key], -1)
            pieces.append((weight.reshape(-1), at.reshape(-1, 4)))
    if not pieces:
        return None
    weights = np.concatenate([_host(weight).astype(np.float64) for weight, _ in pieces])
    places = np.concatenate([_host(at).astype(np.int64) for _, at in pieces])
    candidates = _Candidates(weights, *places.T)
    return _best(candidates, _shows(pattern, candidates, query_lengths(stats, layer, texts), texts, fixed))


def query_lengths(stats: HeadStats, layer: str, texts: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """Return how many queries and keys the runs have; of windows of different lengths, those of the longest one.

    Only their difference is used: it places the queries among the keys. None where that place is unknown.

    Args:
        stats: the statistics.
        layer: its name.
        texts: the text of each token of each run.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.report._example_cells import query_lengths
        >>> runs = [torch.ones(1, 1, n, 4) for n in (3, 2)]
        >>> stats = observe(runs[0], runs[0]).merge(observe(runs[1], runs[1]))
        >>> stats.parts["0"].lengths, query_lengths(stats, "0", ["abc", "de"])
        (None, (3, 3))
    """
    part = stats.parts[layer]
    lengths = [len(each) for each in texts]
    # every token of each text is a query of its run
    if part.lengths is None and part.runs == len(texts) and part.of == sum(lengths):
        return max(lengths), max(lengths)
    return None if part.lengths is None else (part.lengths[0], part.lengths[1])


def _host(values: Tensor) -> NDArray[Any]:
    return values.detach().cpu().numpy()


def _best(candidates: _Candidates, shows: NDArray[np.bool_] | None) -> ExampleCell | None:
    """Return the largest weight that shows the pattern; among nearly equal ones, that of the query in the middle."""
    if shows is None:
        return None
    weight = np.where(shows & (candidates.key >= 0) & np.isfinite(candidates.weight), candidates.weight, -1.0)
    most = float(weight.max(initial=-1.0))
    if most <= 0:
        return None
    tied = np.flatnonzero(weight >= TIED * most)
    order = np.lexsort([candidates.key[tied], candidates.query[tied], candidates.entry[tied], candidates.run[tied]])
    at = tied[order[len(tied) // 2]]
    _, run, entry, query, key = (each[at] for each in candidates)
    return ExampleCell(int(query), int(key), float(weight[at]), int(run), int(entry))


def _shows(
    pattern: str,
    candidates: _Candidates,
    lengths: tuple[int, ...] | None,
    texts: Sequence[Sequence[str]],
    fixed: int | None,
) -> NDArray[np.bool_] | None:
    """Return which candidates are on a key of the pattern; None where that cannot be determined."""
    key = candidates.key
    if pattern == FIXED_KEY:
        return key == fixed
    if pattern == "first":
        return key == key[key >= 0].min(initial=0)
    if lengths is None:  # the places of the queries are not known
        return None
    own = candidates.query + lengths[1] - lengths[0]
    if pattern in ("previous", "next", "self"):
        return key == own + {"previous": -1, "next": 1, "self": 0}[pattern]
    if pattern == "local":
        return abs(key - own) <= REACH
    if pattern not in ("duplicate", "induction"):
        return np.ones_like(key, dtype=bool)
    if not texts or (len(texts) == 1 and candidates.run.max(initial=0) > 0):
        return None
    of_query, of_key = _tokens(candidates.run, own, texts), _tokens(candidates.run, key, texts)
    before = _tokens(candidates.run, key - 1, texts)
    if pattern == "duplicate":
        return (of_query >= 0) & (of_query == of_key) & (key != own)
    return (of_query >= 0) & (of_query == before) & (key != own + 1)


def _tokens(run: NDArray[np.int64], at: NDArray[np.int64], texts: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return a number for the token at each place, the same for equal tokens; -1 where there is none."""
    numbers: dict[str, int] = {}
    ids = [np.array([numbers.setdefault(text, len(numbers)) for text in run], dtype=np.int64) for run in texts]
    longest = max((len(each) for each in ids), default=0)
    table = np.full((len(ids), longest + 1), -1, dtype=np.int64)
    for row, each in zip(table, ids, strict=True):
        row[: len(each)] = each
    inside = (run >= 0) & (run < len(ids)) & (at >= 0) & (at < longest)
    return table[np.where(inside, run, 0), np.where(inside, at, longest)]
