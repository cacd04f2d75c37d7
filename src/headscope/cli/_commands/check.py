"""``headscope check``: what is wrong with an attention module in a file of one's own."""

from __future__ import annotations

import ast
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import ENDING, SIZE, console, print_json, say
from headscope.cli._shared.mistakes import Mistake, name_options

if TYPE_CHECKING:
    from headscope.checking import Findings

PROBLEMS = 1  # the exit code where the module has any
IN_PYTHON = "; give --embed-dim, or use headscope.check with inputs= or call="
CHILD = """
import sys
root = sys.argv[1]  # the same package as here, wherever it was found
if root not in sys.path:
    sys.path.insert(0, root)
from headscope.cli._shared.check_child import main
main()
"""


@click.command(short_help="Find what is wrong with an attention module of yours.")
@click.argument("target", metavar="FILE.py:NAME")
@click.option("--args", "arguments", metavar="ARGS", help='What it is made with: --args "512, 8, causal=True".')
@click.option("--embed-dim", type=SIZE, help="E, width of the input.  [default: from the weights]")
@click.option("--heads", type=SIZE, help="H that was meant.")
@click.option("--causal/--not-causal", default=None, help="Whether no token may see a later one.")
@click.option("--batch-first/--length-first", default=None, help="Whether the input is [B, T, E] or [T, B, E].")
@click.option(
    "--mask-means", type=click.Choice(["keep", "hide", "add"]), help="What True, or a number, in a mask means."
)
@click.option("--scale", type=float, metavar="X", help="Factor of q·k that was meant.  [default: 1/√D]")
@click.option("--length", type=SIZE, help="At what length it will be used; from 1024 on, slow paths are told.")
@click.option("--reproducible", is_flag=True, default=None, help="An entry has the same bits in every batch.")
@click.option("--timeout", type=SIZE, default=60, show_default=True, help="Seconds after which it is stopped.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def check(target: str, arguments: str | None, timeout: int, as_json: bool, **options: Any) -> int:
    """Find what is wrong with an attention module, from outside, by what it computes.

    NAME is a class or a function that makes a module, with --args; both may need none. Or it is a module, or a function
    that attends (with --embed-dim).

    The code in FILE.py is imported and run, in a process of its own with a time limit and without network for Python.
    Processes that the code starts end with it. That is no sandbox: check only code that you would run. Exit code 0:
    nothing found; 1: something found.
    """
    path, name = _parse_target(target)
    args, kwargs = _parse_arguments(arguments or "")
    if (scale := options["scale"]) is not None and not (math.isfinite(scale) and scale > 0):
        raise Mistake(f"--scale: got {scale:g}, expected a finite number above 0")
    say(f"headscope check: importing and running {visible(str(path))}, in a process of its own")
    request = {
        "path": str(path.resolve()), "name": name, "args": args, "kwargs": kwargs, "arguments": arguments,
        "options": {key: value for key, value in options.items() if value is not None},
    }  # fmt: skip
    with progress_line("checking"):
        answer = _ask_child(request, timeout)
    if "mistake" in answer:
        message = str(answer["mistake"]).replace(
            "; give embed_dim=, inputs=, or call=lambda module, x, mask: ...", IN_PYTHON
        )
        raise Mistake(name_options(message, {"embed_dim": "--embed-dim"}))
    findings = answer["findings"]
    if as_json:
        print_json(findings)
    else:
        console().print(_parse_findings(findings).table())
    return PROBLEMS if findings["findings"] else 0


def _parse_target(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if not file or not colon or not name.isidentifier():
        raise Mistake(f"target: got {target}, expected FILE.py:NAME, as homework.py:MultiHeadAttention")
    if os.path.isdir(file):  # False where Path.is_dir raises: a name can be too long
        raise Mistake(f"{file}: is a directory, expected a Python file")
    if not os.path.isfile(file):
        problem = "is no regular file, expected a Python file" if os.path.exists(file) else "there is no such file"
        raise Mistake(f"{file}: {problem}")
    return Path(file), name


def _parse_arguments(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments as they stand in a call; plain values only.

    Raises:
        Mistake: it is no list of arguments, or one is no plain value.
    """
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or any(word.arg is None for word in call.keywords):
            raise ValueError
        args = [ast.literal_eval(each) for each in call.args]
        kwargs = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        json.dumps([args, kwargs])
    except (SyntaxError, ValueError, TypeError):
        raise Mistake(f"--args: got {arguments}, expected plain values as in a call: 512, 8, causal=True") from None
    return args, kwargs


def _ask_child(request: dict[str, Any], timeout: int) -> dict[str, Any]:
    """Return the answer of the process that runs the code. What the code prints is not shown.

    Args:
        request: as that process reads it.
        timeout: seconds.

    Raises:
        Mistake: it was stopped, or ended without an answer.
    """
    program = [sys.executable, "-P", "-c", CHILD, str(Path(__file__).parents[2])]
    pipe = subprocess.PIPE
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        program, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
    )
    with _group_ended(process):
        assert process.stdin is not None
        answer, printed = _Reader(process.stdout), _Reader(process.stderr)
        with process.stdin as stdin:
            with suppress(BrokenPipeError):
                stdin.write(json.dumps(request).encode() + b"\n")  # and left open: the process ends when this one does
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise Mistake(f"--timeout: the code was stopped after {timeout} seconds") from None
    try:
        return json.loads(answer.text())
    except ValueError:
        last = printed.text().strip().rpartition("\n")[2]
        reason = f": {last}" if last else ""
        raise Mistake(f"the code ended its process with {code} before there was an answer{reason}") from None


@contextmanager
def _group_ended(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Kill a process and its group at the end of the block, and on a signal that ends this process.

    The process leads a session of its own, so Ctrl-C in the terminal does not reach it.
    """

    def kill_and_pass_on(number: int, frame: FrameType | None) -> None:
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
        _kill_group(process)
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started, except what has left its group."""
    if not hasattr(os, "killpg"):  # Windows
        process.kill()
    elif process.pid != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM where only zombies are left
            os.killpg(process.pid, signal.SIGKILL)


class _Reader(threading.Thread):
    """A thread that reads a stream while the process runs; only the end is stored."""

    MOST_BYTES = 1 << 22

    def __init__(self, stream: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        assert stream is not None
        self._stream, self._end = stream, b""
        self.start()

    def run(self) -> None:
        """Until the stream ends."""
        with self._stream as stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                self._end = (self._end + chunk)[-self.MOST_BYTES :]

    def text(self) -> str:
        """What was read; a program that the code has left running may keep the stream open."""
        self.join(1.0)
        return self._end.decode("utf-8", "replace")


def _parse_findings(answer: dict[str, Any]) -> Findings:
    """Return the findings of an answer, their text fit for a terminal."""
    from headscope.checking import Finding, Findings

    texts: list[dict[str, Any]] = [{key: visible(value) for key, value in each.items()} for each in answer["findings"]]
    parts = tuple(Finding(**each) for each in texts)
    rest = {visible(what): visible(why) for what, why in answer["not_tested"].items()}
    return Findings(visible(answer["subject"]), parts, tuple(map(visible, answer["understood"])), rest)
