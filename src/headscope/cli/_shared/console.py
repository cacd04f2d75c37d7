"""What the commands share: option types, text for a terminal, the console, and work without interruption."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.cli._shared.mistakes import Mistake

if TYPE_CHECKING:
    from rich.console import Console

    Integer = click.ParamType[int]  # it takes a type from click 8.2 on
else:
    Integer = click.ParamType

WIDEST = 120  # tables and sentences wider than this are hard to read
NARROWEST = 20  # below this width, words are cut
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Whole(Integer):
    """A whole number from ``low`` to ``high``; the default rejects sizes above 10**9 as typing errors."""

    name = "whole number"

    def __init__(self, low: int, high: int = 10**9) -> None:
        self.low, self.high = low, high

    def get_metavar(self, *args: Any, **kwargs: Any) -> str:
        return "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert the value of an option.

        Raises:
            Mistake: it is not a whole number, or is outside the range.
        """
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or not self.low <= number <= self.high:
            name = param.opts[0] if param is not None else "number"
            raise Mistake(f"{name}: got {value}, expected a whole number from {self.low} to {self.high}")
        return number


class Index(Integer):
    """A number counted from 0; its maximum depends on the model and is checked once the model is loaded."""

    name = "index"

    def get_metavar(self, *args: Any, **kwargs: Any) -> str:
        return "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert the value of an option.

        Raises:
            Mistake: it is not a whole number.
        """
        try:
            return int(value)
        except ValueError:
            name = param.opts[0] if param is not None else "number"
            raise Mistake(f"{name}: got {value}, expected a whole number from 0") from None


class DtypeName(click.Choice[str]):
    """A dtype by one of the names that a command lists, or by its other one: fp32 is float32."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
        other = short | {name: long for long, name in short.items()}
        return super().convert(value if value in self.choices else other.get(value, value), param, ctx)


SIZE = Whole(1)
INDEX = Index()


def few(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names with control characters escaped, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(visible(name) for name in names[:most]) + more


def one_line(message: str) -> str:
    """Return a message on one line, with control characters escaped."""
    return visible(" ".join(message.split()))


def console() -> Console:
    """Return the console of stdout: as wide as the terminal, within limits; plain if stdout is not a terminal."""
    from rich.console import Console

    out = Console(highlight=False, markup=False, emoji=False)
    wide = out.width or shutil.get_terminal_size().columns  # COLUMNS=0 stands for unset
    out.width = min(max(wide, NARROWEST), WIDEST)
    return out


def say(note: str) -> None:
    """Write a note on one line of stderr, such as a change of the input."""
    print(one_line(note), file=sys.stderr)


@contextmanager
def warnings_as_notes(command: str) -> Generator[None]:
    """Write each warning of ``headscope.watch`` as one line on stderr, once."""
    from headscope.watching import WatchWarning

    written: set[str] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def write(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if not issubclass(category, WatchWarning):
                show(one_line(str(message)), category, *rest, **more)
                return
            note = str(message).removeprefix("watch: ").partition("; unseen=")[0]
            if note not in written:
                written.add(note)
                say(f"headscope {command}: {note}")

        warnings.simplefilter("always", WatchWarning)
        warnings.showwarning = write
        yield


def print_json(value: dict[str, Any]) -> None:
    """Print a result as JSON: ASCII, with null for numbers that are not finite."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


@contextmanager
def uninterrupted() -> Generator[None]:
    """Defer signals that would end the process until the end of the block, which writes a file."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    struck: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        struck.append(number)

    before = {each: signal.signal(each, remember) or signal.SIG_DFL for each in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for each in struck:
            signal.raise_signal(each)
