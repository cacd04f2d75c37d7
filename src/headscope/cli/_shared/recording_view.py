"""What ``watch`` shows of a recording: in the terminal the heads at a glance, on the page every table."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headscope._analysis.answers import TEXTS, Answer, decimal, plural, share, short_layers
from headscope.cli._shared.console import visible
from headscope.cli._shared.headings import heading, meanings
from headscope.report.words import PATTERNS, STRONG, strength

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from headscope.cli._commands.watch import Watched
    from headscope.report.tables import Section

LINES = 48  # of heads in the terminal; the page has all
MOVES = 20

COLUMNS = ("layer", "head", "pattern", "score", "entropy", "first", "distance", "window", "kept")


def show(out: Console, watched: Watched, recording: str | None, page: str | None) -> None:
    """Print what was seen, and what follows from it."""
    from rich.table import Table
    from rich.text import Text

    from headscope.report import NOT_EXPLANATION
    from headscope.report.sheet import broken_layers

    out.print(Text(visible(f"headscope watch: {_title(watched)}"), style="dim"))
    out.print(Text(visible(_lead(watched))))
    rows = "a sample of the rows" if watched.recording.stats.sampled else "all rows"
    heading(out, "All heads", f"where each spreads its attention, over {rows}")
    cells = _cells(watched)
    shown = _striking(cells)
    out.print(_table(shown))
    if len(shown) < len(cells):
        left = f"The {len(shown)} of {len(cells)} heads with the highest scores; the page has all."
        out.print(Text(left, style="dim"))
    out.print(_reading(watched))
    if broken := broken_layers(watched.recording.stats.parts):
        out.print(Text(visible(broken)))
    heading(out, "What follows", "from this input; more on the page and in docs/decisions.md")
    findings = Table.grid(padding=(0, 1, 0, 0))
    for line in _findings(watched):
        findings.add_row("•", Text(visible(line)))
    out.print(findings)
    if watched.comparison is not None:
        heading(out, "What moved", f"since {watched.against}")
        if watched.comparison.cells():
            out.print(watched.comparison.table(limit=MOVES))
        else:
            out.print(Text(visible(watched.comparison.caption())))
    out.print()
    out.print(Text(NOT_EXPLANATION, style="dim"))
    for what, path in (("The recording", recording), ("All tables, to be opened in a browser", page)):
        if path is not None:
            out.print(Text.assemble(f"{what}: ", (visible(path), "bold")), soft_wrap=True)


def _title(watched: Watched) -> str:
    stats = watched.recording.stats
    count = sum(part.heads for part in stats.parts.values())
    layers = f"{len(stats.layers)} attention {plural('layer', len(stats.layers))}"
    return f"{watched.loaded.name}, {layers}, {count:,} {plural('head', count)}"


def _lead(watched: Watched) -> str:
    given = watched.given
    what = plural("token" if watched.loaded.takes == "text" else "image", given.tokens)
    said = f"Input: {given.source}, {given.tokens:,} {what}"
    count = len(given.parts)
    return said + (f" in {count:,} windows." if count > 1 else ".")


# ---------------------------------------------------------------- all heads


def _cells(watched: Watched) -> list[tuple[str, ...]]:
    """A line for each head."""
    stats = watched.recording.stats
    names, _ = short_layers(stats.layers)
    best = {(each.layer, each.head): each for each in watched.patterns.best}
    streams = {} if watched.streaming is None else {(each.layer, each.head): each for each in watched.streaming.heads}
    kept = {(each.layer, each.name): each.kept for each in watched.budget.heads}
    lines: list[tuple[str, ...]] = []
    for layer, part in stats.parts.items():
        for head in range(part.heads):
            match, stream = best.get((layer, head)), streams.get((layer, head))
            window = None if stream is None else stream.window
            figures = (
                decimal(float(part.moments[name].mean[head])) if name in part.moments else "–"
                for name in ("normalized_entropy", "first")
            )
            far = float(part.moments["distance"].mean[head]) if "distance" in part.moments else math.nan
            lines.append(
                (
                    names[layer], str(head), "–" if match is None else match.pattern,
                    "–" if match is None else decimal(match.score), *figures,
                    "–" if math.isnan(far) else f"{far:.1f}", "–" if window is None else f"{window:g}",
                    share(kept[layer, f"head {head}"][0]),
                )
            )  # fmt: skip
    return lines


def _table(cells: list[tuple[str, ...]]) -> Table:
    """The lines as a table without frames: as many as there are heads."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=name != "layer", overflow="fold")
    for line in cells:
        score = _as_number(line[COLUMNS.index("score")])
        table.add_row(*(Text(visible(cell)) for cell in line), style=strength(score))
    return table


