"""TrainerMonitor: for the Trainer of transformers, and those of TRL, which derive from it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping
from typing import Any

from headscope._intercept import Choice, Kind
from headscope.integrations._packages import load
from headscope.integrations._steps import QUANTITIES, Settings, Steps, due
from headscope.stats import Observe
from headscope.watching import Limits, Recording

_trainers: Any = load("TrainerMonitor", "'headscope[hf]' accelerate", "transformers.trainer_callback")
_reporters: Any = load("TrainerMonitor", "'headscope[hf]' accelerate", "transformers.integrations.integration_utils")


class TrainerMonitor(_trainers.TrainerCallback):
    """A callback of the ``Trainer`` that logs statistics of every head: ``callbacks=[TrainerMonitor()]``.

    It looks at the first step, and at each whose number is a multiple of ``every``. The values go to the trackers that
    the trainer reports to (TensorBoard, Weights & Biases and so on), under the step's number, as
    ``attn/L03/H05/entropy`` in the trainer's group "train". On all other steps the model runs as without a monitor;
    evaluations are not looked at. The passes of one step (gradient accumulation) are pooled. An alarm is a warning of
    the logger "headscope" and counts in ``attn/alarms``.

    A compiled model (``torch_compile=True``) requires headscope's attention, see ``watch_compiled``. With several
    processes, values are those of all their rows, and the first one logs them; of a compiled model, those of the first
    one's part of the batch.

    Args:
        every: look at one of every ``every`` steps.
        rows: observe an even sample of this many query rows of each call; None = all, or as ``what`` specifies.
        quantities: the values that are logged; None = all.
        what, layers, kinds, alarms, log: as for ``headscope.watch``; ``log`` adds further targets, such as a
            ``History``.
        compiled: whether torch.compile runs the model; by default as the trainer's arguments state.

    Attributes:
        recording: all steps that were looked at, together; None before the training.

    Raises:
        ImportError: transformers is missing.

    Examples:
        >>> from headscope.integrations import TrainerMonitor
        >>> monitor = TrainerMonitor(every=10, rows=64)  # Trainer(..., callbacks=[monitor])
        >>> monitor.recording is None
        True
    """

    def __init__(
        self, every: int = 10, rows: int | None = 64, *, quantities: Collection[str] | None = QUANTITIES,
        what: Observe | None = None, layers: Choice | None = None, kinds: Mapping[str, Kind] | None = None,
        alarms: bool | Limits = True, log: Any = None, compiled: bool | None = None,
    ) -> None:  # fmt: skip
        settings = Settings(every, rows, what, layers, kinds, quantities, alarms, log, compiled)
        self._steps = Steps(settings, self._report)
        self._first = True
        self._trainer: tuple[Any, ...] = ()  # arguments, state and control of the step
        self._handler: Any = None

    @property
    def recording(self) -> Recording | None:
        """All steps that were looked at, together."""
        return self._steps.recording

    def close(self) -> None:
        """End the watch after a training that an exception has ended: the trainer does not tell its callbacks."""
        self._steps.close(failed=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to watch the model."""
        self._handler = _calling_handler()
        self._first = True
        compiled = True if args.torch_compile else None
        self._steps.open(kwargs["model"], compiled=compiled, first=state.is_world_process_zero)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the step, if it is due: the trainer counts it when it ends."""
        number = state.global_step + 1
        if self._steps.is_open and due(number, self._steps.settings.every, first=self._first):
            self._first = False
            self._steps.begin(number)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log its values; after the last step also those that are still on a device: trackers close before us."""
        self._trainer = args, state, control
        self._steps.end()
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._steps.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        self._trainer = args, state, control
        self._steps.close()
        self._trainer, self._handler = (), None

    def _report(self, values: dict[str, float], number: int) -> None:
        """Log values under the number of their step, through the callbacks that report to trackers."""
        args, state, control = self._trainer
        state = copy.copy(state)
        state.global_step = number
        for callback in self._handler.callbacks:
            if isinstance(callback, tuple(_reporters.INTEGRATION_TO_CALLBACK.values())):
                callback.on_log(args, state, control, logs=dict(values), model=self._handler.model)


def _calling_handler() -> Any:
    """Return the handler that is calling a callback: callbacks get no other access to the trackers.

    Raises:
        RuntimeError: there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, _trainers.CallbackHandler):
            return handler
        frame = frame.f_back
    raise RuntimeError(
        "TrainerMonitor: was called by other code; expected the Trainer of transformers: callbacks=[...]"
    )


TrainerMonitor.__module__ = "headscope.integrations"  # its public path
