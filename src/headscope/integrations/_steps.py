"""The part that the monitors of all trainers share: which steps are looked at, and what is passed on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from headscope._intercept import Choice, Kind
from headscope._support.arguments import check_type, whole
from headscope.stats import Observe
from headscope.watching import Alarm, CompiledWatch, Limits, Recording, StepWatch, watch_steps

QUANTITIES = ("entropy", "normalized_entropy", "max_logit_max", "first")
"""Those of the alarms, and the entropy: four curves for each head."""

_logger = logging.getLogger("headscope")


@dataclass(frozen=True)
class Settings:
    """The arguments of a monitor.

    Attributes:
        every: look at one of every ``every`` steps, from 1.
        rows, what, layers, kinds, alarms: as for ``watch``.
        quantities: the values that reach the logger; None = all.
        log: further targets, as for ``watch``.
        compiled: whether torch.compile runs the model; None = find out.
    """

    every: int = 10
    rows: int | None = 64
    what: Observe | None = None
    layers: Choice | None = None
    kinds: Mapping[str, Kind] | None = None
    quantities: Collection[str] | None = QUANTITIES
    alarms: bool | Limits = True
    log: Any = None
    compiled: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", whole("every", self.every, 1))
        if isinstance(self.quantities, str):
            raise TypeError(f"quantities: got {self.quantities!r}, expected several names or None")
        if self.compiled is not None:
            check_type("compiled", self.compiled, bool, "True, False or None")
        if self.rows is not None and self.what is not None and self.what.rows is not None:
            raise ValueError("rows: got a number and what.rows; expected one of the two: pass rows=None")


class Steps:
    """The steps of one training.

    Args:
        settings: see there.
        write: receives the values of a step under their flat names, and its number.

    Attributes:
        recording: of the training, all steps that were looked at together; None before it.
    """

    def __init__(self, settings: Settings, write: Callable[[dict[str, float], int], None]) -> None:
        self.settings = settings
        self.recording: Recording | None = None
        self._write = write
        self._watch: StepWatch | CompiledWatch | None = None
        self._step = ExitStack()
        self._alarms = 0
        self._checked = False  # the names of the quantities

    @property
    def is_open(self) -> bool:
        """Whether a training is running."""
        return self._watch is not None

    def open(self, model: nn.Module, *, compiled: bool | None = None, first: bool = True) -> None:
        """Start a training of a model; every process calls it.

        Args:
            model: the model.
            compiled: what its trainer states, if the caller did not.
            first: whether this is the first process of the training.
        """
        self.close(failed=True)  # of a training that an exception has ended
        settings = self.settings
        more = settings.log if isinstance(settings.log, (list, tuple)) else [settings.log]
        watched = watch_steps(
            model,
            compiled=compiled if settings.compiled is None else settings.compiled,
            what=settings.what,
            rows=settings.rows,
            layers=settings.layers,
            kinds=settings.kinds,
            log=[self._pass_on, *(each for each in more if each is not None)],
            alarms=settings.alarms,
            first=first,
        )
        if watched is None:
            return
        watched.__enter__()
        self._watch, self.recording = watched, watched.recording
        if watched.monitor is not None:
            watched.monitor.announce = self._announce

    def begin(self, number: int) -> None:
        """Start to look at a step."""
        if self._watch is not None:
            self._step.enter_context(self._watch.step(number))

    def end(self) -> None:
        """End the step, if one is looked at, and pass on its values."""
        self._step.close()

    def finish(self) -> None:
        """Wait for values that are still on a device, and pass them on."""
        if self._watch is not None and self._watch.monitor is not None:
            self._watch.monitor.finish()

    def close(self, *, failed: bool = False) -> None:
        """End the training; ``failed``: by an exception."""
        watched, self._watch = self._watch, None
        if watched is None:
            return
        error = RuntimeError("the training has ended by an exception") if failed else None
        try:
            if failed:
                self._step.__exit__(RuntimeError, error, None)
            else:
                self._step.close()
        except RuntimeError as raised:
            if raised is not error:
                raise
        finally:
            watched.__exit__(None if error is None else RuntimeError, error, None)

    def _announce(self, alarm: Alarm) -> None:
        self._alarms += 1
        _logger.warning("%s", alarm)

    def _pass_on(self, values: dict[str, float], number: int) -> None:
        """Pass on the selected values, and the number of alarms that this step has raised."""
        wanted = self.settings.quantities
        if wanted is not None and not self._checked:
            self._checked = True
            known = sorted({name.rpartition("/")[2] for name in values})
            if unknown := [name for name in wanted if name not in known]:
                _logger.warning("quantities: no value is named %s; there are %s", ", ".join(unknown), ", ".join(known))
        chosen = {name: x for name, x in values.items() if wanted is None or name.rpartition("/")[2] in wanted}
        if self.settings.alarms is not False:
            chosen["attn/alarms"] = float(self._alarms)
        self._alarms = 0
        self._write(chosen, number)


def due(number: int, every: int, *, first: bool) -> bool:
    """Return whether to look at a step, counted from 1: the first of a training, and each multiple of ``every``."""
    return first or number % every == 0
