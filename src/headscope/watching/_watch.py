"""watch: exact statistics of every attention head of a running model, with unchanged outputs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from headscope._intercept import (
    COMPILED,
    Choice,
    Ids,
    InterceptedCall,
    Kind,
    Layout,
    WatchError,
    WatchWarning,
    check_values,
    close_watch,
    describe_modules,
    describe_passes,
    describe_unrecorded,
    find_compiled,
    find_unobserved,
    match_modules,
    open_watch,
    running_frames,
    select_modules,
    transformers_refusal,
    tree_of,
    unwrapped,
)
from headscope._support.arguments import check_type, whole
from headscope._support.user_line import user_stacklevel
from headscope.stats import HeadStats, Observe
from headscope.watching._about import about_of
from headscope.watching._chosen_heads import RECORDING_GIB, ChosenHeads, check_chosen_heads
from headscope.watching._earlier_calls import EarlierCalls
from headscope.watching._known_modules import KnownModules
from headscope.watching._model_ranks import ranks_together
from headscope.watching._monitor import Limits
from headscope.watching._options import Options, check, texts_of
from headscope.watching._pass import Again, Pass
from headscope.watching._problems import nothing_observed, warn_of_batch, warn_of_unknown_ids
from headscope.watching._recording import Recording
from headscope.watching._segments import warn_of_unsegmented
from headscope.watching._targets import make_monitor
from headscope.watching._token_ids import Streams, check_texts, ids_of_keys
from headscope.watching._verify import Verifier

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Watch", "watch"]

_DEFAULTS = Observe()


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
    verify: int = 0,
    weights: Mapping[str, Collection[int]] | None = None,
    weights_gib: float | None = None,
    group: ProcessGroup | Literal["model"] | None = "model",
) -> Watch:
    """Watch every attention head of a model: ``with headscope.watch(model) as seen: model(**inputs)``.

    The outputs of the model do not change, to the bit. headscope recomputes the attention weights, tile by tile, and
    reduces them to statistics, in memory linear in the length. ``seen`` is a ``Recording``. docs/guides/watch.md lists
    which modules it records and what it does not support.

    Args:
        model: any module; the modules inside are recorded, too, in any thread.
        what: what to measure; by default ``Observe()``.
        rows: observe only an even sample of this many query rows, from 1; short for ``Observe(rows=...)``.
        layers: the modules to record: names or patterns ("decoder.*.self_attn", "h.3"), each with all modules inside;
            or a function of name and module. By default all.
        every: observe the first of every ``every`` forward passes, from 1. A forward pass is one call of the model from
            outside, or of one of its modules; those of an evaluation count, too.
        tokens: ids of the keys, [K] or [B, K], the same for all calls, for ``duplicate`` and ``induction``; "inputs":
            use the ``input_ids`` that the modules are called with, across the steps of a cache.
        texts: the text of each token, saved with the recording: of the queries or keys of some layer.
        kinds: name or pattern -> "self" or "cross", if the calls do not determine it (see docs/guides/watch.md).
        positions: of the keys of self-attention, [K], or [K, 2] on a grid of patches; NaN = none (CLS). By default 0,
            1, 2, …, a cache included.
        accelerate: let headscope's kernel attend as well, in the selected layers. Outputs are then equal up to
            rounding, not to the bit, except rows in which every key is masked: headscope gives them 0.
        unseen: "error": raise if a module called attention ran and could not be observed; warn if an observed one may
            also attend by a softmax of its own. "ignore": neither.
        log: the tracker for the values of each observed forward pass, under flat names (``attn/L03/H05/entropy``): a
            TensorBoard ``SummaryWriter``, a Weights & Biases run, a ``History``, a function of the values and the step,
            or several. A layer's number does not change: the layers of a step are numbered in the order of the model,
            and layers first observed in a later step get the next numbers.
        alarms: warn of entropy collapse, growing logits and a rising sink; ``Limits`` defines when.
        verify: compute this many rows of each recorded call again in float64, from 0, and compare statistics and
            output; ``recording.about.verified`` has the errors. An error that rounding does not explain is a warning.
        weights: layers, by names or patterns as in ``layers``, -> the heads whose weights are retained:
            ``{"decoder.layers.3.encoder_attn": [0, 5]}``; ``recording.weights(layer, head)`` returns them. If ``what``
            measures nothing and ``layers`` is None, only these layers are recorded.
        weights_gib: the largest size of all these weights, in GiB; by default 8, and 2 in one call. A call that would
            exceed it raises before it is measured.
        group: the ranks whose rows together are logged, by the first one of them: a group; "model": those over which
            DDP, FSDP or DTensor parameters split the model; None: this process alone. docs/guides/ranks.md.

    Raises:
        TypeError, ValueError: an argument that does not fit; texts that do not match any layer when the watch ends.
        WatchError: the model is compiled; later, a layer that cannot be observed, one that was replaced or added within
            the block, or no attention call at all.

    Examples:
        >>> import torch
        >>> from headscope import watch
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with watch(model) as recording:
        ...     output = model(torch.zeros(1, 4, 8))  # equal tokens: even rows
        >>> round(recording["self_attn", 0, "effective_keys"].mean, 3)
        4.0
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    what = _DEFAULTS if what is None else what
    check_type("what", what, Observe, "a headscope.Observe")
    for name, value in (("rows", rows), ("tokens", tokens)):
        if value is not None and getattr(what, name) is not None:
            raise ValueError(f"{name}: was passed twice, here and in what.{name}")
    if rows is not None:
        what = replace(what, rows=rows)
    check_type("kinds", {} if kinds is None else kinds, Mapping, "a mapping of patterns to kinds")
    kinds = dict(kinds or {})
    check(tokens, positions, kinds, unseen, alarms)
    check_type("accelerate", accelerate, bool, "True or False")
    verify = whole("verify", verify, 0)
    monitor = make_monitor(log, alarms)
    if monitor is not None and (names := ranks_together(model, group)):
        monitor.join(names, lambda: model.training)
    what, layers = check_chosen_heads(what, weights, weights_gib, layers)
    limit = RECORDING_GIB if weights_gib is None else what.weights_gib
    options = Options(
        what, whole("every", every), tokens, kinds, positions, accelerate, unseen, monitor, verify, weights, limit
    )
    return Watch(model, options, layers, texts_of(texts))


