"""The command line as a process of its own: Ctrl-C, closed pipes, encodings, terminals, and what help imports.

The processes signal themselves at a chosen place in the code, so that no test depends on time.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headscope._attend.backends import native
from headscope.cli import main
from support.forking import run_program
from support.processes import POSIX, PROGRAM, STRIKE, headscope, names

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="streams as /dev/full and the errors of Linux have them")


AT_IMPORT = f"""
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            {STRIKE}
sys.meta_path.insert(0, Finder())
"""

AT_INPUT = f"""
from headscope.cli._shared import text_input as reading
def read(stream, source):
    {STRIKE}
    return []
reading._chunks = read
"""

WHILE_WRITING = f"""
put = os.replace
def strike_and_put(*paths):
    {STRIKE}
    put(*paths)
    print("put", flush=True)
os.replace = strike_and_put
"""

WHILE_PRINTING = f"""
from rich.console import Console
def strike(*arguments, **options):
    {STRIKE}
Console.print = strike
"""


@pytest.mark.parametrize("arguments", [("text", "hi", "--no-page"), ("doctor",)])
@pytest.mark.skipif(native.extension is None, reason="there are no native kernels here")
def test_a_native_target_that_is_not_here_is_a_mistake(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = headscope(*arguments, cwd=tmp_path, environment={"HEADSCOPE_CPU_TARGET": "abacus"})
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"headscope: HEADSCOPE_CPU_TARGET: got 'abacus', expected a target of this CPU: .*\n", done.stderr
    )


HELP = [
    *("--help", "--version"),
    *(f"{command} --help" for command in ("text", "image", "trace", "watch", "report", "check", "doctor", "bench")),
]
ASK_FOR_HELP = """
heavy = ("torch", "numpy", "rich", "matplotlib", "PIL", "tokenizers", "jinja2", "safetensors")
for line in sys.argv[1:]:
    code = cli.main(line.split())
    print(line, code, [name for name in heavy if name in sys.modules], file=sys.stderr)
    print("end of " + line)
