"""Chosen steps of a training: a watch that is open only within them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

from torch import nn

from headscope._intercept import Choice, Kind, WatchError, close_watch, find_compiled, list_modules, open_watch
from headscope._support.ranks import all_processes
from headscope.stats import Observe
from headscope.watching._compiled import CompiledWatch, watch_compiled
from headscope.watching._monitor import Limits, Monitor
from headscope.watching._recording import Recording
from headscope.watching._watch import Watch, watch


class StepWatch:
    """A watch of chosen steps: ``with watch_steps(...) as watched: with watched.step(n): ...``.

    Outside of ``step`` the model runs as without a watch. The forward passes within ``step`` are pooled.

    Attributes:
        recording: the recording of all steps so far.
        monitor: passes on the values, and raises alarms; or None.
    """

    def __init__(self, watched: Watch) -> None:
        self.recording: Recording = watched.recording
        self.monitor: Monitor | None = watched.monitor
        self._watch = watched
        self._stepped = self._active = False

    def __enter__(self) -> StepWatch:
        self._watch.__enter__()
        close_watch(self._watch, self._watch.modules)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error if error is not None or self._stepped else WatchError("watch: no step was recorded")
        self._watch.__exit__(kind, failed, trace)  # without a step there is nothing to check

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """Record the forward passes within the block as one step with this number.

        Raises:
            WatchError: a step is within another one; a layer cannot be observed.
        """
        if self._active:
            raise WatchError("watch: step() was called within another step")
        self._active = True
        open_watch(self._watch, self._watch.modules)
        try:
            with nullcontext() if self.monitor is None else self.monitor.pooling(number):
                yield
            self._stepped = True
        finally:
            close_watch(self._watch, self._watch.modules)
            self._active = False


def watch_steps(
    model: nn.Module,
    *,
    compiled: bool | None,
    what: Observe | None,
    rows: int | None,
    layers: Choice | None,
    kinds: Mapping[str, Kind] | None,
    log: Any,
    alarms: bool | Limits,
    first: bool = True,
) -> StepWatch | CompiledWatch | None:
    """Return a watch of chosen steps; None where this process does not watch.

    All processes of torch.distributed watch together, and the first one writes. Of a compiled model the first process
    watches its own rows.

    Args:
        model, what, rows, layers, kinds, log, alarms: as for ``watch``.
        compiled: whether torch.compile runs the model, see ``watch_compiled``; None: if it or a part of it is marked
            so.
        first: whether this is the first process of the training.
    """
    options: dict[str, Any] = {"rows": rows, "layers": layers, "kinds": kinds, "log": log, "alarms": alarms}
    if compiled is None:
        compiled = bool(find_compiled(list_modules(model)))
    if compiled:
        return watch_compiled(model, what=what, **options) if first else None
    group = all_processes()
    if group is None and not first:
        return None
    return StepWatch(watch(model, what=Observe(received=False) if what is None else what, group=group, **options))
