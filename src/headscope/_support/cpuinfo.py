"""The system's description of the CPU."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def processor() -> str:
    """Return the CPU's name, such as "AMD EPYC 9R14"; else Python's description."""
    return _read_field("model name") or platform.processor() or platform.machine()


def vendor() -> str:
    """Return the CPU's vendor as the system names it: GenuineIntel, AuthenticAMD, …; else Python's description."""
    return _read_field("vendor_id") or platform.processor() or platform.machine()


def family() -> str:
    """Return the CPU's family as the system numbers it, such as "26" for a Zen 5; else an empty string."""
    return _read_field("cpu family") or ""


@cache
def _read_field(name: str) -> str | None:
    described = Path("/proc/cpuinfo")  # on Linux
    if described.is_file():
        with described.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(name):
                    return line.partition(":")[2].strip()
    return None
