"""What can be decided from what was seen: which heads could be streamed, what a smaller cache keeps, what repeats.

Each function takes ``HeadStats``, or a recording that holds them, and returns a small result that says what it rests on
and what it does not say. docs/decisions.md defines every number, with its traps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope._analysis.answers import Basis, Decision, HasStats, decimal, plural, share, stats_of
from headscope._analysis.distances import PROFILE, bins_of, distributions, largest_gap, mass_of, profiles, variation
from headscope._analysis.pattern_means import pattern_means, smallest_window
from headscope._attend.call import as_whole
from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.stats._dense import PATTERNS
from headscope.stats._layer import histogram_edges

if TYPE_CHECKING:
    from headscope.stats import HeadStats
    from headscope.stats._layer import LayerStats, Moments

__all__ = [
    "Basis",
    "HeadBudget",
    "HeadPair",
    "KVBudget",
    "NearDuplicates",
    "PatternScore",
    "Patterns",
    "StreamingHead",
    "StreamingHeads",
    "kv_budget",
    "near_duplicates",
    "patterns",
    "streaming_heads",
]

# ---------------------------------------------------------------- heads that could be streamed


@dataclass(frozen=True)
class StreamingHead:
    """What one head keeps of its mass in a window and on the first keys.

    Attributes:
        layer, head: which one.
        window: the smallest observed distance that suffices, in positions; None = none does.
        kept: the share of its mass within ``window``, or within the largest observed one where none suffices.
        rows_kept: the share of its rows that keep at least ``StreamingHeads.keep``; None where the histogram of twenty
            bins cannot say.
        sees: how many keys the row that sees the most may see.
        rows: on how many rows this stands.
    """

    layer: str
    head: int
    window: float | None
    kept: float
    rows_kept: float | None
    sees: int
    rows: int


@dataclass(frozen=True)
class StreamingHeads(Decision):
    """Which heads a cache of a window and the first keys would serve; see ``streaming_heads``.

    Attributes:
        keep: the share of the mass that was to be kept.
        windows: the distances that were observed.
        heads: every head, in the order of the model.
    """

    keep: float
    windows: tuple[float, ...]
    heads: tuple[StreamingHead, ...]

    @property
    def streaming(self) -> tuple[StreamingHead, ...]:
        """Those for which some window suffices."""
        return tuple(head for head in self.heads if head.window is not None)

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head", "window", "kept", f"rows ≥ {self.keep:.0%}", "sees", "rows")

    def cells(self) -> list[tuple[str, ...]]:
        """The heads with the smallest windows first."""
        last = math.inf
        order = sorted(self.heads, key=lambda each: last if each.window is None else each.window)
        return [
            (
                each.layer,
                str(each.head),
                "none" if each.window is None else f"{each.window:g}",
                share(each.kept),
                share(math.nan if each.rows_kept is None else each.rows_kept),
                f"{each.sees:,}",
                f"{each.rows:,}",
            )
            for each in order
        ]

    def caption(self) -> str:
        """What stands below the table."""
        said = f"{len(self.streaming)} of {len(self.heads)} heads keep {self.keep:.0%} of their mass in a window."
        return f"{said} {super().caption()}"


def streaming_heads(stats: HeadStats | HasStats, keep: float = 0.95) -> StreamingHeads:
    """Which heads keep their mass in a window plus the first keys, and could do with a cache of those.

    Of each head the smallest observed window w is named for which mean ``streaming_w`` / mean ``mass`` >= keep. A
    window that holds all that any row of the head may see, but for the first key, tells nothing and is passed over.

    Args:
        stats: with ``Observe(windows=...)``; how many first keys are added is what ``Observe.first`` said.
        keep: the share of the mass, above 0 and below 1. The share of rows is exact where this is a multiple of 0.05,
            an edge of the histogram; between edges it is that of the next edge above.

    Raises:
        ValueError: keep is out of range, or no window was observed.
    """
    if not 0 < keep < 1:
        raise ValueError(f"keep: got {keep}, wanted a share above 0 and below 1")
    found = stats_of(stats)
    parts = {layer: part for layer, part in found.parts.items() if _windows(part)}
    if not parts:
        raise ValueError("streaming_heads: no window was observed; observe with Observe(windows=(64, 256))")
    heads = [each for layer, part in parts.items() for each in _streaming(layer, part, keep)]
    windows = tuple(sorted({w for part in parts.values() for w in _windows(part)}))
    names = tuple(f"streaming_{w:g}" for w in windows)
    basis = Basis.of_layers(parts.values(), names, [head.rows for head in heads])
    caveat = "Measured on this input: what a head does not need here it may need on a longer or another text."
    if wide := [w for w in windows if all(w >= head.sees - 2 for head in heads)]:
        caveat += f" No row sees more than a window of {', '.join(f'{w:g}' for w in wide)}, which tells nothing."
    if missing := [layer for layer in found.layers if layer not in parts]:
        caveat += f" Without a window and left out: {', '.join(missing)}."
    return StreamingHeads(basis, caveat, keep, windows, tuple(heads))


def _windows(part: LayerStats) -> list[float]:
    """The observed distances, ascending."""
    return sorted(float(name.removeprefix("streaming_")) for name in part.moments if name.startswith("streaming_"))


def _streaming(layer: str, part: LayerStats, keep: float) -> Iterator[StreamingHead]:
    mass, most = part.moments["mass"].mean, 1 / part.moments["chance"].min
    for head in range(part.heads):
        sees = 0 if bool(most[head].isnan()) else round(float(most[head]))
        window, kept, rows_kept, rows = None, math.nan, None, 0
        for w in _windows(part):
            moments = part.moments[f"streaming_{w:g}"]
            kept = float(moments.mean[head] / mass[head])
            rows_kept, rows = _rows_above(keep, moments, head), int(moments.count[head])
            if w >= sees - 2:  # with the first key, all that there is to see
                break
            if kept >= keep:
                window = w
                break
        yield StreamingHead(layer, head, window, kept, rows_kept, sees, rows)


def _rows_above(least: float, moments: Moments, head: int) -> float | None:
    """The share of rows with at least this, or at least the next edge of the histogram."""
    edges = histogram_edges("streaming")
    first = next((at for at, edge in enumerate(edges) if edge >= least - 1e-9), len(edges))
    counts = moments.histogram[head]
    rows = int(moments.count[head])
    return float(counts[first:].sum()) / rows if rows and first < len(counts) else None


# ---------------------------------------------------------------- what a budget of keys keeps


@dataclass(frozen=True)
class HeadBudget:
    """What budgets of keys keep of the mass of one query head, or of the query heads that share keys.

    Attributes:
        layer: which one.
        name: "head 5", or "kv 1 (heads 4-7)" for the key/value head of a group.
        keys: how many keys received anything to choose from.
        kept: the share of the received mass on the keys that receive the most, for each budget; NaN where nothing was
            received.
    """

    layer: str
    name: str
    keys: int
    kept: tuple[float, ...]


@dataclass(frozen=True)
class KVBudget(Decision):
    """How much attention mass smaller caches keep; see ``kv_budget``.

    Attributes:
        budgets: how many keys each head or group may keep.
        pooled: whether several forwards or batch entries are summed by position; each figure is then at most what
            budgets chosen for each sequence by itself would keep.
        heads: query heads and, where asked for, groups, in the order of the model.
    """

    budgets: tuple[int, ...]
    pooled: bool
    heads: tuple[HeadBudget, ...]

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head or group", "keys", *(f"{budget:,}" for budget in self.budgets))

    def cells(self) -> list[tuple[str, ...]]:
        """In the order of the model."""
        return [(each.layer, each.name, f"{each.keys:,}", *map(share, each.kept)) for each in self.heads]


def kv_budget(
    stats: HeadStats | HasStats,
    keys: Collection[int] = (64, 256, 1024),
    *,
    kv_heads: int | Mapping[str, int] | None = None,
) -> KVBudget:
    """How much attention mass a cache of k keys keeps, were it to hold those that receive the most (heavy hitters).

    Args:
        stats: with ``received``.
        keys: budgets k, each from 1.
        kv_heads: how many key/value heads the query heads share, or that for each layer by name: adds a line for each
            group, whose query heads keep the same keys. By default only query heads by themselves.

    Exact for one sequence. ``received`` is summed by position, so where several sequences are in it, one set of
    positions stands for all, which keeps at most what a choice for each would.

    Raises:
        TypeError: one budget that is in no collection.
        ValueError: nothing was received, a budget below 1, or heads that do not divide into so many groups.
    """
    if as_whole(keys) is not None:
        raise TypeError(f"keys: got {keys}, wanted several budgets, as ({keys},)")
    budgets = tuple(as_whole(k) or 0 for k in keys)
    if not budgets or min(budgets) < 1:
        raise ValueError(f"keys: got {tuple(keys)}, wanted whole numbers from 1")
    found = stats_of(stats)
    parts = {layer: part for layer, part in found.parts.items() if part.received is not None}
    if not parts:
        raise ValueError("kv_budget: needs what the keys received; observe with Observe(received=True)")
    if isinstance(kv_heads, Mapping) and (unknown := [layer for layer in kv_heads if layer not in found.parts]):
        raise ValueError(f"kv_heads: got {', '.join(unknown)}, wanted layers: {', '.join(found.layers)}")
    lines: list[HeadBudget] = []
    for layer, part in parts.items():
        groups = kv_heads.get(layer) if isinstance(kv_heads, Mapping) else kv_heads
        lines += _budgets(layer, part, budgets, groups)
    rows = [n for part in parts.values() for n in part.rows.tolist()]
    pooled = any(part.runs > 1 or part.of > _queries(part) for part in parts.values())
    caveat = "The keys are chosen with hindsight, which no cache has while it fills."
    if pooled:
        caveat += " Several forwards or batch entries are summed by position: steps of one sequence are exact, of"
        caveat += " several sequences this is a lower bound."
    basis = Basis.of_layers(parts.values(), ("received",), rows)
    if basis.sampled:
        caveat += " Of a sample of the rows too few keys receive anything: with few rows these figures are too high."
    if missing := [layer for layer in found.layers if layer not in parts]:
        caveat += f" Without received and left out: {', '.join(missing)}."
    return KVBudget(basis, caveat, budgets, pooled, tuple(lines))


def _queries(part: LayerStats) -> int:
    """How many a batch entry has, of one run; of an older file, which does not say it, at most."""
    if part.lengths is not None:
        return part.lengths[0]
    return 0 if part.received is None else part.received.shape[-1]


def _budgets(layer: str, part: LayerStats, budgets: tuple[int, ...], groups: int | None) -> Iterator[HeadBudget]:
    assert part.received is not None
    assert part.eligible is not None
    for head, (received, eligible) in enumerate(zip(part.received, part.eligible, strict=True)):
        yield _kept(layer, f"head {head}", received, eligible, budgets)
    if groups is None:
        return
    if groups < 1 or part.heads % groups:
        raise ValueError(f"kv_heads: got {groups}, wanted a number that divides the {part.heads} heads of {layer}")
    size = part.heads // groups
    sums = (x.unflatten(0, (groups, size)).sum(1) for x in (part.received, part.eligible))
    for group, (received, eligible) in enumerate(zip(*sums, strict=True)):
        first, last = group * size, (group + 1) * size - 1
        name = f"kv {group} (head {first})" if size == 1 else f"kv {group} (heads {first}-{last})"
        yield _kept(layer, name, received, eligible, budgets)


def _kept(layer: str, name: str, received: Tensor, eligible: Tensor, budgets: tuple[int, ...]) -> HeadBudget:
    most_first = received.sort(descending=True).values.cumsum(0)  # [K]
    count = int((eligible > 0).sum())
    total = float(received.sum())
    kept = tuple(float(most_first[min(k, len(most_first)) - 1]) / total if total > 0 else math.nan for k in budgets)
    return HeadBudget(layer, name, count, tuple(min(each, 1.0) for each in kept))


# ---------------------------------------------------------------- heads that repeat another


@dataclass(frozen=True)
class HeadPair:
    """How far two heads are apart, each from 0 (alike) to 1.

    Attributes:
        layer, head, other_layer, other_head: which two.
        map: total variation between their maps.
        received: total variation between what the keys receive.
        rows: the largest difference between the means of a row quantity, see ``PROFILE``; 0 where there are none.
    """

    layer: str
    head: int
    other_layer: str
    other_head: int
    map: float
    received: float
    rows: float

    @property
    def distance(self) -> float:
        """The largest of the three."""
        return max(self.map, self.received, self.rows)


@dataclass(frozen=True)
class NearDuplicates(Decision):
    """Which heads do nearly what another does; see ``near_duplicates``.

    Attributes:
        threshold: how far apart a pair may be.
        bins: of the maps.
        pairs: those within the threshold, the closest first.
        closest: the closest of all pairs; None where there are fewer than two heads.
        left_out: heads and layers that could not be compared, and why.
    """

    threshold: float
    bins: int
    pairs: tuple[HeadPair, ...]
    closest: HeadPair | None
    left_out: tuple[str, ...]

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head", "other layer", "other head", "map", "received", "rows")

    def cells(self) -> list[tuple[str, ...]]:
        """The pairs within the threshold, the closest first."""
        return [
            (
                pair.layer,
                str(pair.head),
                pair.other_layer,
                str(pair.other_head),
                *map(decimal, (pair.map, pair.received, pair.rows)),
            )
            for pair in self.pairs
        ]

    def caption(self) -> str:
        """What stands below the table."""
        said = f"{len(self.pairs)} {plural('pair', len(self.pairs))} within {self.threshold:g}."
        if not self.pairs and self.closest is not None:
            pair = self.closest
            said += f" The closest are {pair.layer} head {pair.head} and {pair.other_layer} head {pair.other_head}:"
            said += f" {pair.distance:.2f} apart."
        left = f" Left out: {'; '.join(self.left_out)}." if self.left_out else ""
        return visible(f"{said} {super().caption()}{left}")

    def to_dict(self) -> dict[str, Any]:
        """The answer ready for JSON; what is not defined is None."""
        pairs = [self.closest, *self.pairs] if self.closest is not None else []
        found = super().to_dict()
        for said, pair in zip([found["closest"], *found["pairs"]], pairs, strict=False):
            said["distance"] = plain(pair.distance)
        return found


def near_duplicates(stats: HeadStats | HasStats, threshold: float = 0.1) -> NearDuplicates:
    """Which heads, of the same layer or of others, spread their attention nearly as another does.

    Two heads are as far apart as the largest of three distances: total variation (half the sum of absolute differences)
    between their maps and between what their keys receive, each normalised to sum to one, and the largest difference
    between the means of their row quantities. In bins nothing is farther apart than it is by single weights: the
    distance is a lower bound.

    Args:
        stats: with a map and ``received``.
        threshold: how far apart near-duplicates may be, from 0 to 1.

    Raises:
        ValueError: threshold is out of range, no layer has a map and ``received``, or maps have different bins.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold: got {threshold}, wanted 0 to 1")
    found = stats_of(stats)
    parts = {layer: part for layer, part in found.parts.items() if part.map is not None and part.received is not None}
    if not parts:
        raise ValueError(
            "near_duplicates: needs maps and what the keys received; observe with Observe(map=64, received=True)"
        )
    bins = bins_of(parts.values())
    left_out = [f"{layer} (no map or received)" for layer in found.layers if layer not in parts]
    every = [(layer, head) for layer, part in parts.items() for head in range(part.heads)]
    seen, profile = mass_of(parts.values()) > 0, profiles(parts.values())
    places = [place for place, has in zip(every, seen.tolist(), strict=True) if has]
    left_out += [f"{layer} head {head} (no weight)" for layer, head in every if (layer, head) not in places]
    between = [variation(x[seen], x[seen]) for x in distributions(parts.values())]
    between.append(largest_gap(profile[seen], profile[seen]))
    names = (f"maps of {bins} bins", "received", *(name for name in PROFILE if name in found.names))
    basis = Basis.of_layers(parts.values(), names, [n for part in parts.values() for n in part.rows.tolist()])
    caveat = "Alike on this input, in bins; heads that only rest (all weight on the first key, say) are alike, too."
    pairs, closest = _pairs(places, between, threshold), _closest(places, between)
    return NearDuplicates(basis, caveat, threshold, bins, pairs, closest, tuple(left_out))


