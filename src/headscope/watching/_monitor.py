"""Monitoring of training: values of each step for trackers, and alarms, without waiting for the device.

The values of a step are copied to the host in parallel with other work, and passed on when they have arrived: on a GPU
in a later step, or when the watch ends; on the CPU at once. Those of several ranks are passed on in the next watched
step; see ``_across_ranks.py``.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headscope._support.text import visible
from headscope._support.user_line import user_stacklevel
from headscope.stats._layer import LayerStats
from headscope.watching._across_ranks import AcrossRanks, Reduced
from headscope.watching._values import to_host, values_of

Write = Callable[[dict[str, float], int], None]


class AttentionWarning(UserWarning):
    """An alarm of ``watch(alarms=...)``.

    Examples:
        >>> import warnings
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> model, x = MultiHeadAttention(8, 1), torch.randn(1, 8, 8)
        >>> with warnings.catch_warnings(record=True, action="always") as caught, watch(model, alarms=True):
        ...     outputs = model(x), model(100 * x)
        >>> print(caught[0].category.__name__, str(caught[0].message)[:6])
        AttentionWarning step 1
    """


@dataclass(frozen=True)
class Limits:
    """The limits of alarms; None = never. docs/guides/watch.md lists the defaults and their sources.

    Attributes:
        entropy: entropy collapse: a head's mean ``normalized_entropy`` is below this, in (0, 1), and less than half of
            its maximum so far.
        max_logit: growing logits: the largest ``max_logit`` of a head's rows is above this, and more than twice its
            first value.
        sink: a rising sink: a head's mean ``first`` is above this, in (0, 1), and more than 0.1 above its minimum so
            far.

    Examples:
        >>> from headscope.watching import Limits
        >>> Limits(max_logit=50.0, sink=None)
        Limits(entropy=0.1, max_logit=50.0, sink=None)
    """

    entropy: float | None = 0.1
    max_logit: float | None = 100.0
    sink: float | None = 0.3

    def __post_init__(self) -> None:
        for name, most in (("entropy", 1.0), ("max_logit", math.inf), ("sink", 1.0)):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < most:
                raise ValueError(
                    f"{name}: got {limit}, expected a number above 0{'' if most == math.inf else ' and below 1'}"
                )


@dataclass(frozen=True)
class Alarm:
    """A value beyond its limit.

    Attributes:
        step: the forward pass, counted from 0.
        layer, head: where.
        what: "entropy collapse", "growing logits" or "rising sink".
        value: the quantity in this step.
        limit: the limit that the value exceeded, or fell below.
        reference: the earlier value that it is compared with.

    Examples:
        >>> import warnings
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> model, x = MultiHeadAttention(8, 1), torch.randn(1, 8, 8)
        >>> with warnings.catch_warnings(action="ignore"), watch(model, alarms=True) as recording:
        ...     outputs = model(x), model(100 * x)  # the logits grow by a factor of 10,000
        >>> recording.alarms[0].step, "growing logits" in [alarm.what for alarm in recording.alarms]
        (1, True)
    """

    step: int
    layer: str
    head: int
    what: str
    value: float
    limit: float
    reference: float

    def __str__(self) -> str:
        return visible(
            f"step {self.step}, layer {self.layer}, head {self.head}: {self.what}: {self.value:.4g} "
            f"(limit {self.limit:g}, before {self.reference:.4g})"
        )


def writer(target: Any) -> Write:
    """Return a writer for a tracker: a TensorBoard ``SummaryWriter``, a Weights & Biases run, or a function.

    Raises:
        TypeError: it is none of these.
    """
    if callable(getattr(target, "add_scalar", None)):

        def to_tensorboard(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                target.add_scalar(name, value, step)

        return to_tensorboard
    if callable(getattr(target, "log", None)):

        def to_weights_and_biases(values: dict[str, float], step: int) -> None:
            # into the row that the training loop logs next: a separate step would have to increase together with its
            # own
            target.log({**values, "attn/step": step}, commit=False)

        return to_weights_and_biases
    if callable(target):
        function: Any = target
        return function
    raise TypeError(f"log: got {type(target).__name__}, expected something with add_scalar or log, or a function")


@dataclass(frozen=True, eq=False)
class _Step:
    """Values on their way to the host: their names, and the event of their arrival."""

    number: int
    names: list[tuple[str, int, str]]  # layer, number of the layer, quantity; its heads follow one another
    heads: list[int]
    values: Tensor
    arrived: Any


class Collector(Protocol):
    """What receives the values of each step as a tensor, before its alarms are raised: a ``History``."""

    def _open(self, read_about: Callable[[], Any], limits: Limits | None) -> None:
        """Begin a watch; ``read_about`` returns the origin and options of its recording."""
        ...

    def _close(self, *, failed: bool) -> None:
        """End the watch."""
        ...

    def _add_step(self, step: int, names: Sequence[tuple[str, str, int]], values: Tensor) -> None:
        """Add a step: layer, quantity and number of heads of each column, and the values of all columns."""
        ...

    def _add_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Add the alarms of the last step."""
        ...


