"""The targets of the native kernels on this machine, and Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from headscope._attend.backends import native

TARGETS = native.native.targets() if native.native is not None else []


def run(code: str, timeout: int = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=timeout
    )
