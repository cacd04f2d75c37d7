"""watch: exact statistics of every attention head of a model, while it runs, its outputs unchanged."""

from __future__ import annotations

import html
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from headscope._attend.call import whole
from headscope._intercept import frames, module_names, transformers
from headscope._intercept.call import (
    COMPILED,
    Call,
    Ids,
    Kind,
    WatchError,
    WatchWarning,
    error_of,
    measure,
    placed,
    standing,
)
from headscope._intercept.frames import Frame
from headscope._intercept.module_names import Choice
from headscope._support.text import visible
from headscope.stats import Column, HeadStats, Observe, Summary, merge
from headscope.stats._layer import LayerStats
from headscope.stats._origin import LayerOrigin, Origin, Part
from headscope.watching._edits import Layout
from headscope.watching._monitor import Alarm, AttentionWarning, Limits, Monitor, writer
from headscope.watching._options import About, Options, about_of, check
from headscope.watching._origin import layer_origin
from headscope.watching._token_ids import Streams, check_texts, given

if TYPE_CHECKING:
    from rich.table import Table

    from headscope.comparing import Comparison, Thresholds

__all__ = [
    "About",
    "Alarm",
    "AttentionWarning",
    "Limits",
    "Origin",
    "Part",
    "Recording",
    "Watch",
    "WatchError",
    "WatchWarning",
    "register_transformers",
    "watch",
]

PENDING = 16  # calls of a layer that are kept before they are merged