sys.exit()
"""


def test_help_imports_no_more_than_click(tmp_path: Path) -> None:
    """One interpreter prints all of it, so that a line names what was imported up to it."""
    ran = headscope(*HELP, cwd=tmp_path, setup=ASK_FOR_HELP, fresh=True)
    assert ran.returncode == 0
    assert ran.stderr == "".join(f"{line} 0 []\n" for line in HELP)
    rest = ran.stdout
    for line in HELP:
        shown, _, rest = rest.partition(f"end of {line}\n")
        assert shown.startswith("headscope" if line == "--version" else "Usage: headscope"), line
    assert rest == ""


def test_a_mistake_in_the_text_waits_for_nothing(tmp_path: Path) -> None:
    setup = "import atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    ran = headscope("text", "", cwd=tmp_path, setup=setup, fresh=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        2,
        "",
        "headscope text: text: is empty, expected a text\nFalse\n",
    )


@POSIX
@pytest.mark.parametrize("setup", [AT_IMPORT, AT_INPUT, WHILE_PRINTING], ids=["import", "input", "printing"])
def test_ctrl_c_is_one_line_and_130(setup: str, tmp_path: Path) -> None:
    text = "-" if setup is AT_INPUT else "a"
    ran = headscope("text", text, "--no-page", cwd=tmp_path, setup=setup, fresh=setup is AT_IMPORT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "headscope: interrupted\n")
    assert names(tmp_path) == []


@POSIX
@pytest.mark.parametrize(
    ("name", "code", "arguments", "written"),
    [
        ("SIGINT", 130, "text a", "headscope-text.html"),
        ("SIGHUP", -1, "text a", "headscope-text.html"),
        ("SIGTERM", -15, "watch digits --no-page --out a.safetensors", "a.safetensors"),
    ],
)
def test_a_signal_while_a_file_is_written_leaves_it_whole(
    name: str, code: int, arguments: str, written: str, tmp_path: Path
) -> None:
    setup = WHILE_WRITING.replace("SIGINT", name)
    if name != "SIGINT":
        setup = f"signal.signal(signal.{name}, signal.SIG_DFL)" + setup
    ran = headscope(*arguments.split(), cwd=tmp_path, setup=setup)
    assert (ran.returncode, ran.stdout) == (code, "put\n")
    assert ran.stderr.endswith("headscope: interrupted\n" if name == "SIGINT" else "")
    assert names(tmp_path) == [written]
    if written.endswith(".html"):
        assert (tmp_path / written).read_text(encoding="utf-8").rstrip().endswith("</html>")


@POSIX
def test_a_signal_that_is_ignored_stays_so_while_a_file_is_written(tmp_path: Path) -> None:
    """As nohup wants it."""
    setup = "signal.signal(signal.SIGHUP, signal.SIG_IGN)" + WHILE_WRITING.replace("SIGINT", "SIGHUP")
    ran = headscope("text", "a", cwd=tmp_path, setup=setup)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert names(tmp_path) == ["headscope-text.html"]


@POSIX
def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    setup = "import errno\ndef fail(*paths): raise OSError(errno.ENOSPC, 'No space left on device')\nos.replace = fail"
    ran = headscope("text", "a", cwd=tmp_path, setup=setup)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "headscope text: --out: headscope-text.html: cannot be written: No space left on device\n"
    assert names(tmp_path) == []


@POSIX
@pytest.mark.parametrize("arguments", [("text", "i love to code"), ("trace", "--json")])
def test_a_closed_pipe_is_no_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -1` does sooner or later: here before the first line
    program = "import runpy; runpy.run_module('headscope', run_name='__main__', alter_sys=True)"
    process = run_program(program, *arguments, cwd=tmp_path, timeout=120, streams=(None, writer, None))
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")
    assert names(tmp_path) == (["headscope-text.html"] if arguments[0] == "text" else []), (
        "the page is there all the same"
    )


OPENED = {
    ">/dev/full": (1, "/dev/full", os.O_WRONLY),
    "1</dev/null": (1, os.devnull, os.O_RDONLY),
    ">large": (1, "large", os.O_WRONLY | os.O_CREAT),
    "2>/dev/full": (2, "/dev/full", os.O_WRONLY),
}


def redirected(streams: str, *arguments: str, cwd: Path, setup: str = "") -> subprocess.CompletedProcess[str]:
    """The command line with streams as a shell redirects them.

    A program that imports torch is forked, but where a stream is closed, which Python notices when it starts.
    """
    if streams in OPENED and "--help" not in arguments and setup != AT_IMPORT:
        number, name, flags = OPENED[streams]
        stream = os.open(cwd / name, flags)
        given = [stream if fd == number else None for fd in range(3)]
        try:
            return run_program(PROGRAM.format(setup=setup), *arguments, cwd=cwd, timeout=120, streams=given)
        finally:
            os.close(stream)
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", PROGRAM.format(setup=setup), *arguments],
        cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip


STDOUT = {
    ">/dev/full": "No space left on device",
    ">&-": "it is closed",
    "1</dev/null": "Bad file descriptor",
    ">large": "File too large",
}


@LINUX
@pytest.mark.parametrize(
    ("streams", "command"),
    [
        *((streams, "--help") for streams in STDOUT),
        *((streams, "text x --no-page") for streams in (">/dev/full", ">&-")),
        *((streams, "trace --json") for streams in ("1</dev/null", ">large")),
    ],
)
def test_a_stdout_that_takes_nothing_is_one_line(streams: str, command: str, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))" if "large" in streams else ""
    ran = redirected(streams, *command.split(), cwd=tmp_path, setup=limit)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"headscope: stdout: cannot be written: {STDOUT[streams]}\n"


PRINTED_BY_CLICK = [[], ["--help"], ["--version"], ["check", "--help"]]


@LINUX
@pytest.mark.parametrize("arguments", PRINTED_BY_CLICK, ids=" ".join)
def test_what_click_prints_in_ascii_fails_as_all_else(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", encoding="ascii") as full, contextlib.redirect_stdout(full):
        assert main(arguments) == 2
    assert capsys.readouterr().err == "headscope: stdout: cannot be written: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="ascii") as closed, contextlib.redirect_stdout(closed):
        assert main(arguments) == 141
    assert capsys.readouterr().err == ""


def test_what_click_prints_in_ascii_is_ascii() -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(shown):
        assert main(["check", "--help"]) == 0
    assert "Intended factor of q.k" in shown.buffer.getvalue().decode("ascii")


class Full(io.StringIO):
    """A stream that takes nothing, and is no file."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@LINUX
