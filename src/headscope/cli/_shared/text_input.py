"""Read the user's text from an argument, a file or stdin; any length, in constant memory."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, TextIO, cast

from headscope._support.text import visible
from headscope.cli._shared.console import say
from headscope.cli._shared.mistakes import Mistake

CHUNK = 1 << 20  # bytes read at once
FEWEST = 1 << 16  # characters of the end: far more than the context of the shipped model
MOST = 1 << 26  # characters, where the whole text is read


@dataclass(frozen=True, slots=True)
class TextInput:
    """The end of a text.

    Attributes:
        text: the text, or its last characters if it is longer.
        dropped: number of characters before it.
        source: where it came from, in a few words.
    """

    text: str
    dropped: int
    source: str


def clipped(text: str) -> str:
    """Return at most 60 characters of a text, for a title."""
    shown = visible(text)
    return shown if len(shown) <= 60 else f"{shown[:59]}…"


def describe_source(text_input: TextInput, argument: str | None) -> str:
    """Return the source of a text for a page: the start of the argument, or the name of the file."""
    return f"“{clipped(text_input.text)}”" if argument not in (None, "-") else visible(text_input.source)


def read_text(argument: str | None, file: str | None) -> TextInput:
    """Return the end of the text from one source: an argument ("-" = stdin), or a file.

    Raises:
        Mistake: there are none or two sources, or the text is empty, cannot be read, or is not UTF-8.
    """
    if (argument is None) == (file is None):
        raise Mistake('expected one text: "your text" as an argument, --file PATH, or - to read from stdin')
    return _decode_end(*_source(argument, file), FEWEST)


def read_whole(argument: str | None, file: str | None) -> TextInput:
    """Return the whole text of one source.

    Raises:
        Mistake: as ``read_text``, or more than ``MOST`` characters.
    """
    whole = _decode_end(*_source(argument, file), MOST)
    if whole.dropped:
        raise Mistake(f"{whole.source}: expected at most {MOST:,} characters, got more")
    return whole


def _source(argument: str | None, file: str | None) -> tuple[Iterable[bytes], str]:
    if argument == "-" or file == "-":
        return _stdin(), "stdin"
    if argument is not None:
        if os.path.isfile(argument):
            say(f"the text is the name of a file; to read that file, use --file {argument}")
        return [os.fsencode(argument)], "text"
    assert file is not None
    if not file:
        raise Mistake("--file: expected a path, got an empty one")
    return _file(file), file


def _stdin() -> Iterator[bytes]:
    stdin = cast("TextIO | None", sys.stdin)  # None if it was closed
    if stdin is None:
        raise Mistake("stdin: is closed, expected a text")
    yield from _chunks(stdin.buffer, "stdin")


def _file(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as stream:
            yield from _chunks(stream, path)
    except OSError as error:
        raise Mistake(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a zero byte in the path
        raise Mistake(f"{path}: cannot be read: {error}") from error


def _chunks(stream: BinaryIO, source: str) -> Iterator[bytes]:
    try:
        while chunk := stream.read(CHUNK):
            yield chunk
    except OSError as error:
        raise Mistake(f"{source}: cannot be read: {error.strerror or error}") from error


def _decode_end(chunks: Iterable[bytes], source: str, fewest: int) -> TextInput:
    """Decode chunk by chunk and return at least so many characters of the end.

    A byte order mark at the start is skipped.
    """
    text, dropped = "", 0
    done, pending = 0, b""  # bytes decoded so far; bytes of a character that continues in the next chunk
    for chunk in chunks:
        data = pending + chunk
        if done == 0 and data.startswith(codecs.BOM_UTF8):
            done, data = len(codecs.BOM_UTF8), data[len(codecs.BOM_UTF8) :]
        new, used = _decode(data, done, source, final=False)
        done, pending = done + used, data[used:]
        text += new
        if len(text) > 2 * fewest:
            dropped, text = dropped + len(text) - fewest, text[-fewest:]
    _decode(pending, done, source, final=True)
    if not text:
        raise Mistake(f"{source}: is empty, expected a text")
    return TextInput(text, dropped, source)


def _decode(data: bytes, start: int, source: str, *, final: bool) -> tuple[str, int]:
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        at = start + error.start
        raise Mistake(f"{source}: byte {at} (0x{data[error.start]:02x}) is not UTF-8: {error.reason}") from error