class Recording:
    """What was seen of a model's attention: the statistics of each layer, and what they are of.

    It can be read while the model is still being watched. Whatever ``HeadStats`` has, it has, too:
    ``recording["h.0.attn", 3, "entropy"]``, ``recording["entropy"]``, ``recording[0].received``.

    Attributes:
        about: model, options, versions, how many forward passes; ``about.part``: the heads of each layer, if not all.
    """

    def __init__(self, stats: HeadStats, about: About) -> None:
        self.about = about if stats.origin is None else replace(about, origin=stats.origin)
        self._parts: dict[str, LayerStats] = dict(stats.parts)
        self._pending: dict[str, list[LayerStats]] = {}
        self._order: dict[str, tuple[int, int]] = {}
        self._monitor: Monitor | None = None
        self._lock = threading.RLock()

    # ------------------------------------------------------------ reading

    @property
    def stats(self) -> HeadStats:
        """The statistics of all layers, named by module path, in the order of the model.

        Raises:
            WatchError: nothing has been seen so far.
        """
        with self._lock:
            if not self._all():
                raise WatchError("watch: nothing has been seen so far; run the model within the with block")
            names = sorted(self._parts, key=lambda name: self._order.get(name, (0, 0)))
            return HeadStats({name: self._parts[name] for name in names}, self.about.origin)

    def __getitem__(self, at: Any) -> Summary | Column | HeadStats | dict[str, Summary]:
        return self.stats[at]

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers' names, in order."""
        return self.stats.layers

    @property
    def names(self) -> tuple[str, ...]:
        """The row quantities that some layer has."""
        return self.stats.names

    @property
    def heads(self) -> int:
        """How many heads the widest layer has."""
        return self.stats.heads

    @property
    def forwards(self) -> int:
        """How many forward passes were looked at."""
        return self.about.forwards

    @property
    def kinds(self) -> Mapping[str, str]:
        """Layer -> "self" or "cross"."""
        return self.about.kinds

    @property
    def texts(self) -> tuple[str, ...] | None:
        """The text of each token, if it was given."""
        return self.about.texts

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms that were raised, if the model was watched with ``alarms``."""
        return () if self._monitor is None else tuple(self._monitor.alarms)

    def flat(self) -> dict[str, float]:
        """Means under flat names, as trackers want them: ``attn/L03/H05/entropy``."""
        return self.stats.flat()

    def to_dict(self) -> dict[str, Any]:
        """What it is of and all statistics, ready for JSON; see ``HeadStats.to_dict``."""
        from headscope.watching._files import said

        return {"about": said(self.about), **self.stats.to_dict()}

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``; see ``HeadStats.to_pandas``."""
        return self.stats.to_pandas()

    def table(self, sort: str | None = None, **options: Any) -> Table:
        """One line for each head, under paths without what is common to all; see ``HeadStats.table``."""
        from rich.markup import escape

        from headscope._analysis.answers import short_layers

        stats = self.stats
        short, note = short_layers(stats.layers)
        table = stats.named(*short.values()).table(sort, **options)
        table.caption = f"{table.caption} {escape(visible(note))}".rstrip()
        return table

    def compare(self, other: HeadStats | Recording, thresholds: Thresholds | None = None) -> Comparison:
        """What moved from this recording to another, head by head; see ``headscope.comparing.compare``."""
        from headscope.comparing import compare

        return compare(self, other, thresholds)

    def save(self, path: str | Path, *, qk: bool = False, force: bool = False) -> Path:
        """Write one safetensors file; ``HeadStats.load`` reads its statistics, too.

        Args:
            path: where.
            qk: with q, k and lse, if they were kept (``Observe(keep_qk=True)``), so that every tile of the weights can
                be computed from the file; it then grows with the length, by B · (H + Hkv) · D numbers a position.
            force: replace any file.

        Raises:
            FileExistsError, ValueError: see ``HeadStats.save``.
            ValueError: ``qk``, and a mask that is too large to be saved.
        """
        from headscope.watching._files import save

        return save(self.stats, self.about, Path(path), force, qk)

    def save_html(self, path: str | Path, *, force: bool = False, **options: Any) -> Path:
        """Write one page in which every head can be looked at, without any request; see docs/viewer.md.

        Maps are shown if they were observed: ``Observe(map=64)``.

        Args:
            path: where.
            force: replace any file.
            options: title, image, grid, special and strips, as for ``headscope.report.viewer.render_recording``.

        Raises:
            SaveError: there is a file that is no page of headscope's own, or it cannot be written.
            TypeError: an option of another kind.
            ValueError: the maps do not fit one page, or an image does not fit the keys.
            WatchError: nothing has been seen so far.
        """
        from headscope.report.viewer import save_recording

        return save_recording(self, path, force=force, **options)

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it cannot be opened.
            ValueError: it is no recording, or one of a newer format.
        """
        from headscope.watching._files import load

        return load(Path(path))

    def __repr__(self) -> str:
        if not self._parts and not self._pending:
            return visible(f"Recording({self.about.model}: nothing seen so far)")
        return visible(f"Recording({self.about.model}, {self.forwards} forward passes: {self.stats!r})")

    def _repr_html_(self) -> str:
        if not self._parts and not self._pending:
            return f"<p>{html.escape(repr(self))}</p>"
        from headscope.report.viewer import framed, render_recording

        return framed(render_recording(self))

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: a monitor, with what it writes to, stays with the original, as does the lock."""
        with self._lock:
            return {**self.__dict__, "_pending": {}, "_parts": self._all(), "_monitor": None, "_lock": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def __rich__(self) -> Table:
        return self.table()

    # ------------------------------------------------------------ writing

    def _add(
        self, name: str, order: tuple[int, int], part: LayerStats, kind: Kind, origin: Callable[[], LayerOrigin]
    ) -> None:
        """Add one call of a layer; ``origin``: what its first call is of."""
        with self._lock:
            if name not in self._order:
                self._order[name] = order
                about = self.about
                whole = about.origin and replace(about.origin, layers={**about.origin.layers, name: origin()})
                self.about = replace(about, kinds={**about.kinds, name: kind}, origin=whole)
            waiting = self._pending.setdefault(name, [])
            waiting.append(part)
            if len(waiting) >= PENDING:
                self._fold(name)

    def _all(self) -> dict[str, LayerStats]:
        """Layer -> all of its calls, merged."""
        for name in list(self._pending):
            self._fold(name)
        return dict(self._parts)

    def _fold(self, name: str) -> None:
        """Merge what waits of a layer."""
        parts = [*self._pending[name]]
        if name in self._parts:
            parts.insert(0, self._parts[name])
        try:
            merged = merge(*(HeadStats({name: part}) for part in parts))
        except ValueError as error:
            raise WatchError(f"watch: {error}; a layer has to have the same heads in every call") from error
        self._parts[name] = merged.parts[name]
        del self._pending[name]


def watch(
    model: nn.Module,
    *,
    what: Observe | None = None,
    rows: int | None = None,
    layers: Choice | None = None,
    every: int = 1,
    tokens: Tensor | Literal["inputs"] | None = None,
    texts: Collection[str] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    positions: Tensor | None = None,
    accelerate: bool = False,
    unseen: Literal["error", "ignore"] = "error",
    log: Any = None,
    alarms: bool | Limits = False,
) -> Watch:
    """Watch every attention head of a model: ``with headscope.watch(model) as seen: model(**inputs)``.

    The model computes what it computes without, to the bit; its attention weights are computed a second time, tile by
    tile, and reduced to statistics, in memory linear in the length. ``seen`` is a ``Recording``. docs/watching.md says
    which modules are seen, and what is refused.

    Args:
        model: any module; what is inside is seen, too, whichever thread runs it.
        what: what to measure; by default ``Observe()``.
        rows: look at an even sample of this many query rows only, from 1; short for ``Observe(rows=...)``.
        layers: which modules: names or patterns ("decoder.*.self_attn", "h.3"), each with all that is inside; or a
            function of name and module. By default all.
        every: look at the first of every so many forward passes, from 1. A forward pass is one call of the model from
            outside, or of one of its modules; those of an evaluation count, too.
        tokens: ids of the keys, [K] or [B, K], the same for all calls, for ``duplicate`` and ``induction``; "inputs":
            take the ``input_ids`` that the modules are called with, over the steps of a cache.
        texts: the text of each token, to be kept with the recording: of the queries or keys of some layer.
        kinds: name or pattern -> "self" or "cross", where the calls do not say (see docs/watching.md).
        positions: where the keys of self-attention stand, [K], or [K, 2] on a grid of patches; NaN = nowhere (CLS). By
            default 0, 1, 2, …, a cache included.
        accelerate: let headscope's kernel attend as well, in the layers that are chosen. Outputs are then equal up to
            rounding, not to the bit, but for rows in which everything is hidden: headscope gives them 0.
        unseen: "error": a module called attention that ran and could not be seen into is an error that names it, and
            one that was seen and may attend once more, by a softmax of its own, a warning. "ignore": neither.
        log: where the values of each forward pass that is looked at go, under flat names (``attn/L03/H05/entropy``): a
            TensorBoard ``SummaryWriter``, a Weights & Biases run, a function of the values and the step, or several. A
            layer keeps its number: those of a step are numbered in the order of the model, layers that are first seen
            in a later step get the next ones.
        alarms: warn of entropy collapse, growing logits and a rising sink; ``Limits`` says when.

    Raises:
        TypeError, ValueError: an argument that does not fit; texts that are of no layer when the watch ends.
        WatchError: the model runs compiled; later, a layer that cannot be seen, one that was replaced or added within
            the block, or nothing that was seen.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model: got {type(model).__name__}, wanted a torch.nn.Module")
    if what is not None and not isinstance(what, Observe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"what: got {type(what).__name__}, wanted a headscope.Observe")
    what = Observe() if what is None else what
    for name, value in (("rows", rows), ("tokens", tokens)):
        if value is not None and getattr(what, name) is not None:
            raise ValueError(f"{name}: given twice, here and in what.{name}")
    if rows is not None:
        what = replace(what, rows=rows)
    if kinds is not None and not isinstance(kinds, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"kinds: got {type(kinds).__name__}, wanted a mapping of patterns to kinds")
    kinds = dict(kinds or {})
    texts = None if texts is None else tuple(texts)
    check(tokens, positions, kinds, unseen, alarms, texts or ())
    if not isinstance(accelerate, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"accelerate: got {type(accelerate).__name__}, wanted True or False")
    targets = [] if log is None else list(log) if isinstance(log, (list, tuple)) else [log]
    limits = Limits() if alarms is True else alarms or None
    monitor = Monitor([writer(target) for target in targets], limits) if targets or limits else None
    options = Options(what, whole("every", every), tokens, kinds, positions, accelerate, unseen, monitor)
    return Watch(model, options, layers, texts)


class Watch:
    """The context that ``watch`` returns; it can be entered once.

    Attributes:
        recording: what has been seen so far.
    """

    def __init__(
        self, model: nn.Module, options: Options, layers: Choice | None, texts: tuple[str, ...] | None
    ) -> None:
        self.monitor = options.monitor
        self.options = options
        self.again = options.accelerate  # what is computed again has to be computed alike
        self._last_active = False
        self.modules = module_names.modules_of(model)
        self.chosen = module_names.chosen(self.modules, layers)
        self.layout = Layout(self.modules, partial(module_names.chosen, layers=layers), "watch")
        for pattern in options.kinds:
            module_names.fitting(self.modules, pattern, "kinds")
        self.places = {name: place for place, name in enumerate(self.modules)}
        self.recording = Recording(HeadStats({}), about_of(model, options, layers, texts))
        self.recording._monitor = options.monitor
        self._lock = threading.RLock()  # what a monitor writes to may run the model itself
        self._entered = False
        self._streams = Streams()
        self._complete: set[tuple[frozenset[str], frozenset[str]]] = set()  # what ran and was seen, with nothing amiss
        self._errors: dict[str, tuple[Tensor, float]] = {}
        self._warned: set[str] = set()

    def __enter__(self) -> Recording:
        if self._entered:
            raise WatchError("watch: this one has been used; make another")
        if found := module_names.compiled(self.modules):
            raise WatchError(f"{COMPILED}; compiled: {', '.join(found[:8])}")
        if refusal := transformers.refusal(self.modules):
            raise WatchError(refusal)
        self._entered = True
        frames.open_(self, self.modules)
        return self.recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frames.close(self, self.modules)
        if self.monitor is not None:
            self.monitor.finish()
        if error is None:
            self.layout.check(last=True)
            self._check()

    def _check(self) -> None:
        for layer in self._errors:
            try:
                self._judge(layer)
            except WatchError as found:
                raise WatchError(f"watch: layer {layer}: {found}") from found
        recording = self.recording
        if recording._parts or recording._pending:
            if recording.texts is not None:
                check_texts(len(recording.texts), recording.stats.parts.values())
            return
        if recording.about.ran == 0:
            raise WatchError(
                "watch: no forward pass of the model ran within the with block (a module that runs compiled, a copy of "
                "the model, and what runs within a backward pass, as a checkpoint computes again, are not seen)"
            )
        hint = module_names.some_of(self.modules)
        raise WatchError(f"watch: no attention call was seen in {recording.about.model}; its modules: {hint}")

    # ------------------------------------------------------------ as the modules' calls see it

    def begin(self) -> Pass:
        """A forward pass starts, or a piece of the last one is computed again.

        Raises:
            WatchError: attention layers were replaced or added since the watch was opened.
        """
        if torch._C._current_graph_task_id() != -1:
            return Again(self, self.recording.about.ran, self._last_active)
        self.layout.check()
        with self.recording._lock:
            about = self.recording.about
            active = about.ran % self.options.every == 0
            self.recording.about = replace(about, ran=about.ran + 1, forwards=about.forwards + active)
            self._last_active = active
        return Pass(self, about.ran, active)

    def tokens_of(self, call: Call) -> Ids | None:
        """The ids of a call's keys, if they were asked for and are known."""
        if self.options.tokens is None or call.beside:  # a key that is no token's would pass for the next one
            return None
        if isinstance(self.options.tokens, Tensor):
            return given(self.options.tokens, call)
        return self._streams.of(call, frames.frames())

    def compare(self, layer: str, call: Call) -> None:
        """Compare a layer's first output with what its call gives by definition.

        Where the call was understood wrongly (a model with a rule of its own), this is an error and no statistic. On a
        device it is looked at when the watch ends, so that no step waits for it.
        """
        if layer in self._errors:
            return
        error = error_of(call if call.own is None else call.own())
        if error is None:
            return
        self._errors[layer] = error
        if error[0].device.type == "cpu":
            self._judge(layer)

    def _judge(self, layer: str) -> None:
        error, most = self._errors[layer]
        if float(error) > most:
            raise WatchError(
                f"its output differs by {float(error):.2g} of the largest value from what its "
                "q, k, v and mask give; it attends by a rule that headscope does not know. Leave it out with layers="
            )

    def end(self, forward: Pass, *, finished: bool) -> None:
        """It is over; not finished = by an exception.

        Raises:
            WatchError: an attention layer ran in it and was not seen.
        """
        if not finished or not forward.active or isinstance(forward, Again):
            return
        if self.monitor is not None:
            order = self.recording._order
            parts = {layer: forward.parts[layer] for layer in sorted(forward.parts, key=order.__getitem__)}
            with self._lock, torch.no_grad():
                self.monitor.step(forward.number, parts)
        if self.options.unseen == "ignore":
            return
        both = (frozenset(forward.ran), frozenset(forward.seen))
        missing: list[str] = []
        if both not in self._complete:
            missing = module_names.unseen(self.modules, forward.ran, forward.seen)
            missing = [name for name in missing if name in self.chosen]
        self._warn_of_unrecorded(forward, missing)
        if missing:
            raise WatchError(
                f"watch: of the attention layers that ran {len(missing)} could not be seen: "
                f"{module_names.with_classes(self.modules, missing)}. None calls scaled_dot_product_attention or "
                'anything else that headscope knows. Leave out with layers=, or give unseen="ignore"'
            )
        self._complete.add(both)

    def _warn_of_unrecorded(self, forward: Pass, missing: Collection[str]) -> None:
        """Warn, once for each layer, of attention beside what was recorded."""
        if not forward.unrecorded:
            return
        texts = module_names.unrecorded(self.modules, forward.unrecorded, forward.seen, missing)
        for name, text in texts.items():
            if name not in self.chosen or name in self._warned:
                continue
            self._warned.add(name)
            warnings.warn(
                f'watch: {text}, which the recording does not include; unseen="ignore" turns this warning off',
                WatchWarning,
                stacklevel=2,
            )


class Pass:
    """One forward pass: which modules ran in it, and which of them attended."""

    def __init__(self, watch: Watch, number: int, active: bool) -> None:
        self.watch = watch
        self.number = number
        self.active = active
        self.parts: dict[str, LayerStats] = {}  # of this pass alone, for a monitor
        self.ran: dict[str, None] = {}
        self.seen: set[str] = set()
        self.unrecorded: dict[str, str | None] = {}  # see module_names.unrecorded

    def note_unrecorded(self, name: str, operator: str | None) -> None:
        """A module attends by an operator, or perhaps by a softmax of its own (None)."""
        self.unrecorded[name] = self.unrecorded.get(name) or operator

    def enter(self, name: str, module: nn.Module) -> bool:
        """A module starts to run; headscope's kernel attends in those that were chosen, if at all."""
        self.ran[name] = None
        return self.watch.options.accelerate and name in self.watch.chosen

    def factors(self, name: str, heads: int) -> Tensor | None:
        """The heads stay as they are."""
        return None

    def see(self, frame: Frame, name: str, make: Callable[[], Call]) -> None:
        """Measure the attention call that a module makes.

        Raises:
            WatchError: it cannot be measured; the message names the layer.
        """
        self.seen.add(name)
        watch = self.watch
        watch.layout.attended.add(name)
        if name not in watch.chosen:
            return
        layer = name if frame.calls == 1 else f"{name}#{frame.calls}"
        before = watch.recording.about.kinds.get(layer)
        try:
            call = make()
            kind = module_names.kind_of(name, call, watch.options.kinds, before)
            watch.compare(layer, call)
            if kind == "self":
                call = standing(call)
                tokens = watch.tokens_of(call)
                if tokens is not None or call.kind != kind:
                    call = replace(call, kind=kind, tokens=tokens)
                call = placed(call, watch.options.positions)
            elif call.kind != kind:
                call = replace(call, kind=kind)
            part = measure(call, watch.options.what)
        except (TypeError, ValueError, RuntimeError) as error:
            raise WatchError(f"watch: layer {layer}: {error}") from error
        order = (watch.places[name], frame.calls)
        watch.recording._add(layer, order, part, kind, partial(layer_origin, watch.modules, name, call))
        if watch.monitor is not None:
            self.parts[layer] = self.parts[layer].merge(part) if layer in self.parts else part


class Again(Pass):
    """A piece of a forward pass that a checkpoint computes once more: by the same kernels, and nobody looks."""

    def see(self, frame: Frame, name: str, make: Callable[[], Call]) -> None:
        """It has been seen."""


def register_transformers(name: str = "headscope") -> None:
    """Register headscope's attention with transformers, for ``attn_implementation=name``.

    The function and the making of its masks are registered under the one name: without the second, transformers gives
    the function no mask at all, and padding is silently lost.

    Raises:
        ImportError: transformers is not installed, or older than 5.
    """
    transformers.register(name)