def test_a_caller_keeps_its_own_stdout_and_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever becomes of the streams that it puts in their place."""
    files = len(os.listdir("/proc/self/fd"))
    with contextlib.redirect_stderr(Full()):
        assert main(["trace", "--dim", "0"]) == 2
    with contextlib.redirect_stdout(Full()):
        assert main(["--help"]) == 2
    assert capfd.readouterr().err == "headscope: stdout: cannot be written: No space left on device\n"
    with open("/dev/full", "w", encoding="utf-8") as full, contextlib.redirect_stdout(full):
        assert main(["--help"]) == 2
        assert os.path.samestat(os.fstat(full.fileno()), os.stat("/dev/full"))
    with contextlib.redirect_stderr(None):
        assert main(["trace", "--dim", "0"]) == 2
    assert len(os.listdir("/proc/self/fd")) == files
    capfd.readouterr()
    os.write(1, b"one")
    os.write(2, b"two")
    assert capfd.readouterr() == ("one", "two")


@LINUX
def test_what_stderr_does_not_take_is_lost_and_nothing_else(tmp_path: Path) -> None:
    asked = ("text", "code " * 300, "--json")
    wanted = headscope(*asked, cwd=tmp_path)
    assert wanted.stderr.startswith("headscope text: the text has ")
    for streams in ("2>&-", "2>/dev/full"):
        ran = redirected(streams, *asked, cwd=tmp_path)
        assert (ran.returncode, ran.stdout) == (0, wanted.stdout), streams


@LINUX
@pytest.mark.parametrize("streams", ["2>&-", "2>&- <&-", "2>/dev/full", "2</dev/null"])
def test_errors_that_stderr_does_not_take_keep_their_exit_code(streams: str, tmp_path: Path) -> None:
    ran = redirected(streams, "text", "", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    text, setup = ("a", AT_IMPORT) if "<&-" in streams else ("-", AT_INPUT)  # the second imports no torch
    ran = redirected(streams, "text", text, "--no-page", cwd=tmp_path, setup=setup)
    assert (ran.returncode, ran.stdout) == (130, "")


def test_an_encoding_that_lacks_characters_does_not_stop_it(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "headscope.cli", "text", "naïve 漢字 ☃", "--explain"],
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, b"")
    assert "scores" in process.stdout.decode("ascii")
    assert b"\x1b" not in process.stdout


@POSIX
@pytest.mark.parametrize(
    ("environment", "escapes", "colours"),
    [({"TERM": "xterm-256color"}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, False, False)],
    ids=["colours", "NO_COLOR", "dumb"],
)
def test_a_terminal_is_used_as_it_asks(
    environment: dict[str, str], escapes: bool, colours: bool, tmp_path: Path
) -> None:
    import pty

    ours, theirs = pty.openpty()
    usual = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")
    }
    chunks: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux tells the end of a pseudo-terminal
            while chunk := os.read(ours, 1 << 16):
                chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        process = run_program(
            PROGRAM.format(setup=""), "image", "--no-page",
            cwd=tmp_path, env={**inherited, **usual, **environment}, timeout=120, streams=(theirs, theirs, theirs),
        )  # fmt: skip
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    shown = b"".join(chunks)
    assert process.returncode == 0
    assert b"Layer " in shown
    assert (b"\x1b[" in shown) is escapes
    assert (b"[48;5;" in shown or b";48;5;" in shown) is colours, "pictures in colours, or in shades of characters"
    if escapes:
        assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is shown again"
    if not colours:
        assert b"@@" in shown
