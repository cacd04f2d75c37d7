"""What the system says of the CPU."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def processor() -> str:
    """The CPU's name, as "AMD EPYC 9R14"; else what Python knows."""
    return _read_field("model name") or platform.processor() or platform.machine()


def vendor() -> str:
    """The CPU's vendor as the system names it: GenuineIntel, AuthenticAMD, …; else what Python knows."""
    return _read_field("vendor_id") or platform.processor() or platform.machine()


def family() -> str:
    """The CPU's family as the system numbers it, as "26" for a Zen 5; else nothing."""
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
