"""headscope check: code of a file is run in a separate process, and the findings are printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headscope import Findings
from headscope.cli import main
from headscope.cli._check.conventions import parse_arguments
from headscope.cli._shared import check_child
from headscope.cli._shared.mistakes import Mistake

HOMEWORK = """
import socket, sys
import torch
from torch import nn
from beside import SIZE

print("\\x1b[31mprinted", file=sys.stderr)
try:
    socket.create_connection(("127.0.0.1", 9))
except OSError as error:
    REACHED = str(error)


class Attention(nn.Module):
    def __init__(self, width, heads=1, *, scaled=True):
        super().__init__()
        if "network is blocked" not in REACHED:
            raise RuntimeError("the network was reached")
        self.heads, self.scaled = heads, scaled
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if self.scaled else 1)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""

MAKES = """
from homework import Attention

def plain(): return Attention(24, 3, scaled=False)
def with_defaults(width=24, **rest): return Attention(width, 3, scaled=False)
def fails(): raise RuntimeError("no")
def sometimes(x=None): return x
"""
IN_PYTHON = "; give --embed-dim or --call, or use headscope.check with inputs="
UNDIVIDED = """
from torch import nn
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.q = heads, nn.Linear(width, width)
    def forward(self, x):
        q = self.q(x).view(*x.shape[:2], self.heads, -1)
        return (q @ q.mT).softmax(-1).sum((-1, -2))
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("beside.py").write_text("SIZE = 24\n")
    Path("homework.py").write_text(HOMEWORK)
    Path("small.py").write_text("import math\nclass Attention: pass\ndef attend(x): pass\n")
    Path("makes.py").write_text(MAKES)
    Path("broken.py").write_text("1 / 0\n")
    Path("endless.py").write_text("while True: pass\n")
    Path("silent.py").write_text("import os\nos._exit(3)\n")
    Path("exits.py").write_text(
        "import sys\nclass A:\n    def __init__(self): sys.exit(0)\ndef attend(x): sys.exit(0)\n"
    )
    Path("stops.py").write_text("import sys\nsys.exit()\n")
    Path("undivided.py").write_text(UNDIVIDED)
    Path("several.py").write_text("from torch import nn\nclass First(nn.Module): pass\nclass Second(nn.Module): pass\n")
    Path("asks.py").write_text("name = input()\n")
    Path("hw.ipynb").write_text("{}")
    Path("crashes.py").write_text("import ctypes\nctypes.string_at(0)\n")
    Path("leaves.py").write_text("import os, sys\nprint('gone\\x1b[2J', file=sys.stderr)\nos._exit(3)\n")


def test_a_bug_is_said_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "homework.py:Attention", "--args", "24, heads=3, scaled=False"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("Attention: 1 wrong\n\n✗ scale-missing  wrong\n  logits are 1 · q·k, expected 0.3536 (1/√8)")
    assert err == "headscope check: running homework.py in a separate process\n"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs the code in this process, which has imported torch, and leaves it as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in ("beside", "exits", "homework", "makes", "several", "small"):
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]

    def refuse(*_: Any) -> Any:
        raise OSError("the network is blocked")

    def answer(request: dict[str, Any], timeout: int) -> dict[str, Any]:
        try:
            return {"findings": check_child._check(request)}
        except check_child.MistakeError as error:
            return {"mistake": str(error)}

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr(import_module("headscope.cli._commands.check"), "_ask_child", answer)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("arguments", [["plain"], ["with_defaults", "--args="]])
def test_what_a_function_makes_that_needs_no_arguments_is_checked(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"makes.py:{arguments[0]}", *arguments[1:]]) == 1
    assert capsys.readouterr().out.startswith("Attention: 1 wrong\n\n✗ scale-missing")


def test_nothing_found_is_exit_code_0_and_json_is_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    nothing = Findings("A\x1b[2J", (), ("1 head",), {"speed": "no \x1b"}).to_dict()

    def ask(what: dict[str, Any], timeout: int) -> dict[str, Any]:
        asked.append({**what, "timeout": timeout})
        return {"findings": nothing}

    monkeypatch.setattr(import_module("headscope.cli._commands.check"), "_ask_child", ask)
    options = ["--heads", "3", "--causal", "--length-first", "--mask-means", "hide", "--timeout", "7"]
    assert main(["check", "homework.py:A", "--args", "24, h=(3,)", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == nothing
    assert asked[0]["options"] == {"heads": 3, "causal": True, "batch_first": False, "mask_means": "hide"}
    assert (asked[0]["args"], asked[0]["kwargs"], asked[0]["timeout"]) == ([24], {"h": (3,)}, 7)
    assert main(["check", "homework.py:A"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("A\\x1b[2J: nothing found\n\nunderstood\n  1 head")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["homework"], "homework: no such file or folder, expected FILE.py:NAME, FILE.py or a folder; for example"),
        ([":x"], "target: got :x, expected FILE.py:NAME"),
        (["homework.py:1"], "for example homework.py:MultiHeadAttention"),
        (["nothing.py"], "nothing.py: no such file or folder"),
        (["asks.py:A"], "asks.py: import failed: EOFError: EOF when reading a line; call input() only below if __name"),
        (["hw.ipynb:A"], "hw.ipynb: is not a Python file; jupyter nbconvert --to python writes one from a notebook"),
        (["crashes.py:A"], "the code ended its process (SIGSEGV) before the check was done"),
        (
            ["homework.py", "--ignore", "scale-mising"],
            "--ignore: got scale-mising, expected the name of a finding; did",
        ),
        (["homework.py", "--only", "x" * 9], "--only: got xxxxxxxxx, expected the name of a finding; they are heads-s"),
        (["homework.py", "--json", "--csv"], "--json: got --csv as well, expected one of --table, --json and --csv"),
        (["homework.py", "--call", "lambda m, x, mask: m(x)"], "--call: got lambda m, x, mask: m(x), expected an exp"),
        (["homework.py", "--call", "module("], "--call: got module(, expected an expression of module, x and mask"),
        (["homework.py", "--class", "a b"], "--class: got a b, expected the name of a class, function or module"),
        (["nothing.py:A"], "nothing.py: no such file, expected a Python file"),
        ([f"{'a' * 300}:A"], f"{'a' * 300}: no such file"),
        (["\0:A"], "no such file, expected a Python file"),
        pytest.param(
            ["/dev/null:A"],
            "/dev/null: is not a regular file, expected a Python file",
            marks=pytest.mark.skipif(not os.path.exists("/dev/null"), reason="this system has no /dev/null"),
        ),
        ([".:A"], ".: is a directory, expected a Python file; --class A names a class for all its files"),
        (["small.py:attend", "--scale", "nan"], "--scale: got nan, expected a finite number above 0"),
        (["small.py:attend", "--scale", "inf"], "--scale: got inf, expected a finite number above 0"),
        (["small.py:attend", "--scale", "0"], "--scale: got 0, expected a finite number above 0"),
        (["small.py:attend", "--scale", "-1"], "--scale: got -1, expected a finite number above 0"),
        (["homework.py:A", "--args", "24, width"], "--args: got 24, width, expected literals as in a call"),
        (["homework.py:A", "--args", "*[1]"], "--args: got *[1], expected literals"),
        (["homework.py:A", "--args", "**{'a': 1}"], "expected literals"),
        (["homework.py:A", "--args", "b'1'"], "expected literals"),
        (["homework.py:A", "--args", "1) + f(2"], "expected literals"),
        (["endless.py:A", "--timeout", "1"], "--timeout: the code was stopped after 1 seconds"),
        (["broken.py:A"], "broken.py: import failed: ZeroDivisionError: division by zero"),
        (["stops.py:A"], "headscope check: stops.py: the file calls sys.exit() when it is imported"),
        (["leaves.py:A"], "the code ended its process (exit code 3) before the check was done: gone\\x1b[2J"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("headscope check: ")
    assert "\x1b" not in err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["small.py"], "small.py: defines no class of nn.Module, expected one; name a function or a module with small"),
        (["several.py"], "several.py: has 2 module classes: First, Second; choose one with several.py:NAME or --class"),
        (["homework.py:Attention"], """'width'; pass the arguments that build it, for example --args "512, 8\""""),
        (
            ["exits.py:A"],
            "A: cannot be built without arguments: exits.py, line 3: def __init__(self): sys.exit(0) raises Sys",
        ),
        (["homework.py:Attention", "--args", "25, 5", "--embed-dim", "24"], IN_PYTHON),
        (["small.py:Attentoin"], "small.py: has no Attentoin, expected one of Attention, attend"),
        (["exits.py:attend", "--embed-dim", "4"], "line 4: def attend(x): sys.exit(0) raises SystemExit: 0; give"),
        (["small.py:attend"], "--embed-dim: missing; it cannot be derived without weights"),
        (["small.py:attend", "--args", ""], "attend: cannot be built with --args '': TypeError"),
        (["makes.py:fails"], 'line 6: def fails(): raise RuntimeError("no") raises RuntimeError: no'),
        (["makes.py:sometimes"], "--embed-dim: missing"),
        (
            ["undivided.py:Attention", "--args", "512, 7"],
            "Attention: fails with x [2, 7, 512]: undivided.py, line 8: q = self.q(x).view(*x.shape[:2], self.h",
        ),
    ],
)
def test_a_mistake_of_the_code_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]  # behind what the code prints, which goes to the same stream here
    assert last.startswith("headscope check: ")
    assert said in last


