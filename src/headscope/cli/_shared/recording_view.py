"""What ``watch`` shows of a recording: an overview of the heads in the terminal, every table on the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headscope._analysis.answers import TEXTS, Answer, decimal, plural, share, short_layers
from headscope._support.text import visible
from headscope.cli._shared.console import few
from headscope.cli._shared.headings import CAVEAT, heading, meanings, show_highlights
from headscope.cli._shared.segment_view import make_sections, show_segments
from headscope.report.words import PATTERNS, strength
from headscope.stats import PARTLY, join_names, second_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from headscope.cli._shared.watch_run import WatchResult
    from headscope.report.highlights import Highlight
    from headscope.report.tables import Section
    from headscope.watching import About

LINES = 48  # of heads in the terminal; the page has all
MOVES = 20

COLUMNS = ("layer", "head", "pattern", "score", "normalized entropy", "first", "distance", "window", "top")
TOP = COLUMNS[-1]  # shown with the number of keys


def show(out: Console, result: WatchResult, recording: str | None, page: str | None) -> None:
    """Print the heads of a recording, and a summary."""
    from rich.table import Table
    from rich.text import Text

    from headscope.report.sheet import broken_layers

    out.print(Text(visible(f"headscope watch: {_title(result)}"), style="dim"))
    out.print(Text(visible(_lead(result))))
    show_highlights(out, find_highlights(result))
    rows = "a sample of the queries" if result.recording.stats.sampled else "all queries"
    heading(out, "All heads", f"best-matching pattern of each, and means over {rows}")
    cells = _cells(result)
    shown = _striking(cells)
    out.print(_table(shown, result))
    if len(shown) < len(cells):
        left = f"Shown: the {len(shown)} most striking heads of {len(cells)}. The page shows all."
        out.print(Text(left, style="dim"))
    out.print(_reading(result, cells))
    if broken := broken_layers(result.recording.stats.parts):
        out.print(Text(visible(broken)))
    if result.segments is not None:
        show_segments(out, result.segments, short_layers(result.recording.layers)[0])
    heading(out, "Summary", "of this input; more on the page and in docs/guides/decide.md")
    bullets = Table.grid(padding=(0, 1, 0, 0))
    for line in _conclusions(result):
        bullets.add_row("•", Text(visible(line)))
    out.print(bullets)
    if result.comparison is not None:
        heading(out, "What moved", f"since {result.against}")
        if result.comparison.cells():
            out.print(result.comparison.table(limit=MOVES))
        else:
            out.print(Text(visible(result.comparison.caption())))
    out.print()
    out.print(Text(CAVEAT, style="dim"))
    for what, path, note in (("Recording", recording, ""), ("Open in a browser", page, " (all tables)")):
        if path is not None:
            out.print(Text.assemble(f"{what}: ", (visible(path), "bold"), note), soft_wrap=True)


def find_highlights(result: WatchResult) -> tuple[Highlight, ...]:
    """Return what to look at first, as on the page."""
    from headscope.report.highlights import recording_highlights

    return recording_highlights(result.recording, unit="patch" if _has_only_patches(result) else "token")


def _has_only_patches(result: WatchResult) -> bool:
    """Return whether each key is a patch of the one image that the page shows."""
    image = _image(result)
    (length,) = {part.lengths for part in result.recording.stats.parts.values()} if image else (None,)
    if length is None:
        return False
    return image.get("special", length[1] - math.isqrt(length[1]) ** 2) == 0


def _title(result: WatchResult) -> str:
    stats = result.recording.stats
    count = sum(part.heads for part in stats.parts.values())
    layers = f"{len(stats.layers)} attention {plural('layer', len(stats.layers))}"
    return f"{result.loaded.name}, {layers}, {count:,} {plural('head', count)}"


def _lead(result: WatchResult) -> str:
    model_input = result.model_input
    unit = plural("token" if result.loaded.takes == "text" else "image", model_input.tokens)
    lead = f"Input: {model_input.source}, {model_input.tokens:,} {unit}"
    count = len(model_input.parts)
    return lead + (f" in {count:,} windows." if count > 1 else ".")


# ---------------------------------------------------------------- all heads


def _cells(result: WatchResult) -> list[tuple[str, ...]]:
    """Return a line for each head."""
    from headscope.report.highlights import fixed_names

    stats = result.recording.stats
    names, _ = short_layers(stats.layers)
    ranked = {(each[0].layer, each[0].head): each for each in result.patterns.ranked()}
    fixed = fixed_names(stats, skips_first=not _has_only_patches(result))
    streams = {} if result.streaming is None else {(each.layer, each.head): each for each in result.streaming.heads}
    shares = {(each.layer, each.name): each.kept for each in result.budget.heads}
    lines: list[tuple[str, ...]] = []
    for layer, part in stats.parts.items():
        for head in range(part.heads):
            matches, stream = ranked.get((layer, head), []), streams.get((layer, head))
            key = fixed.get((layer, head))
            score = key.match if key else next(iter(matches), None)
            name = join_names((score and score.name) or "–", second_name(score, matches))
            window = None if stream is None else stream.window
            figures = (
                decimal(float(part.moments[name].mean[head])) if name in part.moments else "–"
                for name in ("normalized_entropy", "first")
            )
            far = float(part.moments["distance"].mean[head]) if "distance" in part.moments else math.nan
            lines.append(
                (
                    names[layer], str(head), name, "–" if score is None else decimal(score.score), *figures,
                    "–" if math.isnan(far) else f"{far:.1f}", "–" if window is None else f"{window:g}",
                    share(shares[layer, f"head {head}"][0]),
                )
            )  # fmt: skip
    return lines


def _table(cells: list[tuple[str, ...]], result: WatchResult) -> Table:
    """Return the lines as a table without frames."""
    from rich.table import Table
    from rich.text import Text

    gap = 1 if any(" · " in line[COLUMNS.index("pattern")] for line in cells) else 2  # two names need the room
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name in COLUMNS:
        title = f"top {result.budget.budgets[0]:,}" if name == TOP else name.replace(" ", "\n")
        table.add_column(title, justify="left" if name in TEXTS else "right", no_wrap=name != "layer", overflow="fold")
    for line in cells:
        score = _as_number(line[COLUMNS.index("score")])
        table.add_row(*(Text(visible(cell)) for cell in line), style=strength(score))
    return table


def _striking(cells: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the heads with a pattern other than uniform and first, then those with the highest scores.

    There are ``LINES`` at most, in the order of the model.
    """
    pattern, score = COLUMNS.index("pattern"), COLUMNS.index("score")
    dull = ("uniform", "first", "–")
    order = sorted(
        range(len(cells)),
        key=lambda at: (cells[at][pattern].removeprefix(PARTLY) in dull, -_as_number(cells[at][score])),
    )
    return [cells[at] for at in sorted(order[:LINES])]


