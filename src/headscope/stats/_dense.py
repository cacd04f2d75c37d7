"""Statistics of dense attention weights: values of each row, means of each head, matches with known patterns.

docs/concepts/statistics.md defines each quantity, with its traps. All is computed in float64 on the dense weights;
entropies are in nats. ``headscope.observe`` measures the same without building the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headscope.stats._clear import is_name, name_in_words, second_name, share_of_peaks, z_of_mass

__all__ = [
    "LOCAL_REACH",
    "MINIMUM_ROWS",
    "PATTERNS",
    "Match",
    "PatternScores",
    "best_matches",
    "pattern_scores",
    "row_statistics",
    "second_matches",
]

PATTERNS = ("previous", "next", "self", "duplicate", "induction", "first", "local", "uniform")
"""The patterns that a head can match; ties go to the earlier one."""

LOCAL_REACH = 3.0
"""How far the pattern "local" reaches on either side, in positions."""

MINIMUM_ROWS = {"duplicate": 8, "induction": 8}
"""The smallest number of rows for a score; ``FEW`` for the patterns not listed here."""

FEW = 2


class PatternScores(NamedTuple):
    """The scores of each head for each pattern that its rows can show.

    Attributes:
        score: name -> float64 [H] in [0, 1]; NaN for a head with too few rows.
        rows: name -> integers [H], the number of rows of each score.
        z: name -> float64 [H], how far the mass on the pattern's keys is from what chance gives, in standard
            deviations; NaN for "uniform", which is what chance gives, and where exchanging keys changes nothing.
        peaks: float64 [H], the share of the rows with at least three visible keys that put half of their weight or more
            on one; NaN without such rows. A head with many of them has an uneven spread.

    Examples:
        >>> import torch
        >>> from headscope.stats import pattern_scores
        >>> scores = pattern_scores(torch.eye(4)[None, None])
        >>> scores.score["self"].tolist(), scores.rows["next"].tolist()
        ([1.0], [3])
    """

    score: dict[str, Tensor]
    rows: dict[str, Tensor]
    z: dict[str, Tensor]
    peaks: Tensor


class Match(NamedTuple):
    """The pattern that a head matches best: a likeness, not a claim of what the head is for.

    ``z`` is the distance from chance in standard deviations. ``peaks`` is the share of rows with at least half of their
    weight on one key, for "uniform"; NaN for the other patterns.

    Examples:
        >>> import torch
        >>> from headscope.stats import best_matches, pattern_scores
        >>> match = best_matches(pattern_scores(torch.eye(4)[None, None]))[0]
        >>> match.pattern, match.score, match.rows, round(match.z, 2)
        ('self', 1.0, 4, 3.46)
    """

    pattern: str
    score: float
    rows: int
    z: float = math.nan
    peaks: float = math.nan

    @property
    def is_name(self) -> bool:
        """Whether tables name the head by this pattern: see ``PatternScore.is_name`` of headscope.decisions."""
        return is_name(self.pattern, self.score, self.z, self.peaks)

    @property
    def name(self) -> str:
        """The name that tables show: "partly induction" below a score of 0.5, and "" where ``is_name`` is False."""
        return name_in_words(self.pattern, self.score) if self.is_name else ""


def row_statistics(
    p: Tensor,
    *,
    seen: Tensor | None = None,
    kind: Literal["self", "cross"] = "self",
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    tokens: Tensor | None = None,
    rows: Tensor | None = None,
    windows: Collection[float] = (),
    first: int = 1,
) -> dict[str, Tensor]:
    """Return the quantities of every row of attention weights.

    Shapes: p [B, H, Q, K] -> name -> float64 [B, H, Q]. NaN marks a row that does not count (see ``rows``) or that the
    quantity is not defined for, such as ``previous`` for the row that has no key before it.

    Args:
        p: weights; zero where ``seen`` is False. Rows sum to one, or to less with sinks.
        seen: which keys are visible to each row, boolean, broadcasts to p; True = attend; by default all. Pass the
            causal mask, or rows are measured against keys that were masked.
        kind: "cross" omits all quantities that require queries and keys on one axis: distance, self, previous, next,
            window, duplicate, induction.
        q_pos: position of each query, [Q] or [Q, 2]; by default the last Q of the keys' positions (bottom-right).
        k_pos: position of each key, [K] or, on a grid, [K, 2]; by default 0, 1, 2, … NaN = has no position (CLS,
            registers).
        tokens: ids of the keys, [B, K] or [K]; a query has the id of the key at its own position.
        rows: which rows count, boolean, broadcasts to [B, H, Q]. Rows without visible keys, rows of padding (their own
            key is masked for the whole batch entry) and rows with a weight that is not finite never do.
        windows: distances w, each at least 0; adds ``window_{w}``, the mass within w of the query.
        first: the number of keys in the sum ``first``, at least 1; keys masked for the whole batch entry are skipped.

    Returns:
        entropy, normalized_entropy, max_weight, effective_keys, mass, first; for self-attention also distance, self and
        window_{w}, in one dimension previous and next, and with tokens duplicate and induction.

    Raises:
        ValueError: a shape that does not fit, or a weight where ``seen`` is False.

    Examples:
        >>> import torch
        >>> from headscope.stats import row_statistics
        >>> causal = torch.ones(4, 4, dtype=torch.bool).tril()
        >>> p = causal / causal.sum(-1, keepdim=True)  # even rows
        >>> row_statistics(p[None, None], seen=causal)["effective_keys"].round().tolist()
        [[[1.0, 2.0, 3.0, 4.0]]]
    """
    at = _prepare(p, seen, kind, q_pos, k_pos, tokens, rows)
    _check_at_least("first", first, 1)
    entropy = torch.special.entr(at.p).sum(-1).clamp_min(0)  # rounding of float32 inputs may push it below
    squares = at.p.square().sum(-1)
    choices = at.visible.sum(-1)
    values = {
        "entropy": entropy,
        "normalized_entropy": torch.where(choices >= 2, entropy / choices.double().log(), math.nan),
        "max_weight": at.p.amax(-1),
        "effective_keys": torch.where(squares >= torch.finfo(squares.dtype).tiny, 1 / squares, math.nan),
        "mass": at.p.sum(-1),
        "first": (at.p * at.first_keys(first)).sum(-1),
    }
    if at.gap is not None:
        reach = at.gap.norm(dim=-1)  # [Q, K]
        placed = ~at.gap.isnan().all(-1).all(-1)  # a query without a position has no distance
        values["distance"] = torch.where(placed, (at.p * reach.nan_to_num(0.0)).sum(-1), math.nan)
        for w in windows:
            _check_at_least("windows", w, 0)
            values[f"window_{w:g}"] = torch.where(placed, (at.p * (reach <= w)).sum(-1), math.nan)
        targets = _targets(at)
        if "induction" in targets and at.own is not None:  # the query's own token comes before the next key, too
            targets["induction"] = targets["induction"] | at.own.roll(1, -1) & _beyond_first(at.own)
        for name, target in targets.items():
            target = target & at.visible
            values[name] = torch.where(target.any(-1), (at.p * target).sum(-1), math.nan)
    return {name: torch.where(at.counted, value, math.nan) for name, value in values.items()}


def pattern_scores(
    p: Tensor,
    *,
    seen: Tensor | None = None,
    kind: Literal["self", "cross"] = "self",
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    tokens: Tensor | None = None,
    rows: Tensor | None = None,
    reach: float = LOCAL_REACH,
    least_rows: Mapping[str, int] = MINIMUM_ROWS,
) -> PatternScores:
    """Return how well each head matches the ideal rows of each pattern, from 0 (chance or worse) to 1 (exactly).

    A pattern defines an ideal row: all weight on certain keys, or spread evenly over them. The overlap o_i of row i
    with it is compared with the overlap c_i that an even row has by chance (for "uniform": that a row on one key has)

        score = max(0, Σ_i (o_i - c_i) / Σ_i (1 - c_i))

    over the rows where such keys are visible and not the only visible ones (c_i < 1), batch entries pooled.

    Shapes: p [B, H, Q, K] -> name -> [H].

    Args:
        p, seen, kind, q_pos, k_pos, tokens, rows: as for ``row_statistics``.
        reach: the reach of "local" on either side, in positions, above 0.
        least_rows: pattern -> the smallest number of rows for a score; 2 for the patterns not listed.

    A pattern for which no head has enough rows is not in the result.

    Raises:
        ValueError: as ``row_statistics``.

    Examples:
        >>> import torch
        >>> from headscope.stats import pattern_scores
        >>> p = torch.eye(4).roll(1, 0)[None, None]  # each row attends to the key before it
        >>> pattern_scores(p).score["previous"].tolist()
        [1.0]
    """
    at = _prepare(p, seen, kind, q_pos, k_pos, tokens, rows)
    choices = at.visible.sum(-1).double()  # [B, H, Q]
    overlaps: dict[str, tuple[Tensor, Tensor]] = {}  # overlap and chance
    places: dict[str, Tensor] = {}
    for name, target in (_targets(at) | {"first": at.first_keys(1)}).items():
        target = places[name] = target & at.visible
        overlaps[name] = (at.p * target).sum(-1), target.sum(-1) / choices
    if at.gap is not None:
        target = places["local"] = (at.gap.norm(dim=-1) <= reach) & at.visible
        size = target.sum(-1).double()
        overlaps["local"] = torch.minimum(at.p * target, 1 / size[..., None]).sum(-1), size / choices
    overlaps["uniform"] = torch.minimum(at.p * at.visible, 1 / choices[..., None]).sum(-1), 1 / choices
    scores = PatternScores({}, {}, {}, share_of_peaks(at.p.amax(-1), choices.expand(at.p.shape[:3]), at.counted))
    for name in PATTERNS:
        if name not in overlaps:
            continue
        overlap, chance = (value.expand(at.p.shape[:3]) for value in overlaps[name])
        telling = at.counted & (chance > 0) & (chance < 1)
        count = telling.sum((0, 2))
        gain = torch.where(telling, overlap - chance, 0.0).sum((0, 2))
        score = (gain / torch.where(telling, 1 - chance, 0.0).sum((0, 2))).clamp(0, 1)
        enough = count >= least_rows.get(name, FEW)
        if enough.any():
            scores.score[name] = torch.where(enough, score, math.nan)
            scores.rows[name] = count
            z = z_of_mass(at.p, places[name], at.visible, telling) if name in places else score.new_full((), math.nan)
            scores.z[name] = z.expand_as(score)
    return scores


def _worth(match: Match) -> tuple[bool, float]:
    return match.is_name, match.score


def best_matches(scores: PatternScores) -> list[Match | None]:
    """Return for each head the pattern with the highest score, or None (with a single token, say).

    Scores that are large and far from what chance gives come first, see ``Match.is_name``.

    Examples:
        >>> import torch
        >>> from headscope.stats import best_matches, pattern_scores
        >>> p = torch.stack([torch.eye(4), torch.eye(4).roll(1, 0)])[None]
        >>> [match.pattern for match in best_matches(pattern_scores(p))]
        ['self', 'previous']
    """
    return [max(offered, key=_worth, default=None) for offered in _offered(scores)]  # ties go to the first


def second_matches(scores: PatternScores, best: Sequence[Match | None]) -> list[Match | None]:
    """Return what heads match beside their best pattern, beyond chance, see ``second_name``; None for other heads."""
    offered = _offered(scores) or [[] for _ in best]
    return [second_name(match, others) for match, others in zip(best, offered, strict=True)]


def _offered(scores: PatternScores) -> list[list[Match]]:
    """Return the matches of each head, in the order of the patterns."""
    heads = max((len(score) for score in scores.score.values()), default=0)
    matches: list[list[Match]] = [[] for _ in range(heads)]
    for name, score in scores.score.items():
        for head, offered in enumerate(matches):
            if score[head].isnan():
                continue
            z, peaks = float(scores.z[name][head]), float(scores.peaks[head]) if name == "uniform" else math.nan
            z, peaks = (math.nan if math.isnan(x) else x for x in (z, peaks))  # one NaN: equal matches compare equal
            offered.append(Match(name, float(score[head]), int(scores.rows[name][head]), z, peaks))
    return matches


# ---------------------------------------------------------------- rows, keys and their positions


@dataclass(frozen=True)
class _Rows:
    """Prepared weights.

    Attributes:
        p: [B, H, Q, K] float64; rows that do not count are zero.
        visible: [B, H, Q, K].
        counted: [B, H, Q].
        gap: key's position minus query's, [Q, K, axes]; None in cross-attention.
        own: [Q, K], whether the key is the query's own.
        tokens: [B, K] or None.
    """

    p: Tensor
    visible: Tensor
    counted: Tensor
    gap: Tensor | None
    own: Tensor | None
    tokens: Tensor | None

    def first_keys(self, n: int) -> Tensor:
        """Return the first n keys that are visible to any row of the batch entry, [B, 1, 1, K]."""
        real = self.visible.any(1).any(1)  # [B, K]
        return (real & (real.cumsum(-1) <= n))[:, None, None]


def _prepare(
    p: Tensor,
    visible: Tensor | None,
    kind: str,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    tokens: Tensor | None,
    rows: Tensor | None,
) -> _Rows:
    if p.ndim != 4:
        raise ValueError(f"p: has {p.ndim} axes, expected 4 ([B, H, Q, K]); p {list(p.shape)}")
    if kind not in ("self", "cross"):
        raise ValueError(f'kind: got {kind!r}, expected "self" or "cross"')
    batch, keys = p.shape[0], p.shape[3]
    p = p.detach().double()
    sight = _boolean("seen", visible, p, p.shape)
    whole = p.isfinite().all(-1)
    counted = sight.any(-1) & whole & _boolean("rows", rows, p, p.shape[:3])
    astray = ~sight & (p != 0) & whole[..., None]
    if bool(astray.any()):
        b, h, i, j = astray.nonzero()[0].tolist()
        raise ValueError(
            f"p: [{b}, {h}, {i}, {j}] is {p[b, h, i, j]:.3g} where seen is False (True = attend); p "
            f"{list(p.shape)}, seen {list(sight.shape) if visible is None else list(visible.shape)}"
        )
    if kind == "cross":
        return _Rows(torch.where(counted[..., None], p, 0.0), sight, counted, None, None, None)
    gap = _gap(q_pos, k_pos, p)
    own = (gap == 0).all(-1)
    hidden = ~sight.any(1).any(1)  # [B, K]
    padding = (own & hidden[:, None]).any(-1)  # [B, Q]
    counted = counted & ~padding[:, None]
    return _Rows(torch.where(counted[..., None], p, 0.0), sight, counted, gap, own, _ids(tokens, batch, keys, p))


def _boolean(name: str, tensor: Tensor | None, p: Tensor, shape: torch.Size) -> Tensor:
    if tensor is None:
        return torch.ones(shape, dtype=torch.bool, device=p.device)
    if tensor.dtype != torch.bool:
        raise ValueError(f"{name}: dtype is {tensor.dtype}, expected torch.bool; {name} {list(tensor.shape)}")
    try:
        return tensor.to(p.device).expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: does not broadcast to {list(shape)}; p {list(p.shape)}, {name} {list(tensor.shape)}"
        ) from None


def _gap(q_pos: Tensor | None, k_pos: Tensor | None, p: Tensor) -> Tensor:
    """Return key position minus query position, [Q, K, axes]; NaN if one of them has no position."""
    queries, keys = p.shape[2:]
    if k_pos is None:
        k_pos = torch.arange(keys, device="cpu")
    k_at = _positions("k_pos", k_pos, "K", keys, p)
    if q_pos is None:
        if queries > keys:
            raise ValueError(
                f"q_pos: is required, because there are more queries ({queries}) than keys ({keys}); p {list(p.shape)}"
            )
        q_pos = k_pos[keys - queries :]
    q_at = _positions("q_pos", q_pos, "Q", queries, p)
    if q_at.shape[1] != k_at.shape[1]:
        raise ValueError(
            f"q_pos: has {q_at.shape[1]} numbers for each position, k_pos has {k_at.shape[1]}; q_pos "
            f"{list(q_pos.shape)}, k_pos {list(k_pos.shape)}"
        )
    return k_at[None] - q_at[:, None]


def _positions(name: str, places: Tensor, letter: str, length: int, p: Tensor) -> Tensor:
    if tuple(places.shape) not in ((length,), (length, 1), (length, 2)):
        expected = f"[{length}] or [{length}, 2]"
        raise ValueError(
            f"{name}: expected [{letter}] or [{letter}, 2], here {expected}; "
            f"{name} {list(places.shape)}, p {list(p.shape)}"
        )
    at = places.to(p.device).double().reshape(length, -1)  # [length, axes]
    return at.masked_fill(at.isinf(), math.nan)


def _ids(tokens: Tensor | None, batch: int, keys: int, p: Tensor) -> Tensor | None:
    if tokens is None:
        return None
    if tokens.shape not in ((keys,), (batch, keys)):
        raise ValueError(
            f"tokens: expected [B, K] or [K], here [{batch}, {keys}]; tokens {list(tokens.shape)}, p {list(p.shape)}"
        )
    return tokens.to(p.device).expand(batch, keys)


def _beyond_first(x: Tensor) -> Tensor:
    """Return every key but key 0, [K]."""
    return torch.arange(x.shape[-1], device=x.device) > 0


def _targets(at: _Rows) -> dict[str, Tensor]:
    """Return for each pattern of single keys its keys, broadcastable to [B, H, Q, K].

    Those of induction come after *another* occurrence of the query's token: else every next-token head would match.
    """
    if at.gap is None or at.own is None:
        return {}
    targets = {"self": at.own}
    if at.gap.shape[-1] == 1:
        targets |= {"previous": at.gap[..., 0] == -1, "next": at.gap[..., 0] == 1}
    if at.tokens is not None:
        of_query = at.tokens[:, at.own.int().argmax(-1), None]  # [B, Q, 1]
        same = (at.tokens[:, None] == of_query) & ~at.own & at.own.any(-1, keepdim=True)  # [B, Q, K], other places only
        after = torch.zeros_like(same)
        after[..., 1:] = same[..., :-1]
        targets |= {"duplicate": same[:, None], "induction": after[:, None]}
    return targets


def _check_at_least(name: str, got: float, least: int) -> None:
    if not got >= least:
        raise ValueError(f"{name}: got {got}, expected at least {least}")


for _class in (PatternScores, Match):
    _class.__module__ = "headscope.stats"  # their public path