Place = tuple[str, int]


def _pair(places: list[Place], between: list[Tensor], a: int, b: int) -> HeadPair:
    return HeadPair(*places[a], *places[b], *(float(x[a, b]) for x in between))


def _pairs(places: list[Place], between: list[Tensor], threshold: float) -> tuple[HeadPair, ...]:
    far = torch.stack(between).amax(0)
    near = (far <= threshold).triu(1).nonzero().tolist()
    found = [_pair(places, between, a, b) for a, b in near]
    return tuple(sorted(found, key=lambda pair: pair.distance))


def _closest(places: list[Place], between: list[Tensor]) -> HeadPair | None:
    if len(places) < 2:
        return None
    far = torch.stack(between).amax(0)
    far = torch.where(torch.ones_like(far, dtype=torch.bool).triu(1), far, math.inf)
    a, b = divmod(int(far.argmin()), len(places))
    return _pair(places, between, a, b)


# ---------------------------------------------------------------- patterns


@dataclass(frozen=True)
class PatternScore:
    """How well one head matches one pattern: a likeness, not a claim of what the head is for.

    Attributes:
        layer, head: which one.
        pattern: its name.
        score: from 0 (chance or worse) to 1 (every row is exactly the pattern).
        rows: on how many rows that can tell this stands.
        exact: whether it is what ``pattern_scores`` says of the dense weights of the same rows; else an estimate.
    """

    layer: str
    head: int
    pattern: str
    score: float
    rows: int
    exact: bool


