"""The entry of the command line: Ctrl-C, streams that fail, and one line for every mistake.

The commands are in ``_commands``, one file each. No module imports torch before a command runs, so ``--help`` is fast.
Modules that are not needed to catch Ctrl-C are imported after its handler is set.
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
PIPE_CLOSED = 128 + 13  # the exit code of a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: the arguments after the program's name; by default those of the process.

    Returns:
        0; 1 if a file of ``check`` fails, or ``watch --against`` finds that a head moved; 2 after a user's mistake, or
        if stdout cannot be written, with one line on stderr; 141 if the reader of a pipe closed it. Ctrl-C ends the
        process with 130, after one line on stderr. Output that stderr does not accept is lost.
    """
    try:
        before = signal.signal(signal.SIGINT, _interrupted) or signal.SIG_DFL
    except ValueError:  # only the main thread may set handlers, and receives Ctrl-C
        before = None
    if arguments is None:  # a process of its own: collecting torch's many objects again and again is slow
        import gc

        gc.set_threshold(50_000)
    codecs.register_error("headscope", _without)
    out, err = sys.stdout, sys.stderr
    sys.stderr = _stderr(err)
    streams = [(s, s.errors) for s in (out, err) if isinstance(s, io.TextIOWrapper)]
    for stream, _ in streams:  # replaces characters that the encoding lacks
        stream.reconfigure(errors="headscope")
    try:
        return _flushed(arguments)
    finally:
        if before is not None:  # at the end, Ctrl-C would only look like a failure
            signal.signal(signal.SIGINT, signal.SIG_IGN if arguments is None else before)
        sys.stdout, sys.stderr = out, err
        for stream, errors in streams:
            stream.reconfigure(errors=errors)


def _flushed(arguments: Sequence[str] | None) -> int:
    """Run the command line and flush its output."""
    out: TextIO | None = vars(sys)["stdout"]  # None if it was closed
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
    """Stdout cannot be written. Not an ``OSError``, because click and rich handle some of those themselves."""


class _Guarded:
    """A stream that passes its errors to a function, so that they are not confused with errors of files."""

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
    """Return stdout, guarded so that its errors end the run."""

    def failed(error: OSError) -> None:
        raise _StdoutError(error.strerror or str(error)) from error

    return _Guarded(stream, failed)


def _stderr(stream: TextIO | None) -> Any:
    """Return stderr, guarded so that it never fails: output that it does not accept is lost."""
    if stream is None:  # it was closed: a file opened later must not get its number and the messages of libraries
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < 2:
            pass
        if descriptor > 2:
            os.close(descriptor)
        return io.StringIO()
    return _Guarded(stream, lambda error: _discard(stream))


def _discard(stream: TextIO) -> None:
    """Discard the buffer of a stream, so that neither the interpreter at its end nor a caller writes it again.

    The descriptor is restored, because it may belong to a caller.
    """
    try:
        descriptor = stream.fileno()
        copy, inheritable = os.dup(descriptor), os.get_inheritable(descriptor)
    except (AttributeError, OSError, ValueError):  # not a file, or closed
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
    """Replace characters that the encoding of stdout lacks by similar ones, else by "?"."""
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
    """End the process at once: an exception could be swallowed in a callback or while torch is being imported.

    Files are written inside ``console.uninterrupted``, so no partial file is left.
    """
    cursor = b"\r\x1b[K\x1b[?25h" if _on_terminal(2) else b""
    try:
        os.write(2, cursor + b"headscope: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _on_terminal(descriptor: int) -> bool:
    return os.isatty(descriptor) and os.environ.get("TERM") != "dumb"