class Watch:
    """The context that ``watch`` returns; it can be entered once.

    Attributes:
        recording: the recording so far.
        plain: the modules without attention, as earlier forward passes have shown: they need no frame.

    Examples:
        >>> import torch
        >>> from headscope import watch
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> context = watch(model)
        >>> with context as recording:
        ...     output = model(torch.zeros(1, 4, 8))
        >>> context.recording is recording
        True
    """

    def __init__(
        self, model: nn.Module, options: Options, layers: Choice | None, texts: tuple[str, ...] | None
    ) -> None:
        self.monitor = options.monitor
        self.options = options
        self.again = options.accelerate  # a recomputation must run the same kernels
        self._last_active = False
        tree = tree_of(model)
        self.modules = tree.named
        self.chosen = select_modules(self.modules, layers)
        self.layout = Layout(tree, partial(select_modules, layers=layers), "watch")
        for pattern in options.kinds:
            match_modules(self.modules, pattern, "kinds")
        self.places = {name: place for place, name in enumerate(self.modules)}
        self.recording = Recording(HeadStats({}), about_of(unwrapped(model), options, layers, texts))
        self.recording._monitor = options.monitor
        self.verifier = Verifier(options.verify)
        self.chosen_heads = ChosenHeads(self.modules, self.chosen, options.what, options.weights, options.recording_gib)
        self._lock = threading.RLock()  # a writer of the monitor may run the model itself
        self._entered = False
        self._streams = Streams()
        self._complete: set[tuple[frozenset[str], frozenset[str]]] = set()  # modules that ran and were all observed
        self._followed: set[str] = set()  # modules whose operations are followed
        self._once_more: set[str] = set()  # the outermost module of the last pass, if it is followed in the next one
        self.known = KnownModules(self.modules)
        self.plain = self.known.plain
        self.earlier = EarlierCalls(self.known, self.chosen, self.chosen_heads, options, self.recording)
        self._written: set[str] = set()  # modules in which these have found attention
        self._refused: set[str] = set()  # modules with an attention that could not be recorded
        self._warned: set[str] = set()
        self._taken_for_batches: set[str] = set()
        self._unsegmented: set[str] = set()  # layers that a warning has named because they do not fit the segments
        self._warned_of_ids = False
        self._running: set[Pass] = set()

    def __enter__(self) -> Recording:
        if self._entered:
            raise WatchError("watch: was already used; create a new one")
        if compiled := find_compiled(self.modules):
            raise WatchError(f"{COMPILED}; compiled: {', '.join(compiled[:8])}")
        if refusal := transformers_refusal(self.modules):
            raise WatchError(refusal)
        self._entered = True
        if self.monitor is not None:
            self.monitor.open(lambda: self.recording.about)
        open_watch(self, self.modules)
        return self.recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_running_passes()
        close_watch(self, self.modules)
        if self.monitor is not None:
            self.monitor.close(failed=error is not None)
        if error is None:
            self.layout.check(last=True)
            self._check()

    def _leave_running_passes(self) -> None:
        """Stop recording forward passes in other threads: their modules are no longer registered."""
        with self._lock:
            running, self._running = self._running, set()
        for each in running:
            each.active = False
        if running:
            warnings.warn(
                "watch: ended while a forward pass was running in another thread; the rest of that pass is not "
                "recorded",
                WatchWarning,
                stacklevel=user_stacklevel(),
            )

    def _check(self) -> None:
        self.earlier.judge()
        recording = self.recording
        if recording._parts or recording._pending:
            texts = recording._about.texts  # as ``recording.texts``, without the passes and layers that it has to add
            if texts is not None:
                check_texts(len(texts), recording.stats.parts.values())
            self.chosen_heads.warn_of_unused()
            return
        if recording.about.ran == 0:
            raise WatchError(
                "watch: the model's forward() was not called inside the `with` block. Compiled modules, copies of "
                "the model, and recomputation by activation checkpointing are not observed."
            )
        refused = sorted(self._refused & self.chosen, key=self.places.__getitem__)
        raise WatchError(nothing_observed(recording.about.model, self.modules, recording.about.other_layers, refused))

    # ------------------------------------------------------------ interface for the modules' calls

    def begin(self) -> Pass:
        """Start a forward pass, or the recomputation of a piece of the last one.

        Raises:
            WatchError: attention layers were replaced or added since the watch was opened.
        """
        if torch._C._current_graph_task_id() != -1:
            return Again(self, self.recording._ran, self._last_active)
        self.layout.check()
        with self.recording._lock:
            active = self.recording._ran % self.options.every == 0
            number = self.recording._begin(active)
            self._last_active = active
        forward = Pass(self, number, active)
        if active:
            with self._lock:
                self._running.add(forward)
        return forward

    def tokens_of(self, call: InterceptedCall) -> Ids | None:
        """Return the ids of a call's keys, if requested and known."""
        if self.options.tokens is None or call.beside:  # a key without a token would count as the next one
            return None
        if isinstance(self.options.tokens, Tensor):
            return ids_of_keys(self.options.tokens, call)
        check_values(call)
        return self._streams.of(call, [*running_frames()])

    def follows(self, name: str) -> bool:
        """Return whether the operations of a module are followed."""
        return name in self._followed or name in self._once_more or name not in self.known.followed

    def end(self, forward: Pass, *, finished: bool) -> None:
        """End a forward pass; not finished = by an exception.

        Raises:
            WatchError: an attention layer ran in it and was not observed.
        """
        with self._lock:
            self._running.discard(forward)
        if finished:
            self.recording._verify(self.verifier)
        if not finished or not forward.active or isinstance(forward, Again):
            return
        unsegmented = {name: why for name, why in forward.unsegmented.items() if name not in self._unsegmented}
        if unsegmented:
            self._unsegmented |= unsegmented.keys()
            warn_of_unsegmented(unsegmented)
        unfollowed = [name for name, operator in forward.unrecorded.items() if operator is None]
        unfollowed = [name for name in unfollowed if not forward.was_followed(name)]
        self._once_more = forward.once_more()
        self._followed |= forward.to_follow
        self.known.learn(forward, self._followed | self._once_more)
        if self.monitor is not None:
            order = self.recording._order
            parts = {layer: forward.parts[layer] for layer in sorted(forward.parts, key=order.__getitem__)}
            with self._lock, torch.no_grad():
                self.monitor.step(forward.number, parts)
        both = (frozenset(forward.ran), frozenset(forward.observed))
        missing: list[str] = []
        if both not in self._complete:
            others = self.recording._list_others(self.modules, self.chosen, forward)
            missing = find_unobserved(self.modules, forward.ran, forward.observed, others)
            missing = [name for name in missing if name in self.chosen]
        if self.options.unseen == "ignore":
            return
        self._warn_of_unrecorded(forward, missing, unfollowed)
        self._warn_of_unknown_ids()
        self._warn_of_batches(forward)
        if missing:
            raise WatchError(
                f"watch: {len(missing)} of the attention layers that ran could not be observed: "
                f"{describe_modules(self.modules, missing)}. They neither call a function that "
                "headscope recognises nor compute a softmax of products that it can follow. Exclude them with layers=, "
                'or give unseen="ignore"'
            )
        self._complete.add(both)

    def _warn_of_unrecorded(self, forward: Pass, missing: Collection[str], unfollowed: Collection[str]) -> None:
        """Warn, once for each layer, of attention that was not recorded.

        Args:
            forward: the forward pass that has ended.
            missing: modules that are reported as errors.
            unfollowed: modules that multiplied the result of a softmax and were not followed.
        """
        self._refused |= forward.refused
        idle = self._written & forward.ran.keys() - forward.observed - self._refused
        self._written |= forward.written
        refused = self._refused if self.recording._order else set[str]()  # else the watch ends with an error
        if not forward.unrecorded and not idle and not refused - self._warned:
            return
        texts = describe_unrecorded(self.modules, forward.unrecorded, forward.observed, missing, refused)
        texts |= describe_passes(self.modules, forward.number + 1, idle, unfollowed)
        for name, text in texts.items():
            if name not in self.chosen or name in self._warned:
                continue
            self._warned.add(name)
            warnings.warn(
                f'watch: {text}, which the recording does not include; unseen="ignore" silences this warning',
                WatchWarning,
                stacklevel=user_stacklevel(),
            )

    def _warn_of_batches(self, forward: Pass) -> None:
        """Warn, once for each layer, of an axis that was taken for a batch and may be heads."""
        for name in sorted(forward.may_be_heads - self._taken_for_batches):
            self._taken_for_batches.add(name)
            warn_of_batch(name)

    def _warn_of_unknown_ids(self) -> None:
        """Warn, once, of steps without ``duplicate`` and ``induction``."""
        if not self._streams.unknown or self._warned_of_ids:
            return
        self._warned_of_ids = True
        warn_of_unknown_ids()


Watch.__module__ = "headscope.watching"  # its public path
