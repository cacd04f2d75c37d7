"""Programs in a process of their own, forked from one that has imported torch: that import takes longer than most.

``python forking.py FD`` is the process that forks. A test of what is imported, or of how Python starts, starts Python.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CAN_FORK = sys.platform == "linux"  # with SOCK_SEQPACKET; elsewhere a program starts Python


def run_program(
    code: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    streams: Sequence[int | None] = (None, None, None),
) -> subprocess.CompletedProcess[str]:
    """Run Python code as ``python -c`` does.

    Args:
        code: imports of torch cost nothing.
        env: the whole environment; that of this process by default.
        timeout: seconds, after which the process is killed and ``subprocess.TimeoutExpired`` is raised.
        streams: file descriptors of stdin, stdout and stderr; by default there is nothing to read, and what is
            written is returned.
    """
    command, (stdin, *outputs) = [sys.executable, "-c", code, *arguments], streams
    env = os.environ if env is None else env
    if not CAN_FORK:
        stdout, stderr = (subprocess.PIPE if stream is None else stream for stream in outputs)
        return subprocess.run(
            command, cwd=cwd, env=env, timeout=timeout, stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=stdout, stderr=stderr, text=True, encoding="utf-8", check=False,
        )  # fmt: skip
    readers = [None if stream is not None else _Reader() for stream in outputs]
    nothing = os.open(os.devnull, os.O_RDONLY)
    given = [nothing if stdin is None else stdin]
    given += [stream if reader is None else reader.end for stream, reader in zip(outputs, readers, strict=True)]
    described = {"code": code, "arguments": arguments, "cwd": str(cwd or Path.cwd()), "env": dict(env)}
    channel = _forker()
    try:
        socket.send_fds(channel, [json.dumps(described).encode()], given)  # pyright: ignore[reportArgumentType]
        process = int(channel.recv(64))
    finally:
        for each in (nothing, *(reader.end for reader in readers if reader is not None)):
            os.close(each)
    status = _wait(channel, process, timeout)
    texts = ["" if reader is None else reader.text() for reader in readers]
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), *texts)


RANKS = """
import gc, importlib, json, os, runpy, sys, tempfile
script, world, *arguments = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
importlib.import_module(os.path.basename(script)[:-3])  # the ranks share what it imports
if "torch.distributed.tensor" in sys.modules:
    importlib.import_module("torch._dynamo")  # which each rank would import when it first shards
gc.collect()
gc.freeze()
files = [tempfile.TemporaryFile() for _ in range(int(world))]
children = []
for rank, file in enumerate(files):
    child = os.fork()
    if child == 0:
        os.dup2(file.fileno(), 1)
        sys.argv = [script, str(rank), *arguments]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps([os.pread(file.fileno(), 1 << 24, 0).decode() for file in files]))
sys.exit(any(codes))
"""


def run_ranks(script: Path, *arguments: str, world: int = 2) -> list[str]:
    """Run a script in several processes, with its rank before the arguments; return what each writes to stdout."""
    done = run_program(RANKS, str(script), str(world), *arguments, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _wait(channel: socket.socket, process: int, timeout: float) -> int | None:
    """Return the status of a process that has ended, or None where it had to be killed."""
    channel.settimeout(timeout)
    try:
        return int(channel.recv(64))
    except TimeoutError:
        os.kill(process, signal.SIGKILL)
        channel.settimeout(None)
        channel.recv(64)
        return None
    finally:
        channel.settimeout(None)


class _Reader(threading.Thread):
    """Reads what is written to ``end`` until nobody has it open."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stream, self.end = os.pipe()
        self._chunks: list[bytes] = []
        self.start()

    def run(self) -> None:
        while chunk := os.read(self._stream, 1 << 16):
            self._chunks.append(chunk)
        os.close(self._stream)

    def text(self) -> str:
        """Everything that was written."""
        self.join()
        return b"".join(self._chunks).decode("utf-8")


@functools.cache
def _forker() -> socket.socket:
    """Start the process that forks, which ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork a process for each message; return, in that process, what it is to run."""
    while True:
        message, streams, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            os._exit(0)
        process = os.fork()
        if process == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            channel.close()
            return json.loads(message)
        for stream in streams:
            os.close(stream)
        channel.send(str(process).encode())
        channel.send(str(os.waitpid(process, 0)[1]).encode())


def _main() -> None:
    import sympy  # noqa: F401  # torch.testing and torch._dynamo import it, when they are first used
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()
    program = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["env"])
    sys.argv[:] = ["-c", *program["arguments"]]
    sys.path[0] = ""
    for number, (name, errors) in enumerate(
        (("stdin", "strict"), ("stdout", "strict"), ("stderr", "backslashreplace"))
    ):
        stream = open(number, "w" if number else "r", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    main = vars(sys.modules["__main__"])
    names = {name: main[name] for name in ("__builtins__", "__loader__", "__name__", "__package__", "__spec__")}
    main.clear()
    main.update(names)
    exec(compile(program["code"], "<string>", "exec"), main)


if __name__ == "__main__":
    _main()
