"""The front door of the command line: Ctrl-C, closed pipes, and one line for every mistake.

The verbs are in ``_commands``, one file each. Nothing here or there imports torch before a verb runs, so that
``--help`` never waits for it.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Sequence
from types import FrameType

from headscope._ascii import LIKE

__all__ = ["main"]

INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + 13  # what a shell reports for a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: what follows the program's name; by default those of the process.

    Returns:
        0; 1 where ``check`` found something, or ``watch --against`` that something moved; 2 after a user's mistake,
        which is told in one line on stderr; 141 if whoever read the output closed the pipe. Ctrl-C ends the process
        with 130, after one line on stderr.
    """
    main_thread = threading.current_thread() is threading.main_thread()  # others may set no handler, and get no Ctrl-C
    before = signal.signal(signal.SIGINT, _interrupted) if main_thread else None
    codecs.register_error("headscope", _without)
    streams = [(s, s.errors) for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    for stream, _ in streams:  # where its encoding lacks a character, something like it
        stream.reconfigure(errors="headscope")
    try:
        return _flushed(arguments)
    finally:
        if main_thread:  # once all is done, an end by Ctrl-C would only look like a failure
            signal.signal(signal.SIGINT, signal.SIG_IGN if arguments is None else before or signal.SIG_DFL)
        for stream, errors in streams:
            stream.reconfigure(errors=errors)


def _flushed(arguments: Sequence[str] | None) -> int:
    """Run the command line, and see to it that what it printed has left the process."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # it is None where it was closed
        print("headscope: stdout: cannot be written: it is closed", file=sys.stderr)
        return 2
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OSError as error:  # the system would not take what was printed
        if isinstance(error, BrokenPipeError):
            code = PIPE_CLOSED
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            print(f"headscope: stdout: cannot be written: {error.strerror}", file=sys.stderr)
            code = 2
        else:
            raise
        # what is left in the buffer must not be tried again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from headscope._commands import verbs
    from headscope._commands.screen import PipeClosedError, one_line

    try:
        code = verbs.main(arguments, prog_name="headscope", standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context is not None else "headscope"
        print(f"{name}: {one_line(error.format_message())}", file=sys.stderr)
        return 2
    except PipeClosedError:
        raise BrokenPipeError from None
    return code if isinstance(code, int) else 0


def _without(error: UnicodeError) -> tuple[str, int]:
    """For characters that the encoding of stdout lacks: others that look or mean alike, else "?"."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found: list[str] = []
    for character in error.object[error.start : error.end]:
        parts = unicodedata.normalize("NFKD", character)  # ᵀ is T, ₁ is 1, é is e and an accent
        like = LIKE.get(character) or "".join(part for part in parts if not unicodedata.combining(part))
        found.append(like.encode(error.encoding, "replace").decode(error.encoding) or "?")
    return "".join(found), error.end


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End at once. An exception could be swallowed on its way, in a callback or while torch is being imported.

    Files are written where this cannot strike (``screen.uninterrupted``), so nothing is left behind.
    """
    cursor = b"\r\x1b[K\x1b[?25h" if _on_terminal(2) else b""
    os.write(2, cursor + b"headscope: interrupted\n")
    os._exit(INTERRUPTED)


def _on_terminal(descriptor: int) -> bool:
    return os.isatty(descriptor) and os.environ.get("TERM") != "dumb"


if __name__ == "__main__":
    sys.exit(main())