def _as_number(cell: str) -> float:
    return -1.0 if cell == "–" else float(cell)


def _reading(result: WatchResult, cells: list[tuple[str, ...]]) -> object:
    """Return a legend of the patterns and the columns."""
    from rich.text import Text

    _, note = short_layers(result.recording.layers)
    matched = {name for line in cells for name in line[COLUMNS.index("pattern")].removeprefix(PARTLY).split(" · ")}
    explained = meanings((name for name in PATTERNS if name in matched), PATTERNS)
    most = result.budget.budgets[0]
    top = f"top {most:,}: mass on the {_keys(most)} that {'receives' if most == 1 else 'receive'} the most"
    columns = f"{visible(note)}{_columns()} · {top}"
    return Text("\n").join([explained, Text(columns, style="dim")] if explained else [Text(columns, "dim")])


def _columns() -> str:
    """Return the legend of all columns except the last."""
    return (
        "score: 1 = exact match, 0 = no closer than chance; a name needs 0.3 and 3 standard deviations from chance; "
        "partly: below 0.5; uniform needs few rows with half of their weight on one token · "
        "normalized entropy: entropy / ln n, 1 = spread evenly, 0 = one token · first: mass on the first token · "
        "distance: mean, in positions · window: smallest one that holds 95% of the mass, together with the first token"
    )


# ---------------------------------------------------------------- what follows


def _conclusions(result: WatchResult) -> list[str]:
    """Return a sentence for each decision that the recorded rows support."""
    sentences: list[str] = []
    if result.streaming is not None and any(head.sees for head in result.streaming.heads):
        counts = Counter(head.window for head in result.streaming.streaming)
        windows = ", ".join(f"{counts[w]} within {w:g}" for w in sorted(w for w in counts if w is not None))
        every = result.streaming.heads
        sentences.append(
            f"Streaming: {len(result.streaming.streaming)} of {len(every)} heads hold {result.streaming.keep:.0%} of "
            f"their mass in a window plus the first token{f' ({windows} positions)' if windows else ''}. "
            f"A query attends to at most {_keys(max(head.sees for head in every))}."
        )
    sentences += _cache_sentences(result)
    pairs, closest = result.duplicates.pairs, result.duplicates.closest
    sentence = (
        f"Near-duplicates: {len(pairs)} {plural('pair', len(pairs))} of heads within {result.duplicates.threshold:g}"
    )
    if closest is not None:
        names, _ = short_layers(result.recording.layers)
        one = f"layer {names[closest.layer]} head {closest.head}"
        other = f"layer {names[closest.other_layer]} head {closest.other_head}"
        sentence += f"; the closest, {one} and {other}, differ by {closest.distance:.2f}"
    return [*sentences, f"{sentence}.", *_layer_sentences(result.recording.about)]


def _layer_sentences(about: About) -> Iterator[str]:
    """Yield a sentence on what was verified, and one on layers without attention weights, if there are any."""
    if about.verified:
        rows, layers = sum(each.rows for each in about.verified.values()), len(about.verified)
        unfit = [name for name, each in about.verified.items() if not each.fits]
        errors = f"errors beyond rounding in {few(unfit, 6)}" if unfit else "no error beyond rounding"
        sizes = f"{rows:,} {plural('row', rows)} of {layers} {plural('layer', layers)}"
        yield f"Verified: {sizes} against float64; {errors}."
    if about.other_layers:
        name, what = next(iter(about.other_layers.items()))
        count = len(about.other_layers)
        yield f"Other layers: {count} {plural('layer', count)}, such as {name} ({what})."


