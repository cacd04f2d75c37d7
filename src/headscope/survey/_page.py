"""The page of a survey: a table of heads that can be sorted, in one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from headscope._support.text import visible
from headscope.comparing import compare
from headscope.decisions import PatternScore, patterns
from headscope.report.page import MARKER, digest, write
from headscope.stats import HeadStats
from headscope.survey._documents import BINS, LEAST_ROWS, LENGTHS, DocumentTable
from headscope.survey._merge import Spread, Surveyed
from headscope.watching import Recording

LONGEST = 120  # characters of a name
MOST_SHOWN = 200  # of the documents that were left out
WIDTH, HEIGHT, MARGIN = 120, 28, 3  # of a curve, as in the template
EXPLANATION = (
    "Attention weights show where a head reads. They do not explain the model's answer. A score measures how closely a "
    "head matches a pattern. It does not show what the head is for."
)


@dataclass(frozen=True)
class Cell:
    """A cell of the table.

    Attributes:
        text: what it shows; the description of a curve.
        value: what it is sorted by; "" comes last.
        kind: its class in the style sheet.
        lines: several lines in place of the text.
        curve: points in place of the text.
    """

    text: str = ""
    value: str = ""
    kind: str = ""
    lines: Sequence[str] = ()
    curve: Sequence[tuple[float, float]] = ()

    @staticmethod
    def number(value: float, decimals: int = 2, text: str | None = None) -> Cell:
        """Return a cell of a number; NaN is an empty one."""
        if not math.isfinite(value):
            return Cell(kind="number")
        return Cell(f"{value:,.{decimals}f}" if text is None else text, repr(float(value)), "number")


@dataclass(frozen=True)
class Column:
    """A column: its heading, its meaning, and whether the first click sorts from the smallest."""

    heading: str
    meaning: str
    rises: bool = False


HEADS = (
    Column("Layer", "Layers in the order of the model.", True),
    Column("Head", "Counted from 0.", True),
    Column("Pattern", "The pattern that the head matches best over the corpus; in brackets: not clearly.", True),
    Column("Score", "From 0, chance or worse, to 1, every row is exactly the pattern."),
    Column("Over shards", "The smallest and the largest score of a shard."),
    Column("Score by document", "The score in each document: the median, and 10 % to 90 % of the documents."),
    Column("Entropy", "Mean and standard deviation over rows, in nats."),
    Column("Entropy by length", "The mean normalised entropy of rows with 2, 4, 8, … visible keys, from 0 to 1."),
    Column("First", "The mean weight on the first token."),
    Column("Distance", "The mean distance to the keys, in tokens."),
    Column("Documents", "Those in which the score is highest, with the score there."),
)
CHANGES = (
    Column("Layer", "Layers in the order of the model.", True),
    Column("Head", "Counted from 0.", True),
    Column("Pattern before", "The pattern that the head matches best.", True),
    Column("Score before", "From 0 to 1."),
    Column("Pattern after", "The pattern that the head matches best.", True),
    Column("Score after", "From 0 to 1."),
    Column("Entropy before", "In nats."),
    Column("Entropy after", "In nats."),
    Column("Largest change", "Of the means of all quantities, in thresholds: from 1 on it counts."),
    Column("What changed most", "The quantity, before and after.", True),
)


def save_page(path: Path, surveyed: Surveyed, *, force: bool = False) -> Path:
    """Write the page of a survey.

    Raises:
        SaveError: it cannot be written.
    """
    return write(render_page(surveyed), path, force=force)


def render_page(surveyed: Surveyed) -> str:
    """Return the page of a survey."""
    table = surveyed.table
    title = f"Survey: {surveyed.recording.about.model}"
    problems = [(_shown(name), _shown(problem)) for name, problem in table.listed[:MOST_SHOWN]]
    return _render(
        title,
        [_counts(surveyed)],
        HEADS,
        _head_rows(surveyed),
        listed=problems,
        listed_summary=f"{table.left_out:,} documents were left out; the first {len(problems):,}:",
        notes=_notes(surveyed),
        footer=_footer(surveyed.recording),
    )


def render_comparison(before: Surveyed, after: Surveyed, labels: tuple[str, str]) -> str:
    """Return the page of two surveys.

    Raises:
        ValueError: they are of different architectures.
    """
    comparison = compare(before.recording, after.recording)
    ends = {(each.layer, each.head): each for each in comparison.heads}
    rows = [
        _change_row(number, layer, head, before, after, ends.get((layer, head)))
        for number, layer, head in _heads(after.recording.stats)
    ]
    rows.sort(key=lambda row: -float(row[8].value or 0))
    named = [f"{side}: {_shown(label)}: {_counts(each)}" for side, label, each in
             zip(("Before", "After"), labels, (before, after), strict=True)]  # fmt: skip
    lead = [*named, f"{len(comparison.moved):,} of {len(comparison.heads):,} heads moved."]
    return _render(
        "Two surveys", lead, CHANGES, rows, notes=[*comparison.notes], footer=_footer(after.recording)
    )  # fmt: skip


def _render(
    title: str,
    lead: Sequence[str],
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    notes: Sequence[str],
    footer: Mapping[str, str],
    listed: Sequence[tuple[str, str]] = (),
    listed_summary: str = "",
) -> str:
    from jinja2 import Environment  # slow to import, and only needed to write a page
    from markupsafe import Markup

    style, script = _asset("page.css"), _asset("page.js")
    html = (
        Environment(autoescape=True, trim_blocks=False, keep_trailing_newline=True)
        .from_string(_asset("page.html.jinja"))
        .render(
            marker=Markup(MARKER), title=_shown(title), style=Markup(style), style_hash=digest(style),
            script=Markup(script), script_hash=digest(script), lead=lead, columns=columns, rows=rows, listed=listed,
            listed_summary=listed_summary, notes=notes, explanation=EXPLANATION, footer=footer.items(),
        )
    )  # fmt: skip
    return html.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be written


def _asset(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _shown(text: str) -> str:
    """Return a text on one line, every character visible, and not too long."""
    text = visible(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"


def _counts(surveyed: Surveyed) -> str:
    table, entry = surveyed.table, _entry(surveyed.recording)
    return (
        f"{table.documents:,} documents, {table.tokens:,} tokens in {table.windows:,} windows of at most "
        f"{entry.get('context', 0):,} tokens, {entry.get('shards', 0):,} shards."
    )


def _entry(recording: Recording) -> Mapping[str, Any]:
    entry = recording.about.options.get("survey")
    return entry if isinstance(entry, dict) else {}


def _footer(recording: Recording) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in recording.about.versions.items())
    entry = {
        name: _shown(str(value))
        for name, value in _entry(recording).items()
        if name not in ("headscope", "torch", "transformers")
    }
    return {"versions": _shown(versions), **entry}


def _notes(surveyed: Surveyed) -> list[str]:
    return [
        f"A document counts in the columns by document if it has at least {LEAST_ROWS} rows with the pattern's keys. "
        f"Its score is computed from its rows; docs/guides/survey.md says how. Quantiles are exact to {1 / BINS:g}.",
        "Scores are those of headscope.decisions.patterns. seen.safetensors holds all statistics and the maps. For "
        "their page, run headscope report seen.safetensors.",
    ]


def _heads(stats: HeadStats) -> Iterator[tuple[int, str, int]]:
    """Yield number and name of the layer, and head."""
    for number, (layer, part) in enumerate(stats.parts.items()):
        for head in range(part.heads):
            yield number, layer, head


def _best(stats: HeadStats) -> dict[tuple[str, int], PatternScore]:
    return {(each.layer, each.head): each for each in patterns(stats).best}


def _head_rows(surveyed: Surveyed) -> list[list[Cell]]:
    stats = surveyed.recording.stats
    best = _best(stats)
    rows: list[list[Cell]] = []
    for number, layer, head in _heads(stats):
        match = best.get((layer, head))
        summaries = stats[layer, head]
        entropy = summaries["entropy"]
        rows.append([
            *_place(number, layer, head), *_pattern(match), _over_shards(surveyed.spread, match),
            _by_document(surveyed, match),
            Cell.number(entropy.mean, text=f"{entropy.mean:.2f} ± {entropy.std:.2f}"),
            _by_length(surveyed.table, layer, head),
            *(Cell.number(summaries[name].mean) if name in summaries else Cell() for name in ("first", "distance")),
            _documents(surveyed.table, match),
        ])  # fmt: skip
    return rows


def _place(number: int, layer: str, head: int) -> list[Cell]:
    return [Cell(_shown(layer), str(number)), Cell(str(head), str(head), "number")]


def _pattern(match: PatternScore | None) -> list[Cell]:
    if match is None:
        return [Cell(), Cell(kind="number")]
    name = match.name or f"({match.pattern})"
    return [Cell(name, match.pattern), Cell.number(match.score)]


def _over_shards(spread: Spread, match: PatternScore | None) -> Cell:
    heads = spread.get(match.layer, {}).get(match.pattern, []) if match is not None else []
    found = heads[match.head] if match is not None and match.head < len(heads) else None
    if not found:
        return Cell(kind="number")
    least, largest = found
    return Cell.number(largest - least, text=f"{least:.2f} – {largest:.2f}")


def _by_document(surveyed: Surveyed, match: PatternScore | None) -> Cell:
    if match is None or match.pattern not in surveyed.table.names:
        return Cell(kind="number")
    low, middle, high = (surveyed.table.quantile(match.layer, match.head, match.pattern, at) for at in (0.1, 0.5, 0.9))
    return Cell.number(middle, text=f"{middle:.2f} ({low:.2f} – {high:.2f})")


def _by_length(table: DocumentTable, layer: str, head: int) -> Cell:
    """Return the curve of the normalised entropy; its text has the entropies in nats."""
    at = table.place_of(layer) + head
    counts, sums, normalised = (
        x[:, at].tolist() for x in (table.length_count, table.length_sum, table.length_normalized)
    )
    used = [n for n in range(1, LENGTHS) if counts[n]]  # with one visible key there is no entropy
    if not used:
        return Cell()
    step = (WIDTH - 2 * MARGIN) / max(1, used[-1] - 1)
    points = [
        (
            round(MARGIN + (n - 1) * step, 1),
            round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * normalised[n] / counts[n], 1),
        )
        for n in used
    ]
    text = ", ".join(f"{2**n:,}: {sums[n] / counts[n]:.2f}" for n in used)
    last = used[-1]
    return Cell(f"Mean entropy in nats by visible keys, {text}", repr(normalised[last] / counts[last]), "", (), points)


def _documents(table: DocumentTable, match: PatternScore | None) -> Cell:
    if match is None or match.pattern not in table.names:
        return Cell(kind="documents")
    found = table.titles_of(match.layer, match.head, match.pattern)
    lines = [f"{score:.2f} {_shown(title)}" for title, score in found]
    return Cell("", repr(found[0][1]) if found else "", "documents", lines)


def _change_row(number: int, layer: str, head: int, before: Surveyed, after: Surveyed, change: Any) -> list[Cell]:
    sides: list[Cell] = []
    entropies: list[Cell] = []
    for each in (before, after):
        stats = each.recording.stats
        known = layer in stats.parts and head < stats.parts[layer].heads
        sides += _pattern(_best_of(each).get((layer, head)) if known else None)
        entropies.append(Cell.number(stats[layer, head, "entropy"].mean) if known else Cell(kind="number"))
    largest = None if change is None else max(change.changes, key=lambda one: one.size, default=None)
    if largest is None:
        return [*_place(number, layer, head), *sides, *entropies, Cell(kind="number"), Cell()]
    what = f"{largest.name.replace('_', ' ')}: {largest.before:.3g} → {largest.after:.3g}"
    return [*_place(number, layer, head), *sides, *entropies, Cell.number(largest.size), Cell(what, largest.name)]


def _best_of(surveyed: Surveyed) -> dict[tuple[str, int], PatternScore]:
    return _best(surveyed.recording.stats)
