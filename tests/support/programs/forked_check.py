"""headscope as ``python -m headscope``, but the processes in which it runs the code of others are forks of it.

Each of them would otherwise start Python and import torch. Elsewhere than on Linux they do: forks may fail there.
In the environment of that code, COMMAND is the process of the command.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings

from headscope import cli
from headscope.cli._check import class_runner, processes
from headscope.cli._shared.console import ENDING


class Fork:
    """A fork in a session of its own, in ``main`` of a module of ``headscope.cli``, with pipes.

    It has what the command uses of the ``subprocess.Popen`` that ``start_process`` returns.
    """

    def __init__(self, module: str) -> None:
        pipes = [os.pipe() for _ in range(3)]
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = pipes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which only read pipes here
            self.pid = os.fork()
        if self.pid == 0:
            _run(module, (stdin, stdout, stderr))
        for end in (stdin, stdout, stderr):
            os.close(end)
        self.stdin = os.fdopen(to_stdin, "wb", buffering=0)
        self.stdout = os.fdopen(from_stdout, "rb", buffering=0)
        self.stderr = os.fdopen(from_stderr, "rb", buffering=0)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or the negative number of a signal."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if end is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif end is not None and timeout is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.__class__.__name__, timeout)
            else:
                time.sleep(0.005)
        return self.returncode


def _run(module: str, streams: tuple[int, int, int]) -> None:
    """Be what ``start_process`` starts: a process that has nothing of its parent but what it has imported."""
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in ENDING:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ["HF_HUB_OFFLINE"] = "1"
        sys.path[:] = [place for place in sys.path if place]  # without the current folder
        importlib.import_module(f"headscope.cli.{module}").main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent of the tests does with it
    os.environ["COMMAND"] = str(os.getpid())
    if sys.platform == "linux":
        processes.start_process = class_runner.start_process = Fork  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(cli.main())
