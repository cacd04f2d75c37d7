"""LightningMonitor: a callback of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headscope._intercept import Choice, Kind
from headscope.integrations._packages import load
from headscope.integrations._steps import QUANTITIES, Settings, Steps
from headscope.stats import Observe
from headscope.watching import Limits, Recording

_lightning: Any = load("LightningMonitor", "lightning", "lightning.pytorch", "pytorch_lightning")


class LightningMonitor(_lightning.Callback):
    """A callback of Lightning's ``Trainer`` that logs statistics of every head: ``callbacks=[LightningMonitor()]``.

    It looks at the first batch of a step, once in every ``every`` steps of ``trainer.global_step``. The values go to
    the trainer's loggers, under that number, as ``attn/L03/H05/entropy``. Otherwise the model runs as without a
    monitor. An alarm is a warning of the logger "headscope" and counts in ``attn/alarms``.

    A compiled module requires headscope's attention, see ``watch_compiled``. With several processes, values are those
    of all their rows, and the first one logs them; of a compiled module, those of the first one's part of the batch.

    Args:
        every, rows, quantities, what, layers, kinds, alarms, log, compiled: as for ``TrainerMonitor``.

    Attributes:
        recording: all steps that were looked at, together; None before the training.

    Raises:
        ImportError: lightning is missing.

    Examples:
        >>> from headscope.integrations import LightningMonitor
        >>> monitor = LightningMonitor(every=50)  # lightning.Trainer(callbacks=[monitor])
        >>> monitor.recording is None
        True
    """

    def __init__(
        self, every: int = 10, rows: int | None = 64, *, quantities: Collection[str] | None = QUANTITIES,
        what: Observe | None = None, layers: Choice | None = None, kinds: Mapping[str, Kind] | None = None,
        alarms: bool | Limits = True, log: Any = None, compiled: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        settings = Settings(every, rows, what, layers, kinds, quantities, alarms, log, compiled)
        self._steps = Steps(settings, self._report)
        self._due = 0
        self._loggers: list[Any] = []

    @property
    def recording(self) -> Recording | None:
        """All steps that were looked at, together."""
        return self._steps.recording

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to watch the module."""
        self._due = trainer.global_step
        self._loggers = list(trainer.loggers)
        compiled = True if getattr(pl_module, "_compiler_ctx", None) is not None else None
        self._steps.open(pl_module, compiled=compiled, first=trainer.is_global_zero)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Look at the batch, if a step is due."""
        number = trainer.global_step
        if self._steps.is_open and number >= self._due:
            every = self._steps.settings.every
            self._due = (number // every + 1) * every
            self._steps.begin(number)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log its values."""
        self._steps.end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop."""
        self._steps.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop."""
        self._steps.close(failed=True)

    def _report(self, values: dict[str, float], number: int) -> None:
        for logger in self._loggers:
            logger.log_metrics(values, step=number)


LightningMonitor.__module__ = "headscope.integrations"  # its public path
