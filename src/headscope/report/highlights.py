"""What to look at first: at most five sentences about the heads that stand out against chance.

A pattern is named only where its score is clear, as in tables (docs/concepts/statistics.md, "Names"). The page shows
the highlights as cards, and the commands print them first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headscope import decisions
from headscope.report._clear_regions import clear_region
from headscope.report._example_cells import ExampleCell, query_lengths, recorded_cell, weights_cell
from headscope.report._figures import SheetFigures
from headscope.report._texts import short_layers, visible
from headscope.report.fixed_keys import FIXED_KEY, FixedKey, fixed_key_of_weights, fixed_keys
from headscope.report.observed_model import ObservedModel
from headscope.report.words import REGIONS, WEAK
from headscope.stats import HeadStats, Match, Scored, deed_in_words, is_second_name, second_name

__all__ = ["Highlight", "fixed_names", "recording_highlights", "sheet_highlights"]

MOST = 5
"""How many highlights there are at most."""

MOST_HEADS = 4
"""How many of them are about one head."""

SHARP = ("induction", "duplicate", "previous", "next", *REGIONS, FIXED_KEY, "self")
"""The patterns for which the best head stands, the most informative first; among regions the largest ratio is first."""

COUNTED = ("local", "first", "uniform")
"""The patterns of which only the number of heads is interesting."""

LONGEST = 16  # characters of a token


@dataclass(frozen=True)
class Highlight:
    """A head, or a number of heads, to look at first.

    Attributes:
        pattern: its name, a region of the image, or "" where nothing stands out.
        heads: how many heads have this pattern as their name or their second name.
        of: how many heads there are.
        unit: what queries and keys are: "token" or "patch".
        layer, head: the number of the layer, and the head; None where the highlight counts heads.
        name: of the head, as "3.2".
        score: of the head, 0 to 1; of a region the ratio to chance; of a number of heads the least that counts.
        share: of "fixed key" the mean weight on it.
        cell: a query and a key that show the pattern, and the texts of both if they are known.
        weight: of the cell.
        texts: of the query and the key.
        run: the number of the forward pass that the cell is from.
        also: the second pattern of the head beyond chance, and its score, if that is at least 0.3. Beside a pattern
            that the head follows partly, 0.1 suffices.

    Examples:
        >>> from headscope.report.highlights import Highlight
        >>> head = Highlight("previous", heads=1, of=8, layer=2, head=0, name="2.0", score=0.97)
        >>> head.sentence
        '2.0 looks at the previous token (97%)'
        >>> Highlight("self", 1, 8, layer=2, head=1, name="2.1", score=0.38, also=("previous", 0.31)).sentence
        '2.1 partly looks at the token itself (38%; also previous, 31%)'
        >>> Highlight("uniform", heads=5, of=8).sentence
        '5 of 8 heads come closest to an even spread'
    """

    pattern: str
    heads: int
    of: int
    unit: str = "token"
    layer: int | None = None
    head: int | None = None
    name: str = ""
    score: float | None = None
    share: float | None = None
    cell: tuple[int, int] | None = None
    weight: float | None = None
    texts: tuple[str, str] | None = None
    also: tuple[str, float] | None = None
    run: int | None = None

    @property
    def sentence(self) -> str:
        """The highlight in words, without a full stop."""
        if self.layer is None:
            return self._count()
        many = f", one of {self.heads}" if self.heads > 1 else ""
        also = f"; also {self.also[0]}, {_percent(self.also[1])}" if self.also else ""
        if self.pattern in REGIONS:
            return f"{self.name} looks at {_REGION_WORDS[self.pattern]} ({self.score:.1f} times chance{many})"
        if self.pattern == FIXED_KEY:
            key = "" if self.cell is None else f": {self.texts[1] if self.texts else self.cell[1]}"
            more = f"{many}{also}"[2:]
            more = more and f" ({more})"
            return f"{self.name} puts {_percent(self.share)} of its attention on one {self.unit}{key}{more}"
        does = _HEAD_WORDS[self.pattern].format(unit=self.unit)
        example = f": {self.texts[0]} → {self.texts[1]}" if self.texts and self.pattern in _WITH_EXAMPLE else ""
        does = deed_in_words(does, self.score)
        return f"{self.name} {does} ({_percent(self.score)}{many}{also}){example}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the sentence."""
        return {**asdict(self), "sentence": self.sentence}

    def _count(self) -> str:
        heads = f"{self.heads:,} of {self.of:,} {'head' if self.of == 1 else 'heads'}"
        if self.pattern:
            one, more = _COUNT_WORDS[self.pattern]
            return f"{heads} {(one if self.heads == 1 else more).format(unit=self.unit)}"
        return "No head matches a pattern clearly better than chance"


