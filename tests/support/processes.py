"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.forking import run_program

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals, pipes and pseudo-terminals of POSIX")


# a program that runs the command line, after a line of set-up
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent of the tests does with it
from headscope import cli
{setup}
sys.exit(cli.main())
"""


STRIKE = "os.kill(os.getpid(), signal.SIGINT)"


def headscope(
    *arguments: str, cwd: Path, setup: str = "", environment: dict[str, str] | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command line; torch has been imported before, but for a test of its import."""
    environment = {**os.environ, "COLUMNS": "80", **(environment or {})}
    program = PROGRAM.format(setup=setup)
    if not fresh:
        return run_program(program, *arguments, cwd=cwd, env=environment, timeout=120)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, env=environment, timeout=120,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
