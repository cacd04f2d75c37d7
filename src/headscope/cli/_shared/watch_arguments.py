"""The options of ``headscope watch`` for its input, and for the files that it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from headscope.cli._shared.pages import PAGE

Command = TypeVar("Command", bound=Callable[..., int])

_INPUT = (
    click.option("--text", metavar="TEXT", help='Input: this text ("-" = stdin).'),
    click.option("--file", metavar="PATH", help="Input: a text file (UTF-8); long texts are read in windows."),
    click.option("--ids", metavar="IDS", help="Input: token ids, as 5,7,9."),
    click.option("--image", metavar="PATH", help="Input: a PNG or JPEG.  [default: the shipped samples]"),
    click.option(
        "--chat", metavar="PATH", help="Input: messages (JSON), by the model's chat template; each is a segment."
    ),
    click.option(
        "--segment",
        "named",
        multiple=True,
        metavar="NAME=PLACE",
        help="A segment of the text: START:STOP, TEXT, or TEXT... up to the next; repeatable.",
    ),
    click.option(
        "--segments", metavar="PATH|RxC", help="Segments from a JSON file; of an image, R x C regions of its patches."
    ),
)
_FILES = (
    click.option("--out", metavar="PATH", help="Write the recording (.safetensors)."),
    click.option("--keep-qk", is_flag=True, help="Save q and k with it, for exact tiles in headscope report --serve."),
    click.option(
        "--weights",
        "heads",
        multiple=True,
        metavar="LAYER:HEADS",
        help="Save the exact weights of these heads with --out, as h.3:0,5; repeatable.",
    ),
    click.option("--exact", is_flag=True, help="Save maps in float64; by default they take 16 bits."),
    click.option("--page", metavar="PATH", help=f"Where to write the page.  [default: {PAGE}]"),
    click.option("--no-page", is_flag=True, help="Do not write a page."),
    click.option("--force", is_flag=True, help="Overwrite existing files, even if headscope did not write them."),
    click.option("--json", "as_json", is_flag=True, help="Print only JSON; write a page only with --page."),
)


def input_options(command: Command) -> Command:
    """Add the options of the input."""
    for option in reversed(_INPUT):
        command = option(command)
    return command


def file_options(command: Command) -> Command:
    """Add the options of the recording, the page and the output."""
    for option in reversed(_FILES):
        command = option(command)
    return command