_WITH_EXAMPLE = ("induction", "duplicate")
_HEAD_WORDS = {
    "induction": "looks like an induction head",
    "duplicate": "looks at other copies of the same {unit}",
    "previous": "looks at the previous {unit}",
    "next": "looks at the next {unit}",
    "self": "looks at the {unit} itself",
}
_COUNT_WORDS = {
    "local": ("often looks at nearby {unit}s", "often look at nearby {unit}s"),
    "first": ("often looks at the first {unit}", "often look at the first {unit}"),
    "uniform": ("comes closest to an even spread", "come closest to an even spread"),
}
_REGION_WORDS = {
    "centre": "the centre of the object", "edges": "edges", "boundary": "the outline of the object",
    "texture": "texture", "near": "the nearest patches", "far": "the farthest patches",
}  # fmt: skip


def _percent(share: float | None) -> str:
    """Return a share as on the page: "100%" only where one decimal rounds to it, too."""
    value = 100 * (share or 0.0)
    one = f"{value:.1f}"
    decimals = value < 9.95 or (value >= 99.5 and one != "100.0")
    return f"{one.removesuffix('.0') if decimals else format(value, '.0f')}%"


@dataclass(frozen=True)
class _Named:
    """A head with its clear pattern."""

    layer: int
    head: int
    pattern: str
    score: float
    fixed: FixedKey | None = None
    also: Scored | None = None


@dataclass(frozen=True)
class _Source:
    """What highlights are made of, from a recording or a sheet.

    Attributes:
        heads: how many there are.
        names: of the layers, short.
        unit: "token" or "patch".
        example: returns a cell of a head, or None.
        texts: returns the texts of a cell, or None.
    """

    heads: int
    names: Sequence[str]
    unit: str
    example: Callable[[_Named], ExampleCell | None]
    texts: Callable[[_Named, ExampleCell], tuple[str, str] | None]


def recording_highlights(recording: ObservedModel, *, unit: str = "token") -> tuple[Highlight, ...]:
    """Return the highlights of a recording; none where patterns were not measured.

    Args:
        recording: with row quantities.
        unit: "patch" if all keys are patches of an image: the first one is then like any other.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.highlights import recording_highlights
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.zeros(1, 12, 8))
        >>> [each.sentence for each in recording_highlights(recording)]
        ['No head matches a pattern clearly better than chance', '2 of 2 heads come closest to an even spread']
    """
    stats, about = recording.stats, recording.about
    if "chance" not in stats.names:
        return ()
    fixed = fixed_names(stats, skips_first=unit == "token")
    layers = {name: n for n, name in enumerate(stats.parts)}
    ranked = decisions.patterns(stats).ranked()
    named: list[_Named] = []
    for each, *others in ranked:
        at, place = (layers[each.layer], each.head), (each.layer, each.head)
        if place in fixed:
            key = fixed[place]
            named.append(_Named(*at, FIXED_KEY, key.score, key, second_name(key.match, [each, *others])))
        elif each.is_name:
            named.append(_Named(*at, each.pattern, each.score, None, second_name(each, others)))
    if not ranked:
        return ()
    names = [*layers]
    texts = about.run_texts or (() if about.texts is None else (about.texts,))

    def example(head: _Named) -> ExampleCell | None:
        key = head.fixed and head.fixed.key
        return recorded_cell(head.pattern, stats, names[head.layer], head.head, texts, fixed=key)

    def texts_of(head: _Named, cell: ExampleCell) -> tuple[str, str] | None:
        lengths = query_lengths(stats, names[head.layer], texts)
        run = cell.run if about.run_texts else 0
        if lengths is None or cell.entry or run >= len(texts) or about.kinds.get(names[head.layer]) == "cross":
            return None
        query, tokens = cell.query + lengths[1] - lengths[0], texts[run]
        return _texts(tokens, query, cell.key) if max(query, cell.key) < len(tokens) else None

    short, _ = short_layers(names)
    heads = sum(part.heads for part in stats.parts.values())
    return _select(named, _Source(heads, [short[name] for name in names], unit, example, texts_of))