def _cache_sentences(result: WatchResult) -> list[str]:
    heads = [head for head in result.budget.heads if head.name.startswith("head ")]
    lines: list[str] = []
    for at, budget in enumerate(result.budget.budgets):
        shares = [head.kept[at] for head in heads if not math.isnan(head.kept[at])]
        if shares:
            hold = "holds" if budget == 1 else "hold"
            lines.append(f"{_keys(budget)} {hold} {sum(shares) / len(shares):.0%} (lowest head: {min(shares):.0%})")
    if not lines:
        return []
    pooled = ", once for all windows" if result.budget.pooled else ""
    sample = " The shares are too high if few queries are sampled." if result.budget.basis.sampled else ""
    held = f"on average over heads, the best {'; the best '.join(lines)} of the attention mass"
    return [f"Cache: {held}. The keys are chosen after the run{pooled}.{sample}"]


def _keys(count: int) -> str:
    return f"{count:,} {plural('key', count)}"


# ---------------------------------------------------------------- the page


def page(result: WatchResult) -> str:
    """Return the page with every head and every table."""
    from headscope.report._viewer.from_recording import reading
    from headscope.report.sheet import versions
    from headscope.report.viewer import render_shown, shown_recording

    about = result.recording.about
    footer = {"Model": result.loaded.name, "Versions": versions()}
    if about.options.get("layers") is not None:
        footer["Layers"] = ", ".join(about.options["layers"])
    title = _capital(f"{result.loaded.name}: {result.model_input.source}")
    shown = shown_recording(result.on_page, title=title, strips=(), **_image(result))
    lead = f"{_capital(_title(result))}. {_capital(_lead(result))} {reading(result.recording)}"
    notes = [*map(_sentence, result.notes), *shown.notes]
    return render_shown(
        replace(shown, tables=_sections(result), footer={**shown.footer, **footer}, lead=lead, notes=notes)
    )


def _image(result: WatchResult) -> dict[str, Any]:
    """Return the image and its patches, if the input is one image and the keys are its patches."""
    from headscope.cli._shared.image_regions import patches_of
    from headscope.report._viewer.from_recording import few_before

    parts = result.model_input.parts
    if result.loaded.takes != "image" or len(parts) != 1 or len(parts[0]) != 1:
        return {}
    lengths = {part.lengths for part in result.recording.stats.parts.values()}
    if len(lengths) != 1 or (size := next(iter(lengths))) is None or size[0] != size[1]:
        return {}
    patches = patches_of(result.loaded, parts[0])
    if patches is not None:
        special = size[1] - patches.rows * patches.columns
        if not 0 <= special <= patches.special:
            return {}
        return {"image": _as_bytes(parts[0][0]), "grid": patches[:2], "special": special}
    side = math.isqrt(size[1])
    if not few_before(side, side, size[1]):
        return {}
    return {"image": _as_bytes(parts[0][0])}


def _as_bytes(pixels: Tensor) -> Any:
    """Return the model's input, [h, w] or [channels, h, w], scaled so that its range is 0 to 255."""
    if pixels.ndim == 3:
        pixels = pixels.movedim(0, -1) if pixels.shape[0] == 3 else pixels[0]
    low, high = pixels.min(), pixels.max()
    return ((pixels - low) / (high - low).clamp_min(1e-9) * 255).round().byte().numpy()


def _sentence(note: str) -> str:
    return f"{_capital(note)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sections(result: WatchResult) -> list[Section]:
    from headscope.report.tables import Section

    _, note = short_layers(result.recording.layers)
    columns = [*COLUMNS[:-1], f"top {_keys(result.budget.budgets[0])}"]
    caption, below = "The best-matching pattern of each head, and means over its queries.", f"{note}{_columns()}"
    sections = [Section("Every head", caption, columns, _cells(result), below, TEXTS)]
    if result.comparison is not None:
        sections.insert(0, _section("What moved", f"Since {result.against}.", result.comparison))
    if result.segments is not None:
        sections += make_sections(result.segments, *short_layers(result.recording.layers))
    sections.append(_section("Patterns", "The best and the second-best pattern of each head.", result.patterns))
    if result.streaming is not None:
        caption = "The window that, with the first token, suffices for each head; the smallest windows first."
        sections.append(_section("Streaming", caption, result.streaming))
    caption = "Share of the mass on the keys that receive the most."
    sections.append(_section("Smaller caches", caption, result.budget))
    sections.append(_section("Near-duplicates", "Pairs of heads with similar attention.", result.duplicates))
    return sections


def _section(title: str, caption: str, answer: Answer) -> Section:
    from headscope.report.tables import Section

    return Section(title, caption, answer.columns(), answer.cells(), answer.caption(), TEXTS)
