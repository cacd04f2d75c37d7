"""The text a user gives: as an argument, from a file or from stdin, of any length, in constant memory."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from headscope.cli._shared.console import Mistake, visible

CHUNK = 1 << 20  # bytes read at once
KEPT = 1 << 16  # characters kept at least: far more than any model of ours reads
MOST = 1 << 26  # characters of a text that is read whole


@dataclass(frozen=True, slots=True)
class Given:
    """The end of a text.

    Attributes:
        text: the text, or its last characters if there are more than were kept.
        dropped: how many characters stand before it.
        source: where it came from, in a few words.
    """

    text: str
    dropped: int
    source: str


def clipped(text: str) -> str:
    """As much of a text as a title shows."""
    shown = visible(text)
    return shown if len(shown) <= 60 else f"{shown[:59]}…"


def told(given: Given, argument: str | None) -> str:
    """Where a text came from, as a page says it: of an argument how it begins."""
    return f"“{clipped(given.text)}”" if argument not in (None, "-") else visible(given.source)


def read_text(argument: str | None, file: str | None) -> Given:
    """The text of the one source that was given: an argument ("-" = stdin), or a file.

    Raises:
        Mistake: no source or two, nothing in it, a file that cannot be read, or bytes that are not UTF-8.
    """
    if (argument is None) == (file is None):
        raise Mistake('wanted one text: "your text" as an argument, --file PATH, or - to read from stdin')
    return _given(*_source(argument, file), KEPT)


def read_whole(argument: str | None, file: str | None) -> Given:
    """The whole text of one source; nothing of it is dropped.

    Raises:
        Mistake: as ``read_text``, or more than ``MOST`` characters.
    """
    given = _given(*_source(argument, file), MOST)
    if given.dropped:
        raise Mistake(f"{given.source}: has more than {MOST:,} characters")
    return given


def _source(argument: str | None, file: str | None) -> tuple[Iterable[bytes], str]:
    if argument == "-" or file == "-":
        return _stdin(), "stdin"
    if argument is not None:
        return [os.fsencode(argument)], "text"
    assert file is not None
    if not file:
        raise Mistake("--file: is empty, wanted a path")
    return _file(file), file


def _stdin() -> Iterator[bytes]:
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  # it is None where it was closed
        raise Mistake("stdin: is closed")
    yield from _chunks(sys.stdin.buffer, "stdin")


def _file(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as stream:
            yield from _chunks(stream, path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise Mistake(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _chunks(stream: BinaryIO, source: str) -> Iterator[bytes]:
    try:
        while chunk := stream.read(CHUNK):
            yield chunk
    except OSError as error:
        raise Mistake(f"{source}: cannot be read: {error.strerror or error}") from error


def _given(chunks: Iterable[bytes], source: str, kept: int) -> Given:
    """Decode chunk by chunk and keep at least so many characters of the end.

    A byte order mark at the start is no part of the text.
    """
    text, dropped = "", 0
    done, pending = 0, b""  # bytes decoded so far; bytes of a character that goes on in the next chunk
    for chunk in chunks:
        data = pending + chunk
        if done == 0 and data.startswith(codecs.BOM_UTF8):
            done, data = len(codecs.BOM_UTF8), data[len(codecs.BOM_UTF8) :]
        new, used = _decode(data, done, source, final=False)
        done, pending = done + used, data[used:]
        text += new
        if len(text) > 2 * kept:
            dropped, text = dropped + len(text) - kept, text[-kept:]
    _decode(pending, done, source, final=True)
    if not text:
        raise Mistake(f"{source}: is empty")
    return Given(text, dropped, source)


def _decode(data: bytes, start: int, source: str, *, final: bool) -> tuple[str, int]:
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        at = start + error.start
        raise Mistake(f"{source}: byte {at} (0x{data[error.start]:02x}) is not UTF-8: {error.reason}") from error
