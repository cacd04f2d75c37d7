"""watch_compiled: statistics of the rows of a model that torch.compile runs, in chosen steps."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from headscope._intercept import (
    Choice,
    Kind,
    WatchError,
    WatchWarning,
    attends_by_headscope,
    describe_modules,
    enclosing_paths,
    is_attention,
    is_cross,
    layer_origin,
    list_compiled_modules,
    match_modules,
    select_modules,
)
from headscope._observe import SUMS, LayerSums, StepOfLayer
from headscope._support.arguments import check_type
from headscope._support.user_line import user_stacklevel
from headscope.stats import HeadStats, Observe
from headscope.watching._about import about_of
from headscope.watching._monitor import Limits
from headscope.watching._options import Options, check
from headscope.watching._recording import Recording
from headscope.watching._targets import make_monitor

_ROWS_ONLY = Observe(received=False)
_ALLOWED = ("rows", "row_stats", "windows", "first", "weights_gib")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")  # of modules and configurations


def watch_compiled(
    model: nn.Module,
    *,
    what: Observe | None = None,
    rows: int | None = None,
    layers: Choice | None = None,
    kinds: Mapping[str, Kind] | None = None,
    log: Any = None,
    alarms: bool | Limits = False,
) -> CompiledWatch:
    """Watch chosen steps of a model that ``torch.compile`` runs: ``with watched.step(n): ...``.

    headscope's attention calls the operator ``headscope::observe_into``, which adds the rows of a step to memory of a
    fixed size. It does not break the graph and does not change outputs or gradients. The model is compiled once more
    when the watch opens. From then on one graph serves all steps; outside of ``step`` the operator returns at once.

    The watch records ``MultiHeadAttention``, ``nn_compat.MultiheadAttention``, and models of transformers with
    ``attn_implementation="headscope"`` (see ``register_transformers``). It also records the parts of a model that are
    not compiled.

    Args:
        model: the model, or what ``torch.compile(model)`` has returned.
        what: what to measure; by default ``Observe(received=False)``. The sums have a fixed size, so only ``rows`` (a
            number), ``windows`` and ``first`` may differ.
        rows: observe only an even sample of this many query rows, from 1; short for ``Observe(rows=...)``.
        layers: the modules to record: names or patterns, or a function of name and module. By default all.
        kinds: name or pattern -> "self" or "cross". By default a layer attends to another sequence if it is named so,
            or if a module of headscope's gets one as ``context`` or ``key``.
        log, alarms: as for ``watch``; the step of a value is the number that ``step`` gets.

    Raises:
        TypeError, ValueError: an argument that does not fit, or an option that a compiled watch does not support.
        WatchError: a layer does not use headscope's attention; later, no layer ran in a step.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention
        >>> from headscope.watching import watch_compiled
        >>> model = MultiHeadAttention(8, 2)
        >>> compiled = torch.compile(model, backend="eager")
        >>> with watch_compiled(compiled) as watched:
        ...     for step in range(4):
        ...         if step % 2 == 0:
        ...             with watched.step(step):
        ...                 output = compiled(torch.zeros(1, 4, 8))  # equal tokens: even rows
        ...         else:
        ...             output = compiled(torch.zeros(1, 4, 8))
        >>> watched.recording.forwards, round(watched.recording[0, 0, "effective_keys"].mean, 3)
        (2, 4.0)
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    what = _ROWS_ONLY if what is None else what
    check_type("what", what, Observe, "a headscope.Observe")
    if rows is not None:
        if what.rows is not None:
            raise ValueError("rows: was passed twice, here and in what.rows")
        what = replace(what, rows=rows)
    _check_what(what)
    check_type("kinds", {} if kinds is None else kinds, Mapping, "a mapping of patterns to kinds")
    kinds = dict(kinds or {})
    check(None, None, kinds, "error", alarms)
    options = Options(what, 1, None, kinds, None, False, "error", make_monitor(log, alarms))
    return CompiledWatch(model, options, layers)


