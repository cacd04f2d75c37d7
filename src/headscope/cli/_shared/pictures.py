"""Small pictures for ``image``: the digit, and where each head of a layer looks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from headscope.cli._shared.observation import is_clear
from headscope.report import Sheet
from headscope.report.terminal import Ink, ability, brightness, largest, looked_at, patches

GAP = 3  # spaces between pictures


@dataclass(frozen=True)
class Digit:
    """The image, two characters for each patch."""

    sheet: Sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ink = Ink(ability(console, options), 255.0, grey=True)
        yield patches(brightness(self.sheet), ink, None)


@dataclass(frozen=True)
class Gallery:
    """Mean weight on each patch for every head of a layer, as many heads side by side as the width allows."""

    sheet: Sheet
    layer: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        able = ability(console, options)
        heads = range(len(self.sheet.weights[self.layer]))
        maps = [looked_at(self.sheet, self.layer, head, None) for head in heads]
        wide = 2 * maps[0].shape[1]
        room = max(1, (options.max_width + GAP) // (wide + GAP))
        across = math.ceil(len(maps) / math.ceil(len(maps) / room))  # rows of equal length
        for start in range(0, len(maps), across):
            table = Table.grid(padding=(0, GAP, 0, 0))
            shown = heads[start : start + across]
            table.add_row(*(self._title(head, wide) for head in shown))
            table.add_row(*(patches(maps[head], Ink(able, largest(maps[head])), None) for head in shown))
            yield table

    def _title(self, head: int, wide: int) -> Text:
        look = self.sheet.named_looks[self.layer][head]
        named = f" {look[0]} {look[1]:.1f}" if is_clear(look) else ""
        title = Text(f"{self.layer}.{head}{named}", style="bold")
        title.truncate(wide)
        return title
