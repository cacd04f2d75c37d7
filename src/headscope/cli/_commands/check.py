"""``headscope check``: find the mistakes in the attention module of a file."""

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

PROBLEMS = 1  # exit code
IN_PYTHON = {
    "give embed_dim=, inputs=, or call=lambda module, x, mask: ...": "give --embed-dim, or use headscope.check with "
    "inputs= or call=",
    "give inputs= or call=lambda module, x, mask: ...": "use headscope.check with inputs= or call=",
}
"""Remedies of the library that no option replaces, and the same for the command line."""
CHILD = """
import sys
root = sys.argv[1]  # so that the child imports this very package
if root not in sys.path:
    sys.path.insert(0, root)
from headscope.cli._shared.check_child import main
main()
"""


@click.command(short_help="Find the mistakes in your attention module.")
@click.argument("target", metavar="FILE.py:NAME")
@click.option(
    "--args", "arguments", metavar="ARGS", help='Arguments that build the module: --args "512, 8, causal=True".'
)
@click.option("--embed-dim", type=SIZE, help="E, width of the input.  [default: from the weights]")
@click.option("--heads", type=SIZE, help="H, the intended number of heads.")
@click.option("--causal/--not-causal", default=None, help="Whether later tokens must be masked.")
@click.option("--batch-first/--length-first", default=None, help="Whether the input is [B, T, E] or [T, B, E].")
@click.option(
    "--mask-means",
    type=click.Choice(["keep", "hide", "add"]),
    help="What a mask means: True = keep (attend), True = hide, or add to the scores.",
)
@click.option("--scale", type=float, metavar="X", help="Intended factor of q·k.  [default: 1/√D]")
@click.option("--length", type=SIZE, help="Intended sequence length; from 1024 on, slow paths are reported.")
@click.option(
    "--reproducible", is_flag=True, default=None, help="Also check that a batch entry gives the same bits in any batch."
)
@click.option("--timeout", type=SIZE, default=60, show_default=True, help="Seconds after which the check is stopped.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the report.")
def check(target: str, arguments: str | None, timeout: int, as_json: bool, **options: Any) -> int:
    """Find the mistakes in an attention module by running it and comparing what it computes.

    NAME is a class or function that builds a module (with --args, if it needs arguments), a module, or a function that
    attends (with --embed-dim).

    FILE.py is imported and run in a separate process with a time limit and without network access from Python;
    processes that the code starts end with it. This is not a sandbox: check only code that you trust. The exit code
    is 1 if there are findings, else 0.
    """
    path, name = parse_target(target)
    args, kwargs = parse_arguments(arguments or "")
    if (scale := options["scale"]) is not None and not (math.isfinite(scale) and scale > 0):
        raise Mistake(f"--scale: got {scale:g}, expected a finite number above 0")
    say(f"headscope check: running {visible(str(path))} in a separate process")
    request = {
        "path": str(path.resolve()), "name": name, "args": args, "kwargs": kwargs, "arguments": arguments,
        "options": {key: value for key, value in options.items() if value is not None},
    }  # fmt: skip
    with progress_line("checking"):
        answer = ask_child(request, timeout)
    if "mistake" in answer:
        message = str(answer["mistake"])
        for remedy, on_the_command_line in IN_PYTHON.items():
            message = message.replace(remedy, on_the_command_line)
        raise Mistake(name_options(message, {"embed_dim": "--embed-dim"}))
    findings = answer["findings"]
    if as_json:
        print_json(findings)
    else:
        console().print(_parse_findings(findings).table())
    return PROBLEMS if findings["findings"] else 0


def parse_target(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if not file or not colon or not name.isidentifier():
        raise Mistake(f"target: got {target}, expected FILE.py:NAME, for example {_example(target)}")
    if os.path.isdir(file):  # False where Path.is_dir raises: a name can be too long
        raise Mistake(f"{file}: is a directory, expected a Python file")
    if not os.path.isfile(file):
        problem = "is not a regular file" if os.path.exists(file) else "no such file"
        raise Mistake(f"{file}: {problem}, expected a Python file")
    return Path(file), name


def _example(target: str) -> str:
    """Return a target that follows FILE.py:NAME, with the file of this one if it has one."""
    file = target.partition(":")[0]
    return f"{file if file.endswith('.py') else 'homework.py'}:MultiHeadAttention"


def parse_arguments(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments in a text such as ``512, 8, causal=True``.

    Raises:
        Mistake: the text is not a list of arguments, or one of them is not a literal.
    """
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or any(word.arg is None for word in call.keywords):
            raise ValueError
        args = [ast.literal_eval(each) for each in call.args]
        kwargs = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        json.dumps([args, kwargs])
    except (SyntaxError, ValueError, TypeError):
        raise Mistake(f"--args: got {arguments}, expected literals as in a call: 512, 8, causal=True") from None
    return args, kwargs


def ask_child(request: dict[str, Any], timeout: int) -> dict[str, Any]:
    """Return the answer of the process that runs the code; what the code prints is discarded.

    Args:
        request: the line of JSON that the process reads.
        timeout: seconds.

    Raises:
        Mistake: the process was stopped, or ended without an answer.
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
                stdin.write(json.dumps(request).encode() + b"\n")  # the pipe stays open: the child ends when it closes
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise Mistake(f"--timeout: the code was stopped after {timeout} seconds") from None
    try:
        return json.loads(answer.text())
    except ValueError:
        last = printed.text().strip().rpartition("\n")[2]
        reason = f": {last}" if last else ""
        raise Mistake(f"the code ended its process (exit code {code}) before the check was done{reason}") from None


@contextmanager
def _group_ended(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Kill a process and its group at the end of the block, and on a signal that ends this process.

    The process leads its own session, so Ctrl-C in the terminal does not reach it.
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
    """Kill a process and its children, except those that left its process group."""
    if not hasattr(os, "killpg"):  # Windows
        process.kill()
    elif process.pid != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):  # macOS raises EPERM if only zombies are left
            os.killpg(process.pid, signal.SIGKILL)


class _Reader(threading.Thread):
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


def _parse_findings(answer: dict[str, Any]) -> Findings:
    """Return the findings of an answer, with control characters escaped."""
    from headscope.checking import Finding, Findings

    texts: list[dict[str, Any]] = [{key: visible(value) for key, value in each.items()} for each in answer["findings"]]
    parts = tuple(Finding(**each) for each in texts)
    rest = {visible(what): visible(why) for what, why in answer["not_tested"].items()}
    return Findings(visible(answer["subject"]), parts, tuple(map(visible, answer["understood"])), rest)
