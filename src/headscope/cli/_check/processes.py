"""Processes that run the code of others: one for a single file, ended with all that it has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from headscope.cli._shared.console import ENDING
from headscope.cli._shared.mistakes import Mistake

PACKAGE_PARENT = str(Path(__file__).parents[3])
PROGRAM = """
import sys
root = sys.argv[1]  # so that the process imports this very package
if root not in sys.path:
    sys.path.insert(0, root)
from headscope.cli.{module} import main
main()
"""


def start_process(module: str) -> subprocess.Popen[bytes]:
    """Start Python in a session of its own, in ``main`` of a module of ``headscope.cli``, with pipes."""
    program = [sys.executable, "-P", "-c", PROGRAM.format(module=module), PACKAGE_PARENT]
    pipe = subprocess.PIPE
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        program, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
    )


def ask_child(request: dict[str, Any], timeout: int) -> dict[str, Any]:
    """Return the answer of the process that runs the code; what the code prints is discarded.

    Args:
        request: the line of JSON that the process reads.
        timeout: seconds.

    Raises:
        Mistake: the process was stopped, or ended without an answer.
    """
    process = start_process("_shared.check_child")
    with group_ended(process):
        assert process.stdin is not None
        answer, printed = StreamReader(process.stdout), StreamReader(process.stderr)
        with process.stdin as stdin:
            with suppress(BrokenPipeError):
                stdin.write(json.dumps(request).encode() + b"\n")  # the pipe stays open: the child ends when it closes
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise Mistake(describe_timeout(timeout)) from None
    try:
        return json.loads(answer.text())
    except ValueError:
        raise Mistake(describe_end(code, printed.text())) from None


def describe_timeout(seconds: int) -> str:
    """Return the message about code that ran too long."""
    return f"--timeout: the code was stopped after {seconds} seconds"


def describe_end(code: int, printed: str) -> str:
    """Return the message about code that ended its process.

    Args:
        code: the exit code; the negative number of a signal.
        printed: what the code printed; the last line is shown.
    """
    last = printed.strip().rpartition("\n")[2]
    how = f"exit code {code}"
    if code < 0:
        with suppress(ValueError):
            how = signal.Signals(-code).name
    return f"the code ended its process ({how}) before the check was done{f': {last}' if last else ''}"


@contextmanager
def group_ended(process: subprocess.Popen[bytes], end: Callable[[], None] = lambda: None) -> Generator[None]:
    """Kill a process and its group at the end of the block, and on a signal that ends this process.

    The process leads its own session, so Ctrl-C in the terminal does not reach it.

    Args:
        process: the process.
        end: called before it is killed, so that it can end first what it has started.
    """

    def kill_and_pass_on(number: int, frame: FrameType | None) -> None:
        end()
        _kill_group(process)
        signal.signal(number, before[number])
        signal.raise_signal(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in ENDING}
        before |= {number: each for number, each in handlers.items() if each not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, kill_and_pass_on)
    try:
        yield
    finally:
        end()
        _kill_group(process)
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, except those that left its process group."""
    if not hasattr(os, "killpg"):  # Windows
        process.kill()
    elif process.pid != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):  # macOS raises EPERM if only zombies are left
            os.killpg(process.pid, signal.SIGKILL)


class StreamReader(threading.Thread):
    """A thread that reads a stream while the process runs, and stores its last ``MOST_BYTES``."""

    MOST_BYTES = 1 << 22

    def __init__(self, stream: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        assert stream is not None
        self._stream, self._end = stream, b""
        self.start()

    def run(self) -> None:
        """Read until the stream ends."""
        with self._stream as stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                self._end = (self._end + chunk)[-self.MOST_BYTES :]

    def text(self) -> str:
        """Return what was read; wait 1 s at most, because a program of the code may hold the stream open."""
        self.join(1.0)
        return self._end.decode("utf-8", "replace")