def _check_what(what: Observe) -> None:
    """Raise if an option requires more than sums of a fixed size."""
    if isinstance(what.rows, Tensor):
        raise ValueError("what.rows: got a tensor; expected a number of rows: a compiled watch has no tensors by row")
    changed = [
        each.name
        for each in fields(Observe)
        if each.name not in _ALLOWED and getattr(what, each.name) != getattr(_ROWS_ONLY, each.name)
    ]
    requested = [name for name in changed if getattr(what, name) != getattr(Observe(), name)]
    if changed:
        name = (requested or changed)[0]
        raise ValueError(
            f"what.{name}: a compiled watch measures row quantities only, because its sums have a fixed size; "
            f"expected {getattr(_ROWS_ONLY, name)!r}; for {name}, watch the model without torch.compile"
        )
    if not what.row_stats:
        raise ValueError("what.row_stats: got False; expected True: a compiled watch measures row quantities only")


class CompiledWatch:
    """The context that ``watch_compiled`` returns; it can be entered once.

    Attributes:
        recording: the recording of all steps so far; ``about.forwards`` counts these.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention
        >>> from headscope.watching import watch_compiled
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch_compiled(model) as watched, watched.step():
        ...     output = model(torch.zeros(1, 4, 8))
        >>> watched.recording.forwards
        1
    """

    def __init__(self, model: nn.Module, options: Options, layers: Choice | None) -> None:
        self.monitor = options.monitor
        self.options = options
        self.modules = list_compiled_modules(model)
        self.chosen = select_modules(self.modules, layers)
        for pattern in options.kinds:
            match_modules(self.modules, pattern, "kinds")
        self.sums = self._make_sums()
        root = next(iter(self.modules.values()))
        self.recording = Recording(HeadStats({}), about_of(root, options, layers, None))
        self.recording._monitor = options.monitor
        self._places = {name: place for place, name in enumerate(self.modules)}
        self._entered = self._open = self._active = self._stepped = False
        self._idle: set[str] = set()  # layers that a warning has named

    def _make_sums(self) -> dict[str, LayerSums]:
        """Return the sums of each layer that can add to them.

        Raises:
            WatchError: another layer is an attention too, or there is none.
        """
        attends = {name: module for name, module in self.modules.items() if is_attention(name, module)}
        own = {name for name, module in self.modules.items() if hasattr(type(module), SUMS)}
        own |= {name for name, module in attends.items() if attends_by_headscope(module)}
        around = {path for name in own for path in enclosing_paths(name)}  # such as a block named after its attention
        others = [name for name in attends if name in self.chosen and name not in around and not _within(name, own)]
        if others:
            raise WatchError(
                f"watch_compiled: {len(others)} attention layers do not use headscope's attention: "
                f"{describe_modules(self.modules, others)}. Use MultiHeadAttention, load a model of transformers with "
                'attn_implementation="headscope" after headscope.watching.register_transformers(), exclude them with '
                "layers=, or watch the model without torch.compile"
            )
        names = [name for name in self.modules if name in own and name in self.chosen]
        if not names:
            raise WatchError("watch_compiled: the model has no layer with headscope's attention")
        return {name: self._sums_of(name) for name in names}

    def _sums_of(self, name: str) -> LayerSums:
        module = self.modules[name]
        kind: Kind | None = next(
            (
                kind
                for pattern, kind in self.options.kinds.items()
                if name in match_modules(self.modules, pattern, "kinds")
            ),
            None,
        )
        if kind is None and (is_cross(name) or getattr(module, "is_cross_attention", False)):
            kind = "cross"
        if getattr(module, "is_split", False):
            raise WatchError(
                f"watch_compiled: layer {name}: its heads are split over ranks, which the operator does not support; "
                "exclude the layer with layers=, or watch the model without torch.compile"
            )
        if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
            raise WatchError(
                f"watch_compiled: layer {name}: bias_kv, add_bias_kv and add_zero_attn add a key without a position, "
                "which the operator does not support; exclude the layer with layers=, or watch the model without "
                "torch.compile"
            )
        device = next((each.device for each in module.parameters()), torch.device("cpu"))
        return LayerSums(name, _heads_of(name, module), kind, self.options.what, device)

    def __enter__(self) -> CompiledWatch:
        if self._entered:
            raise WatchError("watch_compiled: was already used; create a new one")
        busy = [name for name in self.sums if getattr(self.modules[name], SUMS, None) is not None]
        if busy:
            raise WatchError(
                f"watch_compiled: another compiled watch is open on {describe_modules(self.modules, busy)}"
            )
        self._entered = self._open = True
        if self.monitor is not None:
            self.monitor.open(lambda: self.recording.about)
        for name, sums in self.sums.items():
            setattr(self.modules[name], SUMS, sums)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        for name, sums in self.sums.items():
            sums.stop()
            vars(self.modules[name]).pop(SUMS, None)
        if self.monitor is not None:
            self.monitor.close(failed=error is not None)
        if error is None and not self._stepped:
            warnings.warn(
                "watch_compiled: nothing was recorded: only forward passes within `with watched.step():` are",
                WatchWarning,
                stacklevel=user_stacklevel(),
            )

    @contextmanager
    def step(self, number: int | None = None) -> Generator[None]:
        """Record the forward passes within the block as one step.

        Args:
            number: the step's number in logs and alarms; by default that of the recorded step, from 0.

        Raises:
            WatchError: the watch is not open, a step is within another one, or no layer ran.
        """
        if not self._open or self._active:
            where = "within another step" if self._active else "outside of `with watch_compiled(...)`"
            raise WatchError(f"watch_compiled: step() was called {where}")
        self._active = self._stepped = True
        for sums in self.sums.values():
            sums.begin()
        try:
            yield
        except BaseException:
            for sums in self.sums.values():
                sums.stop()
            raise
        finally:
            self._active = False
        self._end(number)

    def _end(self, number: int | None) -> None:
        """Record a step."""
        try:
            with torch.no_grad():
                steps = {name: step for name, sums in self.sums.items() if (step := sums.end()) is not None}
        except ValueError as error:
            raise WatchError(f"watch_compiled: {error}") from error
        finally:
            for sums in self.sums.values():
                sums.stop()
        if not steps:
            raise WatchError(
                "watch_compiled: no attention layer ran within step(); call the model within it, and check that the "
                "watched model is the one that runs, not a copy"
            )
        self._warn_of_idle(steps)
        counted = self.recording._begin(active=True)
        for name, step in steps.items():
            origin = partial(layer_origin, self.modules, name, self.sums[name].heads, step.widths)
            part = partial(_same, step)
            self.recording._add(name, (self._places[name], 1), part, step.kind, origin)
        if self.monitor is not None:
            with torch.no_grad():
                parts = {name: step.part for name, step in steps.items()}
                self.monitor.step(counted if number is None else number, parts)

    def _warn_of_idle(self, steps: Mapping[str, StepOfLayer]) -> None:
        """Warn, once for each layer, of layers that did not run, or not with headscope's attention."""
        ran = {path for name in steps for path in enclosing_paths(name)}
        idle = [name for name in self.sums if name not in ran and not _within(name, steps) and name not in self._idle]
        if idle:
            self._idle |= {*idle}
            warnings.warn(
                f"watch_compiled: {len(idle)} attention layers did not run in this step, or do not call headscope's "
                f"attention: {describe_modules(self.modules, idle)}",
                WatchWarning,
                stacklevel=user_stacklevel(),
            )


def _same(step: StepOfLayer) -> Any:
    return step.part


def _within(name: str, names: Any) -> bool:
    """Return whether a module is inside one of these."""
    return any(path in names for path in enclosing_paths(name))


def _heads_of(name: str, module: nn.Module) -> int:
    """Return the number of query heads of a module that attends."""
    for holder in (module, getattr(module, "config", None)):
        for attribute in _HEADS:
            heads = getattr(holder, attribute, None)
            if isinstance(heads, int):
                return heads
    raise WatchError(
        f"watch_compiled: layer {name} ({type(module).__name__}): the number of its heads is unknown; expected an "
        f"attribute {', '.join(_HEADS)} of the module or its configuration"
    )


CompiledWatch.__module__ = "headscope.watching"  # its public path
