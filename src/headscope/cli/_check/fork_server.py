"""A process that imports torch once, and forks a process for each submission.

A fork starts in milliseconds and shares nothing with the next one: code that patches torch, exits or crashes affects
its own process only. No code of a submission runs in this process. It reads lines of JSON from stdin, and ends with all
that it started when stdin closes.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headscope.cli._check.processes import describe_end, describe_timeout
from headscope.cli._shared.check_child import answer_request, block_network, silence_input

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 0.05  # between looks at the processes: a program that the code has started can hold its pipes open
MOST_ANSWER_BYTES = 1 << 22
MOST_PRINTED_BYTES = 1 << 12  # of which the last line is shown


@dataclass
class Fork:
    """A running submission.

    Attributes:
        index: of its request.
        pid: its process, which leads a session.
        timeout: seconds after which it is stopped.
        deadline: the same as a time of ``time.monotonic``.
        pipes: what it has written, by the descriptor that reads it: the answer, and what the code prints.
    """

    index: int
    pid: int
    timeout: int
    deadline: float
    pipes: dict[int, bytes] = field(default_factory=dict[int, bytes])


def main() -> None:
    """Serve the requests on stdin: first a line with ``jobs`` and ``count``, then a line for each submission."""
    requests, answers = os.dup(0), os.dup(1)
    silence_input()
    os.dup2(2, 1)
    _warm_up()
    ForkServer(requests, answers).serve()
    os._exit(0)


def _warm_up() -> None:
    """Import what every check needs, and run one: torch loads some parts at their first use.

    A function is checked, because a backward pass could start threads, which do not survive a fork.
    """
    import torch

    from headscope.checking import check

    torch.set_num_threads(1)  # a pool of threads does not survive a fork, either
    check(_attend, embed_dim=8)
    gc.collect()
    gc.freeze()  # the collector of a fork would otherwise copy all pages


def _attend(x: Tensor) -> Tensor:
    return (x @ x.mT * x.shape[-1] ** -0.5).softmax(-1) @ x


class ForkServer:
    """The submissions that wait and that run.

    Args:
        requests: the descriptor from which requests are read.
        answers: the descriptor to which answers are written.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._lifeline, self._own_end = os.pipe()  # closes with this process, also if it is killed
        self._selector = selectors.SelectSelector()  # has no descriptor that a fork would share
        self._selector.register(requests, selectors.EVENT_READ)
        self._waiting, self._running = deque[tuple[int, dict[str, Any]]](), dict[int, Fork]()
        self._unread, self._jobs, self._count, self._received, self._done = b"", 1, None, 0, 0

    def serve(self) -> None:
        """Run the submissions until all are done, or until the requests end early."""
        try:
            while self._count is None or self._done < self._count:
                while self._waiting and len(self._running) < self._jobs:
                    self._start(*self._waiting.popleft())
                for key, _ in self._selector.select(POLL_SECONDS if self._running else None):
                    if key.fd != self._requests:
                        self._read_pipe(key.data, key.fd)
                    elif not self._read_requests():
                        return
                for fork in [*self._running.values()]:
                    self._end_if_done(fork)
        finally:
            for fork in self._running.values():
                _kill_session(fork.pid)

    def _read_requests(self) -> bool:
        """Read what has arrived; return False where the sender is gone."""
        chunk = os.read(self._requests, 1 << 16)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if self._count is None:
                self._jobs, self._count = int(message["jobs"]), int(message["count"])
            else:
                self._waiting.append((self._received, message))
                self._received += 1
        return bool(chunk)

    def _start(self, index: int, request: dict[str, Any]) -> None:
        (answer, answer_end), (printed, printed_end) = os.pipe(), os.pipe()
        self._send({"started": index})
        pid = os.fork()
        if not pid:
            others = [end for fork in self._running.values() for end in fork.pipes]
            _run_in_fork(request, answer_end, printed_end, self._lifeline, [
                self._requests, self._answers, self._own_end, answer, printed, *others,
            ])  # fmt: skip
        os.close(answer_end)
        os.close(printed_end)
        timeout = int(request["timeout"])
        fork = Fork(index, pid, timeout, time.monotonic() + timeout, {answer: b"", printed: b""})
        self._running[pid] = fork
        for end in fork.pipes:
            os.set_blocking(end, False)
            self._selector.register(end, selectors.EVENT_READ, fork)

    def _read_pipe(self, fork: Fork, end: int) -> bool:
        """Read a part of what a fork has written; return False where there is nothing now."""
        try:
            chunk = os.read(end, 1 << 16)
        except BlockingIOError:
            return False
        most = MOST_ANSWER_BYTES if end == next(iter(fork.pipes)) else MOST_PRINTED_BYTES
        fork.pipes[end] = (fork.pipes[end] + chunk)[-most:]
        if not chunk:
            with suppress(KeyError):
                self._selector.unregister(end)
        return bool(chunk)

    def _end_if_done(self, fork: Fork) -> None:
        """Send the answer of a fork that has ended, or that has run too long."""
        late = time.monotonic() >= fork.deadline
        if not late and os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        _kill_session(fork.pid)  # before it is waited for, so that its number cannot belong to another process
        code = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        for end in fork.pipes:
            for _ in range(MOST_ANSWER_BYTES >> 16):  # a process that left the session could print without end
                if not self._read_pipe(fork, end):
                    break
            with suppress(KeyError):
                self._selector.unregister(end)
            os.close(end)
        del self._running[fork.pid]
        self._done += 1
        answer, printed = fork.pipes.values()
        try:
            result: dict[str, Any] = json.loads(answer)
        except ValueError:
            text = printed.decode("utf-8", "replace")
            result = {"mistake": describe_timeout(fork.timeout) if late else describe_end(code, text)}
        self._send({"index": fork.index, "answer": result})

    def _send(self, message: dict[str, Any]) -> None:
        """Write a line for the process that asked."""
        rest = json.dumps(message).encode() + b"\n"
        while rest:
            rest = rest[os.write(self._answers, rest) :]


def _kill_session(pid: int) -> None:
    """Kill a fork and all processes of its session's group."""
    for kill in (os.killpg, os.kill):  # it may not have become the leader of a group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _run_in_fork(request: dict[str, Any], answer_end: int, printed_end: int, lifeline: int, close: list[int]) -> None:
    """Run a submission in the process that was forked for it, and end the process.

    Args:
        request: the request.
        answer_end: the descriptor for the answer.
        printed_end: the descriptor for what the code prints.
        lifeline: a descriptor that can be read once the server has ended.
        close: the descriptors of the server.
    """
    try:
        os.setsid()
        for end in close:
            os.close(end)
        for stream in (1, 2):
            os.dup2(printed_end, stream)
        os.close(printed_end)
        _limit_harm()
        sys.dont_write_bytecode = True  # no __pycache__ among the submissions
        threading.Thread(target=_leave_with_server, args=(lifeline,), daemon=True).start()
        block_network()
        answer = answer_request(request)
        with os.fdopen(answer_end, "w", encoding="utf-8") as stream:
            json.dump(answer, stream)
    except BaseException as error:
        with suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _leave_with_server(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the last copy of the other end is closed
    os.killpg(0, signal.SIGKILL)


def _limit_harm() -> None:
    """Write no core files, and be the first to end when memory runs out."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("1000")
