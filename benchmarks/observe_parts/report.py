"""From times to ratios and to Markdown tables; files."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from observe_parts import attention, details, generation, models
from observe_parts.timing import Row

OBSERVED = (*attention.WATCHED, attention.AFTER)


@dataclass(slots=True)
class Report:
    """A run, or several of one machine put together."""

    commands: list[str]
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"commands": self.commands, "machine": self.machine, "rows": [row.as_dict() for row in self.rows]}

    def of(self, kind: str) -> list[Row]:
        """The rows of one kind."""
        return [row for row in self.rows if row.kind == kind]

    def add(self, later: Report) -> Report:
        """Both, in the order of the full run; of rows of the same case the later one.

        Raises:
            ValueError: they are of different machines.
        """
        if self.machine != later.machine:
            both = f"{told(self.machine)}; this is {told(later.machine)}"
            raise ValueError(f"--add: the file is of another machine: {both}")
        rows = {(row.kind, row.name): row for row in (*self.rows, *later.rows)}
        order = {key: n for n, key in enumerate(every())}
        commands = list(dict.fromkeys((*self.commands, *later.commands)))
        return Report(commands, self.machine, [rows[key] for key in sorted(rows, key=lambda key: order.get(key, -1))])


def every() -> list[tuple[str, str]]:
    """Kind and name of each case of the full run, in order."""
    found = [(attention.TIME, case.name) for case in attention.cases(attention.LENGTHS)]
    found += [(attention.SHORT, case.name) for case in attention.cases(attention.SHORT_LENGTHS)]
    found += [(details.SEGMENTS, case.name) for case in details.cases()]
    found += [(attention.MEMORY, str(length)) for length in attention.MEMORY_LENGTHS]
    found += [(attention.LONG, case.name) for case in attention.cases((attention.LONG_LENGTH,))]
    found += [(details.CHOSEN, str(length)) for length in details.CHOSEN_LENGTHS]
    found += [(models.KIND, case.name) for case in models.cases()]
    return found + [(generation.KIND, case.name) for case in generation.cases()]


def told(machine: dict[str, Any]) -> str:
    """A machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


# ---------------------------------------------------------------- tables


def markdown(report: Report) -> str:
    """The whole page."""
    made = ", then ".join(f"`{command}`" for command in report.commands)
    parts = ["# Observing attention", f"Made by {made} on {told(report.machine)}. Medians of interleaved rounds; fp32."]
    for kind, title, table in (
        (attention.TIME, TIME_TEXT, time_tables),
        (attention.SHORT, SHORT_TEXT, short_table),
        (details.SEGMENTS, SEGMENTS_TEXT, segments_table),
        (attention.MEMORY, MEMORY_TEXT, memory_table),
        (attention.LONG, LONG_TEXT, long_table),
        (details.CHOSEN, CHOSEN_TEXT, chosen_table),
        (models.KIND, MODELS_TEXT, models_table),
        (generation.KIND, GENERATION_TEXT, generation_table),
    ):
        if rows := report.of(kind):
            parts += [title, table(rows)]
    return "\n\n".join(parts) + "\n"


TIME_TEXT = """## One call, (1, 8, T, 64)

`rows`: the row quantities; `received`: those of keys, too; `all`: with them the 64 x 64 map and the 32 largest weights
of each head, in one pass with attending; `rows=256`: the default on an even sample of rows; `observe alone`: all of it
after the fact, with the lse of another kernel, without attending."""
SHORT_TEXT = """## A short call, (1, 8, T, 64)

What the default statistics, `rows, received`, add to attending."""
SEGMENTS_TEXT = """## Segments, (1, 8, T, 64)

What 16 segments over the whole sequence, 16 x 16 masses for each head with what chance gives, add to the default
statistics."""
CHOSEN_TEXT = """## The weights of chosen heads

A watch with default statistics of twelve attentions with twelve heads of 64, which have no other work; the watch is
opened and closed each time. `times their share`: what the weights of ten heads add, over 10 / 144 of what those of all
heads add."""
MEMORY_TEXT = """## Memory of attend with all statistics

What the process grows by at most beyond inputs, out and lse, each in a fresh process. Eager is computed: the weights
alone, T x T of eight heads."""
LONG_TEXT = """## A long text

Attend with all statistics, one head, its map checked."""
MODELS_TEXT = """## Watching a model

`text` is the shipped model (6 layers, 8 heads of 16); its context is 256 tokens, and for longer texts its table of
positions is repeated: the work is that of the model, what it predicts is not. `Llama` is one of transformers with
random weights (4 layers, 8 heads of 64, 4 key/value heads). Each time a watch is opened, one forward pass runs, and it
is closed; `16 passes`: sixteen run within it, and the time, opening and closing included, is that of one of them.
`everything`: all rows, received, 64 x 64 map, 32 edges; `eager weights`: every layer's weights are returned
(`output_attentions=True`, `need_weights=True`) and nothing is computed of them; `eager, statistics`: most of the same
figures computed of them in torch. In brackets: times the unwatched model."""