@dataclass(frozen=True)
class Patterns(Decision):
    """Which patterns heads match; see ``patterns``.

    Attributes:
        scores: of each head and each pattern that can be told, in the order of the model.
        local: the distances within which "local" was measured, for each layer that has any.
    """

    scores: tuple[PatternScore, ...]
    local: dict[str, float]

    def of(self, layer: str, head: int) -> dict[str, PatternScore]:
        """Pattern -> score of one head.

        Raises:
            KeyError: no pattern could be told of such a head.
        """
        found = {each.pattern: each for each in self.scores if (each.layer, each.head) == (layer, head)}
        if not found:
            layers = ", ".join(dict.fromkeys(each.layer for each in self.scores)) or "none"
            raise KeyError(f"layer {layer}, head {head}: no scores; there are scores of heads of {layers}")
        return found

    @property
    def best(self) -> tuple[PatternScore, ...]:
        """Of each head the pattern with the highest score; of equal ones the more specific. None scored is left out."""
        return tuple(ranked[0] for ranked in self._ranked())

    def _ranked(self) -> list[list[PatternScore]]:
        heads: dict[Place, list[PatternScore]] = {}
        for each in self.scores:
            heads.setdefault((each.layer, each.head), []).append(each)
        return [sorted(each, key=lambda score: -score.score) for each in heads.values()]  # stable: specific ones first

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        return ("layer", "head", "pattern", "score", "rows", "next best", "its score")

    def cells(self) -> list[tuple[str, ...]]:
        """One line for each head: its best pattern and the next best."""
        lines: list[tuple[str, ...]] = []
        for best, *rest in self._ranked():
            second = (_marked(rest[0]), decimal(rest[0].score)) if rest else ("", "")
            lines.append((best.layer, str(best.head), _marked(best), decimal(best.score), f"{best.rows:,}", *second))
        return lines


