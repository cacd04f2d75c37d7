"""The steps of one observation, from a request to statistics; and their caches for further similar calls."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import full_precision
from headscope._attend.prepare import Prepared
from headscope._observe import native_observer
from headscope._observe.aggregate import LazyLayer, layer_stats, tiles_of
from headscope._observe.chosen_heads import (
    RepeatedWeights,
    check_chosen,
    measures_only_weights,
    observe_chosen,
    with_weights,
    without_numbers,
)
from headscope._observe.exchange import Exchange
from headscope._observe.inputs import Request, to_reductions
from headscope._observe.native_observer import Ready
from headscope._observe.portable import observe_blocks
from headscope._observe.scene import Scene, build_scene
from headscope._observe.selected_mass import with_selection
from headscope._support.bounded import BoundedTable
from headscope._support.precision import exact_products
from headscope.stats import HeadStats, HeadWeights, LayerStats, Observe


def observe_request(request: Request) -> HeadStats:
    """Return the statistics of a request, by all three steps of ``headscope._observe``."""
    with torch.no_grad(), full_precision(request.call), exact_products(request.call.device):
        check_chosen(request)
        if measures_only_weights(request.what):
            scene = build_scene(request)
            layer = observe_chosen(request, scene)
            repeats = request.repeats and request.inputs.q.is_cpu and _is_simple(request)
            again = None
            if repeats and not layer.broken.any():  # a call like it has no such rows, either
                again = ChosenRepetition(replace(layer, weights=()), request.what, scene)
            return HeadStats(_ChosenLayer(layer, again))
        known, ready = _find_ready(request)
        memory = None if ready is None else native_observer.observe_into_memory(ready, request.inputs)
        if ready is not None and memory is not None and known is ready:
            return HeadStats(_lazy_layer(request, ready, memory))
        observed = None if ready is None or memory is None else ready.observed(memory)
        if observed is None:
            known = known if isinstance(known, Scene) else build_scene(request)
            observed = observe_blocks(to_reductions(request.what), known)
        elif isinstance(known, Scene):
            observed = with_selection(observed, known, request.what.keep_rows)
        tiles = tiles_of(request, known)
        layer = layer_stats(request.call, request.what, known, observed, tiles, nulls=request.nulls)
        return HeadStats({"0": with_weights(layer, request, known) if isinstance(known, Scene) else layer})


@dataclass(frozen=True, slots=True)
class NativeRepetition:
    """An observation for calls that differ in the numbers in q, k and v only.

    Attributes:
        ready: the observation.
        what: its options.
        weights: the weights of chosen heads.
    """

    ready: Ready
    what: Observe
    weights: RepeatedWeights | None = None

    @property
    def size_of_weights(self) -> int:
        """The size of the weights of one call, in bytes."""
        return 0 if self.weights is None else self.weights.size

    def with_heads(self, what: Observe) -> NativeRepetition | None:
        """Return the same for other chosen heads; None: that is not known."""
        weights = None if self.weights is None else self.weights.with_heads(what)
        return None if weights is None else NativeRepetition(self.ready, what, weights)

    def observe(self, q: Tensor, k: Tensor, v: Tensor) -> LazyLayer | None:
        """Return the statistics of such a call; None: a row with visible keys is not finite."""
        memory = self.ready.observe_again(q, k, v)
        return None if memory is None else self._layer(memory, q, k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, LazyLayer] | None:
        """Attend and observe in one pass: out [B, H, Q, Dv], as the native kernels give it, and the statistics.

        Returns None for a small sample of rows, or if a row with visible keys is not finite.
        """
        if len(self.ready.rows) < self.ready.call.queries:
            return None
        done = self.ready.attend_again(q, k, v)
        return None if done is None else (done[0], self._layer(done[2], q, k))

    def _layer(self, memory: Tensor, q: Tensor, k: Tensor) -> LazyLayer:
        weights = () if self.weights is None else (self.weights.of(q, k),)
        return LazyLayer(self.ready.light, self.what, memory, weights)


class ChosenRepetition:
    """An observation of nothing but the weights of chosen heads, for calls that differ in the numbers in q and k only.

    Args:
        like: the statistics of such a call.
        what: the options.
        scene: of such a call.
    """

    def __init__(self, like: LayerStats, what: Observe, scene: Scene) -> None:
        self._like = like
        self._what = what
        self._scene = without_numbers(scene)

    @cached_property
    def _weights(self) -> RepeatedWeights:
        return RepeatedWeights(self._what, self._scene)

    def with_heads(self, what: Observe) -> ChosenRepetition | None:
        """Return the same for other chosen heads; None: that is an error."""
        weights = self._weights.with_heads(what)
        if weights is None:
            return None
        other = ChosenRepetition(self._like, what, self._scene)
        other._weights = weights
        return other

    @property
    def size_of_weights(self) -> int:
        """The size of the weights of one call, in bytes."""
        return self._weights.size

    def observe(self, q: Tensor, k: Tensor, _: Tensor) -> Callable[[], LayerStats] | None:
        """Return the statistics of such a call; None: a row may be empty or not finite, or there are many rows."""
        weights = self._weights.of_finite(q, k)
        return None if weights is None else partial(replace, self._like, weights=(weights,))

    def attend(self, *_: Tensor) -> None:
        """Return None: attention is a pass of its own."""
        return


Repetition = NativeRepetition | ChosenRepetition
"""An observation for calls like an earlier one."""


class _ChosenLayer(dict[str, LayerStats]):
    """The layer of a call of which only the weights of chosen heads were measured; ``again``: of calls like it."""

    def __init__(self, layer: LayerStats, again: ChosenRepetition | None) -> None:
        super().__init__({"0": layer})
        self.again = again

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def shares_pass(what: Observe, call: Call) -> bool:
    """Return whether a sample of rows is measured in the pass that attends to all rows.

    To compute the logits of a large part of the rows once more takes longer than to measure all rows on the way, and
    the more so the wider a head is.
    """
    if not isinstance(what.rows, int) or what.selected is not None:
        return False
    if what.keep_rows or what.keep_qk or what.top or what.weights:
        return False
    least = 8 if call.head_dim >= 64 else 4  # of (1, 8, T, D), measured
    return least * min(what.rows, call.queries) >= call.queries


def repetition_of(parts: Mapping[str, Any]) -> Repetition | None:
    """Return the observation of ``HeadStats.parts`` for calls like theirs; None: each has to be described.

    The parts then no longer hold it, nor the mask: a recording holds the parts.
    """
    if isinstance(parts, _ChosenLayer):
        again, parts.again = parts.again, None
        return again
    if not isinstance(parts, LazyLayer) or parts.again is None:
        return None
    ready, parts.again = parts.again, None
    return NativeRepetition(ready, parts.what, _repeated_weights.get(ready))


def attend_request(request: Request) -> Result | None:
    """Attend natively and measure in the same pass: out [B, H, Q, Dv], lse [B, H, Q] and the statistics.

    Returns None if that is not possible: attend first then, and observe after it. It is a pass over all query rows.
    """
    with torch.no_grad(), full_precision(request.call), exact_products(request.call.device):
        check_chosen(request)
        if measures_only_weights(request.what):
            return None
        known, ready = _find_ready(request)
        if ready is None:
            return None
        into = native_observer.attending(request.call)
        memory = native_observer.observe_into_memory(ready, request.inputs, into)
        if memory is None:
            return None
        if not isinstance(known, Scene):
            once = request.what.weights or not _is_repeatable(request)
            if request.has_place and not once and repeater_of(request.prepared, request.what) is None:
                _prepared_observations.add((request.prepared, id(request.what)), _repeat(ready, request.what))
            return *into, HeadStats(_lazy_layer(request, ready, memory))
        observed = with_selection(ready.observed(memory), known, request.what.keep_rows)
        layer = layer_stats(request.call, request.what, known, observed, tiles_of(request, known))
        return *into, HeadStats({"0": with_weights(layer, request, known)})


def _lazy_layer(request: Request, ready: Ready, memory: Tensor) -> LazyLayer:
    weights = _weights_again(request, ready)
    return LazyLayer(ready.light, request.what, memory, weights, again=ready if request.repeats else None)


def _weights_again(request: Request, ready: Ready) -> tuple[HeadWeights, ...]:
    """Return the weights of chosen heads of a call that has been described before."""
    if not request.what.weights:
        return ()
    found = _repeated_weights.get(ready)
    if found is None:
        found = _repeated_weights[ready] = RepeatedWeights(request.what, build_scene(request))
    return (found.of(request.inputs.q, request.inputs.k),)


Result = tuple[Tensor, Tensor, HeadStats]


def repeater_of(prepared: Prepared, what: Observe) -> Callable[[Tensor, Tensor, Tensor], Result | None] | None:
    """Return the fast path of ``attend`` for such calls, if there is one with the same ``Observe`` object."""
    return _prepared_observations.get((prepared, id(what)))


def _repeat(ready: Ready, what: Observe) -> Callable[[Tensor, Tensor, Tensor], Result | None]:
    """Return ``attend`` for further calls with the same ``Observe`` object: it reuses the description."""
    run = ready.attend_again

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Result | None:
        done = run(q, k, v)
        return None if done is None else (done[0], done[1], HeadStats(LazyLayer(ready, what, done[2])))

    return attend


def _find_ready(request: Request) -> tuple[Scene | Ready, Ready | None]:
    """Return the inputs of a request, and its description for the native kernels if they support it.

    If the description is all that a request needs, it is returned as the inputs, too.
    """
    simple, key = _is_simple(request), _key(request) if _is_repeatable(request) else None
    if simple and key is not None:
        ready = _prepared_observations.get(key)
        if ready is not None:
            return ready, ready
    scene = build_scene(request)
    if native_observer.refuses(to_reductions(request.what), scene):
        return build_scene(replace(request, in_whole_pass=False)) if request.in_whole_pass else scene, None
    ready = Ready(request.what, scene, request.nulls, None if key is None else _exchanges.get(key))
    if key is not None and ready.exchange is not None:
        _exchanges.add(key, ready.exchange)
    if not simple:
        return scene, ready
    if key is not None:
        _prepared_observations.add(key, ready)
    return ready, ready


def _is_simple(request: Request) -> bool:
    """Return whether q, k, v and a mask are the only tensors of a request."""
    quiet = request.lse is None and request.inputs.sinks is None and not request.what.keep_qk
    return quiet and _has_usual_rows(request)


def _is_repeatable(request: Request) -> bool:
    """Return whether only sizes and options determine which keys the rows see, and where."""
    return _has_usual_rows(request) and (request.mask is None or request.mask.is_constant())


def _has_usual_rows(request: Request) -> bool:
    """Return whether sizes, options and mask determine which keys the rows see, and where."""
    what = request.what
    tensors = (
        *(request.q_pos, request.k_pos, request.real, request.rows_at),
        *(request.inputs.bias, what.tokens, what.selected),
    )
    quiet = all(x is None for x in tensors) and not isinstance(what.rows, Tensor)
    return quiet and request.call.form == "plain"


def _key(request: Request) -> Any:
    return request.prepared, options_of(request.what), request.kind, *request_flags(request)


request_flags = attrgetter("has_values", "nulls", "in_whole_pass")
options_of = attrgetter(*(each.name for each in fields(Observe)))
_prepared_observations: BoundedTable[Any, Any] = BoundedTable(64)  # some megabytes each for long sequences
_exchanges: BoundedTable[Any, Exchange] = BoundedTable(16)
_repeated_weights: WeakKeyDictionary[Ready, RepeatedWeights] = WeakKeyDictionary()
atexit.register(_prepared_observations.clear)  # a compiler may refer to this module until the extension is gone