class Monitor:
    """A monitor that passes the values of each step to writers, and checks the limits of alarms.

    Attributes:
        alarms: those that were raised so far.
        announce: receives each alarm; by default it gives an ``AttentionWarning``.
        across: the ranks whose rows are put together; None: those of this process alone.
    """

    across: AcrossRanks | None = None

    def __init__(self, writers: Iterable[Write], limits: Limits | None, collectors: Iterable[Collector] = ()) -> None:
        self.writers = tuple(writers)
        self.collectors = tuple(collectors)
        self.limits = limits
        self.alarms: list[Alarm] = []
        self.announce: Callable[[Alarm], None] = _warn
        self._pooled: dict[str, LayerStats] | None = None
        self._waiting: deque[_Step] = deque()
        self._numbers: dict[str, int] = {}  # of layers; a name once written must stay that layer's
        self._writing = False
        self._references: dict[tuple[str, int, str], float] = {}
        self._raised: set[tuple[str, int, str]] = set()

    def join(self, names: Sequence[int], is_training: Callable[[], bool]) -> None:
        """Put the rows of these ranks together; only the first one of them writes, and raises alarms.

        Args:
            names: the ranks among all processes.
            is_training: returns the mode of the model.
        """
        self.across = AcrossRanks(names, is_training)
        if self.across.ranks.rank:
            self.writers, self.collectors, self.limits = (), (), None

    def open(self, read_about: Callable[[], Any]) -> None:
        """Begin a watch; ``read_about`` returns the origin and options of its recording."""
        try:
            self._open_collectors(read_about)
        except Exception as error:
            if self.across is not None:  # the other ranks would wait for this one
                self.across.open(read_about, error)
            raise
        try:
            if self.across is not None:
                self.across.open(read_about)
        except BaseException:
            for collector in self.collectors:
                collector._close(failed=True)
            raise

    def _open_collectors(self, read_about: Callable[[], Any]) -> None:
        for at, collector in enumerate(self.collectors):
            try:
                collector._open(read_about, self.limits)
            except BaseException:
                for opened in self.collectors[:at]:
                    opened._close(failed=True)
                raise

    def close(self, *, failed: bool) -> None:
        """Wait for the remaining values, pass them on, and end the watch; ``failed``: by an exception."""
        try:
            if not failed or self.across is None:  # the other ranks may not come to the same step
                self.finish()
        except BaseException:
            failed = True
            raise
        finally:
            for collector in self.collectors:
                collector._close(failed=failed)
            if self.across is not None:
                self.across.close()

    def step(self, number: int, parts: Mapping[str, LayerStats]) -> None:
        """Start to fetch the values of a step, and pass on those that have arrived; do nothing while a writer runs.

        Args:
            number: the forward pass, counted from 0.
            parts: layer -> its statistics in this step only, in the order of the model.
        """
        if self._writing:  # the writer runs the model itself: passing that on would never end
            return
        if self._pooled is not None:
            for layer, part in parts.items():
                self._pooled[layer] = self._pooled[layer].merge(part) if layer in self._pooled else part
            return
        if self.across is not None:
            self._hand_on_all(self.across.step(number, parts))
            return
        for layer in parts:
            self._numbers.setdefault(layer, len(self._numbers))
        if parts:
            self._waiting.append(_fetch(number, parts, self._numbers))
        while self._waiting and (self._waiting[0].arrived is None or self._waiting[0].arrived.query()):
            self._hand_on(self._waiting.popleft())

    @contextmanager
    def pooling(self, number: int) -> Generator[None]:
        """Pass on the forward passes within the block as one step, unless it ends by an exception."""
        self._pooled = {}
        try:
            yield
            pooled, self._pooled = self._pooled, None
            self.step(number, pooled)
        finally:
            self._pooled = None

    def finish(self) -> None:
        """Wait for the remaining values, and pass them on."""
        if self.across is not None:
            self._hand_on_all(self.across.finish())
        while self._waiting:
            step = self._waiting.popleft()
            if step.arrived is not None:
                step.arrived.synchronize()
            self._hand_on(step)

    def _hand_on_all(self, steps: Iterable[Reduced]) -> None:
        """Pass on values over the rows of all ranks."""
        for step in steps:
            for layer, _ in step.names:
                self._numbers.setdefault(layer, len(self._numbers))
            names = [(layer, self._numbers[layer], quantity) for layer, quantity in step.names]
            self._hand_on(_Step(step.number, names, [*step.heads], step.values, None))

    def _hand_on(self, step: _Step) -> None:
        columns = [(layer, quantity, heads) for (layer, _, quantity), heads in zip(step.names, step.heads, strict=True)]
        for collector in self.collectors:
            collector._add_step(step.number, columns, step.values.detach())
        before = len(self.alarms)
        try:
            flat = self._flat(step) if self.writers or self.limits is not None else {}
        finally:  # also where a filter turns the warning of an alarm into an error
            for collector in self.collectors:
                collector._add_alarms(self.alarms[before:])
        self._writing = True
        try:
            for write in self.writers:
                write(flat, step.number)
        finally:
            self._writing = False

    def _flat(self, step: _Step) -> dict[str, float]:
        """Return the values under flat names, and raise alarms."""
        flat: dict[str, float] = {}
        numbers = iter(step.values.tolist())
        for (layer, at, quantity), heads in zip(step.names, step.heads, strict=True):
            for head in range(heads):
                value = next(numbers)
                if math.isnan(value):
                    continue  # no row of the head has the quantity
                flat[f"attn/L{at:02d}/H{head:02d}/{quantity}"] = value
                if self.limits is not None:
                    self._look(self.limits, step.number, (layer, head, quantity), value)
        return flat

    def _look(self, limits: Limits, step: int, at: tuple[str, int, str], value: float) -> None:
        """Raise an alarm if a limit is passed; the next one of that head only after the value was within the limit."""
        before = self._references.get(at, value)
        match at[2]:
            case "normalized_entropy":
                what, limit, reference = "entropy collapse", limits.entropy, max(before, value)
                beyond, changed = limit is not None and value < limit, value < reference / 2
            case "max_logit_max":
                what, limit, reference = "growing logits", limits.max_logit, before
                beyond, changed = limit is not None and value > limit, value > 2 * reference
            case "first":
                what, limit, reference = "rising sink", limits.sink, min(before, value)
                beyond, changed = limit is not None and value > limit, value > reference + 0.1
            case _:
                return
        self._references[at] = reference
        if not beyond or limit is None:
            self._raised.discard(at)
        elif changed and at not in self._raised:
            self._raised.add(at)
            alarm = Alarm(step, at[0], at[1], what, value, limit, reference)
            self.alarms.append(alarm)
            self.announce(alarm)


def _warn(alarm: Alarm) -> None:
    warnings.warn(str(alarm), AttentionWarning, stacklevel=user_stacklevel())


def _fetch(number: int, parts: Mapping[str, LayerStats], layers: Mapping[str, int]) -> _Step:
    """Return the means of all quantities, and the largest logit, copied to the host without waiting."""
    names: list[tuple[str, int, str]] = []
    tensors: list[Tensor] = []
    for layer, part in parts.items():
        for quantity, values, _ in values_of(part):
            names.append((layer, layers[layer], quantity))
            tensors.append(values)
    device = tensors[0].device if tensors else torch.device("cpu")
    every = torch.cat([torch.empty(0, device=device), *(each.to(device, non_blocking=True) for each in tensors)])
    return _Step(number, names, [len(each) for each in tensors], *to_host(every))


for _class in (AttentionWarning, Limits, Alarm):
    _class.__module__ = "headscope.watching"  # their public path