def sheet_highlights(sheet: SheetFigures) -> tuple[Highlight, ...]:
    """Return the highlights of a sheet.

    Examples:
        >>> import torch
        >>> from headscope.report import text_sheet
        >>> from headscope.report.highlights import sheet_highlights
        >>> weights = torch.eye(12).roll(-1, 1).tril()
        >>> weights[0, 0] = 1
        >>> sheet = text_sheet("Each token attends to the one before it", [*"abcdefghijkl"], [weights[None]])
        >>> [each.sentence for each in sheet_highlights(sheet)]
        ['0.0 looks at the previous token (100%)']
    """
    image = sheet.kind == "image"
    named: list[_Named] = []
    for layer, matches in enumerate(sheet.patterns):
        keys: list[FixedKey | None] | None = None
        for head, match in enumerate(matches):
            look = clear_region(sheet, layer, head) if image else None
            also = sheet.also[layer][head] if sheet.also else None
            if match is not None and match.pattern == FIXED_KEY:
                if keys is None:
                    keys = fixed_key_of_weights(sheet.weights[layer], sheet.seen[layer], skips_first=not image)
                named.append(_Named(layer, head, FIXED_KEY, match.score, keys[head], also))
            elif look is not None:
                named.append(_Named(layer, head, *look))
            elif match is not None and match.is_name:
                named.append(_Named(layer, head, match.pattern, match.score, None, also))
    if not any(match is not None for matches in sheet.patterns for match in matches):
        return ()

    def example(head: _Named) -> ExampleCell | None:
        weights = sheet.weights[head.layer][head.head]
        return weights_cell(head.pattern, weights, sheet.tokens, fixed=head.fixed and head.fixed.key)

    def texts_of(_: _Named, cell: ExampleCell) -> tuple[str, str]:
        return _texts(sheet.tokens, cell.query, cell.key, blanks=not image)

    heads = sum(len(weights) for weights in sheet.weights)
    unit = "patch" if image else "token"
    return _select(named, _Source(heads, [str(n) for n in range(sheet.layers)], unit, example, texts_of))


def fixed_names(stats: HeadStats, *, skips_first: bool = True) -> Mapping[tuple[str, int], FixedKey]:
    """Return layer and head -> its key, for the heads that tables name by "fixed key".

    That is where the key is clear, and no other clear pattern has a higher score than it.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.report.highlights import fixed_names
        >>> q, k = torch.ones(1, 1, 12, 4), torch.zeros(1, 1, 12, 4)
        >>> k[0, 0, 7] = 4.0
        >>> fixed_names(observe(q, k))["0", 0].key
        7
    """
    if "chance" not in stats.names:
        return {}
    best = {(each.layer, each.head): each for each in decisions.patterns(stats).best}
    names: dict[tuple[str, int], FixedKey] = {}
    for layer in stats.parts:
        for head, key in enumerate(fixed_keys(stats, layer, skips_first=skips_first)):
            other = best.get((layer, head))
            if key is not None and key.beats(other and Match(other.pattern, other.score, other.rows, other.z)):
                names[layer, head] = key
    return names


def _texts(tokens: Sequence[str], query: int, key: int, *, blanks: bool = True) -> tuple[str, str]:
    """Return the texts of a query and a key as they are shown; without ``blanks`` they are places, and stay whole."""
    limit = LONGEST if blanks else 40
    return visible(tokens[query], limit=limit, blanks=blanks), visible(tokens[key], limit=limit, blanks=blanks)


def _select(named: Sequence[_Named], source: _Source) -> tuple[Highlight, ...]:
    """Return the best head of each informative pattern, then the numbers of the other heads."""
    counts = Counter(each.pattern for each in named)
    counts.update(each.also.pattern for each in named if is_second_name(each.also))
    best: dict[str, _Named] = {}
    for each in named:
        if each.pattern not in COUNTED and (each.pattern not in best or each.score > best[each.pattern].score):
            best[each.pattern] = each
    order = sorted(best.values(), key=_rank)
    chosen = order[:MOST_HEADS]
    highlights = [_of_head(each, counts[each.pattern], source) for each in chosen]
    if not highlights and not any(counts[name] for name in COUNTED[:-1]):
        highlights.append(Highlight("", 0, source.heads, source.unit))
    more = sorted((name for name in COUNTED if counts[name]), key=lambda name: -counts[name])
    room = MOST - len(highlights)
    highlights += [Highlight(name, counts[name], source.heads, source.unit, score=WEAK) for name in more[:room]]
    return tuple(highlights)


def _rank(head: _Named) -> tuple[int, float]:
    is_region = head.pattern in REGIONS
    return SHARP.index(next(iter(REGIONS)) if is_region else head.pattern), -head.score if is_region else 0.0


def _of_head(head: _Named, count: int, source: _Source) -> Highlight:
    cell = source.example(head)
    short = source.names[head.layer]
    return Highlight(
        head.pattern,
        count,
        source.heads,
        source.unit,
        head.layer,
        head.head,
        f"{short}.{head.head}" if short.isdigit() else f"{visible(short, limit=40, blanks=False)}, head {head.head}",
        head.score,
        head.fixed and head.fixed.share,
        None if cell is None else (cell.query, cell.key),
        None if cell is None else cell.weight,
        None if cell is None else source.texts(head, cell),
        None if head.also is None else (head.also.pattern, head.also.score),
        None if cell is None else cell.run,
    )