def _marked(score: PatternScore) -> str:
    return score.pattern if score.exact else f"{score.pattern} ~"


def patterns(stats: HeadStats | HasStats) -> Patterns:
    """Which patterns each head matches, with a score and the rows it stands on.

    previous, next, self, first, duplicate, induction, local and uniform, in the sense of ``pattern_scores``: row is
    query, and "previous" is weight on the key before it. From means alone the scores of the first four are those of the
    dense weights in most cases; the others are estimates, marked ``exact=False`` and by ~ in the table.
    docs/decisions.md says how each differs. "first" expects ``Observe(first=1)``.

    Args:
        stats: with the row quantities; "duplicate" and "induction" want ``Observe(tokens=...)``, "local" a window, of
            which the smallest from 1 on is taken.

    Raises:
        ValueError: there are no row quantities.
    """
    found = stats_of(stats)
    parts = {layer: part for layer, part in found.parts.items() if "chance" in part.moments}
    if not parts:
        raise ValueError("patterns: there are no row quantities with chance; observe with Observe(row_stats=True)")
    scores: list[PatternScore] = []
    for layer, part in parts.items():
        told = {name: tuple(x.tolist() for x in each) for name, each in pattern_means(part).items()}
        for head in range(part.heads):
            for name in PATTERNS:
                if name in told and not math.isnan(told[name][0][head]):
                    score, rows, exact = (x[head] for x in told[name])
                    scores.append(PatternScore(layer, head, name, score, rows, exact))
    local = {layer: w for layer, part in parts.items() if (w := smallest_window(part)) is not None}
    names = tuple(dict.fromkeys(each.pattern for each in scores))
    rows = [int(n) for part in parts.values() for n in part.moments["chance"].count.tolist()]
    basis = Basis.of_layers(parts.values(), (f"the means of {', '.join(names)}", "chance"), rows)
    caveat = "A pattern is a likeness on this input, no claim of what a head is for; below about 0.3 none fits."
    if any(not each.exact for each in scores):
        caveat += " ~ marks estimates from means."
    return Patterns(basis, caveat, tuple(scores), local)
