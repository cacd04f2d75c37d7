"""The targets of the native kernels on this machine, and Python in a process of its own."""

from __future__ import annotations

import os
import subprocess

from headscope._attend.backends import native
from support.forking import run_program

TARGETS = native.extension.targets() if native.extension is not None else []


def run(code: str, *arguments: str, timeout: int = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return run_program(code, *arguments, env={**os.environ, **environment}, timeout=timeout)
