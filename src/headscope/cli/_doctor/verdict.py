"""The verdict that ``headscope doctor`` begins with: whether the native kernels run, and the remedy if not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headscope._attend.backends import native
from headscope.cli._doctor.machine import Verdict

__all__ = ["summarise"]

REINSTALL = "install headscope again: pip install --force-reinstall --no-deps . (in its source folder)"


def summarise(device: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    """Return the verdict on some calls, and the remedy if there is one.

    Args:
        device: the device type that was judged.
        verdicts: call -> dtype -> verdict.
    """
    rows = [verdict for row in verdicts.values() for verdict in row.values()]
    backends = Counter(verdict.selected for verdict in rows)
    counts = ", ".join(f"{name} {count}" for name, count in backends.items())
    if device != "cpu":
        return [f"On {device} the native kernels do not run, because they are for the CPU. Calls run on: {counts}."]
    if native.extension is None:
        return [f"No native kernels: {_problem()}. Calls run on torch instead: {counts}.", f"To fix: {_remedy()}"]
    subject = "This call runs" if len(verdicts) == 1 else "All calls run"
    target = native.extension.target()
    slow = next((verdict for verdict in rows if verdict.observer), None)
    if set(backends) == {native.name} and slow is None:
        return [f"{subject} natively ({target}). Nothing to do."]
    ran = f"{backends[native.name]} of {len(rows)} calls run natively ({target})"
    if set(backends) == {native.name}:
        return [f"{subject} natively ({target}); observing uses the portable implementation."]
    others = ", ".join(f"{name} {count}" for name, count in backends.items() if name != native.name)
    return [f"{ran}; the others: {others}. The reasons are below."]


def _problem() -> str:
    if native.unloadable:
        return f"they are built, but cannot be loaded ({native.unloadable})"
    return "no C++ compiler was available when headscope was built"


def _remedy() -> str:
    return REINSTALL if native.unloadable else f"install a C++ compiler, then {REINSTALL}"
