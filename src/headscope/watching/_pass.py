"""One forward pass of a watched model: what ran in it, and the calls that are measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor, nn

from headscope._intercept import (
    Frame,
    Ids,
    InterceptedCall,
    LayerOrigin,
    Layout,
    Like,
    Unfollowed,
    WatchError,
    by_product,
    enclosing_paths,
    is_attention,
    kind_of_call,
    layer_origin,
    placed,
    standing,
    unobserved,
)
from headscope._observe import Repetition
from headscope.stats import Observe
from headscope.stats._layer import LayerStats, equally_segmented
from headscope.watching._chosen_heads import ChosenHeads
from headscope.watching._earlier_calls import EarlierCalls
from headscope.watching._known_modules import Described, KnownModules
from headscope.watching._monitor import Monitor
from headscope.watching._options import Options
from headscope.watching._recording import Recording
from headscope.watching._segments import fit_segments
from headscope.watching._selected_keys import with_layer
from headscope.watching._verify import Verifier

Result = TypeVar("Result")


class Watching(Protocol):
    """What a pass requires of its watch."""

    options: Options
    modules: dict[str, nn.Module]
    chosen: frozenset[str]
    places: dict[str, int]
    layout: Layout
    recording: Recording
    monitor: Monitor | None
    verifier: Verifier
    chosen_heads: ChosenHeads
    known: KnownModules
    earlier: EarlierCalls

    def follows(self, name: str) -> bool:
        """Return whether the operations of a module are followed."""
        ...

    def tokens_of(self, call: InterceptedCall) -> Ids | None:
        """Return the ids of a call's keys, if requested and known."""
        ...


