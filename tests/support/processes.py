"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    *arguments: str, cwd: Path, setup: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup), *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
