"""The entry of the command line: Ctrl-C, streams that fail, and one line for every mistake.

The commands are in ``_commands``, one file each. Nothing here or there imports torch before a command runs, so that
``--help`` never waits for it; and what is not needed to catch Ctrl-C is imported once that is caught.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys

TYPE_CHECKING = False  # as in ``headscope``
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any, TextIO

__all__ = ["main"]

INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + 13  # what a shell reports for a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: what follows the program's name; by default those of the process.

    Returns:
        0; 1 where ``check`` found something, or ``watch --against`` that something moved; 2 after a user's mistake, or
        where stdout cannot be written, which is told in one line on stderr; 141 if whoever read the output closed the
        pipe. Ctrl-C ends the process with 130, after one line on stderr. What stderr does not take is lost.
    """
    try:
        before = signal.signal(signal.SIGINT, _interrupted) or signal.SIG_DFL
    except ValueError:  # in another thread than the main one, which may set no handler, and gets no Ctrl-C
        before = None
    if arguments is None:  # a process of its own: what torch leaves behind is searched for garbage again and again
        import gc

        gc.set_threshold(50_000)
    codecs.register_error("headscope", _without)
    out, err = sys.stdout, sys.stderr
    sys.stderr = _stderr(err)
    streams = [(s, s.errors) for s in (out, err) if isinstance(s, io.TextIOWrapper)]
    for stream, _ in streams:  # where its encoding lacks a character, something like it
        stream.reconfigure(errors="headscope")
    try:
        return _flushed(arguments)
    finally:
        if before is not None:  # once all is done, an end by Ctrl-C would only look like a failure
            signal.signal(signal.SIGINT, signal.SIG_IGN if arguments is None else before)
        sys.stdout, sys.stderr = out, err
        for stream, errors in streams:
            stream.reconfigure(errors=errors)


def _flushed(arguments: Sequence[str] | None) -> int:
    """Run the command line, and see to it that what it printed has left the process."""
    out: TextIO | None = vars(sys)["stdout"]  # None where it was closed
    if out is None:
        print("headscope: stdout: cannot be written: it is closed", file=sys.stderr)
        return 2
    sys.stdout = _stdout(out)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except _StdoutError as error:
        _discard(out)
        if isinstance(error.__cause__, BrokenPipeError):
            return PIPE_CLOSED
        print(f"headscope: stdout: cannot be written: {error}", file=sys.stderr)
        return 2
    return code


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from headscope.cli._commands import commands
    from headscope.cli._shared.console import one_line

    try:
        code = commands.main(arguments, prog_name="headscope", standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context is not None else "headscope"
        print(f"{name}: {one_line(error.format_message())}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


class _StdoutError(Exception):
    """What was printed cannot be written. No ``OSError``: click and rich have answers of their own to some of those."""


class _Guarded:
    """A stream whose errors are told apart from those of files: each is handed to a function."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer" and codecs.lookup(self._stream.encoding or "ascii").name == "ascii":
            raise AttributeError("buffer: click would write to it, past this guard, in UTF-8")
        return getattr(self._stream, name)


def _stdout(stream: TextIO) -> Any:
    """Stdout, whose errors end the run."""

    def failed(error: OSError) -> None:
        raise _StdoutError(error.strerror or str(error)) from error

    return _Guarded(stream, failed)


def _stderr(stream: TextIO | None) -> Any:
    """Stderr that never fails: what it does not take is lost, and the work goes on."""
    if stream is None:  # it was closed: a file opened later must not get its number, and the messages of libraries
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < 2:
            pass
        if descriptor > 2:
            os.close(descriptor)
        return io.StringIO()
    return _Guarded(stream, lambda error: _discard(stream))


def _discard(stream: TextIO) -> None:
    """What is left in the buffer of a stream must not be tried again, when the interpreter ends or by a caller.

    The descriptor stays what it was: it may be a caller's.
    """
    try:
        descriptor = stream.fileno()
        copy, inheritable = os.dup(descriptor), os.get_inheritable(descriptor)
    except (AttributeError, OSError, ValueError):  # it is no file, or closed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    try:
        stream.flush()
    finally:
        os.dup2(copy, descriptor, inheritable)
        os.close(nowhere)
        os.close(copy)


def _without(error: UnicodeError) -> tuple[str, int]:
    """For characters that the encoding of stdout lacks: others that look or mean alike, else "?"."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    import unicodedata

    from headscope._support.ascii import LIKE

    replacements: list[str] = []
    for character in error.object[error.start : error.end]:
        parts = unicodedata.normalize("NFKD", character)  # ᵀ is T, ₁ is 1, é is e and an accent
        like = LIKE.get(character) or "".join(part for part in parts if not unicodedata.combining(part))
        replacements.append(like.encode(error.encoding, "replace").decode(error.encoding) or "?")
    return "".join(replacements), error.end


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End at once. An exception could be swallowed on its way, in a callback or while torch is being imported.

    Files are written where this cannot strike (``console.uninterrupted``), so nothing is left behind.
    """
    cursor = b"\r\x1b[K\x1b[?25h" if _on_terminal(2) else b""
    try:
        os.write(2, cursor + b"headscope: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _on_terminal(descriptor: int) -> bool:
    return os.isatty(descriptor) and os.environ.get("TERM") != "dumb"
