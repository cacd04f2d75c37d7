"""The monitor for the arguments ``log`` and ``alarms``."""

from __future__ import annotations

from typing import Any

from headscope.watching._history import History
from headscope.watching._monitor import Limits, Monitor, writer


def make_monitor(log: Any, alarms: bool | Limits) -> Monitor | None:
    """Return a monitor that passes values to ``log`` and raises alarms; None: neither is requested.

    Raises:
        TypeError: a log of another kind.
    """
    targets = [] if log is None else list(log) if isinstance(log, (list, tuple)) else [log]
    limits = Limits() if alarms is True else alarms or None
    histories = [target for target in targets if isinstance(target, History)]
    writers = [writer(target) for target in targets if not isinstance(target, History)]
    return Monitor(writers, limits, histories) if targets or limits else None