def _striking(cells: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The heads with the highest scores, in the order of the model; all where there are no more lines than fit."""
    order = sorted(range(len(cells)), key=lambda at: _as_number(cells[at][COLUMNS.index("score")]), reverse=True)
    return [cells[at] for at in sorted(order[:LINES])]


def _as_number(cell: str) -> float:
    return -1.0 if cell == "–" else float(cell)


def _reading(watched: Watched) -> object:
    """What the columns mean."""
    from rich.text import Text

    _, note = short_layers(watched.recording.layers)
    found = {each.pattern for each in watched.patterns.best}
    said = meanings((name for name in PATTERNS if name in found), PATTERNS)
    columns = f"{visible(note)}{_columns()} Kept: mass that the {_keys(watched.budget.budgets[0])} with the most keep."
    return Text("\n").join([said, Text(columns, style="dim")] if said else [Text(columns, "dim")])


def _columns() -> str:
    """What the columns mean, but for the last."""
    return (
        "Score 1: exactly so; 0: no closer than chance. Entropy: of an even row's. First: mass on the first token. "
        "Distance: mean, in positions. Window: the smallest that, with the first token, keeps 95% of the mass."
    )


# ---------------------------------------------------------------- what follows


def _findings(watched: Watched) -> list[str]:
    """A sentence for each decision; none of what no row tells."""
    found = [_patterned(watched)]
    if watched.streaming is not None and any(head.sees for head in watched.streaming.heads):
        counts = Counter(head.window for head in watched.streaming.streaming)
        windows = ", ".join(f"{counts[w]} in {w:g}" for w in sorted(w for w in counts if w is not None))
        every = watched.streaming.heads
        found.append(
            f"Streaming: {len(watched.streaming.streaming)} of {len(every)} heads keep {watched.streaming.keep:.0%} of "
            f"their mass in a window and on the first token{f' ({windows} positions)' if windows else ''}; "
            f"a row sees at most {_keys(max(head.sees for head in every))}."
        )
    found += _cache(watched)
    pairs, closest = watched.repeated.pairs, watched.repeated.closest
    said = f"Near-duplicates: {len(pairs)} {plural('pair', len(pairs))} of heads within {watched.repeated.threshold:g}"
    if closest is not None:
        names, _ = short_layers(watched.recording.layers)
        one = f"layer {names[closest.layer]} head {closest.head}"
        other = f"layer {names[closest.other_layer]} head {closest.other_head}"
        said += f"; the closest are {one} and {other}, {closest.distance:.2f} apart"
    return [*found, f"{said}."]


def _patterned(watched: Watched) -> str:
    best = [each for each in watched.patterns.best if each.score >= STRONG]
    counts = Counter(each.pattern for each in best)
    named = ", ".join(f"{counts[name]} {name}" for name in PATTERNS if name in counts)
    return f"Patterns: {len(best)} heads match one with {STRONG} or more" + (f": {named}." if named else ".")


def _cache(watched: Watched) -> list[str]:
    heads = [head for head in watched.budget.heads if head.name.startswith("head ")]
    lines: list[str] = []
    for at, budget in enumerate(watched.budget.budgets):
        kept = [head.kept[at] for head in heads if not math.isnan(head.kept[at])]
        if kept:
            keep = "keeps" if budget == 1 else "keep"
            lines.append(f"{_keys(budget)} {keep} {sum(kept) / len(kept):.0%} ({min(kept):.0%} at least)")
    if not lines:
        return []
    pooled = ", chosen once for all windows" if watched.budget.pooled else ""
    sample = ", too much where few rows are sampled" if watched.budget.basis.sampled else ""
    return [f"Cache: of the attention mass, {'; '.join(lines)}; by hindsight{pooled}{sample}."]


def _keys(count: int) -> str:
    return f"{count:,} {plural('key', count)}"


# ---------------------------------------------------------------- the page


def page(watched: Watched) -> str:
    """The page with every head and every table."""
    from headscope.report._viewer.from_recording import reading
    from headscope.report.sheet import versions
    from headscope.report.viewer import render_shown, shown_recording

    about = watched.recording.about
    footer = {"Model": watched.loaded.name, "Versions": versions()}
    if about.options.get("layers") is not None:
        footer["Layers"] = ", ".join(about.options["layers"])
    title = _capital(f"{watched.loaded.name}: {watched.given.source}")
    shown = shown_recording(watched.recording, title=title, strips=(), **_image(watched))
    lead = f"{_capital(_title(watched))}. {_capital(_lead(watched))} {reading(watched.recording)}"
    notes = [*map(_sentence, watched.notes), *shown.notes]
    return render_shown(
        replace(shown, tables=_sections(watched), footer={**shown.footer, **footer}, lead=lead, notes=notes)
    )


def _image(watched: Watched) -> dict[str, Any]:
    """The image that was looked at, if it was one and its patches are a square."""
    from headscope.report._viewer.from_recording import few_before

    parts = watched.given.parts
    if watched.loaded.takes != "image" or len(parts) != 1 or len(parts[0]) != 1:
        return {}
    lengths = {part.lengths for part in watched.recording.stats.parts.values()}
    if len(lengths) != 1 or (size := next(iter(lengths))) is None or size[0] != size[1]:
        return {}
    side = math.isqrt(size[1])
    if not few_before(side, side, size[1]):
        return {}
    return {"image": _as_bytes(parts[0][0])}


def _as_bytes(pixels: Tensor) -> Any:
    """What the model was given, [h, w] or [channels, h, w], from its least to its largest value as 0 to 255."""
    if pixels.ndim == 3:
        pixels = pixels.movedim(0, -1) if pixels.shape[0] == 3 else pixels[0]
    low, high = pixels.min(), pixels.max()
    return ((pixels - low) / (high - low).clamp_min(1e-9) * 255).round().byte().numpy()


def _sentence(note: str) -> str:
    return f"{_capital(note)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sections(watched: Watched) -> list[Section]:
    from headscope.report.tables import Section

    _, note = short_layers(watched.recording.layers)
    columns = [*COLUMNS[:-1], f"kept by {_keys(watched.budget.budgets[0])}"]
    says, below = "The pattern that each comes closest to.", f"{note}{_columns()}"
    sections = [Section("Every head", says, columns, _cells(watched), below, TEXTS)]
    if watched.comparison is not None:
        sections.insert(0, _section("What moved", f"Since {watched.against}.", watched.comparison))
    sections.append(_section("Patterns", "The best and the next best match of each head.", watched.patterns))
    if watched.streaming is not None:
        says = "Heads that a window and the first token would serve, the smallest windows first."
        sections.append(_section("Streaming", says, watched.streaming))
    says = "The share of the mass on the keys that receive the most."
    sections.append(_section("What a smaller cache keeps", says, watched.budget))
    sections.append(_section("Near-duplicates", "Pairs of heads that spread alike.", watched.repeated))
    return sections


def _section(title: str, says: str, answer: Answer) -> Section:
    from headscope.report.tables import Section

    return Section(title, says, answer.columns(), answer.cells(), answer.caption(), TEXTS)