GENERATION_TEXT = """## Watching a model that generates

A step of one token with a cache that has so many keys at first. `Llama` is the one above; four texts of other lengths
are padded. `Whisper` has the sizes of Whisper base, six layers in the decoder, and 1500 frames of sound. Each time a
watch is opened around 96 steps. `weights of a head`: those of one head of each layer, of Whisper's over the sound, and
nothing else; `eager weights`: every layer returns its weights (`output_attentions=True`), and nothing is computed of
them. In brackets: times the unwatched model."""


def table_of(head: list[str], lines: list[list[str]]) -> str:
    """Markdown."""
    shown = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def time_tables(rows: list[Row]) -> str:
    """Times, and each over SDPA and over our attending pass."""
    head = ["T", f"{attention.SDPA}, ms", f"{attention.ATTEND}, ms", *(f"{name}, ms" for name in OBSERVED)]
    timed = (attention.SDPA, attention.ATTEND, *OBSERVED)
    times = [[row.name, *(_ms(row.median(name)) for name in timed)] for row in rows]
    parts = [table_of(head, times)]
    for base, names in ((attention.SDPA, (attention.ATTEND, *OBSERVED)), (attention.ATTEND, OBSERVED)):
        lines = [[row.name, *(_times(row.ratio(name, base)) for name in names)] for row in rows]
        parts.append(f"Time over that of {base}:\n\n" + table_of(["T", *names], lines))
    return "\n\n".join(parts)


def short_table(rows: list[Row]) -> str:
    """Microseconds."""
    lines: list[list[str]] = []
    for row in rows:
        attend, observed = (1e6 * (row.median(name) or 0) for name in (attention.ATTEND, attention.DEFAULTS))
        lines.append([row.name, *(f"{x:.0f}" for x in (attend, observed, observed - attend))])
    return table_of(["T", "attend, µs", f"{attention.DEFAULTS}, µs", "difference, µs"], lines)


def segments_table(rows: list[Row]) -> str:
    """Times, and one over the other."""
    names = (details.PLAIN, details.WITH_SEGMENTS)
    lines = [[row.name, *(_ms(row.median(name)) for name in names), _times(row.ratio(*names[::-1]))] for row in rows]
    return table_of(["T", *(f"{name}, ms" for name in names), "ratio"], lines)


def chosen_table(rows: list[Row]) -> str:
    """Times, and what ten heads add over their share."""
    names = (details.NONE, details.TEN, details.EVERY)
    lines = [[row.name, *(_ms(row.median(name)) for name in names), _times(details.share(row))] for row in rows]
    return table_of(["T", *(f"{name}, ms" for name in names), "times their share"], lines)


def memory_table(rows: list[Row]) -> str:
    """Megabytes."""
    names = ("all", "all, causal")
    lines = [[row.name, *(_mb(row, name) for name in (*names, "eager"))] for row in rows]
    return table_of(["T", *(f"{name}, MB" for name in names), "eager, MB"], lines)


def long_table(rows: list[Row]) -> str:
    """Seconds."""
    return table_of(["T", "all, s"], [[row.name, f"{row.median('all'):.1f}"] for row in rows])


def models_table(rows: list[Row]) -> str:
    """Times, and how many times those of the unwatched model they are."""
    return _over_unwatched("model, tokens", models.COMPETITORS, models.UNWATCHED, rows)


def generation_table(rows: list[Row]) -> str:
    """The same of a step."""
    return _over_unwatched("model, keys", generation.COMPETITORS, generation.UNWATCHED, rows)


def _over_unwatched(head: str, competitors: tuple[str, ...], unwatched: str, rows: list[Row]) -> str:
    lines: list[list[str]] = []
    for row in rows:
        cells = [row.name]
        for name in competitors:
            ratio = row.ratio(name, unwatched)
            told = row.absent.get(name, "—") if ratio is None else f"{_ms(row.median(name))} ({ratio:.2f})"
            cells.append(_ms(row.median(name)) if name == unwatched else told)
        lines.append(cells)
    return table_of([head, *(f"{name}, ms" for name in competitors)], lines)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _times(ratio: float | None) -> str:
    return "—" if ratio is None else f"{ratio:.2f}"


def _mb(row: Row, name: str) -> str:
    number = row.figures.get(name)
    if number is None:
        return row.absent.get(name, "—")
    return f"{number / 1e6:.1f}" if number < 1e8 else f"{number / 1e6:,.0f}"


# ---------------------------------------------------------------- files


def save(report: Report, path: Path) -> None:
    """JSON, and the page beside it; each whole or not at all."""
    texts = {path: json.dumps(report.as_dict(), indent=1) + "\n", path.with_suffix(".md"): markdown(report)}
    for to, text in texts.items():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=to.name, delete=False) as file:
            file.write(text)
        Path(file.name).replace(to)


def load(path: Path) -> Report:
    """What ``save`` wrote."""
    saved = json.loads(path.read_text())
    return Report(saved["commands"], saved["machine"], [Row.of(row) for row in saved["rows"]])