class Pass:
    """One forward pass: which modules ran in it, and which of them attended."""

    def __init__(self, watch: Watching, number: int, active: bool) -> None:
        self.watch = watch
        self.number = number
        self.active = active
        self.parts: dict[str, LayerStats] = {}  # of this pass only, for a monitor
        self.ran: dict[str, None] = {}
        self.observed: set[str] = set()
        self.unrecorded: dict[str, str | None] = {}  # see describe_unrecorded
        self.to_follow: set[str] = set()
        self.doubtful: set[str] = set()  # modules with a softmax whose product is not recorded
        self.refused: set[str] = set()
        self.written: set[str] = set()  # modules that have written out an attention
        self.functions: set[str] = set()  # modules whose own code called functions that may be part of an attention
        self.may_be_heads: set[str] = set()  # those whose batch may be heads
        self.unsegmented: dict[str, str] = {}  # layers with a call that does not fit the segments -> why

    def follows(self, name: str) -> bool:
        """Return whether a module is followed: all are in the first forward pass in which they run."""
        return self.watch.follows(name)

    def observes_functions(self, name: str) -> bool:
        """Return whether the functions that a module calls are observed: they are, unless it is known to be calm."""
        return name not in self.watch.known.calm

    def note_functions(self, name: str) -> None:
        """Note a module whose own code called functions that may be part of an attention."""
        self.functions.add(name)

    def note_followed(self, name: str) -> None:
        """Note a module that the next forward passes have to follow."""
        self.to_follow.add(name)

    def note_refused(self, name: str) -> None:
        """Note that a module has written out an attention that cannot be recorded."""
        self.refused.add(name)
        self.doubtful.add(name)

    def was_followed(self, name: str) -> bool:
        """Return whether a module of this pass was followed, alone or with a module around it."""
        around = (next(iter(self.ran)), *enclosing_paths(name))
        return any(self.watch.follows(path) for path in around if path in self.ran)

    def once_more(self) -> set[str]:
        """Return the outermost module of this pass, if the next one has to be followed whole.

        That is so if a module has attended, as far as known, and is not recorded. To follow it alone would hide where
        its inputs come from: what counts as heads, say, may be chunks of the text.
        """
        root = next(iter(self.ran))
        for name in self.doubtful:
            attends = is_attention(name, self.watch.modules[name]) or name in self.observed or name in self.refused
            if attends or not self.was_followed(name):  # else its softmax is that of a router, say
                return {root}
        return set()

    def note_unrecorded(self, name: str, operator: str | None) -> None:
        """Note that a module attends by an operator, or perhaps by a softmax of its own (None)."""
        self.unrecorded[name] = self.unrecorded.get(name) or operator
        if operator is None:
            self.doubtful.add(name)

    def enter(self, name: str, module: nn.Module) -> bool:
        """Note that a module starts to run; headscope's kernel attends only in selected ones."""
        self.ran[name] = None
        return self.watch.options.accelerate and name in self.watch.chosen

    def factors(self, name: str, heads: int, widths: tuple[int, int]) -> Tensor | None:
        """Return None: the heads do not change."""
        return None

    def see(self, frame: Frame, name: str, make: Callable[[], InterceptedCall]) -> None:
        """Measure the attention call that a module makes.

        Raises:
            WatchError: it cannot be measured; the message names the layer.
        """
        self.observed.add(name)
        self._measure(name, frame.calls, make, frame.like)()

    def repeat(self, frame: Frame, name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Measure an attention call as an earlier one that was like it; return whether nothing is left to be done.

        To describe a call takes longer than to measure a short one.
        """
        if name not in self.watch.chosen:
            self._note_observed(name)
            return True
        layer = name if frame.calls == 1 else f"{name}#{frame.calls}"
        found = self.watch.earlier.repeated(name, layer, frame.like)
        if found is None or found.again is None:
            return False
        part = self._again(name, found.again, lambda again: again.observe(q, k, v))
        if part is None:
            return False
        self.observed.add(name)
        self._record(name, frame.calls, found, part)
        return True

    def attend_again(self, frame: Frame, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Attend and measure in one pass, as an earlier call that was like this one; return None if that cannot be.

        To measure a short call after attending takes twice as long.
        """
        layer = name if frame.calls == 1 else f"{name}#{frame.calls}"
        found = self.watch.earlier.repeated(name, layer, frame.like)
        if found is None or found.again is None or not found.natively:
            return None
        result = self._again(name, found.again, lambda again: again.attend(q, k, v))
        if result is None:
            return None
        out, part = result
        self.observed.add(name)
        self._record(name, frame.calls, found, part)
        return out

    def _again(self, name: str, again: Repetition, run: Callable[[Repetition], Result | None]) -> Result | None:
        """Return the result of a repetition; None if it has none, or its weights would exceed the limit."""
        size = again.size_of_weights
        if not size:
            return run(again)
        chosen = self.watch.chosen_heads
        if not chosen.reserve_again(name, size):
            return None  # the first call's way, which words the error
        with unobserved():
            result = run(again)
        if result is None:
            chosen.release(size)
        return result

    def measure(self, name: str, number: int, make: Callable[[], InterceptedCall]) -> Callable[[], None]:
        """Measure a call that a module has written out; return a function that records it.

        Raises:
            WatchError: it cannot be measured; the message names the layer.
        """
        self.written.add(name)
        return self._measure(name, number, make)

    def _measure(
        self, name: str, number: int, make: Callable[[], InterceptedCall], like: Like | None = None
    ) -> Callable[[], None]:
        """Measure a call, the ``number``-th of its module from 1 on, and return a function that records it.

        Raises:
            WatchError: it cannot be measured; the message names the layer.
        """
        watch = self.watch
        if name not in watch.chosen:
            return partial(self._note_observed, name)
        layer = name if number == 1 else f"{name}#{number}"
        before = watch.recording._kind(layer)
        call: InterceptedCall | None = None
        try:
            call = make()
            kind = kind_of_call(name, call, watch.options.kinds, before)
            if call.may_be_heads:
                self.may_be_heads.add(name)
            watch.earlier.compare(name, layer, call)
            if kind == "self":
                call = standing(call)
                tokens = watch.tokens_of(call)
                if tokens is not None or call.kind != kind:
                    call = replace(call, kind=kind, tokens=tokens)
                call = placed(call, watch.options.positions)
            elif call.kind != kind:
                call = replace(call, kind=kind)
            requires_qk = watch.options.what.keep_qk or callable(watch.options.what.selected)
            if call.is_written and (requires_qk or call.from_exponentials):
                call = by_product(call) or call
            what = self._segmented(layer, call, kind, watch.chosen_heads.options(name, call))
            what = with_layer(what, layer, call)
            measured = watch.verifier.measure(layer, call, what)
        except (TypeError, ValueError, RuntimeError) as error:
            raise WatchError(f"watch: layer {layer}: {_own_sizes(str(error), call)}") from error
        q = call.q if call.factors is None else call.factors[0]
        widths = q.shape[-1], 0 if call.v is None else call.v.shape[-1]
        described = Described(kind, call.q.shape[-3], widths, measured.again, call.natively)
        if like is not None:
            watch.earlier.remember(name, layer, like, described, call)
        return partial(self._record, name, number, described, measured.part)

    def _record(self, name: str, number: int, described: Described, part: Callable[[], LayerStats]) -> None:
        """Record the statistics of a call, the ``number``-th of its module."""
        watch = self.watch
        layer = name if number == 1 else f"{name}#{number}"
        self._note_observed(name)
        origin = partial(self._origin, name, described)
        watch.recording._add(layer, (watch.places[name], number), part, described.kind, origin)
        if watch.monitor is not None:
            both = equally_segmented([self.parts[layer], part()]) if layer in self.parts else [part()]
            self.parts[layer] = both[0].merge(*both[1:])

    def _origin(self, name: str, described: Described) -> LayerOrigin:
        root = next(iter(self.watch.modules.values()))
        if described.origin is None or described.origin[0]() is not root:
            origin = layer_origin(self.watch.modules, name, described.heads, described.widths)
            described.origin = weakref.ref(root), origin
        return described.origin[1]

    def _segmented(self, layer: str, call: InterceptedCall, kind: str, what: Observe) -> Observe:
        """Return the options with the segments of this call."""
        if what.segments is None:
            return what
        segments = fit_segments(what.segments, call, kind)
        if not isinstance(segments, str):
            return what if segments is what.segments else replace(what, segments=segments)
        self.unsegmented[layer] = segments
        return replace(what, segments=None)

    def _note_observed(self, name: str) -> None:
        self.observed.add(name)
        self.watch.layout.attended.add(name)


def _own_sizes(text: str, call: InterceptedCall | None) -> str:
    """Return the text of an error with the sizes of queries and keys that a module has written out."""
    if call is None or not call.is_written:
        return text
    sizes = [list(x.shape) for x in (call.q, call.k)]
    own = (
        [f" {[*size[:-1]]}" for size in sizes] if call.factors is None else [f" {list(x.shape)}" for x in call.factors]
    )
    for name, size, shown in zip("qk", sizes, own, strict=True):
        text = text.replace(f"{name} {size}", name + shown)
    return text


class Again(Unfollowed, Pass):
    """A piece of a forward pass that a checkpoint recomputes: by the same kernels, without observation."""

    def see(self, frame: Frame, name: str, make: Callable[[], InterceptedCall]) -> None:
        """Do nothing: the call was recorded before."""

    def measure(self, name: str, number: int, make: Callable[[], InterceptedCall]) -> Callable[[], None]:
        """Do nothing: the call was recorded before."""
        return lambda: None
