"""All heads at a glance: a row of cells for each layer, a column for each head, a few lines in each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from headscope.cli._shared.observation import Choice, is_clear
from headscope.report import Sheet
from headscope.report.terminal import statistics_table
from headscope.report.words import strength
from headscope.stats import PARTLY, is_part, is_second_name

PLACE = 9  # characters of a cell, with the gap to the next
SHORT = {"duplicate": "duplic.", "induction": "induct."}  # names that are longer than a cell
FAR_FROM_CHANCE = 2.0  # ratios that are bold from here

Figure = Callable[[int, int], Text]


@dataclass(frozen=True)
class HeadGrid:
    """Layers × heads with the chosen head highlighted; on a narrow console, the table with one line for each head."""

    sheet: Sheet
    choice: Choice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self._image() if self.sheet.kind == "image" else self._text()
        side = len(f"layer {self.sheet.layers - 1}") + 1
        if side + PLACE * self.sheet.heads - 1 > options.max_width:
            yield statistics_table(self.sheet)
            return
        yield Text(" " * side + "".join(f"{f'head {head}':<{PLACE}}" for head in range(self.sheet.heads)), "dim")
        for layer in range(self.sheet.layers):
            for number, (name, figure) in enumerate(lines.items()):
                line = Text(f"{f'layer {layer}' if number == 0 else f' {name}':<{side}}", "" if number == 0 else "dim")
                places = [figure(layer, head) for head in range(len(self.sheet.weights[layer]))]
                if not any(places):
                    continue
                for head, place in enumerate(places):
                    if (layer, head) == (self.choice.layer, self.choice.head):
                        place.stylize(Style(reverse=True))
                    line.append_text(place).append(" " * (PLACE - place.cell_len))
                yield line

    def _text(self) -> dict[str, Figure]:
        """Return the lines of a cell for a text: best-matching pattern, whether partly, score, second name, keys."""

        def pattern(layer: int, head: int) -> Text:
            match = self.sheet.patterns[layer][head]
            if match is None or not match.is_name:
                return Text("-", "dim")
            return Text(SHORT.get(match.pattern, match.pattern), strength(match.score))

        def partly(layer: int, head: int) -> Text:
            match = self.sheet.patterns[layer][head]
            return Text(PARTLY.strip() if match is not None and match.is_name and is_part(match.score) else "", "dim")

        def score(layer: int, head: int) -> Text:
            match = self.sheet.patterns[layer][head]
            return _number(None if match is None else match.score, 2)

        def also(layer: int, head: int) -> Text:
            second = self.sheet.also[layer][head] if self.sheet.also else None
            return Text(SHORT.get(second.pattern, second.pattern) if is_second_name(second) else "", "dim")

        def keys(layer: int, head: int) -> Text:
            return _number(self.sheet.statistics[layer]["effective_keys"][head], 1)

        return {"pattern": pattern, "match": partly, "score": score, "also": also, "keys": keys}

    def _image(self) -> dict[str, Figure]:
        """Return the lines of a cell for an image: the region that the page names, and its ratio to chance."""

        def region(layer: int, head: int) -> Text:
            look = self.sheet.named_looks[layer][head]
            if not is_clear(look):
                return Text("-")
            return Text(look[0], "bold" if look[1] >= FAR_FROM_CHANCE else "")

        def ratio(layer: int, head: int) -> Text:
            look = self.sheet.named_looks[layer][head]
            return _number(None if look is None else look[1], 1)

        return {"region": region, "ratio": ratio}


def _number(value: float | None, decimals: int) -> Text:
    return Text("-" if value is None else f"{value:.{decimals}f}", "dim")