FORKS = """
import fcntl, os, time

ready, told = os.pipe()
if not os.fork():
    lock = open("lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(told, b"x")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
open("started", "w").close()
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def is_locked() -> bool:
    """Whether the sleeper still runs; the system releases its lock when it ends, also if nobody reaps it."""
    import fcntl

    deadline = time.monotonic() + 5
    with open("lock") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                return False
    return True


@needs_fork
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("time.sleep(60)", "--timeout: the code was stopped after 1 seconds"),
        ("1 / 0", "forks.py: import failed: ZeroDivisionError"),
        ("os._exit(3)", "the code ended its process (exit code 3) before the check was done"),
    ],
)
def test_what_the_code_has_started_ends_with_it(end: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("forks.py").write_text(FORKS + end)

    code = main(["check", "forks.py:A", "--timeout", "1"])

    assert code == 2
    assert message in capsys.readouterr().err
    assert Path("started").exists()
    assert not is_locked()


@needs_fork
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_ends_what_the_code_has_started(name: str) -> None:
    """Of SIGKILL the process learns nothing: the one that runs the code notices that its parent is gone."""
    Path("forks.py").write_text(FORKS + "time.sleep(60)")
    number = getattr(signal, name)
    unblocked = f"import signal; signal.signal({int(signal.SIGINT)}, signal.default_int_handler); "
    program = [sys.executable, "-c", f"{unblocked}from headscope.cli import main; main(['check', 'forks.py:A'])"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as running:
        while not Path("started").exists() and running.poll() is None:
            time.sleep(0.02)

        running.send_signal(number)
        _, err = running.communicate(timeout=20)

    assert running.returncode == (130 if name == "SIGINT" else -number)
    assert err.endswith(b"headscope: interrupted\n" if name == "SIGINT" else b"")
    assert not is_locked()


def test_code_that_ends_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "silent.py:A"]) == 2
    assert capsys.readouterr().err.endswith(
        "check: the code ended its process (exit code 3) before the check was done\n"
    )


@pytest.mark.parametrize(
    ("path", "name", "args", "said"),
    [
        ("small.py", "Attention", [1], r"Attention: cannot be built with --args '1': TypeError"),
        ("small.py", "attend", [], r"embed_dim: missing; it cannot be derived without weights"),
        ("notes.txt", "A", [], r"notes.txt: is not a Python file"),
    ],
)
def test_code_that_cannot_be_checked(
    path: str, name: str, args: list[int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in this process, which is left as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "small", None)
    Path("notes.txt").write_text("no code")
    asked = {"path": path, "name": name, "args": args, "kwargs": {}, "arguments": "1" if args else None, "options": {}}
    with pytest.raises(check_child.MistakeError, match=said):
        check_child._check(asked)


def test_arguments_are_those_of_a_call() -> None:
    assert parse_arguments("") == ([], {})
    assert parse_arguments("24, 'a', c=(1, None), d=-0.5") == ([24, "a"], {"c": (1, None), "d": -0.5})
    with pytest.raises(Mistake, match="expected literals"):
        parse_arguments("open('x')")
