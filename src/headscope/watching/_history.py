"""The history of a training: a log of ``watch`` that collects the values of every head, step by step."""

from __future__ import annotations

import html
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope._intercept import WatchError, WatchWarning
from headscope._support.arguments import check_type, number, whole
from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope._support.user_line import user_stacklevel
from headscope.report import viewer
from headscope.stats import StoredHistory, check_history_target, is_history, load_history, save_history
from headscope.watching._about import About
from headscope.watching._history_table import HistoryTable, Name
from headscope.watching._monitor import Alarm, Limits

__all__ = ["History"]

MOST_STEPS = 2000
SECONDS = 60.0
_SHARE = 20  # writing takes at most one part of so many of the time


class History:
    """The history of a training: every head, quantity and step, in one file, for ``watch(log=History(path))``.

    The values are those that a function in ``log`` receives, in float32. Several watches of one run continue one
    history: the steps of the second watch follow those of the first one.

    **When it is written.** After the first step, when a watch ends, also by an exception, and at most every ``seconds``
    in between, or less often so that writing takes at most 5 % of the time. A killed process loses what came after the
    last write. A file is written to a temporary file, then renamed.

    **How large it becomes.** Values take 4 bytes each, at most ``most_steps`` steps and 256 MiB. A history that would
    exceed this removes every other step, and from then on stores every second one (every fourth, …). The first and
    the last step are always stored. Alarms are never removed. While a file is written, memory holds it three times.

    Attributes:
        path: the file.
        limits: the limits of the alarms; None if no alarms were requested.

    Examples:
        >>> import torch
        >>> from headscope import History, MultiHeadAttention, watch
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, log=History("run.safetensors")):
        ...     outputs = [model(torch.randn(1, 5, 8)) for _ in range(3)]
        >>> history = History.load("run.safetensors")
        >>> history.steps, history["entropy"].shape  # steps, layers, heads
        ((0, 1, 2), torch.Size([3, 1, 2]))
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume: bool = False,
        force: bool = False,
        seconds: float = SECONDS,
        most_steps: int = MOST_STEPS,
    ) -> None:
        """Begin a history, or continue that of an earlier run.

        Args:
            path: the file, as "run.safetensors".
            resume: append to the history in this file, after its last step; if there is no file, begin one.
            force: overwrite any file.
            seconds: the least time between two writes, from 0.
            most_steps: the largest number of stored steps, from 2.

        Raises:
            FileExistsError: the file exists, without ``resume`` and ``force``.
            FileNotFoundError: its folder does not exist.
            TypeError, ValueError: an argument that does not fit; ``resume``, and the file is not a history or is
                damaged.
        """
        for name, flag in (("resume", resume), ("force", force)):
            check_type(name, flag, bool, "True or False")
        if resume and force:
            raise ValueError("force: got True with resume=True, expected one of the two")
        seconds = number("seconds", seconds)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds: got {seconds}, expected a finite number from 0")
        check_type("path", path, (str, Path), "the name of a file")
        self.path = Path(path)
        check_history_target(self.path, force=force or resume)
        stored = load_history(self.path) if resume and self.path.exists() else None
        self._begin(stored, whole("most_steps", most_steps, 2))
        self._seconds = seconds
        self._loaded = False

    def _begin(self, stored: StoredHistory | None, most_steps: int = MOST_STEPS) -> None:
        self._table = HistoryTable(most_steps, stored)
        self._alarms: list[Alarm] = []
        self._starts: list[int] = []
        self._next_step = 0  # the number of forward passes of the watches before
        self._about, self.limits = About(), None
        self._read_about: Callable[[], About] | None = None  # while a watch is open
        self._seconds, self._due, self._loaded = SECONDS, 0.0, True
        self._lock = threading.RLock()
        if stored is None:
            return
        try:
            self._alarms = [Alarm(*alarm) for alarm in stored.alarms]
            self._about = About(**stored.about)
            self.limits = None if stored.limits is None else Limits(**stored.limits)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: is damaged: {error}") from error
        self._starts = list(stored.starts)
        self._next_step = self.about.ran

    # ------------------------------------------------------------ reading

    @staticmethod
    def load(path: str | Path) -> History:
        """Read a file, to look at; ``History(path, resume=True)`` continues it.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: it cannot be opened.
            ValueError: it is not a history, has a newer format, or is damaged.
        """
        history = History.__new__(History)
        history.path = Path(path)
        history._begin(load_history(history.path))
        return history

    @staticmethod
    def is_history(path: str | Path) -> bool:
        """Return whether a file holds a history; False also where there is no file."""
        return is_history(Path(path))

    @property
    def about(self) -> About:
        """The origin and options; the numbers of forward passes are those of all watches."""
        if self._read_about is None:
            return self._about
        about, before = self._read_about(), self._about
        kinds = {**before.kinds, **about.kinds}
        ran, forwards = self._next_step + about.ran, before.forwards + about.forwards
        return replace(before, options=about.options, versions=about.versions, kinds=kinds, forwards=forwards, ran=ran)

    @property
    def steps(self) -> tuple[int, ...]:
        """The stored steps: numbers of forward passes, counted from 0 through all watches."""
        with self._lock:
            return tuple(self._table.steps)

    @property
    def observed(self) -> int:
        """The number of observed steps; ``steps`` has fewer if the history was thinned."""
        return self._table.observed

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each watch."""
        return tuple(self._starts)

    @property
    def names(self) -> tuple[str, ...]:
        """The quantities, as in the names of a tracker: entropy, max_logit_max, …."""
        return self._table.names

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers, in the order in which they were first observed: L00, L01, … of a tracker's names."""
        return tuple(self._table.heads)

    @property
    def heads(self) -> Mapping[str, int]:
        """Layer -> its number of heads."""
        return self._table.heads

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """All alarms, with their steps in this history."""
        with self._lock:
            return tuple(self._alarms)

    def __getitem__(self, at: str | tuple[int | str, int, str]) -> Tensor:
        """Return a quantity of all heads, float32 [steps, layers, heads], or of one: ``history[layer, head, name]``.

        It is NaN where a head does not have the quantity in a step, or a layer has fewer heads.

        Raises:
            KeyError: the quantity, layer or head does not exist.
        """
        with self._lock:
            if isinstance(at, tuple):
                layer, head, name = at
                layer = self._layer(layer)
                if not 0 <= head < self.heads[layer]:
                    raise KeyError(f"head: got {head}, expected 0 to {self.heads[layer] - 1}")
                return self._of_layer(layer, self._known(name))[:, head].clone()
            name = self._known(at)
            most = max(self.heads.values())
            whole_table = self._table.values.new_full((len(self._table.steps), len(self.heads), most), math.nan)
            for n, (layer, heads) in enumerate(self.heads.items()):
                whole_table[:, n, :heads] = self._of_layer(layer, name)
            return whole_table

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise KeyError(f"quantity: got {name!r}, expected one of {', '.join(self.names) or 'none so far'}")
        return name

    def _layer(self, layer: int | str) -> str:
        layers = self.layers
        if isinstance(layer, int) and 0 <= layer < len(layers):
            return layers[layer]
        if layer not in layers:
            raise KeyError(f"layer: got {layer!r}, expected a number below {len(layers)} or one of {', '.join(layers)}")
        return str(layer)

    def _of_layer(self, layer: str, name: str) -> Tensor:
        column = self._table.column(layer, name)
        if column is not None:
            return column
        return self._table.values.new_full((len(self._table.steps), self.heads[layer]), math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON: undefined and infinite values are None."""
        with self._lock:
            layers = {
                layer: {"heads": heads, "values": {name: self._of_layer(layer, name).tolist() for name in self.names}}
                for layer, heads in self.heads.items()
            }
            content = {
                "about": self._stored_about(),
                "limits": None if self.limits is None else asdict(self.limits),
                "steps": [*self.steps],
                "starts": [*self.starts],
                "alarms": [asdict(alarm) for alarm in self._alarms],
                "layers": layers,
            }
        return plain(content)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one line for each step, layer and head, and a column for each quantity.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
        except ImportError as error:
            raise ImportError("to_pandas: pandas is not installed; pip install pandas, or use to_dict()") from error
        with self._lock:
            places = [(layer, head) for layer, heads in self.heads.items() for head in range(heads)]
            count = len(self._table.steps)
            columns: dict[str, Any] = {
                "step": [step for step in self._table.steps for _ in places],
                "layer": [layer for layer, _ in places] * count,
                "head": [head for _, head in places] * count,
            }
            for name in self.names:
                parts = [self._of_layer(layer, name) for layer in self.heads]
                columns[name] = torch.cat(parts, 1).reshape(-1).numpy()
        return pd.DataFrame(columns)

    def save_html(self, path: str | Path, *, title: str = "", force: bool = False) -> Path:
        """Write one self-contained HTML page: every head over all steps; see docs/guides/watch_training.md.

        Raises:
            SaveError: the file exists and is not a page of headscope, or it cannot be written.
            ValueError: there is no step yet.
        """
        return viewer.save_history(self, path, title=title, force=force)

    def __repr__(self) -> str:
        if not self._table.steps:
            return visible(f"History({self.path}: no step yet)")
        heads = sum(self.heads.values())
        counts = [(len(self._table.steps), "step"), (len(self.heads), "layer"), (heads, "head")]
        counts.append((len(self._alarms), "alarm"))
        listed = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
        return visible(f"History({self.path}: {self.about.model}, {listed})")

    def _repr_html_(self) -> str:
        if not self._table.steps:
            return f"<p>{html.escape(repr(self))}</p>"
        return viewer.framed(viewer.render_history(self))

    # ------------------------------------------------------------ writing

    def save(self) -> Path:
        """Write the file now; a watch does so by itself.

        Raises:
            OSError: it cannot be written.
            ValueError: the history was loaded to look at.
        """
        if self._loaded:
            raise ValueError("save: the history was loaded to look at; History(path, resume=True) continues it")
        with self._lock:
            began = time.monotonic()
            alarms = [
                (each.step, each.layer, each.head, each.what, each.value, each.limit, each.reference)
                for each in self._alarms
            ]
            table = self._table
            stored = StoredHistory(
                table.columns, tuple(table.steps), table.values, tuple(alarms), table.observed, table.stride,
                tuple(self._starts), self._stored_about(), None if self.limits is None else asdict(self.limits),
            )  # fmt: skip
            try:
                save_history(self.path, stored)
            finally:
                now = time.monotonic()
                self._due = now + max(self._seconds, _SHARE * (now - began))
        return self.path

    def _stored_about(self) -> dict[str, Any]:
        about = self.about
        return {name: getattr(about, name) for name in ("model", "options", "versions", "kinds", "forwards", "ran")}

    def _open(self, read_about: Callable[[], About], limits: Limits | None) -> None:
        """Begin a watch; ``read_about`` returns the origin and options of its recording.

        Raises:
            WatchError: the history is of another model, in another watch, or was loaded to look at.
        """
        model = read_about().model
        with self._lock:
            if self._loaded:
                raise WatchError(
                    f"log: the history {self.path} was loaded to look at; History(path, resume=True) continues it"
                )
            if self._read_about is not None:
                raise WatchError(f"log: the history {self.path} is in use by another watch; give each watch its own")
            if self._table.observed and self._about.model != model:
                raise WatchError(
                    f"log: the history {self.path} is of the model {self._about.model}, got {model}; write another file"
                )
            self._about = replace(self._about, model=model)
            self._read_about = read_about
            self.limits = limits or self.limits

    def _add_step(self, step: int, names: Sequence[Name], values: Tensor) -> None:
        """Add the values of a step of the open watch."""
        with self._lock:
            start = self._next_step
            try:
                self._table.add(start + step, names, values)
            except ValueError as error:
                raise WatchError(f"log: {self.path}: {error}; write another file for another model") from error
            if not self._starts or self._starts[-1] < start:
                self._starts.append(start)

    def _add_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Add the alarms of the last step, and write the file if it is time."""
        with self._lock:
            self._alarms += [replace(alarm, step=self._next_step + alarm.step) for alarm in alarms]
            if time.monotonic() < self._due:
                return
            if self._table.observed == 1:  # a file that cannot be written is an error at once
                self.save()
            else:
                self._try_to_save()

    def _try_to_save(self) -> None:
        """Write the file; if that fails, warn, because the training is worth more."""
        try:
            self.save()
        except OSError as error:
            text = f"log: the history could not be written: {error}"
            warnings.warn(text, WatchWarning, stacklevel=user_stacklevel())

    def _close(self, *, failed: bool) -> None:
        """End a watch, and write the file.

        Args:
            failed: the watch ends by an exception, which an error of the file would replace.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            if self._read_about is None:
                return
            self._about = self.about
            self._next_step, self._read_about = self._about.ran, None
            if not self._table.observed:
                return
            if failed:
                self._try_to_save()
            else:
                self.save()


History.__module__ = "headscope.watching"  # its public path
