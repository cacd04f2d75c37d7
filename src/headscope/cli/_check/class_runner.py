"""The submissions of a class, several at a time, each in a process of its own."""

from __future__ import annotations

import io
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO, Any

from headscope.cli._check.processes import StreamReader, ask_child, group_ended, start_process
from headscope.cli._shared.mistakes import Mistake

CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"  # macOS ends forks that use some of its libraries
SECONDS_TO_END = 2  # for the server to end the processes of the submissions

Answers = Iterator[tuple[int, dict[str, Any]]]


def count_jobs() -> int:
    """Return how many submissions run at a time: one for each core that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


def run_requests(requests: list[dict[str, Any]], jobs: int, fork: bool = CAN_FORK) -> Answers:
    """Yield the index and the answer of each request, in the order in which they are done.

    Args:
        requests: as ``check_child`` reads them, with "timeout" in seconds.
        jobs: how many run at a time.
        fork: whether all are forks of one process that has imported torch; otherwise each imports it.
    """
    return _run_on_servers(requests, jobs) if fork else _run_on_threads(requests, jobs)


def _run_on_threads(requests: list[dict[str, Any]], jobs: int) -> Answers:
    def ask(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return ask_child(request, request["timeout"])
        except Mistake as error:
            return {"mistake": error.message}

    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(ask, request): index for index, request in enumerate(requests)}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run_on_servers(requests: list[dict[str, Any]], jobs: int) -> Answers:
    """Run all on one server; where a submission ends it, run what was running alone, and the rest on another."""
    waiting = list(range(len(requests)))
    while waiting:
        started, done = set[int](), set[int]()
        for message in _serve([requests[index] for index in waiting], jobs):
            if "started" in message:
                started.add(waiting[message["started"]])
                continue
            index = waiting[message["index"]]
            done.add(index)
            yield index, message["answer"]
        if not started:
            raise Mistake("the process that imports torch for all files ended before it started one of them")
        for index in sorted(started - done):
            if jobs == 1:
                yield index, {"mistake": "the file ended the process that checks all files"}
                continue
            for _, answer in _run_on_servers([requests[index]], 1):
                yield index, answer
        waiting = [index for index in waiting if index not in started]


def _serve(requests: list[dict[str, Any]], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield what a new server sends, until it has answered all or ends."""
    process = start_process("_check.fork_server")

    def end() -> (
        None
    ):  # the server then ends its forks: each leads a session, which a signal to the server does not reach
        with suppress(OSError):
            process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)

    with group_ended(process, end):
        StreamReader(process.stderr)  # what the server prints is discarded
        messages: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_read_lines, args=(process.stdout, messages), daemon=True).start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            for line in ({"jobs": jobs, "count": len(requests)}, *requests):
                process.stdin.write(json.dumps(line).encode() + b"\n")
        while line := messages.get():
            yield json.loads(line)


def _read_lines(stream: IO[bytes] | None, messages: queue.Queue[bytes]) -> None:
    """Put each line of a stream, and b"" at its end."""
    assert isinstance(stream, io.RawIOBase)
    with io.BufferedReader(stream) as buffered:
        for line in buffered:
            messages.put(line)
    messages.put(b"")
