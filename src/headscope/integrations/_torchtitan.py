"""TorchtitanMonitor: for the metrics processor of torchtitan's trainer. This module does not import torchtitan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headscope._intercept import Choice, Kind
from headscope.integrations._steps import QUANTITIES, Settings, Steps
from headscope.stats import Observe
from headscope.watching import Limits, Recording


class TorchtitanMonitor:
    """Adds statistics of every head to what torchtitan logs: ``TorchtitanMonitor(trainer.metrics_processor)``.

    It looks at the steps that the ``MetricsProcessor`` logs (``log_freq``), and adds the values to its metrics, as
    ``attn/L03/H05/entropy``. On all other steps the model runs as without a monitor. An alarm is a warning of the
    logger "headscope" and counts in ``attn/alarms``.

    A compiled model requires headscope's attention, see ``watch_compiled``. With pipeline parallelism, each process
    looks at the first of its parts.

    Args:
        processor: the ``MetricsProcessor`` of a trainer that has been built.
        rows, quantities, what, layers, kinds, alarms, log, compiled: as for ``TrainerMonitor``.

    Attributes:
        recording: all steps that were looked at, together; None before the training.

    Raises:
        TypeError: the processor has no ``should_log``, ``log`` and ``close``.

    Examples:
        >>> from types import SimpleNamespace
        >>> from headscope.integrations import TorchtitanMonitor
        >>> processor = SimpleNamespace(should_log=bool, log=print, close=print)  # trainer.metrics_processor
        >>> monitor = TorchtitanMonitor(processor, rows=64)
        >>> monitor.recording is None
        True
    """

    def __init__(
        self, processor: Any, rows: int | None = 64, *, quantities: Collection[str] | None = QUANTITIES,
        what: Observe | None = None, layers: Choice | None = None, kinds: Mapping[str, Kind] | None = None,
        alarms: bool | Limits = True, log: Any = None, compiled: bool | None = None,
    ) -> None:  # fmt: skip
        for name in ("should_log", "log", "close"):
            if not callable(getattr(processor, name, None)):
                raise TypeError(
                    f"processor: got {type(processor).__name__} without {name}(), expected the MetricsProcessor of "
                    "torchtitan: trainer.metrics_processor"
                )
        self._steps = Steps(Settings(1, rows, what, layers, kinds, quantities, alarms, log, compiled), self._keep)
        self._processor = processor
        self._values: dict[str, float] = {}
        self._own = processor.should_log, processor.log, processor.close
        self._number: int | None = None
        processor.should_log, processor.log, processor.close = self._should_log, self._log, self._close

    @property
    def recording(self) -> Recording | None:
        """All steps that were looked at, together."""
        return self._steps.recording

    def _should_log(self, step: int) -> bool:
        """Begin to look at a step that will be logged."""
        logs = bool(self._own[0](step))
        if logs and self._number != step:
            if not self._steps.is_open:
                self._steps.open(self._processor.model_parts[0])
            self._steps.end()
            self._steps.begin(step)
            self._number = step
        return logs

    def _log(self, step: int, *args: Any, extra_metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """End the step, and log its values with those of the trainer."""
        self._steps.end()
        self._steps.finish()
        values, self._values = self._values, {}
        self._own[1](step, *args, extra_metrics={**(extra_metrics or {}), **values}, **kwargs)

    def _close(self) -> None:
        self._steps.close()
        self._own[2]()

    def _keep(self, values: dict[str, float], number: int) -> None:
        self._values.update(values)


TorchtitanMonitor.__module__ = "headscope.integrations"  # its public path
